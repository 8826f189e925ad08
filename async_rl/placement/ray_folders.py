"""The folder of weights on an engine's host, as the driver knows it."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayError

from async_rl.errors import WeightSyncError
from async_rl.placement.ray_trainer import cause_of, last_line
from async_rl.weights.delta_delivery import HostFolder


class RayFolder(HostFolder):
    """Kept by the actor that owns the engine's server."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def copy_version(self, path: str, version: int) -> str:
        """See `WeightFolder.copy_version`."""
        return await self._answer(self._actor.copy_version.remote(path, version))

    async def apply_delta(self, path: str) -> str:
        """See `WeightFolder.apply_delta`."""
        return await self._answer(self._actor.apply_delta.remote(path))

    async def _answer(self, reference: Any) -> str:
        try:
            folder: str = await reference
        except RayError as error:
            raise cause_of(error, WeightSyncError(last_line(error))) from error
        return folder
