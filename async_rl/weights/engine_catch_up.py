"""Brings single engines to the current weight version, while updates of the other engines go on.

```
 engine that joins, was restarted, or comes back from an evaluation
   ├─ there are files of the current version, or engines load files ──► it loads them
   ├─ at least half of the engines serve, and it does not come back ──► it takes the next update with them
   └─ else ──► the trainer sends it the current version alone, between two steps
```

On devices that it shares with the trainer, an engine that cannot load files waits for the next hand-over.

An engine that loads files serves only if theirs is still the current version then; else it loads again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Final

from async_rl.config import WeightsConfig
from async_rl.engine_protocol import Engine
from async_rl.engines.control_requests import wait_out
from async_rl.engines.pool import EnginePool, EngineSnapshot, EngineState
from async_rl.errors import EngineError, WeightSyncError
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import NamedLock, waiting
from async_rl.weights.checksums import VersionVerifier
from async_rl.weights.delta_delivery import WeightRoutes
from async_rl.weights.engine_updater import EngineUpdater
from async_rl.weights.publisher import WeightPublisher, absolute

_MAX_RETRIES: Final = 2
"""Loads of an engine that new versions may overtake; during the load after these, updates wait."""


class EngineCatchUp:
    """Loads the current version into engines that do not have it, and lets them serve."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        pool: EnginePool,
        publisher: WeightPublisher,
        verifier: VersionVerifier,
        updater: EngineUpdater,
        sync_lock: NamedLock,
        trainer_busy: NamedLock,
        trainer_restarted: bool,
        routes: WeightRoutes,
        match_trainer: Callable[[], Awaitable[None]],
        shares_devices: bool = False,
    ) -> None:
        """Wire the parts.

        Args:
            config: Transport, interruption and time limit.
            pool: The engines.
            publisher: Knows the current version and its files.
            verifier: Verifies the version that an engine serves.
            updater: Updates engines together.
            sync_lock: Held while engines are updated to a new version.
            trainer_busy: Held while the trainer's weights are ahead of the current version.
            trainer_restarted: Whether engines may have part of what an earlier trainer sent.
            routes: Knows which engines were started by others, and so outlive the run.
            match_trainer: Makes the trainer's version the current one, with `trainer_busy` held.
            shares_devices: Whether the trainer's weights are on its host while engines catch up.
        """
        self._config = config
        self._pool = pool
        self._publisher = publisher
        self._verifier = verifier
        self._updater = updater
        self._sync_lock = sync_lock
        self._trainer_busy = trainer_busy
        self._trainer_restarted = trainer_restarted
        self._routes = routes
        self._match_trainer = match_trainer
        self._shares_devices = shares_devices
        self._locks: dict[str, asyncio.Lock] = {}
        """By engine: held while it catches up, so that none is interrupted by a second one once it serves."""
        self._publishes_on_demand = config.transport == "delta"
        """Whether files of a version are published when an engine needs them."""

    async def catch_up_joining_engines(self) -> None:
        """Bring all engines that have joined to the current version.

        Raises:
            EngineError: When one fails at the start of a run; after a trainer restart it is quarantined.
        """

        async def catch_up(engine: Engine) -> None:
            try:
                await self._serve(engine, await self._load_files(engine, self._publisher.current_version))
            except EngineError as error:
                if not self._trainer_restarted:
                    raise
                self._pool.quarantine_engine(engine.engine_id, error)

        async with Nursery() as nursery:
            for engine in self._joined_engines():
                nursery.start_task(f"catch up {engine.engine_id}", catch_up(engine))

    async def send_to_joining_engines(self) -> None:
        """Send the current version, which has no files, to all engines that have joined.

        Raises:
            EngineError: As `catch_up_joining_engines`.
        """

        async def resume(engine: Engine) -> None:
            try:
                async with self._bounded(engine):
                    await engine.resume_generation(self._config.interrupt)
            except EngineError as error:
                self._pool.quarantine_engine(engine.engine_id, error)

        if self._trainer_restarted:  # the update before this one may have been cut short
            async with Nursery() as nursery:
                for engine in self._joined_engines():
                    nursery.start_task(f"resume {engine.engine_id}", resume(engine))
        engines = self._joined_engines()
        ids = {engine.engine_id for engine in engines}
        self._updater.joining |= ids
        try:
            for wave in [[each] for each in engines] if self._config.rolling else [engines]:
                await self._updater.update_wave(wave, self._publisher.current_version)
        finally:
            self._updater.joining -= ids
        for engine_id in () if self._trainer_restarted else ids:
            await self._has_taken(engine_id)

    def _joined_engines(self) -> list[Engine]:
        joining = self._pool.engines(EngineState.JOINING)
        return [engine for engine in joining if not self._pool.needs_repair(engine.engine_id)]

    async def catch_up_engine(self, engine_id: str, *, at_once: bool = False) -> None:
        """Bring an engine that has (re)joined to the current version, or to the next one, and let it serve.

        Args:
            engine_id: The engine.
            at_once: Whether the next version comes too late.

        Raises:
            EngineError: When it fails; it stays out of service.
        """
        if engine_id not in self._pool:
            return  # it has left
        engine = self._pool.engine(engine_id)
        lock = self._locks.setdefault(engine_id, asyncio.Lock())
        with waiting("engine update", engine_id) if lock.locked() else nullcontext():
            await lock.acquire()
        try:
            # It may have joined early enough for `catch_up_joining_engines`, or come back from an evaluation
            # and been restarted meanwhile: then both let it catch up.
            snapshot = self._pool.snapshot_of(engine_id)
            if snapshot is not None and snapshot.state is EngineState.JOINING:
                await self._catch_up(engine, at_once=at_once or self._pool.is_reserved(engine_id))
        finally:
            lock.release()

    async def _catch_up(self, engine: Engine, *, at_once: bool) -> None:
        publisher, sender = self._publisher, self._updater.sender
        for _ in range(_MAX_RETRIES):
            if sender is not None and not publisher.has_files(publisher.current_version):
                sender.forget(engine.engine_id)  # its process may be another one
                if self._shares_devices:
                    return  # it joins until the next hand-over, see `SharedDevices.hand_to_engines`
                if at_once or not await self._take_next_update(engine.engine_id):
                    await self._take_alone(engine)
                return
            if self._publishes_on_demand:
                async with self._trainer_busy:
                    await self._match_trainer()
                    version = await self._ensure_current_files()
            else:
                version = publisher.current_version
            loaded = await self._load_files(engine, version)
            if self._publishes_on_demand:
                async with self._trainer_busy:
                    if version == publisher.current_version:
                        await self._serve(engine, loaded)
                        break
            elif version == publisher.current_version:
                await self._serve(engine, loaded)
                break
        else:
            async with self._trainer_busy if self._publishes_on_demand else self._sync_lock:
                if self._publishes_on_demand:
                    await self._match_trainer()
                loaded = await self._load_files(engine, await self._ensure_current_files())
                await self._serve(engine, loaded)
        await publisher.remove_old_files()

    async def _take_next_update(self, engine_id: str) -> bool:
        """Wait until an engine has taken the next update; return whether it serves, or has left.

        While most engines do not serve, the next version is long in coming.

        Raises:
            EngineError: When it has failed meanwhile.
        """
        snapshot = self._pool.snapshot_of(engine_id)
        self._updater.joining.add(engine_id)
        try:
            with waiting("next update"):
                while self._pool.snapshot_of(engine_id) == snapshot and self._pool.most_serve:
                    await self._pool.wait_for_change()
        finally:
            self._updater.joining.discard(engine_id)
        return await self._has_taken(engine_id)

    async def _take_alone(self, engine: Engine) -> None:
        """Send the current version to one engine, unless it has taken an update that was under way.

        Raises:
            EngineError: When it has failed.
        """
        engine_id = engine.engine_id
        self._updater.joining.add(engine_id)
        try:
            async with self._trainer_busy:
                await self._match_trainer()
                async with self._sync_lock:
                    snapshot = self._pool.snapshot_of(engine_id)
                    if snapshot is not None and snapshot.state is EngineState.JOINING:
                        await self._updater.update_wave([engine], self._publisher.current_version)
        finally:
            self._updater.joining.discard(engine_id)
        await self._has_taken(engine_id)

    async def _has_taken(self, engine_id: str) -> bool:
        """Return whether an engine serves, or has left, once an update that it takes has ended.

        Raises:
            EngineError: When it has failed.
        """
        while (snapshot := self._pool.snapshot_of(engine_id)) is not None:
            if snapshot.state is EngineState.QUARANTINED:
                raise WeightSyncError(f"engine {engine_id} failed: {self._pool.error_of(engine_id)}")
            if snapshot.state is not EngineState.UPDATING:
                return snapshot.state is not EngineState.JOINING
            with waiting("engine update", engine_id):
                await self._pool.wait_for_change()
        return True

    async def take_back_engine(self, engine_id: str) -> None:
        """End the loan of an engine to an evaluation, and the calls that an evaluation which failed has left.

        An engine that still has the current version serves at once, with its prefix cache.

        Raises:
            EngineError: When it fails; it stays out of service.
        """
        snapshot = self._pool.snapshot_of(engine_id)
        if snapshot is None or snapshot.state is not EngineState.EVALUATING:
            return  # it failed meanwhile
        engine = self._pool.engine(engine_id)
        async with self._bounded(engine):
            await self._pool.interrupt_engine(engine, "abort")
            await engine.resume_generation("abort")
        async with self._sync_lock:
            if self._pool.snapshot_of(engine_id) != snapshot:
                return
            if snapshot.weight_version == self._publisher.current_version:
                self._pool.serve_engine(engine_id, snapshot.weight_version, keeps_cache=True)
                return
            self._pool.recall_engine(engine_id)
        await self.catch_up_engine(engine_id, at_once=True)

    async def load_current_version(self, engine: Engine) -> None:
        """Load the current version into an engine that was without the memory of its weights.

        Raises:
            EngineError: When the engine does not take it. The caller bounds the time.
        """
        version = self._publisher.current_version
        with self._publisher.reading_files(version) as path:
            await engine.update_weights(self._publisher.update_from(path, version), flush=True)

    async def _ensure_current_files(self) -> int:
        """Publish the current version and return it. The caller keeps the trainer from training meanwhile."""
        version = self._publisher.current_version
        await self._publisher.ensure_files(version)
        return self._publisher.current_version

    async def _load_files(self, engine: Engine, version: int) -> EngineSnapshot | None:
        """Load a published version into an engine that serves no calls, and verify it.

        Returns:
            The engine's state before that.

        Raises:
            EngineError: When it fails; it stays out of service.
        """
        snapshot = self._pool.snapshot_of(engine.engine_id)
        with self._publisher.reading_files(version) as path:
            async with self._bounded(engine):
                if self._trainer_restarted:  # the update before this one may have been cut short
                    await engine.resume_generation(self._config.interrupt)
                health = await wait_out(engine.health)
                same_model = not health.model_path or absolute(health.model_path) == path
                # Weights of the model alone are no version of a run with adapters: its first one is loaded.
                fresh = version == health.weight_version == 0 and same_model and not self._publisher.adapters
                if self._trainer_restarted or not fresh or self._may_have_part(engine):
                    # A server started by others may still run our calls.
                    await self._pool.interrupt_engine(engine, "abort")
                    await engine.update_weights(self._publisher.update_from(path, version), flush=True)
                await self._verifier.verify_version(engine, version, from_files=True)
        return snapshot

    def _may_have_part(self, engine: Engine) -> bool:
        """Whether an engine may have part of the weights that a driver sent which was killed.

        It has the version that it had before. The run's own engines end with their driver.
        """
        is_sent = self._config.transport in ("distributed", "tensor")
        return is_sent and self._routes.local_folder(engine.engine_id) is None

    async def _serve(self, engine: Engine, loaded: EngineSnapshot | None) -> None:
        """Let an engine serve the current version, which it has loaded and which does not change meanwhile.

        An engine that was restarted since has lost what it loaded: its restart brings it to the version.
        """
        if self._updater.sender is not None:
            self._updater.sender.forget(engine.engine_id)  # its process may be another one
        if self._pool.snapshot_of(engine.engine_id) == loaded:
            self._pool.serve_engine(engine.engine_id, self._publisher.current_version)

    @asynccontextmanager
    async def _bounded(self, engine: Engine) -> AsyncIterator[None]:
        limit_s = self._config.timeout_s
        try:
            async with self._pool.bounded_request(engine.engine_id, limit_s):
                yield
        except TimeoutError as error:
            if self._pool.needs_repair(engine.engine_id) and (cause := self._pool.error_of(engine.engine_id)):
                raise WeightSyncError(f"engine {engine.engine_id} failed meanwhile: {cause}") from error
            message = f"engine {engine.engine_id} did not take weights within weights.timeout_s = {limit_s}"
            raise WeightSyncError(message) from error
