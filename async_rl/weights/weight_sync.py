"""Brings the engines to the trainer's weight version, over and over.

```
 trainer at n+1 ─► WeightPublisher ─► EngineUpdater: all serving engines at once, or one after the other
                          └─────────► EngineCatchUp: an engine that joins, was restarted, or was lent
```

Publishing files takes time during which the engines go on generating. An engine that fails its update is
quarantined, and the run continues even without any engine: `repair` restarts it, and it catches up without
delaying the others.

With `weights.overlap` the trainer copies its weights after each step, and the engines are updated from the
copy while it trains on. There is one copy: the next step's has to wait until this one has been sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

import msgspec
from msgspec.structs import replace

from async_rl.config import Config, SGLangEngines
from async_rl.engine_protocol import Engine
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.observability.metrics import Metrics
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import NamedLock, waiting
from async_rl.trainer_protocol import Trainer
from async_rl.weights.bucket_senders import BroadcastSender, BucketSender, Sent, SharedMemorySender
from async_rl.weights.checksums import ChecksumComparison, VersionVerifier
from async_rl.weights.delta_delivery import DeltaDelivery, WeightRoutes
from async_rl.weights.engine_catch_up import EngineCatchUp
from async_rl.weights.engine_groups import EngineGroups
from async_rl.weights.engine_updater import EngineUpdater, UpdateCost, quarantine_silent
from async_rl.weights.publisher import WeightPublisher

log = logging.getLogger(__name__)


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """How long one sync took, seconds; 0 if no engine has to serve the version."""

    weight_version: int
    parts: dict[str, float] = {}
    """Its parts that took time: publish, connect, interrupt, gather, send, load, verify (`UpdateCost`)."""
    num_bytes: int = 0
    """What was written or sent, bytes."""
    pause_s: float = 0.0
    """From the last moment an engine could take a call to the next such moment, less the transfer: that of
    the slowest engine."""
    total_s: float = 0.0
    handover_s: float = 0.0
    """Time the trainer had to wait: `total_s`, or with `weights.overlap` until its weights were copied."""


class WeightSync:
    """Brings engines to the trainer's version. One sync at a time."""

    def __init__(
        self,
        config: Config,
        *,
        pool: EnginePool,
        trainer: Trainer,
        routes: WeightRoutes,
        directory: Path,
        metrics: Metrics,
        clock: Callable[[], float],
        generation: int = 0,
        comparison: ChecksumComparison | None = None,
    ) -> None:
        """Wire the parts.

        Args:
            config: The run's config.
            pool: The engines.
            trainer: Publishes and sends its weights.
            routes: How they get to the engines.
            directory: Folder for published versions; only the newest stay.
            metrics: Durations.
            clock: Monotonic seconds.
            generation: Number of trainers before this one: engines may have part of what they sent.
            comparison: As for `VersionVerifier`.
        """
        weights = self._config = config.weights
        adapters = config.adapters is not None
        tp_size = config.engine.tp_size if isinstance(config.engine, SGLangEngines) else 1
        self._pool = pool
        self._trainer = trainer
        self._metrics = metrics
        self._clock = clock
        self._lock = NamedLock("sync lock")
        self.trainer_busy = NamedLock("trainer lock")
        """Held while what the trainer publishes and sends is ahead of the current version, so that no engine
        catches up from it: from the start of a step to the end of its sync, or with `weights.overlap` from
        the copying of the weights on.
        """
        self.trainer_version = -1
        """What the trainer sends after a step: with `weights.every` this may be ahead of the current one."""
        self._started = asyncio.Event()
        self._trainer_restarted = generation > 0
        self._calibrates = weights.verify == "checksum" and not self._trainer_restarted
        """Whether a load from files has to tell which sums of trainer and engines can be compared."""
        self._verifier = VersionVerifier(
            weights, pool=pool, trainer=trainer, metrics=metrics, adapters=adapters, comparison=comparison
        )
        self._publisher = WeightPublisher(trainer, directory, adapters=adapters)
        self._deltas = DeltaDelivery(
            weights, trainer=trainer, publisher=self._publisher, metrics=metrics, routes=routes
        )
        self._groups: EngineGroups | None = None
        self._sender: BucketSender | None = None
        if weights.transport == "distributed":
            self._groups = EngineGroups(trainer, routes, tp_size=tp_size)
            self._sender = BroadcastSender(trainer, self._groups, weights.bucket_bytes)
        elif weights.transport == "tensor":
            self._sender = SharedMemorySender(
                trainer,
                ranks_beside=lambda engine_id: routes.ranks_beside(engine_id) or [0] * tp_size,
                bucket_bytes=weights.bucket_bytes,
            )
        self._updater = EngineUpdater(
            weights,
            pool=pool,
            publisher=self._publisher,
            deltas=self._deltas,
            sender=self._sender,
            verifier=self._verifier,
            clock=clock,
        )
        self.catch_up = EngineCatchUp(
            weights,
            pool=pool,
            publisher=self._publisher,
            verifier=self._verifier,
            updater=self._updater,
            sync_lock=self._lock,
            trainer_busy=self.trainer_busy,
            trainer_restarted=generation > 0,
            routes=routes,
            match_trainer=self._match_trainer,
            shares_devices=config.placement.shared,
        )
        """Brings single engines to the current version."""

    async def start_from_version(
        self, version: int, initial_path: Path | None, *, update_engines: bool = True
    ) -> None:
        """Make the version that training starts from the current one, and bring every engine to it.

        Args:
            version: The trainer's version.
            initial_path: Files that hold it already (the model itself, at version 0), or None to send or
                publish it. They hold no adapter, so one is published in any case.
            update_engines: Whether to bring the engines to it; else `catch_up.load_current_version` does.
        """
        async with self._lock:
            self._publisher.current_version = version
            await self._publisher.remove_leftovers()
            if self._config.overlap:
                await self._take_snapshot(version)
            if initial_path is not None and not self._publisher.adapters:
                self._publisher.adopt_files(version, initial_path)
            elif self._sender is None or self._calibrates:
                await self._publisher.publish_files(version)
            if self._sender is not None:
                await self._sender.plan_buckets()
            await self._verifier.expect_version(version)
            if update_engines and self.has_files:
                await self.catch_up.catch_up_joining_engines()
                if self._sender is not None:
                    await self._connect_at_start(self._sender)
            elif update_engines:
                await self.catch_up.send_to_joining_engines()
        self._started.set()

    # -- engines that share their devices with the trainer: `device_sharing` decides when -------------------

    @property
    def current_version(self) -> int:
        """The version that engines are brought to."""
        return self._publisher.current_version

    @property
    def has_files(self) -> bool:
        """Whether there are files of the current version, which engines load; else it is sent to them."""
        return self._publisher.has_files(self._publisher.current_version)

    async def publish_version(self, version: int) -> int:
        """Make a version the current one; publish its files unless it is sent, and return their bytes."""
        async with self._lock:
            if self._sender is None:
                await self._publisher.ensure_files(version)
            await self._verifier.expect_version(version)
            self._publisher.current_version = version
            await self._publisher.remove_old_files()
            return await self._publisher.count_bytes(version)

    async def send_current_version(
        self, engines: Collection[Engine], receiving: Callable[[Engine], AbstractAsyncContextManager[None]]
    ) -> Sent:
        """Send the current version to engines that have memory for it, all at once.

        Args:
            engines: The engines.
            receiving: Returns a context in which an engine receives. It handles the engine's failure, and
                passes over `WeightsNotReceived`: the trainer has failed.

        Raises:
            AsyncRLError: The trainer's.
        """
        sender, version = self._sender, self._publisher.current_version
        assert sender is not None, "a version without files is sent"

        async def receive(engine: Engine) -> None:
            try:
                async with receiving(engine):
                    await engine.update_weights(sender.update_for(engine.engine_id, version), flush=True)
            finally:
                sender.end_receiving(engine.engine_id)

        async def send() -> Sent:
            sent = await sender.send_buckets()
            quarantine_silent(self._pool, sent)
            return sent

        await sender.connect(list(engines))
        sender.begin_sending([engine.engine_id for engine in engines])
        async with Nursery() as nursery:
            for engine in engines:
                nursery.start_task(f"update {engine.engine_id}", receive(engine))
            sending = nursery.start_task("send weights", send())
        return sending.result()

    async def serve_current_version(self, engine: Engine) -> None:
        """Verify what an engine that can take calls again has loaded, and let it serve.

        Raises:
            EngineError: When it has another version. The caller bounds the time.
        """
        version = self._publisher.current_version
        await self._verifier.verify_version(engine, version, from_files=self.has_files)
        self._pool.serve_engine(engine.engine_id, version)

    # -- engines with devices of their own ----------------------------------------------------------------

    def exclusive_trainer(self) -> AbstractAsyncContextManager[object]:
        """Return a context for a trainer step and the start of its sync.

        Inside it nothing else uses the trainer's weights, unless there is a copy of them (`weights.overlap`).
        """
        return nullcontext() if self._config.overlap else self.trainer_busy

    async def update_from_snapshot(self, version: int, copied: asyncio.Event) -> SyncReport:
        """Copy the trainer's weights, once the copy before is no longer needed, and update engines from it.

        Args:
            version: The trainer's.
            copied: Set when the trainer may change its weights again.
        """
        asked = self._clock()
        async with self.trainer_busy:
            begin = self._clock()
            await self._take_snapshot(version)
            copied_s = self._clock()
            self._metrics.weight_sync_seconds.labels("snapshot").observe(copied_s - begin)
            copied.set()
            return replace(await self.update_engines(version), handover_s=copied_s - asked)

    async def update_engines(self, version: int) -> SyncReport:
        """Bring all serving engines to a new version. Those that fail are quarantined, even if all fail."""
        async with self._lock:
            begin = self._clock()
            if self._config.transport == "disk":
                await self._publisher.publish_files(version)
            elif self._config.transport == "delta":
                await self._deltas.publish_delta(version)
            await self._verifier.expect_version(version)
            published = self._clock()
            # No await in between: an engine that joins serves the old version and is updated here, or loads
            # the new one.
            self._publisher.current_version = version
            joining = [each for each in sorted(self._updater.joining) if each in self._pool]
            engines = [*self._pool.engines(EngineState.SERVING), *map(self._pool.engine, joining)]
            waves: Sequence[Sequence[Engine]] = [[e] for e in engines] if self._config.rolling else [engines]
            costs = [await self._updater.update_wave(wave, version) for wave in waves]
            num_bytes = sum(cost.num_bytes for cost in costs) + await self._publisher.count_bytes(version)
            await self._deltas.remove_delta()
            await self._publisher.remove_old_files()
            publish_s, total_s = published - begin, self._clock() - begin
            return self._report(version, costs, num_bytes, publish_s=publish_s, total_s=total_s)

    def observe_update(self, report: SyncReport) -> SyncReport:
        """Observe an update that an engine has taken, and return its report."""
        for name, seconds in {**report.parts, "total": report.total_s}.items():
            self._metrics.weight_sync_seconds.labels(name).observe(seconds)
        self._metrics.weight_sync_bytes_total.inc(report.num_bytes)
        return report

    async def _match_trainer(self) -> None:
        """Make the trainer's version the current one, early if engines would take a later one."""
        if self.trainer_version > self.current_version:
            log.info("weight version %d: an engine needs the trainer's weights", self.trainer_version)
            await self.update_engines(self.trainer_version)

    async def catch_up_engine(self, engine_id: str) -> None:
        """Bring an engine that has (re)joined to the current version, or to the next one, and let it serve.

        Updates of the other engines go on meanwhile.

        Raises:
            EngineError: When it fails; it stays out of service.
        """
        await self._started.wait()
        await self.catch_up.catch_up_engine(engine_id)

    async def remove_engine(self, engine_id: str) -> None:
        """Use the weight-update groups of an engine no longer that has left for good."""
        if self._groups is not None:
            self._groups.forget(engine_id)

    async def close(self) -> None:
        """Leave the weight-update groups, and remove old files that were still read at the last update."""
        if self._groups is not None:
            await self._groups.close()
        await self._publisher.remove_old_files()

    # -- inside -------------------------------------------------------------------------------------------

    async def _connect_at_start(self, sender: BucketSender) -> None:
        """Connect the engines, so that a network in which they cannot be reached ends the start."""
        engines = self._pool.engines(EngineState.SERVING)
        for wave in [[each] for each in engines] if self._config.rolling else [engines]:
            for engine, error in (await sender.connect(wave)).items():
                if not self._trainer_restarted:
                    raise error
                self._pool.quarantine_engine(engine.engine_id, error)

    async def _take_snapshot(self, version: int) -> None:
        with waiting("snapshot", f"version {version}"):
            await self._trainer.take_snapshot(version)

    def _report(
        self, version: int, costs: Sequence[UpdateCost], num_bytes: int, *, publish_s: float, total_s: float
    ) -> SyncReport:
        served = [cost for cost in costs if cost.engines]
        slowest = max((cost.parts for cost in served), key=lambda parts: sum(parts.values()), default={})
        parts = {"publish": publish_s} | slowest
        pause_s = max((each.pause_s for cost in served for each in cost.engines), default=0.0)
        report = SyncReport(
            weight_version=version,
            parts={name: seconds for name, seconds in parts.items() if seconds},
            num_bytes=num_bytes,
            pause_s=pause_s,
            total_s=total_s,
            handover_s=total_s,
        )
        if not served:
            log.warning("weight version %d: no engine serves it yet", version)
            return report
        self._metrics.engine_pause_seconds.observe(pause_s)
        return self.observe_update(report)
