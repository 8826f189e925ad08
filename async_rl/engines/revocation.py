"""The processes that hold leases of a pool, and the wait until all have confirmed that theirs are revoked.

An update revokes the leases of thousands of engines in one turn, each held by a hundred workers. A worker
gets one message for all of them, and a confirmation costs each engine that waits for it a subtraction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

from async_rl.runtime.waits import waiting


class Revocation:
    """The revocation of a process's leases of some engines, until it has confirmed."""

    def __init__(self, holder: str) -> None:
        """Expect that a process confirms."""
        self.holder = holder
        """The process."""
        self.is_confirmed = False
        """Whether it has acknowledged that it begins no more calls, or its leases have expired."""
        self._latches: list[_Latch] = []

    def confirm(self) -> None:
        """Let all waits go on that have no other reason."""
        self.is_confirmed = True
        for latch in self._latches:
            latch.count_down()
        self._latches.clear()

    def add_latch(self, latch: _Latch) -> None:
        """Count the latch down once confirmed."""
        self._latches.append(latch)


class _Latch:
    """Opens after `count` count-downs."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def count_down(self) -> None:
        self._count -= 1
        if not self._count and not self.opened.done():  # cancelled at this moment
            self.opened.set_result(None)


async def wait_for_confirmations(revocations: Collection[Revocation], engine_id: str) -> None:
    """Wait until all of an engine's revocations are confirmed."""
    pending = [each for each in revocations if not each.is_confirmed]
    if not pending:
        return
    latch = _Latch(len(pending))
    for each in pending:
        each.add_latch(latch)
    with waiting("leases", engine_id, why=partial(_list_silent, pending)):
        await latch.opened


def _list_silent(revocations: Collection[Revocation]) -> str:
    return ", ".join(each.holder for each in revocations if not each.is_confirmed)


class LeaseHolder(Protocol):
    """A process that makes calls of its own under leases of the pool: a rollout worker."""

    num_reports: int = 0
    """The number of its reports on its calls so far."""

    @property
    def is_silent(self) -> bool:
        """Whether it has not reported for longer than usual: its calls say nothing about their engines."""
        ...

    def begin_revocation(self, engine_id: str, *, aborts: bool) -> Sequence[Revocation]:
        """Forbid calls under the leases of an engine that it has now; those that have begun go on.

        Args:
            engine_id: The engine.
            aborts: Whether the engine then aborts those that have begun, and waits for their ends.

        Returns:
            What to wait for; nothing when it holds no lease of the engine.
        """
        ...
