"""`weights.transport: delta`: what brings a version into a folder on each engine's host.

```
 trainer ─ publish ─► delta_n ─► each host: version n-1 ─► version n       its engine loads that
                         └ refused, or none ─► version_n, whole ─► copied to the host
```
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from async_rl.config import WeightsConfig
from async_rl.errors import EngineError
from async_rl.observability.metrics import Metrics
from async_rl.runtime.waits import NamedLock, waiting
from async_rl.trainer_protocol import Trainer
from async_rl.weights.delta import DeltaRefused, Refusal

log = logging.getLogger(__name__)


class LocalFolder(Protocol):
    """A `Follower` on an engine's host."""

    async def hold(self, path: str, version: int) -> str:
        """See `Follower.hold`."""
        ...

    async def apply(self, path: str) -> str:
        """See `Follower.apply`."""
        ...


class LocalWeights:
    """Delivers one version after the other to the hosts of engines."""

    def __init__(
        self,
        config: WeightsConfig,
        *,
        trainer: Trainer,
        directory: Path,
        metrics: Metrics,
        folder_of: Callable[[str], LocalFolder | None],
        whole: Callable[[int], Awaitable[Path]],
    ) -> None:
        """Deliver nothing yet.

        Args:
            config: How often whole versions go out, and how long one delivery may take.
            trainer: Writes deltas.
            directory: Where.
            metrics: Fallbacks are counted there.
            folder_of: The folder of an engine's host, by engine; None where nobody keeps one.
            whole: Publishes whole files of a version unless they are there. Not called twice at a time.
        """
        self._config = config
        self._trainer = trainer
        self._directory = directory
        self._metrics = metrics
        self._folder_of = folder_of
        self._whole = whole
        self._lock = NamedLock("publish")
        self._last: int | None = None
        """The version that hosts have."""
        self._deltas = 0
        """Since the last whole version."""
        self._path: Path | None = None

    async def publish(self, version: int) -> None:
        """Write the delta of a version, unless it is to go out whole."""
        whole = self._deltas >= self._config.full_every
        path, base = self._directory / f"delta_{version}", None if whole else self._last
        with waiting("publish", f"delta of version {version}"):
            written = await self._trainer.publish_delta(str(path), base, version)
        self._last = version
        self._path = path if written else None
        self._deltas = self._deltas + 1 if written else 0

    async def bring(self, engine_id: str, version: int) -> str:
        """Bring the published version to an engine's host, as a delta or else whole.

        Returns:
            The folder to load.

        Raises:
            EngineError: When the trainer cannot write whole files.
        """
        folder = self._folder_of(engine_id)
        if folder is None:
            self._fall_back(engine_id, "no_actor", "nobody on its host keeps a folder")
            return await self._whole_path(version)
        if self._path is not None:
            try:
                return await self._bounded(engine_id, folder.apply(str(self._path)))
            except DeltaRefused as error:
                self._fall_back(engine_id, error.reason, str(error))
        path = await self._whole_path(version)
        try:
            return await self._bounded(engine_id, folder.hold(path, version))
        except DeltaRefused as error:
            self._fall_back(engine_id, error.reason, str(error))
            return path

    async def clear_away(self) -> None:
        """Remove the delta, which nobody reads any more."""
        if self._path is not None:
            await asyncio.to_thread(self._path.unlink, missing_ok=True)
            self._path = None

    async def _whole_path(self, version: int) -> str:
        async with self._lock:
            return str(await self._whole(version))

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

    def _fall_back(self, engine_id: str, reason: Refusal, why: str) -> None:
        self._metrics.weight_delta_fallbacks_total.labels(reason).inc()
        log.warning("engine %s loads whole weights in place of a delta: %s", engine_id, why)
