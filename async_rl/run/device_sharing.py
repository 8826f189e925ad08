"""Devices that engines and trainer share: when each holds them, and how they are handed over.

```
 engines' phase    groups are sampled until a batch is ready
   to the trainer  each engine: no more calls ─► calls end, their tokens are kept ─► all its memory released
                              (with adapters, the server keeps the model's weights in host memory)
                   the trainer takes its memory, with what it held
 trainer's phase   every batch that is ready is trained, settled, and written to a checkpoint where one is due
   to the engines  by files: published; the trainer moves its memory to the host
                             each engine: memory for weights ─► loads them, or the adapter
                   by handles: the trainer moves all memory but its weights to the host
                               each engine: memory for weights ─► takes them, bucket by bucket
                               the trainer moves its weights to the host
                   each engine: the rest of its memory ─► verified ─► serves
```

An engine that fails anywhere in this is quarantined and its process ended, because it may hold memory that
the trainer is about to take. `repair` restarts it in the engines' phase. A trainer that fails is restarted
while the engines hold nothing, in whichever phase it failed.

Versions go by handles with `weights.transport: tensor`, except those that have files: version 0, and with
`weights.verify: checksum` the one that a run resumes from. An engine that is restarted when the current
version has none joins until the next hand-over. If no other engine serves, there would be no batch for one:
the engines are starved, and the train loop hands the devices to the trainer and back at once.
"""

from __future__ import annotations

import asyncio
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
from async_rl.errors import EngineError, EngineTimeout, WeightsNotReceived, WeightSyncError
from async_rl.observability.metrics import Metrics
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import waiting
from async_rl.trainer_protocol import Trainer
from async_rl.weights.bucket_senders import Sent
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

    def are_starved(self, sync: WeightSync) -> bool:
        """Whether no engine serves before the trainer has had the devices."""
        return False

    async def wait_until_starved(self, sync: WeightSync) -> None:
        """Wait until no engine serves before the trainer has had the devices."""
        await asyncio.Future()


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
        num_bytes = await sync.publish_version(version)
        published = self._clock()
        sent = Sent()
        if not sync.has_files:
            await self._offload(trainer, keep_weights=True)
            sent = await self._send_weights(sync)
        received = self._clock()
        await self._offload(trainer)
        offloaded = self._clock()
        async with Nursery() as nursery:
            for engine in self._engines_to_fill():
                nursery.start_task(f"fill {engine.engine_id}", self._fill_engine(engine, sync))
        self._memory.clear()  # of engines that failed: `repair` restarts them
        self.phases.enter_phase("engines")
        now = self._clock()
        self._metrics.hand_over_to_engines_seconds.observe(now - begin)
        stopped_s = self._stopped_s if self._stopped_s is not None else begin
        parts = {
            "publish": published - begin,
            "gather": sent.gather_s,
            "load": received - published - sent.gather_s + now - offloaded,
        }
        report = SyncReport(
            weight_version=version,
            parts={name: seconds for name, seconds in parts.items() if seconds},
            num_bytes=num_bytes + sent.num_bytes,
            pause_s=published - stopped_s,
            total_s=now - begin,
            handover_s=now - begin,
        )
        return sync.observe_update(report) if self._pool.engines(EngineState.SERVING) else report

    async def _offload(self, trainer: Trainer, *, keep_weights: bool = False) -> None:
        with waiting("hand-over", "its memory to the host"):
            await trainer.offload(keep_weights)

    def _engines_to_fill(self) -> list[Engine]:
        """Return the engines of which it is known what they hold, and that have not failed since."""
        return [
            engine
            for engine in self._pool.engines(EngineState.UPDATING, EngineState.JOINING)
            if engine.engine_id in self._memory and not self._pool.needs_repair(engine.engine_id)
        ]

    async def _send_weights(self, sync: WeightSync) -> Sent:
        """Give all engines memory for weights, and send them the current ones from the trainer's device."""

        async def resume_weights(engine: Engine) -> None:
            async with self._quarantined_on_failure(engine):
                await self._resume_weights(engine)

        async with Nursery() as nursery:
            for engine in self._engines_to_fill():
                nursery.start_task(f"resume {engine.engine_id}", resume_weights(engine))
        with waiting("send weights"):
            return await sync.send_current_version(self._engines_to_fill(), self._quarantined_on_failure)

    async def _resume_weights(self, engine: Engine) -> LoadableEngine:
        """Give an engine that holds nothing memory for weights."""
        memory = self._memory.pop(engine.engine_id)
        assert isinstance(memory, EmptyEngine), "in the trainer's phase no engine has memory for weights"
        loadable = self._memory[engine.engine_id] = await memory.resume_weights()
        return loadable

    async def _fill_engine(self, engine: Engine, sync: WeightSync) -> None:
        """Give an engine the memory that it lacks, and the weights unless they were sent; let it serve."""
        async with self._quarantined_on_failure(engine):
            if sync.has_files:
                loadable = await self._resume_weights(engine)
                await sync.catch_up.load_current_version(engine)
            else:
                found = self._memory[engine.engine_id]
                assert isinstance(found, LoadableEngine), "weights were sent to it"
                loadable = found
            del self._memory[engine.engine_id]
            await loadable.resume_rest()
            await sync.serve_current_version(engine)

    # -- back to the trainer without a batch --------------------------------------------------------------

    def are_starved(self, sync: WeightSync) -> bool:
        """Implements `Devices.are_starved`: they wait for a version that only the trainer has."""
        return (
            self.phases.phase == "engines"
            and not sync.has_files
            and not self._pool.has_active_engine
            and any(
                not self._pool.needs_repair(engine.engine_id)
                for engine in self._pool.engines(EngineState.JOINING)
            )
        )

    async def wait_until_starved(self, sync: WeightSync) -> None:
        """Implements `Devices.wait_until_starved`."""
        with waiting("idle"):
            while not self.are_starved(sync):
                await self._pool.wait_for_change()

    @asynccontextmanager
    async def _quarantined_on_failure(self, engine: Engine) -> AsyncIterator[None]:
        """Bound the requests to an engine; quarantine it when one fails.

        A cancellation also quarantines it, unless it is known what the engine holds. An engine to which the
        trainer has not sent all weights has not failed.
        """
        engine_id, limit_s = engine.engine_id, self._timeout_s
        try:
            async with self._pool.bounded_request(engine_id, limit_s):
                yield
        except WeightsNotReceived as error:
            log.warning("engine %s waits for the trainer: %s", engine_id, error)
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
