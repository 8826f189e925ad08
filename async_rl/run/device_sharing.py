"""Devices that engines and trainer share: when each holds them, and how they are handed over.

```
 engines' phase    groups are sampled until a batch is ready
   to the trainer  each engine: no more calls ─► calls end, their tokens are kept ─► all its memory released
                              (with adapters, the server keeps the model's weights in host memory)
                   the trainer takes its memory, with what it held
 trainer's phase   every batch that is ready is trained, settled, and written to a checkpoint where one is due
   to the engines  the weights are published; the trainer moves its memory to the host
                   each engine: memory for weights ─► loads them, or the adapter ─► the rest ─► verified
                              ─► serves
```

An engine that fails anywhere in this is quarantined and its process ended, because it may hold memory that
the trainer is about to take. `repair` restarts it in the engines' phase. A trainer that fails is restarted
while the engines hold nothing, in whichever phase it failed.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from async_rl.engine_protocol import Engine
from async_rl.engines.device_memory import EmptyEngine, LoadableEngine, stop_engine
from async_rl.engines.device_phases import DevicePhases
from async_rl.engines.lease import EngineState
from async_rl.engines.pool import EnginePool
from async_rl.errors import EngineError, EngineTimeout, WeightSyncError
from async_rl.observability.metrics import Metrics
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import waiting
from async_rl.trainer_protocol import Trainer
from async_rl.weights.weight_sync import SyncReport, WeightSync

log = logging.getLogger(__name__)


class Devices:
    """Where engines and trainer run. These have devices of their own: both work at the same time."""

    shared = False
    """Whether engines are stopped while the trainer works, and the other way round."""

    def __init__(self) -> None:
        self.phases = DevicePhases()
        """The time-sharing phase: engines are started in their own phase only."""

    async def clear_devices(self) -> None:
        """Free the devices for a trainer that has not been started yet."""

    async def hand_to_trainer(self, trainer: Trainer) -> None:
        """Let the trainer work; returns at once when it already may."""

    async def start_engines(
        self, sync: WeightSync, trainer: Trainer, version: int, path: Path | None
    ) -> None:
        """Bring all engines to the version that training starts from: see `WeightSync.start_from_version`."""
        await sync.start_from_version(version, path)

    async def hand_to_engines(self, sync: WeightSync, trainer: Trainer, version: int) -> SyncReport:
        """Bring the trainer's new version to the engines, and let them work."""
        return await sync.update_engines(version)


class SharedDevices(Devices):
    """Engines and trainer use the same devices one after the other.

    Invariant: between two awaits each engine of the pool serves, is quarantined, is joining and has served no
    calls, or has an entry in `_memory` that says what it holds.
    """

    shared = True

    def __init__(
        self,
        pool: EnginePool,
        end_engine: Callable[[str], Awaitable[None]],
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        timeout_s: float,
        keep_weights: bool = False,
    ) -> None:
        """Start in the engines' phase.

        Args:
            pool: The engines.
            end_engine: Ends a failed engine's process, in whatever state it is; bounded in time.
            metrics: Durations of hand-overs.
            clock: Monotonic seconds.
            timeout_s: Longest part of a hand-over of one engine, seconds.
            keep_weights: Whether engines keep the model's weights in host memory, and load adapters only.
        """
        super().__init__()
        self._pool = pool
        self._end_engine = end_engine
        self._metrics = metrics
        self._clock = clock
        self._timeout_s = timeout_s
        self._keep_weights = keep_weights
        self._memory: dict[str, EmptyEngine | LoadableEngine] = {}
        self._stopped_s: float | None = None
        """When the engines' phase ended, and its last lease holder with it."""

    # -- to the trainer -----------------------------------------------------------------------------------

    async def clear_devices(self) -> None:
        """Make each engine release its memory, or end its process."""
        if self.phases.phase == "trainer":
            return
        if self.phases.phase == "engines":
            self._stopped_s = None
        self.phases.enter_phase("to trainer")
        await self.phases.wait_for_lease_holders()
        if self._stopped_s is None:
            self._stopped_s = self._clock()
        async with Nursery() as nursery:
            for engine in self._pool.engines():
                nursery.start_task(f"clear {engine.engine_id}", self._clear_engine(engine))
        self.phases.enter_phase("trainer")

    async def hand_to_trainer(self, trainer: Trainer) -> None:
        """Implements `Devices.hand_to_trainer`."""
        had_devices = self.phases.phase == "trainer"
        await self.clear_devices()
        with waiting("hand-over", "its memory back"):
            await trainer.reload()
        if not had_devices and self._stopped_s is not None:
            self._metrics.hand_over_to_trainer_seconds.observe(self._clock() - self._stopped_s)

    async def _clear_engine(self, engine: Engine) -> None:
        engine_id = engine.engine_id
        if not self._pool.needs_repair(engine_id):
            memory = self._memory.pop(engine_id, None)
            async with self._quarantined_on_failure(engine):
                if isinstance(memory, EmptyEngine):
                    self._memory[engine_id] = memory
                    return
                if isinstance(memory, LoadableEngine):
                    self._memory[engine_id] = await memory.release_weights()
                    return
                self._pool.hold_engine(engine_id)  # a joining engine gets no calls anyway
                stopped = await stop_engine(engine, partial(self._pool.interrupt_engine, engine))
                self._memory[engine_id] = await stopped.release_all(keeps_weights=self._keep_weights)
                return
        self._memory.pop(engine_id, None)
        with waiting("engine update", engine_id):
            await self._pool.end_engine(engine_id, self._end_engine)

    # -- to the engines -----------------------------------------------------------------------------------

    async def start_engines(
        self, sync: WeightSync, trainer: Trainer, version: int, path: Path | None
    ) -> None:
        """Implements `Devices.start_engines`: the trainer has just been set up, in its phase."""
        await sync.start_from_version(version, path, update_engines=False)
        await self.hand_to_engines(sync, trainer, version)

    async def hand_to_engines(self, sync: WeightSync, trainer: Trainer, version: int) -> SyncReport:
        """Implements `Devices.hand_to_engines`."""
        self.phases.enter_phase("to engines")
        begin = self._clock()
        await sync.publish_version(version)
        published = self._clock()
        with waiting("hand-over", "its memory to the host"):
            await trainer.offload()
        offloaded = self._clock()
        async with Nursery() as nursery:
            for engine in self._pool.engines(EngineState.UPDATING, EngineState.JOINING):
                if engine.engine_id in self._memory and not self._pool.needs_repair(engine.engine_id):
                    nursery.start_task(f"fill {engine.engine_id}", self._fill_engine(engine, sync))
        self._memory.clear()  # of engines that failed: `repair` restarts them
        self.phases.enter_phase("engines")
        now = self._clock()
        self._metrics.hand_over_to_engines_seconds.observe(now - begin)
        stopped_s = self._stopped_s if self._stopped_s is not None else begin
        return SyncReport(
            weight_version=version,
            parts={"publish": published - begin, "load": now - offloaded},
            pause_s=published - stopped_s,
            total_s=now - begin,
            handover_s=now - begin,
        )

    async def _fill_engine(self, engine: Engine, sync: WeightSync) -> None:
        """Load the current weights into an engine that holds no memory, and let it serve."""
        memory = self._memory.pop(engine.engine_id)
        assert isinstance(memory, EmptyEngine), "in the trainer's phase no engine has memory for weights"
        async with self._quarantined_on_failure(engine):
            loadable = self._memory[engine.engine_id] = await memory.resume_weights()
            await sync.catch_up.load_current_version(engine)
            del self._memory[engine.engine_id]
            await loadable.resume_rest()
            await sync.serve_current_version(engine)

    @asynccontextmanager
    async def _quarantined_on_failure(self, engine: Engine) -> AsyncIterator[None]:
        """Bound the requests to an engine; quarantine it when one fails.

        A cancellation also quarantines it, unless it is known what the engine holds.
        """
        engine_id, limit_s = engine.engine_id, self._timeout_s
        try:
            async with self._pool.bounded_request(engine_id, limit_s):
                yield
        except EngineError as error:
            self._pool.quarantine_engine(engine_id, error)
        except TimeoutError:
            message = f"engine {engine_id} did not hand its device over within weights.timeout_s = {limit_s}"
            self._pool.quarantine_engine(engine_id, EngineTimeout(message))
        except BaseException:
            if engine_id not in self._memory:
                message = f"the hand-over of engine {engine_id} was cut short"
                self._pool.quarantine_engine(engine_id, WeightSyncError(message))
            raise
