"""The folder of weights on an engine's host, as the driver knows it."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayError

from async_rl.errors import WeightSyncError
from async_rl.placement.ray_trainer import cause_of, last_line
from async_rl.weights.local_folders import LocalFolder


class RayFolder(LocalFolder):
    """Kept by the actor that owns the engine's server."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def hold(self, path: str, version: int) -> str:
        """See `Follower.hold`."""
        return await self._answer(self._actor.hold_weights.remote(path, version))

    async def apply(self, path: str) -> str:
        """See `Follower.apply`."""
        return await self._answer(self._actor.apply_delta.remote(path))

    async def _answer(self, reference: Any) -> str:
        try:
            folder: str = await reference
        except RayError as error:
            raise cause_of(error, WeightSyncError(last_line(error))) from error
        return folder
