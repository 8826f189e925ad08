"""Devices that engines and trainer share: who holds them when, and how they are handed over.

```
 engines' turn     groups are sampled until a batch is ready
   to the trainer  each engine: sent nothing ─► calls end, kept ─► gives all its memory back
                   the trainer takes its own, as it was
 trainer's turn    every batch that is ready is trained, settled, and written to a checkpoint where one is due
   to the engines  the weights are published; the trainer moves its memory to the host
                   each engine: room for weights ─► loads them ─► the rest ─► read back ─► serves
```

An engine that fails anywhere in this is quarantined, and its process ended: it may hold memory that the
trainer is about to take. `repair` starts it again in the engines' turn. A trainer that fails is started again
with the engines holding nothing, whatever it failed in.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from async_rl.engine_protocol import Engine
from async_rl.engines.device_memory import Empty, Loadable, stop
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


class Devices(Protocol):
    """Where engines and trainer run, as the orchestrator needs to know it."""

    turns: DevicePhases
    """Whose turn it is: engines are started in their own alone."""
    shared: bool
    """Whether one stands still while the other works."""

    async def clear(self) -> None:
        """Make room for a trainer that is yet to be started."""
        ...

    async def to_trainer(self, trainer: Trainer) -> None:
        """Let the trainer work; returns at once when it may already."""
        ...

    async def start(self, sync: WeightSync, trainer: Trainer, version: int, path: Path | None) -> None:
        """Bring all engines to the version that training starts from: see `WeightSync.start`."""
        ...

    async def to_engines(self, sync: WeightSync, trainer: Trainer, version: int) -> SyncReport:
        """Bring the trainer's new version to the engines, and let them work."""
        ...


class OwnDevices:
    """Engines and trainer have devices of their own: both work at the same time."""

    shared = False

    def __init__(self) -> None:
        self.turns = DevicePhases()

    async def clear(self) -> None:
        """See `Devices.clear`."""

    async def to_trainer(self, trainer: Trainer) -> None:
        """See `Devices.to_trainer`."""

    async def start(self, sync: WeightSync, trainer: Trainer, version: int, path: Path | None) -> None:
        """See `Devices.start`."""
        await sync.start(version, path)

    async def to_engines(self, sync: WeightSync, trainer: Trainer, version: int) -> SyncReport:
        """See `Devices.to_engines`."""
        return await sync.sync(version)


class SharedDevices:
    """Engines and trainer take turns: see the module.

    Invariant: between two awaits each engine of the pool serves, or is quarantined, or joins and has served
    nobody, or its place in `_holdings` says what it holds.
    """

    shared = True

    def __init__(
        self,
        pool: EnginePool,
        stop_engine: Callable[[str], Awaitable[None]],
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        timeout_s: float,
    ) -> None:
        """Start in the engines' turn.

        Args:
            pool: The engines.
            stop_engine: Ends a failed engine's process, in whatever state it is; bounded in time.
            metrics: How long hand-overs take.
            clock: Monotonic seconds.
            timeout_s: Longest part of a hand-over of one engine, seconds.
        """
        self.turns = DevicePhases()
        self._pool = pool
        self._stop_engine = stop_engine
        self._metrics = metrics
        self._clock = clock
        self._timeout_s = timeout_s
        self._holdings: dict[str, Empty | Loadable] = {}
        self._stopped_s: float | None = None
        """When the engines' turn ended, and the last of its guests had left."""

    # -- to the trainer -----------------------------------------------------------------------------------

    async def clear(self) -> None:
        """See `Devices.clear`: each engine holds nothing, or has no process."""
        if self.turns.turn == "trainer":
            return
        if self.turns.turn == "engines":
            self._stopped_s = None
        self.turns.move("to trainer")
        await self.turns.without_guests()
        if self._stopped_s is None:
            self._stopped_s = self._clock()
        async with Nursery() as nursery:
            for engine in self._pool.engines():
                nursery.start_task(f"clear {engine.engine_id}", self._clear(engine))
        self.turns.move("trainer")

    async def to_trainer(self, trainer: Trainer) -> None:
        """See `Devices.to_trainer`."""
        held = self.turns.turn == "trainer"
        await self.clear()
        with waiting("hand-over", "its memory back"):
            await trainer.reload()
        if not held and self._stopped_s is not None:
            self._metrics.hand_over_to_trainer_seconds.observe(self._clock() - self._stopped_s)

    async def _clear(self, engine: Engine) -> None:
        engine_id = engine.engine_id
        if not self._pool.needs_repair(engine_id):
            holding = self._holdings.pop(engine_id, None)
            async with self._attending(engine):
                if isinstance(holding, Empty):
                    self._holdings[engine_id] = holding
                    return
                if isinstance(holding, Loadable):
                    self._holdings[engine_id] = await holding.release()
                    return
                self._pool.hold(engine_id)  # one that joins is sent nothing anyway
                stopped = await stop(engine)
                self._holdings[engine_id] = await stopped.release()
                return
        self._holdings.pop(engine_id, None)
        with waiting("engine update", engine_id):
            await self._stop_engine(engine_id)

    # -- to the engines -----------------------------------------------------------------------------------

    async def start(self, sync: WeightSync, trainer: Trainer, version: int, path: Path | None) -> None:
        """See `Devices.start`: the trainer has just been set up, in its turn."""
        await sync.start(version, path, bring=False)
        await self.to_engines(sync, trainer, version)

    async def to_engines(self, sync: WeightSync, trainer: Trainer, version: int) -> SyncReport:
        """See `Devices.to_engines`."""
        self.turns.move("to engines")
        begin = self._clock()
        await sync.publish(version)
        published = self._clock()
        with waiting("hand-over", "its memory to the host"):
            await trainer.offload()
        offloaded = self._clock()
        async with Nursery() as nursery:
            for engine in self._pool.engines(EngineState.UPDATING, EngineState.JOINING):
                if engine.engine_id in self._holdings and not self._pool.needs_repair(engine.engine_id):
                    nursery.start_task(f"fill {engine.engine_id}", self._fill(engine, sync))
        self._holdings.clear()  # of those that failed: `repair` starts them again
        self.turns.move("engines")
        now = self._clock()
        self._metrics.hand_over_to_engines_seconds.observe(now - begin)
        stopped_s = self._stopped_s if self._stopped_s is not None else begin
        return SyncReport(
            weight_version=version,
            publish_s=published - begin,
            transfer_s=now - offloaded,
            pause_s=published - stopped_s,
            total_s=now - begin,
            handover_s=now - begin,
        )

    async def _fill(self, engine: Engine, sync: WeightSync) -> None:
        """Bring an engine that holds nothing to the current weights, and let it serve."""
        holding = self._holdings.pop(engine.engine_id)
        assert isinstance(holding, Empty), "in the trainer's turn nobody holds room for weights"
        async with self._attending(engine):
            loadable = self._holdings[engine.engine_id] = await holding.resume_weights()
            await sync.load(engine)
            del self._holdings[engine.engine_id]
            await loadable.resume_rest()
            sync.serve(engine)

    @asynccontextmanager
    async def _attending(self, engine: Engine) -> AsyncIterator[None]:
        """Bound what is asked of an engine. One that fails in it is quarantined, and so is one that is left
        in the middle, where nobody knows what it holds.
        """
        engine_id, limit_s = engine.engine_id, self._timeout_s
        try:
            async with (
                self._pool.attended(engine_id, limit_s) as scope,
                waiting("engine update", engine_id, scope=scope),
            ):
                yield
        except EngineError as error:
            self._pool.quarantine(engine_id, error)
        except TimeoutError:
            message = f"engine {engine_id} did not hand its device over within weights.timeout_s = {limit_s}"
            self._pool.quarantine(engine_id, EngineTimeout(message))
        except BaseException:
            if engine_id not in self._holdings:
                message = f"the hand-over of engine {engine_id} was cut short"
                self._pool.quarantine(engine_id, WeightSyncError(message))
            raise
