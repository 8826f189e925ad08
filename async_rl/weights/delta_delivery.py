"""`weights.transport: delta`: delivers each version to a folder on each engine's host.

```
 trainer ─ publish ─► delta_n ─► each host: version n-1 ─► version n       its engine loads that
                         └ refused, or none ─► version_n, whole ─► copied to the host
```
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Final, Protocol

from async_rl.config import WeightsConfig
from async_rl.errors import EngineError
from async_rl.observability.metrics import Metrics
from async_rl.runtime.waits import NamedLock, waiting
from async_rl.trainer_protocol import Trainer
from async_rl.weights.delta import DeltaRefused, Refusal
from async_rl.weights.publisher import WeightPublisher

log = logging.getLogger(__name__)

FULL_EVERY: Final = 64
"""Deltas between two versions that are sent in full: a host that missed one needs no more than these."""


class HostFolder(Protocol):
    """A `WeightFolder` on an engine's host."""

    async def copy_version(self, path: str, version: int) -> str:
        """Copy a folder of whole weights to the host; return its path."""
        ...

    async def apply_delta(self, path: str) -> str:
        """Create the next version from the current one; return its path."""
        ...


class WeightRoutes(Protocol):
    """The ways by which weights get from the trainer to the engines of a run."""

    weight_backend: str
    """`gloo` or `nccl`, for distributed weight updates."""
    abortable_servers: bool
    """Whether the servers that the run starts end a broadcast that is aborted."""

    async def open_port(self, rank: int) -> tuple[str, int]:
        """Return host and a free port of a trainer rank, where it and an engine can meet."""
        ...

    def ranks_beside(self, engine_id: str) -> Sequence[int]:
        """Return for each GPU of an engine the trainer rank on it; nothing where they share no GPUs."""
        ...

    def local_folder(self, engine_id: str) -> HostFolder | None:
        """Return the folder of weights on the host of an engine; None for an external server."""
        ...


class DeltaDelivery:
    """Delivers one version after the other to the hosts of engines."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        trainer: Trainer,
        publisher: WeightPublisher,
        metrics: Metrics,
        routes: WeightRoutes,
    ) -> None:
        """Deliver nothing yet.

        Args:
            config: How often whole versions are sent, and how long one delivery may take.
            trainer: Writes deltas.
            publisher: Publishes whole versions; the deltas are in its folder.
            metrics: Counts fallbacks to whole versions.
            routes: Has the folders on the engines' hosts.
        """
        self._config = config
        self._trainer = trainer
        self._publisher = publisher
        self._metrics = metrics
        self._routes = routes
        self._lock = NamedLock("publish")
        self._last_version: int | None = None
        """The version that the hosts have."""
        self._num_deltas = 0
        """Deltas since the last whole version."""
        self._path: Path | None = None

    async def publish_delta(self, version: int) -> None:
        """Let the trainer write the delta of a version, unless it is due to be sent whole."""
        whole = self._num_deltas >= FULL_EVERY
        path, base = self._publisher.directory / f"delta_{version}", None if whole else self._last_version
        with waiting("publish", f"delta of version {version}"):
            written = await self._trainer.publish_delta(str(path), base, version)
        self._last_version = version
        self._path = path if written else None
        self._num_deltas = self._num_deltas + 1 if written else 0

    async def deliver_version(self, engine_id: str, version: int) -> str:
        """Deliver the published version to an engine's host, as a delta or else whole.

        Returns:
            The folder to load.

        Raises:
            EngineError: When the trainer cannot write whole files.
        """
        folder = self._routes.local_folder(engine_id)
        if folder is None:
            self._record_fallback(engine_id, "no_actor", "its host has no folder for weights")
            return await self._publish_whole(version)
        if self._path is not None:
            try:
                return await self._bounded(engine_id, folder.apply_delta(str(self._path)))
            except DeltaRefused as error:
                self._record_fallback(engine_id, error.reason, str(error))
        path = await self._publish_whole(version)
        try:
            return await self._bounded(engine_id, folder.copy_version(path, version))
        except DeltaRefused as error:
            self._record_fallback(engine_id, error.reason, str(error))
            return path

    async def remove_delta(self) -> None:
        """Remove the delta once every host has read it."""
        if self._path is not None:
            await asyncio.to_thread(shutil.rmtree, self._path, ignore_errors=True)
            self._path = None

    async def _publish_whole(self, version: int) -> str:
        async with self._lock:
            return str(await self._publisher.ensure_files(version))

    async def _bounded(self, engine_id: str, call: Awaitable[str]) -> str:
        limit_s = self._config.timeout_s
        try:
            async with asyncio.timeout(limit_s) as scope, waiting("engine update", engine_id, scope=scope):
                return await call
        except TimeoutError as error:
            raise DeltaRefused(f"nothing within weights.timeout_s = {limit_s}", "failed") from error
        except DeltaRefused:
            raise
        except EngineError as error:
            raise DeltaRefused(str(error), "failed") from error

    def _record_fallback(self, engine_id: str, reason: Refusal, why: str) -> None:
        self._metrics.weight_delta_fallbacks_total.labels(reason).inc()
        log.warning("engine %s loads whole weights in place of a delta: %s", engine_id, why)
