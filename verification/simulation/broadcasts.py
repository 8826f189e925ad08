"""Process groups of simulated engines: a broadcast ends when all members take part, or never."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Literal

from async_rl.engine_protocol import GroupInvite
from async_rl.errors import ABORTED, WeightsNotReceived, WeightSyncError

Life = Literal["runs", "stopped", "ended"]

_JOIN_S: Final = 3.0
"""How long the trainer waits for all engines to join."""

_SILENT_S: Final = 9.0
"""As `async_rl.engines.group_liveness.SILENT_S`, which needs torch."""

_LIMIT_S: Final = 75.0
"""How long a broadcast may take."""

_POLL_S: Final = 0.5


class _Group:
    def __init__(self, size: int) -> None:
        self.size = size
        self.lives: dict[str, Callable[[], Life]] = {}
        """By engine, in the order of their ranks."""
        self.is_complete = asyncio.Event()
        self.listening: set[str] = set()
        self.sent = asyncio.Event()
        """Set for a moment."""
        self.num_sent = 0
        self.content = ""
        self.aborted = ""


class Broadcasts:
    """Where a trainer and engines meet, by group name."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    async def open(self, invite: GroupInvite) -> None:
        """Wait as the trainer until all engines have joined.

        Raises:
            WeightSyncError: When they have not in time.
        """
        group = self._group(invite)
        try:
            async with asyncio.timeout(_JOIN_S):
                await group.is_complete.wait()
        except TimeoutError as error:
            group.aborted = f"{len(group.lives)} of {group.size - 1} engines joined in {_JOIN_S} s"
            group.is_complete.set()
            raise WeightSyncError(group.aborted) from error

    async def join(self, invite: GroupInvite, engine_id: str, life: Callable[[], Life]) -> None:
        """Wait as an engine until the group is complete."""
        group = self._group(invite)
        group.lives[engine_id] = life
        if len(group.lives) == group.size - 1:
            group.is_complete.set()
        await group.is_complete.wait()
        if group.aborted:
            raise WeightSyncError(f"{engine_id} did not join: {group.aborted}")

    async def receive(self, name: str, engine_id: str) -> str:
        """Wait as an engine for the trainer's weights.

        Raises:
            WeightsNotReceived: When the group is aborted. Every second engine also notices by itself that
                another one's process has ended, as neighbours in a tree of connections do.
        """
        group = self._groups[name]
        group.listening.add(engine_id)
        is_neighbour = list(group.lives).index(engine_id) % 2
        before = group.num_sent
        try:
            while group.num_sent == before:
                if group.aborted:
                    raise WeightsNotReceived(f"{engine_id}: {ABORTED}{group.aborted}")
                if is_neighbour and "ended" in (life() for life in group.lives.values()):
                    raise WeightsNotReceived(f"{engine_id}: connection closed by peer")
                await _changed(group.sent)
        finally:
            group.listening.discard(engine_id)
        return group.content

    async def send(self, name: str, weights: str) -> list[int]:
        """Wait as the trainer until all engines listen, and send; return the ranks that are found silent."""
        group, waited_s = self._groups[name], 0.0
        silent_s = dict.fromkeys(group.lives, 0.0)
        while group.listening != group.lives.keys() and not group.aborted and waited_s < _LIMIT_S:
            await asyncio.sleep(_POLL_S)
            waited_s += _POLL_S
            for engine_id, life in group.lives.items():
                silent_s[engine_id] = 0.0 if life() == "runs" else silent_s[engine_id] + _POLL_S
            silent = [rank for rank, seconds in enumerate(silent_s.values(), 1) if seconds > _SILENT_S]
            if silent:
                self.abort(name, f"no sign of life from ranks {silent}")
                return silent
        if group.listening == group.lives.keys():
            group.content = weights
            group.num_sent += 1
            group.sent.set()
            group.sent.clear()
        return []

    def abort(self, name: str, why: str) -> None:
        """Let nobody wait in a group any more."""
        self._groups[name].aborted = self._groups[name].aborted or why

    def _group(self, invite: GroupInvite) -> _Group:
        return self._groups.setdefault(invite.group_name, _Group(invite.world_size))


async def _changed(event: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(_POLL_S):
            await event.wait()
    except TimeoutError:
        pass
