"""The slots of `rollout.max_concurrent_trajectories`, and the trajectories that hold them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from async_rl.observability.diagnosis import SlotsView
from async_rl.runtime.waits import waiting

_DISPATCH: Final = ""
"""The holder of the slot for a group that is about to be dispatched and has no trajectories yet."""


class Slots:
    """A semaphore that knows its holders, which tells a leaked slot from a busy one.

    Example:
        >>> slots = Slots(limit=2)
        >>> await slots.acquire_slot()
        >>> slots.hand_over("trajectory-7")
        >>> slots.view().holders
        ('trajectory-7',)
        >>> slots.release_slot("trajectory-7")
    """

    def __init__(self, limit: int) -> None:
        """Start with all slots free."""
        self.limit = limit
        self._free = asyncio.Semaphore(limit)
        self._holders: dict[str, None] = {}

    def view(self) -> SlotsView:
        """Return which trajectories hold a slot, for diagnosis; the dispatcher's slot reduces the limit."""
        holders = tuple(holder for holder in self._holders if holder != _DISPATCH)
        return SlotsView(limit=self.limit - (_DISPATCH in self._holders), holders=holders)

    async def acquire_slot(self, holder: str = _DISPATCH) -> None:
        """Wait for a slot; without a holder it belongs to the dispatcher, which holds at most one."""
        if self._free.locked():
            with waiting("slot", why=self._why):
                await self._free.acquire()
        else:
            await self._free.acquire()
        self._holders[holder] = None

    def hand_over(self, holder: str) -> None:
        """Pass the dispatcher's slot to a trajectory."""
        del self._holders[_DISPATCH]
        self._holders[holder] = None

    def release_slot(self, holder: str = _DISPATCH) -> None:
        """Release a slot, unless it has been reclaimed."""
        if holder in self._holders:
            self._free_slot(holder)

    def reclaim_slots(self, alive: Collection[str]) -> list[str]:
        """Free the slots of trajectories that are not alive, and return those trajectories."""
        gone = [holder for holder in self._holders if holder != _DISPATCH and holder not in alive]
        for holder in gone:
            self._free_slot(holder)
        return gone

    def _free_slot(self, holder: str) -> None:
        del self._holders[holder]
        self._free.release()

    def _why(self) -> str:
        return f"all of rollout.max_concurrent_trajectories = {self.limit} are taken"
