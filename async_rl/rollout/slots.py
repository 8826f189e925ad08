"""`rollout.max_concurrent_trajectories`, and who holds a place of it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from async_rl.observability.diagnosis import SlotsView
from async_rl.runtime.waits import waiting

_DISPATCH: Final = ""
"""Holds the slot of a group that is about to be dispatched: it has no trajectories yet."""


class Slots:
    """A semaphore that knows its holders, so that a slot nobody will give back can be told from a busy one.

    Example:
        >>> slots = Slots(limit=2)
        >>> await slots.acquire()
        >>> slots.hand_to("trajectory-7")
        >>> slots.release("trajectory-7")
    """

    def __init__(self, limit: int) -> None:
        """All free."""
        self.limit = limit
        self._free = asyncio.Semaphore(limit)
        self._holders: dict[str, None] = {}

    def view(self) -> SlotsView:
        """For a diagnosis: which trajectories hold a slot; one of the dispatcher's is taken off the limit."""
        holders = tuple(holder for holder in self._holders if holder != _DISPATCH)
        return SlotsView(limit=self.limit - (_DISPATCH in self._holders), holders=holders)

    async def acquire(self, holder: str = _DISPATCH) -> None:
        """Wait for a slot; without a holder it is the dispatcher's, one at a time."""
        with waiting("slot", why=self._why):
            await self._free.acquire()
        self._holders[holder] = None

    def hand_to(self, holder: str) -> None:
        """The dispatcher's slot is a trajectory's from now on."""
        del self._holders[_DISPATCH]
        self._holders[holder] = None

    def release(self, holder: str = _DISPATCH) -> None:
        """Give a slot back; nothing happens when it was reclaimed."""
        if holder in self._holders:
            self._give_back(holder)

    def reclaim(self, alive: Collection[str]) -> list[str]:
        """Free what is held by nobody who is alive; who held it."""
        gone = [holder for holder in self._holders if holder != _DISPATCH and holder not in alive]
        for holder in gone:
            self._give_back(holder)
        return gone

    def _give_back(self, holder: str) -> None:
        del self._holders[holder]
        self._free.release()

    def _why(self) -> str:
        return f"all of rollout.max_concurrent_trajectories = {self.limit} are taken"
