"""Updates serving engines to a new weight version.

```
 for each engine of a wave:
   hold        the pool gives it no more calls
   interrupt   running calls end (abort) or pause (retract, in_place)
   update      by the transport; the prefix cache is flushed unless in_place
   verify      the version is read back and compared
   serve       calls that wait are admitted
```

An engine that fails or hangs in any of this is quarantined with its old version, and so is one whose update
was cancelled in the middle. The other engines continue.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from async_rl.config import WeightsConfig
from async_rl.engine_protocol import Engine, WeightUpdate
from async_rl.engines.pool import EnginePool, EngineSnapshot, EngineState
from async_rl.errors import EngineError, WeightSyncError
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import waiting
from async_rl.weights.bucket_senders import BucketSender
from async_rl.weights.checksums import VersionVerifier
from async_rl.weights.delta_delivery import DeltaDelivery
from async_rl.weights.publisher import WeightPublisher

log = logging.getLogger(__name__)


class EngineUpdateTimes(msgspec.Struct, frozen=True):
    """How long the parts of one engine's update took, seconds."""

    engine_id: str
    interrupt_s: float
    transfer_s: float
    verify_s: float

    @property
    def pause_s(self) -> float:
        """Time without calls, the transfer left out."""
        return self.interrupt_s + self.verify_s


class _HeldEngine(msgspec.Struct, frozen=True):
    """An engine that was held and interrupted for an update."""

    engine: Engine
    snapshot: EngineSnapshot | None
    """Its state right after it was held."""
    interrupt_s: float


class EngineUpdater:
    """Updates waves of engines to a version; those that fail are quarantined, even if all fail."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        pool: EnginePool,
        publisher: WeightPublisher,
        deltas: DeltaDelivery,
        sender: BucketSender | None,
        verifier: VersionVerifier,
        clock: Callable[[], float],
    ) -> None:
        """Wire the parts.

        Args:
            config: Transport, interruption and time limit.
            pool: The engines.
            publisher: Knows the files of each version.
            deltas: Delivers versions to the engines' hosts, for `weights.transport: delta`.
            sender: Sends buckets; None for the transports `disk` and `delta`, which load files.
            verifier: Verifies the version that an engine serves.
            clock: Monotonic seconds.
        """
        self._config = config
        self._pool = pool
        self._publisher = publisher
        self._deltas = deltas
        self._sender = sender
        self._verifier = verifier
        self._clock = clock

    async def update_wave(self, engines: Sequence[Engine], version: int) -> list[EngineUpdateTimes]:
        """Update some engines together; returns the times of those that serve the version.

        Engines whose update was cut short by a cancellation are quarantined: their weights are unknown, and
        they may be paused.
        """
        times: list[EngineUpdateTimes] = []
        # Calls that go on during the update may report it before its engine serves again.
        self._pool.announce_version(version)
        try:
            if self._sender is None:
                await self._update_from_files(engines, version, times)
            else:
                await self._update_by_sending(self._sender, engines, version, times)
        finally:
            for engine in engines:
                snapshot = self._pool.snapshot_of(engine.engine_id)
                if snapshot is not None and snapshot.state is EngineState.UPDATING:
                    message = f"the update of engine {engine.engine_id} to version {version} was cut short"
                    self._pool.quarantine_engine(engine.engine_id, WeightSyncError(message))
        return times

    async def _update_from_files(
        self, engines: Sequence[Engine], version: int, times: list[EngineUpdateTimes]
    ) -> None:
        async def update_engine(engine: Engine) -> None:
            if self._config.transport == "delta":  # while it keeps generating
                path = await self._deltas.deliver_version(engine.engine_id, version)
            else:
                path = str(self._publisher.path_of(version))
            held = await self._interrupt_engine(engine)
            if held is not None:
                update = self._publisher.update_from(path, version)
                await self._load_weights(held, lambda: update, version, times)

        async with Nursery() as nursery:
            for engine in engines:
                nursery.start_task(f"update {engine.engine_id}", update_engine(engine))

    async def _update_by_sending(
        self,
        sender: BucketSender,
        engines: Sequence[Engine],
        version: int,
        times: list[EngineUpdateTimes],
    ) -> None:
        async with Nursery() as nursery:
            interrupts = [
                nursery.start_task(f"interrupt {engine.engine_id}", self._interrupt_engine(engine))
                for engine in engines
            ]
        # Only now: a broadcast into the group of an engine that cannot receive would wait for it.
        receiving = [
            held
            for interrupt in interrupts
            if (held := interrupt.result()) is not None
            and sender.can_reach(held.engine.engine_id)
            and self._is_held(held)
        ]
        if not receiving:
            return
        sender.begin_sending([held.engine.engine_id for held in receiving])

        async def load_weights(held: _HeldEngine) -> None:
            engine_id = held.engine.engine_id
            try:
                await self._load_weights(held, lambda: sender.update_for(engine_id, version), version, times)
            finally:
                sender.end_receiving(engine_id)

        async with Nursery() as nursery:
            for held in receiving:
                nursery.start_task(f"update {held.engine.engine_id}", load_weights(held))
            nursery.start_task("send weights", self._send_buckets(sender))

    async def _interrupt_engine(self, engine: Engine) -> _HeldEngine | None:
        """Hold and interrupt an engine; None when it failed."""
        if not self._pool.hold_engine(engine.engine_id):
            return None
        snapshot = self._pool.snapshot_of(engine.engine_id)
        begin = self._clock()
        async with self._quarantined_on_failure(engine):
            await self._pool.interrupt_engine(engine, self._config.interrupt)
            return _HeldEngine(engine, snapshot, self._clock() - begin)
        return None

    def _is_held(self, held: _HeldEngine) -> bool:
        """Whether nothing has happened to an engine since it was held.

        Repair loads the weights of an engine that was restarted since.
        """
        return self._pool.snapshot_of(held.engine.engine_id) == held.snapshot

    async def _load_weights(
        self,
        held: _HeldEngine,
        update: Callable[[], WeightUpdate],
        version: int,
        times: list[EngineUpdateTimes],
    ) -> None:
        """Update an interrupted engine, and let it serve again."""
        if not self._is_held(held):
            return
        engine = held.engine
        begin = self._clock()
        async with self._quarantined_on_failure(engine):
            flush = self._config.interrupt != "in_place"
            await engine.update_weights(update(), flush=flush)
            transferred = self._clock()
            await self._verifier.verify_version(engine, version, from_files=self._sender is None)
            await engine.resume_generation(self._config.interrupt)
            served = self._is_held(held) and self._pool.serve_engine(
                engine.engine_id, version, keeps_cache=not flush
            )
            if not served:
                return
            engine_times = EngineUpdateTimes(
                engine.engine_id, held.interrupt_s, transferred - begin, self._clock() - transferred
            )
            log.info(
                "weight version %d: engine %s was interrupted in %.3f s, loaded in %.3f, verified in %.3f",
                version,
                engine_times.engine_id,
                engine_times.interrupt_s,
                engine_times.transfer_s,
                engine_times.verify_s,
            )
            times.append(engine_times)

    async def _send_buckets(self, sender: BucketSender) -> None:
        """Send all buckets. A failure is only logged: each engine that did not receive them reports it."""
        try:
            with waiting("send weights"):
                await sender.send_buckets()
        except EngineError as error:
            log.warning("sending weights: %s", error)

    @asynccontextmanager
    async def _quarantined_on_failure(self, engine: Engine) -> AsyncIterator[None]:
        limit_s = self._config.timeout_s
        try:
            async with self._pool.bounded_request(engine.engine_id, limit_s):
                yield
        except EngineError as error:
            self._pool.quarantine_engine(engine.engine_id, error)
        except TimeoutError:
            message = (
                f"engine {engine.engine_id} did not take new weights within weights.timeout_s = {limit_s}"
            )
            self._pool.quarantine_engine(engine.engine_id, WeightSyncError(message))
