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

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final

import msgspec

from async_rl.config import WeightsConfig
from async_rl.engine_protocol import Engine, InterruptMode
from async_rl.engines.pool import EnginePool, EngineSnapshot, EngineState
from async_rl.errors import EngineError, EngineTimeout, TrainerError, WeightsNotReceived, WeightSyncError
from async_rl.runtime.supervision import Nursery, finished
from async_rl.runtime.waits import waiting
from async_rl.weights.bucket_senders import BucketSender, Sent
from async_rl.weights.checksums import VersionVerifier
from async_rl.weights.delta_delivery import DeltaDelivery
from async_rl.weights.publisher import WeightPublisher

log = logging.getLogger(__name__)

_ANSWER_S: Final = 5.0
"""How long an engine may take to answer once its broadcast was aborted."""


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


class UpdateCost(msgspec.Struct):
    """What the update of a wave of engines took; those that failed are left out."""

    engines: list[EngineUpdateTimes] = []
    connect_s: float = 0.0
    """Time in which engines joined the trainer's groups; at first they generate meanwhile."""
    gather_s: float = 0.0
    """As `Sent.gather_s`, of the last time that the version was sent, and so is the following."""
    send_s: float = 0.0
    num_bytes: int = 0
    """As `Sent.num_bytes`, of all times."""

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part. Where engines do the same at the same time, those of the slowest count."""
        transfer_s = max((each.transfer_s for each in self.engines), default=0.0)
        return {
            "connect": self.connect_s,
            "interrupt": max((each.interrupt_s for each in self.engines), default=0.0),
            "gather": self.gather_s,
            "send": self.send_s,
            "load": max(0.0, transfer_s - self.gather_s - self.send_s),
            "verify": max((each.verify_s for each in self.engines), default=0.0),
        }


def quarantine_silent(pool: EnginePool, sent: Sent) -> None:
    """Quarantine engines that were found stopped, which ends their requests."""
    for engine in sent.silent:
        message = f"engine {engine.engine_id} gave no sign of life while it received weights"
        pool.quarantine_engine(engine.engine_id, EngineTimeout(message))


class _HeldEngine(msgspec.Struct, frozen=True):
    """An engine that was held and interrupted for an update."""

    engine: Engine
    snapshot: EngineSnapshot | None
    """Its state right after it was held."""
    interrupt_s: float
    joins: bool
    """Whether it did not serve before. Then it may have calls and prefixes of an earlier driver."""


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
        self.sender = sender
        """Sends buckets; None when engines load files."""
        self.joining: set[str] = set()
        """Engines that do not serve, and take the next version together with those that do."""
        self._verifier = verifier
        self._clock = clock

    async def update_wave(self, engines: Sequence[Engine], version: int) -> UpdateCost:
        """Update some engines together.

        Engines whose update was cut short by a cancellation are quarantined: their weights are unknown, and
        they may be paused.
        """
        cost = UpdateCost()
        # Calls that go on during the update may report it before its engine serves again.
        self._pool.announce_version(version)
        try:
            if self.sender is None:
                await self._update_from_files(engines, version, cost)
            else:
                await self._update_by_sending(self.sender, engines, version, cost)
        finally:
            for engine in engines:
                snapshot = self._pool.snapshot_of(engine.engine_id)
                if snapshot is not None and snapshot.state is EngineState.UPDATING:
                    message = f"the update of engine {engine.engine_id} to version {version} was cut short"
                    self._pool.quarantine_engine(engine.engine_id, WeightSyncError(message))
        return cost

    async def _update_from_files(self, engines: Sequence[Engine], version: int, cost: UpdateCost) -> None:
        async def update_engine(engine: Engine) -> None:
            if self._config.transport == "delta":  # while it keeps generating
                path = await self._deltas.deliver_version(engine.engine_id, version)
            else:
                path = str(self._publisher.path_of(version))
            held = await self._interrupt_engine(engine)
            if held is not None:
                update = self._publisher.update_from(path, version)
                await self._load_weights(
                    held, partial(engine.update_weights, update, flush=self._flushes), version, cost
                )

        async with Nursery() as nursery:
            for engine in engines:
                nursery.start_task(f"update {engine.engine_id}", update_engine(engine))

    async def _update_by_sending(
        self,
        sender: BucketSender,
        engines: Sequence[Engine],
        version: int,
        cost: UpdateCost,
    ) -> None:
        reached = await self._connect(sender, engines, cost)  # while they generate
        async with Nursery() as nursery:
            interrupts = [
                nursery.start_task(f"interrupt {engine.engine_id}", self._interrupt_engine(engine))
                for engine in reached
            ]
        # Only now: a broadcast to an engine that cannot receive would wait for it.
        receiving = [held for interrupt in interrupts if (held := interrupt.result()) is not None]
        while receiving:
            still_held = [held.engine for held in receiving if self._is_held(held)]
            reached = await self._connect(sender, still_held, cost)
            receiving = [held for held in receiving if held.engine in reached]
            receiving = await self._send_once(sender, receiving, version, cost)

    async def _connect(
        self, sender: BucketSender, engines: Sequence[Engine], cost: UpdateCost
    ) -> list[Engine]:
        """Return the engines that can be sent to; quarantine the others."""
        begin = self._clock()
        failures = await sender.connect(engines)
        cost.connect_s += self._clock() - begin
        for engine, error in failures.items():
            self._pool.quarantine_engine(engine.engine_id, error)
        return [engine for engine in engines if engine not in failures]

    async def _send_once(
        self,
        sender: BucketSender,
        receiving: Sequence[_HeldEngine],
        version: int,
        cost: UpdateCost,
    ) -> list[_HeldEngine]:
        """Send a version to engines; return those that did not receive it because of another one.

        An engine that fails before it has received all is given up. Those that share its broadcasts then have
        `_ANSWER_S` to say that they have not received them, and all but the one to blame are sent to again.
        """
        if not receiving:
            return []
        limits: dict[str, asyncio.Timeout] = {}
        """By engine that receives."""
        given_up: dict[str, Collection[str]] = {}
        """By engine that has not received all: those that share its broadcasts."""
        not_received: dict[str, WeightsNotReceived] = {}
        """By engine: its own answer, when it gives another one the chance to be to blame."""
        sender.begin_sending([held.engine.engine_id for held in receiving])

        async def receive(held: _HeldEngine) -> None:
            engine_id = held.engine.engine_id
            try:
                async with asyncio.timeout(None) as limits[engine_id]:
                    await held.engine.update_weights(
                        sender.update_for(engine_id, version), flush=self._flushes or held.joins
                    )
            except TimeoutError as error:
                message = f"engine {engine_id} did not end a broadcast that was aborted"
                raise WeightSyncError(message) from error
            finally:
                del limits[engine_id]
            del given_up[engine_id]

        async def load_weights(held: _HeldEngine) -> None:
            engine_id = held.engine.engine_id
            given_up[engine_id] = ()
            try:
                await self._load_weights(held, partial(receive, held), version, cost)
            except WeightsNotReceived as error:
                not_received[engine_id] = error
            finally:
                sender.end_receiving(engine_id)
            if engine_id in given_up:
                given_up[engine_id] = peers = await sender.give_up(engine_id)
                for peer in limits.keys() & peers:
                    if limits[peer].when() is None:
                        limits[peer].reschedule(asyncio.get_running_loop().time() + _ANSWER_S)

        try:
            async with Nursery() as nursery:
                for held in receiving:
                    nursery.start_task(f"update {held.engine.engine_id}", load_weights(held))
                nursery.start_task("send weights", self._send_buckets(sender, cost))
        except BaseException:  # the trainer may have to write a checkpoint, and must not wait for engines
            for held in receiving:
                with suppress(TrainerError, TimeoutError):
                    await finished(sender.give_up(held.engine.engine_id), limit_s=_ANSWER_S)
            raise
        again = []
        for held in receiving:
            engine_id = held.engine.engine_id
            if (error := not_received.get(engine_id)) is None:
                continue
            blamed = [
                peer
                for peer in given_up[engine_id]
                if peer in given_up and (peer not in not_received or not not_received[peer].is_aborted)
            ]
            if blamed and (error.is_aborted or any(peer not in not_received for peer in blamed)):
                again.append(held)
            else:
                self._pool.quarantine_engine(engine_id, error)
        return again

    async def _interrupt_engine(self, engine: Engine) -> _HeldEngine | None:
        """Hold and interrupt an engine; None when it failed."""
        joins = engine.engine_id in self.joining and self._pool.include_engine(engine.engine_id)
        mode: InterruptMode = "abort" if joins else self._config.interrupt
        if not joins and not self._pool.hold_engine(engine.engine_id):
            return None
        snapshot = self._pool.snapshot_of(engine.engine_id)
        begin = self._clock()
        async with self._quarantined_on_failure(engine):
            await self._pool.interrupt_engine(engine, mode)
            return _HeldEngine(engine, snapshot, self._clock() - begin, joins)
        return None

    def _is_held(self, held: _HeldEngine) -> bool:
        """Whether nothing has happened to an engine since it was held.

        Repair loads the weights of an engine that was restarted since.
        """
        return self._pool.snapshot_of(held.engine.engine_id) == held.snapshot

    async def _load_weights(
        self,
        held: _HeldEngine,
        load: Callable[[], Awaitable[None]],
        version: int,
        cost: UpdateCost,
    ) -> None:
        """Update an interrupted engine, and let it serve again.

        Raises:
            WeightsNotReceived: When another engine may be to blame that this one did not receive them.
        """
        if not self._is_held(held):
            return
        engine = held.engine
        begin = self._clock()
        async with self._quarantined_on_failure(engine):
            await load()
            transferred = self._clock()
            await self._verifier.verify_version(engine, version, from_files=self.sender is None)
            await engine.resume_generation(self._config.interrupt)
            served = self._is_held(held) and self._pool.serve_engine(
                engine.engine_id, version, keeps_cache=not (self._flushes or held.joins)
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
            cost.engines.append(engine_times)

    @property
    def _flushes(self) -> bool:
        return self._config.interrupt != "in_place"

    async def _send_buckets(self, sender: BucketSender, cost: UpdateCost) -> None:
        """Send all buckets. A failure is only logged: each engine that did not receive them reports it."""
        try:
            with waiting("send weights"):
                sent = await sender.send_buckets()
            cost.gather_s, cost.send_s = sent.gather_s, sent.send_s
            cost.num_bytes += sent.num_bytes
            quarantine_silent(self._pool, sent)
        except EngineError as error:
            log.warning("sending weights: %s", error)

    @asynccontextmanager
    async def _quarantined_on_failure(self, engine: Engine) -> AsyncIterator[None]:
        limit_s = self._config.timeout_s
        try:
            async with self._pool.bounded_request(engine.engine_id, limit_s):
                yield
        except WeightsNotReceived:
            raise
        except EngineError as error:
            self._pool.quarantine_engine(engine.engine_id, error)
        except TimeoutError:
            message = (
                f"engine {engine.engine_id} did not take new weights within weights.timeout_s = {limit_s}"
            )
            self._pool.quarantine_engine(engine.engine_id, WeightSyncError(message))
