"""The life of a weight version: publish, interrupt, update, attest, resume.

```
 trainer at n+1 ─ publish ─► (disk: files, while the engines go on generating)
                             for each engine, all at once or rolling:
                               hold        the pool sends it nothing more
                               interrupt   running calls end (abort) or stand still (retract, in_place)
                               update      by the transport; the prefix cache is flushed unless in_place
                               attest      the version is read back and compared
                               serve       sessions that wait wake up
```

An engine that fails any of this, hangs in it, or is left in the middle because the update was cut short, is
quarantined with its old version. The others go on, and the job does without any: `repair` brings them back.
An engine that (re)joins loads the current version from files beside all this, holding nobody up, and serves
only if that is still the current one.

With `weights.overlap` the trainer copies its weights after each step, and everything above is done from the
copy while it trains on. There is one copy: the next step's has to wait until it has been sent.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from async_rl.config import WeightsConfig
from async_rl.engine_protocol import (
    DiskUpdate,
    DistributedUpdate,
    Engine,
    GroupInvite,
    TensorSpec,
    TensorUpdate,
    WeightUpdate,
)
from async_rl.engines.lease import EngineSnapshot
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.errors import EngineError, VersionMismatch, WeightSyncError
from async_rl.observability.metrics import Metrics
from async_rl.runtime.supervision import Nursery, first_error
from async_rl.runtime.waits import NamedLock, waiting
from async_rl.trainer_protocol import Trainer
from async_rl.weights.checksums import Comparison
from async_rl.weights.local_folders import LocalFolder, LocalWeights
from async_rl.weights.relay import Relay

log = logging.getLogger(__name__)


_CHASES: Final = 2
"""Loads of an engine that joins while new versions overtake it; for the one after that, updates wait."""


class SyncReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one sync took, seconds; per-engine figures are those of the slowest, 0 when no engine served."""

    weight_version: int
    publish_s: float
    transfer_s: float
    pause_s: float
    """From the last moment an engine could take a call to the next, less the transfer."""
    total_s: float
    handover_s: float
    """The trainer could not go on: `total_s`, or with `weights.overlap` until its weights were copied."""

    @classmethod
    def none(cls, version: int) -> SyncReport:
        """Of a version that no engine is to serve."""
        return cls(
            weight_version=version,
            publish_s=0.0,
            transfer_s=0.0,
            pause_s=0.0,
            total_s=0.0,
            handover_s=0.0,
        )


class _EngineTimes(msgspec.Struct, frozen=True):
    engine_id: str
    interrupt_s: float
    transfer_s: float
    attest_s: float

    @property
    def pause_s(self) -> float:
        """Time without requests beyond the transfer."""
        return self.interrupt_s + self.attest_s


class WeightSync:
    """Brings engines to the trainer's version. One sync at a time."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        pool: EnginePool,
        trainer: Trainer,
        directory: Path,
        metrics: Metrics,
        clock: Callable[[], float],
        open_port: Callable[[], Awaitable[tuple[str, int]]],
        folder_of: Callable[[str], LocalFolder | None] = lambda engine_id: None,
        backend: str = "gloo",
        tp_size: int = 1,
        generation: int = 0,
    ) -> None:
        """Wire the parts.

        Args:
            config: Transport, interruption, bucket size.
            pool: The engines.
            trainer: Where weights come from.
            directory: Folder for published versions; only the newest `keep_versions` stay.
            metrics: Durations.
            clock: Monotonic seconds.
            open_port: Host and free port where trainer rank 0 and an engine can meet.
            folder_of: Where an engine's host keeps weights, for deltas; None where nobody does.
            backend: `gloo` or `nccl`, for the distributed transport.
            tp_size: Ranks of one engine in its group.
            generation: Trainers before this one: engines may still be in their groups, by name.
        """
        self._config = config
        self._pool = pool
        self._trainer = trainer
        self._directory = _whole(directory)
        self._metrics = metrics
        self._clock = clock
        self._open_port = open_port
        self._backend = backend
        self._tp_size = tp_size
        self._generation = generation
        self._lock = NamedLock("sync lock")
        self.trainer_busy = NamedLock("trainer lock")
        """Held while what the trainer publishes and sends is ahead of the version that engines know, so that
        nobody else may: from the start of a step to the end of its sync, or with `weights.overlap` from the
        copying of the weights on.
        """
        self._published: dict[int, Path] = {}
        self._readers = Counter[int]()
        """By version: engines that load its files now."""
        self._version = -1
        self._started = asyncio.Event()
        self._buckets: tuple[tuple[TensorSpec, ...], ...] = ()
        self._groups: dict[str, str] = {}
        self._comparison = Comparison()
        self._relay: Relay[Mapping[str, Sequence[bytes]]]
        """Of the wave that is being updated."""
        self._num_groups = 0
        self._deltas = LocalWeights(
            config,
            trainer=trainer,
            directory=self._directory,
            metrics=metrics,
            folder_of=folder_of,
            whole=self._files_of,
        )
        self._local: dict[str, str] = {}
        """By engine: the folder on its host that it is to load, with deltas."""
        self._held: dict[str, EngineSnapshot | None] = {}
        """How each engine stood when it was stopped for the last update."""

    async def start(self, version: int, initial_path: Path | None, *, bring: bool = True) -> None:
        """Bring every engine to the version that training starts from.

        Args:
            version: The trainer's version.
            initial_path: Files that hold it already (the model itself, at version 0), or None to publish.
            bring: Whether to bring them; else `load` does, one by one.
        """
        async with self._lock:
            self._version = version
            for left in sorted(self._directory.glob("version_*")):  # by an earlier life of the run
                await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
            for left in sorted(self._directory.glob("*delta_*")):
                left.unlink()
            if self._config.overlap:
                await self._take_snapshot(version)
            if initial_path is not None:
                self._published[version] = _whole(initial_path)
            else:
                await self._publish_files(version)
            if self._config.transport in ("distributed", "tensor"):
                self._buckets = await self._trainer.plan_buckets(self._config.bucket_bytes)
            await self._expect_sums(version)
            if bring:
                await self._catch_up_all()
        self._started.set()

    # -- engines that share their devices with the trainer: `sharing` says when ---------------------------

    async def publish(self, version: int) -> None:
        """Make a version the current one, with files of it, that engines are then brought to one by one."""
        async with self._lock:
            if version not in self._published:
                await self._publish_files(version)
            await self._expect_sums(version)
            self._version = version
            await self._clear_away()

    async def load(self, engine: Engine) -> None:
        """Load the current version into an engine that has nothing of use in its memory; read it back.

        Raises:
            EngineError: When it does not take it. Its caller bounds the time.
        """
        version = self._version
        with self._reading(version) as path:
            await engine.update_weights(DiskUpdate(weight_version=version, path=str(path)), flush=True)
        await self._attest(engine, version, from_files=True)

    def serve(self, engine: Engine) -> None:
        """Let an engine serve that has been loaded so."""
        self._pool.serve(engine.engine_id, self._version)

    # -- engines of their own -----------------------------------------------------------------------------

    def training(self) -> AbstractAsyncContextManager[object]:
        """Around a trainer step and what brings its weights on their way: nobody else uses the trainer's
        weights meanwhile, unless there is a copy of them for that.
        """
        return nullcontext() if self._config.overlap else self.trainer_busy

    async def hand_over(self, version: int, taken: asyncio.Event) -> SyncReport:
        """`sync` from a copy of the trainer's weights, once the copy before it is no longer needed.

        Args:
            version: The trainer's.
            taken: Set when the trainer may change its weights again.
        """
        asked = self._clock()
        async with self.trainer_busy:
            begin = self._clock()
            await self._take_snapshot(version)
            copied = self._clock()
            self._metrics.weight_sync_seconds.labels("snapshot").observe(copied - begin)
            taken.set()
            return replace(await self.sync(version), handover_s=copied - asked)

    async def _take_snapshot(self, version: int) -> None:
        with waiting("snapshot", f"version {version}"):
            await self._trainer.take_snapshot(version)

    async def sync(self, version: int) -> SyncReport:
        """Bring all serving engines to a new version. Those that fail are quarantined, be it all of them."""
        async with self._lock:
            begin = self._clock()
            if self._config.transport == "disk":
                await self._publish_files(version)
            elif self._config.transport == "delta":
                await self._deltas.publish(version)
            await self._expect_sums(version)
            published = self._clock()
            # No await in between: whoever joins serves the old version and is among these, or loads the new.
            self._version = version
            engines = self._pool.engines(EngineState.SERVING)
            waves: Sequence[Sequence[Engine]] = [[e] for e in engines] if self._config.rolling else [engines]
            times: list[_EngineTimes] = []
            for wave in waves:
                times += await self._update_wave(wave, version)
            await self._deltas.clear_away()
            await self._clear_away()
            return self._report(version, times, publish_s=published - begin, total_s=self._clock() - begin)

    def _report(
        self, version: int, times: Sequence[_EngineTimes], *, publish_s: float, total_s: float
    ) -> SyncReport:
        interrupt_s = max((t.interrupt_s for t in times), default=0.0)
        transfer_s = max((t.transfer_s for t in times), default=0.0)
        attest_s = max((t.attest_s for t in times), default=0.0)
        pause_s = max((t.pause_s for t in times), default=0.0)
        if times:
            observe = self._metrics.weight_sync_seconds
            observe.labels("interrupt").observe(interrupt_s)
            observe.labels("transfer").observe(transfer_s)
            observe.labels("verify").observe(attest_s)
            observe.labels("total").observe(total_s)
            self._metrics.engine_pause_seconds.observe(pause_s)
        else:
            log.warning("weight version %d: no engine serves it yet", version)
        return SyncReport(
            weight_version=version,
            publish_s=publish_s,
            transfer_s=transfer_s,
            pause_s=pause_s,
            total_s=total_s,
            handover_s=total_s,
        )

    async def catch_up(self, engine_id: str) -> None:
        """Bring an engine that has (re)joined to the current version, from files, and let it serve.

        Updates of the others go on meanwhile; when one overtakes it, it loads again.

        Raises:
            EngineError: When it cannot be; it stays out of service.
        """
        await self._started.wait()
        engine = next((e for e in self._pool.engines() if e.engine_id == engine_id), None)
        if engine is None:
            return  # it has left
        standing = self._pool.standing_of(engine_id)
        if standing is not None and standing.state is EngineState.SERVING:
            return  # it was back before `start` looked who is there, and has been brought by that
        on_demand = self._config.transport != "disk"  # only then are there no files of every version
        for _ in range(_CHASES):
            if on_demand:
                async with self.trainer_busy:
                    version = await self._files_of_now()
            else:
                version = self._version
            loaded = await self._load_files(engine, version)
            if on_demand:
                async with self.trainer_busy:
                    if version == self._version:
                        await self._serve(engine, loaded)
                        break
            elif version == self._version:
                await self._serve(engine, loaded)
                break
        else:
            async with self.trainer_busy if on_demand else self._lock:
                loaded = await self._load_files(engine, await self._files_of_now())
                await self._serve(engine, loaded)
        await self._clear_away()

    async def take_back(self, engine_id: str) -> None:
        """Bring an engine that was lent out to the current version; one that has it still serves at once.

        Raises:
            EngineError: See `catch_up`.
        """
        async with self._lock:
            standing = self._pool.standing_of(engine_id)
            if standing is None or standing.state is not EngineState.EVALUATING:
                return  # it failed meanwhile
            if standing.weight_version == self._version:
                self._pool.serve(engine_id, self._version, keeps_cache=True)
                return
            self._pool.recall(engine_id)
        await self.catch_up(engine_id)

    async def leave(self, engine_id: str) -> None:
        """An engine has left for good: its weight-update group is closed."""
        if (group_name := self._groups.pop(engine_id, None)) is not None:
            async with self.trainer_busy:
                await self._trainer.close_weight_group(group_name)

    async def close(self) -> None:
        """Leave the weight-update groups and the files that somebody still read when they grew old."""
        for group_name in self._groups.values():
            await self._trainer.close_weight_group(group_name)
        self._groups.clear()
        await self._clear_away()

    # -- one engine ------------------------------------------------------------------------------------

    async def _update_wave(self, engines: Sequence[Engine], version: int) -> list[_EngineTimes]:
        """Interrupt, update, attest and serve some engines together; those that fail are quarantined.

        So are those that are left in the middle, because the update was cancelled: nobody knows what they
        have, and they may stand still.
        """
        results: list[_EngineTimes] = []
        try:
            await self._update_together(engines, version, results)
        finally:
            for engine in engines:
                standing = self._pool.standing_of(engine.engine_id)
                if standing is not None and standing.state is EngineState.UPDATING:
                    message = f"the update of engine {engine.engine_id} to version {version} was cut short"
                    self._pool.quarantine(engine.engine_id, WeightSyncError(message))
        return results

    async def _update_together(
        self, engines: Sequence[Engine], version: int, results: list[_EngineTimes]
    ) -> None:

        async def bring(engine: Engine) -> None:
            if self._config.transport == "delta":  # while it goes on generating
                self._local[engine.engine_id] = await self._deltas.bring(engine.engine_id, version)
            interrupt_s = await self._interrupt(engine)
            if interrupt_s is not None:
                await self._load(engine, version, interrupt_s, results)

        if self._from_files:
            async with Nursery() as nursery:
                for engine in engines:
                    nursery.start_task(f"update {engine.engine_id}", bring(engine))
            return
        async with Nursery() as nursery:
            interrupts = [
                (engine, nursery.start_task(f"interrupt {engine.engine_id}", self._interrupt(engine)))
                for engine in engines
            ]
        # Only now: a broadcast into the group of an engine that cannot listen would wait for it.
        listening = [
            (engine, done.result())
            for engine, done in interrupts
            if done.result() is not None and self._is_listening(engine) and self._is_held(engine)
        ]
        if not listening:
            return
        engine_ids = [engine.engine_id for engine, _ in listening]
        self._relay = Relay(engine_ids, len(self._buckets), self._share)

        async def load(engine: Engine, interrupt_s: float | None) -> None:
            try:
                await self._load(engine, version, interrupt_s or 0.0, results)
            finally:
                self._relay.leave(engine.engine_id)

        async with Nursery() as nursery:
            for engine, interrupt_s in listening:
                nursery.start_task(f"update {engine.engine_id}", load(engine, interrupt_s))
            nursery.start_task("send weights", self._send(engine_ids))

    @property
    def _from_files(self) -> bool:
        """Whether engines load each version from files: the trainer's, or what deltas have made of them."""
        return self._config.transport in ("disk", "delta")

    def _is_listening(self, engine: Engine) -> bool:
        return self._config.transport == "tensor" or engine.engine_id in self._groups

    async def _interrupt(self, engine: Engine) -> float | None:
        """Stop an engine; seconds that took, or None when it failed."""
        if not self._pool.hold(engine.engine_id):
            return None
        self._held[engine.engine_id] = self._pool.standing_of(engine.engine_id)
        begin = self._clock()
        async with self._quarantined_on_failure(engine):
            await engine.interrupt(self._config.interrupt)
            return self._clock() - begin
        return None

    def _is_held(self, engine: Engine) -> bool:
        """Whether nothing has happened to an engine since it was stopped.

        One that was restarted since is brought up by whoever did that, beside whom nobody may load it.
        """
        return self._pool.standing_of(engine.engine_id) == self._held[engine.engine_id]

    async def _load(
        self, engine: Engine, version: int, interrupt_s: float, results: list[_EngineTimes]
    ) -> None:
        """Update an engine that stands still, and let it serve again."""
        if not self._is_held(engine):
            return
        begin = self._clock()
        async with self._quarantined_on_failure(engine):
            flush = self._config.interrupt != "in_place"
            await engine.update_weights(self._update_for(engine, version), flush=flush)
            transferred = self._clock()
            await self._attest(engine, version, from_files=self._from_files)
            await engine.resume_generation(self._config.interrupt)
            served = self._is_held(engine) and self._pool.serve(
                engine.engine_id, version, keeps_cache=not flush
            )
            if not served:
                return
            times = _EngineTimes(
                engine.engine_id, interrupt_s, transferred - begin, self._clock() - transferred
            )
            log.info("weight version %d: %s", version, times)
            results.append(times)

    async def _send(self, engine_ids: Sequence[str]) -> None:
        """Send all buckets; engines that could not receive say so themselves, so this only reports."""
        try:
            with waiting("send weights"):
                if self._config.transport == "tensor":
                    await self._relay.run()
                else:
                    groups = [self._groups[engine_id] for engine_id in engine_ids]
                    await self._trainer.send_weights(groups, self._config.bucket_bytes)
        except EngineError as error:
            log.warning("sending weights: %s", error)

    async def _share(self, number: int) -> Mapping[str, Sequence[bytes]]:
        """A bucket in shared memory: for each reader as many payloads as it has ranks."""
        readers, ranks = self._relay.readers, self._tp_size
        payloads = await self._trainer.share_bucket(number, self._config.bucket_bytes, ranks * len(readers))
        return {reader: payloads[i * ranks : (i + 1) * ranks] for i, reader in enumerate(readers)}

    @asynccontextmanager
    async def _quarantined_on_failure(self, engine: Engine) -> AsyncIterator[None]:
        limit_s = self._config.timeout_s
        try:
            async with (
                self._pool.attended(engine.engine_id, limit_s) as scope,
                waiting("engine update", engine.engine_id, scope=scope),
            ):
                yield
        except EngineError as error:
            self._pool.quarantine(engine.engine_id, error)
        except TimeoutError:
            message = (
                f"engine {engine.engine_id} did not take new weights within weights.timeout_s = {limit_s}"
            )
            self._pool.quarantine(engine.engine_id, WeightSyncError(message))

    def _update_for(self, engine: Engine, version: int) -> WeightUpdate:
        if self._config.transport == "disk":
            return DiskUpdate(weight_version=version, path=str(self._published[version]))
        if self._config.transport == "delta":
            return DiskUpdate(weight_version=version, path=self._local[engine.engine_id])
        if self._config.transport == "tensor":
            relay, engine_id = self._relay, engine.engine_id

            async def buckets() -> AsyncGenerator[Sequence[bytes], None]:
                async for payloads in relay.buckets(engine_id):
                    yield payloads[engine_id]

            return TensorUpdate(weight_version=version, num_buckets=len(self._buckets), buckets=buckets)
        group = self._groups.get(engine.engine_id)
        if group is None:
            raise WeightSyncError(f"engine {engine.engine_id} has joined no weight-update group")
        return DistributedUpdate(weight_version=version, group_name=group, buckets=self._buckets)

    async def _attest(self, engine: Engine, version: int, *, from_files: bool) -> None:
        """Read back what an engine has; others that prove to have something else are quarantined."""
        health = await engine.health()
        if health.weight_version != version:
            raise VersionMismatch(
                f"engine {engine.engine_id} reports weight version {health.weight_version} after an "
                f"update to {version}"
            )
        if self._config.verify == "version":
            return
        sums = await engine.checksums()
        wrong = self._comparison.report(engine.engine_id, version, sums, from_files=from_files)
        errors = {
            engine_id: VersionMismatch(f"engine {engine_id} has not version {version}: {words}")
            for engine_id, words in wrong.items()
        }
        mine = errors.pop(engine.engine_id, None)
        for engine_id, error in errors.items():
            self._pool.quarantine(engine_id, error)
        if mine is not None:
            raise mine

    async def _expect_sums(self, version: int) -> None:
        """What the trainer's weights sum to. Nobody changes them meanwhile."""
        if self._config.verify == "checksum":
            self._comparison.expect(version, await self._trainer.checksums())

    async def _catch_up_all(self) -> None:
        """Bring up all engines that have joined; one that fails fails the start of a run, not a restart."""

        async def bring(engine: Engine) -> None:
            try:
                await self._serve(engine, await self._load_files(engine, self._version))
            except EngineError as error:
                if not self._generation:
                    raise
                self._pool.quarantine(engine.engine_id, error)

        async with Nursery() as nursery:
            for engine in self._pool.engines(EngineState.JOINING):
                if not self._pool.needs_repair(engine.engine_id):
                    nursery.start_task(f"catch up {engine.engine_id}", bring(engine))

    async def _load_files(self, engine: Engine, version: int) -> EngineSnapshot | None:
        """Load a published version into an engine that serves nobody, and read it back.

        Returns:
            What the engine was then.

        Raises:
            EngineError: When it cannot; it stays out of service.
        """
        standing = self._pool.standing_of(engine.engine_id)
        with self._reading(version) as path:
            async with self._bounded(engine):
                if self._generation:  # the update before this one may have been cut short
                    await engine.resume_generation(self._config.interrupt)
                health = await engine.health()
                same_model = not health.model_path or _whole(health.model_path) == path
                fresh = version == health.weight_version == 0 and same_model
                if self._generation or not fresh:  # it may have half of what an earlier trainer sent
                    await engine.interrupt("abort")  # one that we did not start may still run calls of ours
                    await engine.update_weights(
                        DiskUpdate(weight_version=version, path=str(path)), flush=True
                    )
                await self._attest(engine, version, from_files=True)
        return standing

    async def _serve(self, engine: Engine, loaded: EngineSnapshot | None) -> None:
        """Let an engine serve the current version, which it has loaded; nobody changes that meanwhile.

        One that was restarted since has loaded nothing: whoever restarted it brings it up.
        """
        if self._config.transport == "distributed":
            async with self._bounded(engine):
                await self._open_group(engine)
        if self._pool.standing_of(engine.engine_id) == loaded:
            self._pool.serve(engine.engine_id, self._version)

    @asynccontextmanager
    async def _bounded(self, engine: Engine) -> AsyncIterator[None]:
        limit_s = self._config.timeout_s
        try:
            async with (
                asyncio.timeout(limit_s) as scope,
                waiting("engine update", engine.engine_id, scope=scope),
            ):
                yield
        except TimeoutError as error:
            message = f"engine {engine.engine_id} did not take weights within weights.timeout_s = {limit_s}"
            raise WeightSyncError(message) from error

    async def _open_group(self, engine: Engine) -> None:
        """Make a process group of trainer rank 0 and one engine: a dead engine then hangs nobody else's
        update.
        """
        host, port = await self._open_port()
        self._num_groups += 1
        invite = GroupInvite(
            group_name=f"weights-{engine.engine_id}-{self._generation}-{self._num_groups}",
            backend="nccl" if self._backend == "nccl" else "gloo",
            host=host,
            port=port,
            world_size=1 + self._tp_size,
            rank_offset=1,
        )
        try:
            async with Nursery() as nursery:
                nursery.start_task("trainer joins", self._trainer.open_weight_group(invite))
                nursery.start_task("engine joins", engine.join_weight_group(invite))
        except ExceptionGroup as group:
            raise first_error(group) from group
        stale = self._groups.pop(engine.engine_id, None)
        self._groups[engine.engine_id] = invite.group_name
        if stale is not None:
            await self._trainer.close_weight_group(stale)

    # -- files -----------------------------------------------------------------------------------------

    async def _publish_files(self, version: int) -> None:
        path = self._directory / f"version_{version}"
        with waiting("publish", f"version {version}"):
            await self._trainer.publish(str(path), version)
        self._published[version] = path

    async def _files_of_now(self) -> int:
        """The current version, published. Nobody trains meanwhile."""
        await self._files_of(self._version)
        return self._version

    async def _files_of(self, version: int) -> Path:
        if version not in self._published:
            await self._publish_files(version)
        return self._published[version]

    @contextmanager
    def _reading(self, version: int) -> Iterator[Path]:
        """The files of a version, which stay for as long as somebody reads them."""
        self._readers[version] += 1
        try:
            yield self._published[version]
        finally:
            self._readers[version] -= 1

    async def _clear_away(self) -> None:
        """Remove versions that are neither new nor read.

        Not while one is being published: until it is the current version, that is the one to load.
        """
        old = sorted(self._published)[: -self._config.keep_versions]
        unread = [version for version in old if not self._readers[version]]
        for stale in [self._published.pop(version) for version in unread]:
            if stale.parent == self._directory:
                await asyncio.to_thread(shutil.rmtree, stale, ignore_errors=True)


def _whole(path: Path | str) -> Path:
    """That means the same elsewhere: servers that we did not start have working folders of their own."""
    return Path(path).absolute()
