"""The process groups of `weights.transport: distributed`, in which trainer ranks send and engines receive.

```
 senders 0, 8      engines a, b (started by the run)    engine c (started by others)
 group x-0         sender 0 ─► a, b                     group y-0   sender 0 ─► c
 group x-8         sender 8 ─► a, b                     group y-8   sender 8 ─► c
```

Engines that can end a broadcast share a group with each sender, which sends each byte once. Others have
groups of their own, so that one that stops in the middle stops no other.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from async_rl.engine_protocol import Engine, GroupInvite, group_of
from async_rl.errors import EngineError, WeightSyncError
from async_rl.runtime.supervision import Nursery, first_error
from async_rl.trainer_protocol import Trainer
from async_rl.weights.delta_delivery import WeightRoutes

log = logging.getLogger(__name__)

_LEAVE_LIMIT_S: Final = 5.0
"""How long an engine may take to leave a group, for which others wait. It keeps the group's memory then."""

_ANSWER_S: Final = 5.0
"""How long an engine may take to answer once the group that it was to join has been given up."""

_SAME_TIME_S: Final = 2.0
"""An engine that fails so shortly before the sender has failed with it: both lose one store."""


class EngineGroups:
    """Opens and closes the groups, each of exactly the engines that are updated together."""

    def __init__(self, trainer: Trainer, routes: WeightRoutes, *, tp_size: int) -> None:
        """Start without groups.

        Args:
            trainer: Its senders join groups as their rank 0.
            routes: Has the addresses where a sender and engines can meet.
            tp_size: Ranks of one engine in its group.
        """
        self._trainer = trainer
        self._routes = routes
        self._tp_size = tp_size
        self._members: dict[str, tuple[Engine, ...]] = {}
        """By what the names of groups, one per sender, begin with: their engines in the order of ranks."""
        self._stale: dict[str, None] = {}  # a set in the order in which groups were opened
        """Groups that are not used any more, and closed before the next ones are opened."""
        self._names: dict[str, str] = {}
        """By engine: the groups that it is in."""
        self.senders: Sequence[int] = (0,)
        """The trainer ranks that send."""

    def name_of(self, engine_id: str) -> str:
        """Return what the names of an engine's groups begin with.

        Raises:
            WeightSyncError: When it has joined none.
        """
        if (name := self.find_name(engine_id)) is None:
            raise WeightSyncError(f"engine {engine_id} has joined no weight-update group")
        return name

    def find_name(self, engine_id: str) -> str | None:
        """Return what the names of an engine's groups begin with; None when it has joined none."""
        return self._names.get(engine_id)

    def engine_of(self, group_name: str, rank: int) -> Engine:
        """Return the engine that a rank of a sender's group belongs to."""
        name, _, sender = group_name.rpartition("-")
        members = self._members[name]
        return members[((rank - 1) // self._tp_size - self._shift(int(sender), len(members))) % len(members)]

    def _shift(self, sender: int, num_members: int) -> int:
        """Return by how many places the ranks of engines are shifted in a sender's group.

        In Gloo's tree low ranks pass most on: with the same ranks everywhere one engine would for all.
        """
        return self.senders.index(sender) * num_members // len(self.senders)

    def are_concurrent(self, engine_id: str) -> bool:
        """Whether an engine can receive from several senders at a time."""
        return self._routes.abortable_servers and self._routes.local_folder(engine_id) is not None

    def peers_of(self, engine_id: str) -> Collection[str]:
        """Return the other engines in an engine's groups."""
        members = self._members.get(self._names.get(engine_id, ""), ())
        return [each.engine_id for each in members if each.engine_id != engine_id]

    async def connect(self, engines: Sequence[Engine]) -> Mapping[Engine, EngineError]:
        """Let engines that are about to be updated together have groups.

        Those that have them already keep them. The caller keeps the trainer from other work.

        Returns:
            The engines that have not joined theirs, with the reason.
        """
        failures: dict[Engine, EngineError] = {}
        for members in self._divide(engines):
            name = self._open_group_of(members)
            while members and not name:
                failed = await self._open(members)
                failures |= failed
                members = tuple(each for each in members if each not in failed)
                name = self._open_group_of(members)
        return failures

    def _open_group_of(self, members: tuple[Engine, ...]) -> str:
        names = (name for name, its in self._members.items() if its == members and name not in self._stale)
        return next(names, "")

    def _divide(self, engines: Sequence[Engine]) -> list[tuple[Engine, ...]]:
        """Return the engines that share groups, and each other one."""
        ordered = sorted(engines, key=lambda engine: engine.engine_id)
        sharing = tuple(each for each in ordered if self.are_concurrent(each.engine_id))
        return [*([sharing] if sharing else []), *((each,) for each in ordered if each not in sharing)]

    async def _open(self, members: tuple[Engine, ...]) -> dict[Engine, EngineError]:
        """Let each sender and some engines join a new group; return the engines that do not, and why.

        Groups that these engines were in are closed first.
        """
        for engine in members:
            self._retire(engine.engine_id)
        await self._close_stale()
        for can_retry in (True, False):
            # The engine may still be in groups of earlier trainers and runs, and knows them by name.
            name = f"weights-{secrets.token_hex(8)}"
            self._members[name] = members
            self._names |= {engine.engine_id: name for engine in members}
            try:
                failed = await self._join_all(members, name, blames_all=not can_retry)
            except BaseException:
                self._stale[name] = None
                raise
            if failed is None:  # a port may have been taken meanwhile
                self._stale[name] = None
                await self._close_stale()
                continue
            for engine in failed:
                self.forget(engine.engine_id)
            return failed
        raise AssertionError("the second attempt blames somebody")

    async def _join_all(
        self, members: tuple[Engine, ...], name: str, *, blames_all: bool
    ) -> dict[Engine, EngineError] | None:
        """Let each sender and engines join a group; return the engines because of which one is incomplete.

        Returns:
            None when a sender gave up although all engines have answered, unless that blames all.
        """
        # One sender after the other: its port is in use before the next one is chosen.
        for sender in self.senders:
            host, port = await self._routes.open_port(sender)
            invite = GroupInvite(
                group_name=name,
                sender=sender,
                is_concurrent=all(self.are_concurrent(engine.engine_id) for engine in members),
                backend="nccl" if self._routes.weight_backend == "nccl" else "gloo",
                host=host,
                port=port,
                world_size=1 + len(members) * self._tp_size,
                rank_offset=1,
            )
            failed, refusal = await self._join(members, invite)
            if failed:
                return failed
            if refusal is not None:
                return dict.fromkeys(members, refusal) if blames_all else None
        return {}

    async def _join(
        self, members: tuple[Engine, ...], invite: GroupInvite
    ) -> tuple[dict[Engine, EngineError], WeightSyncError | None]:
        """Let a sender and engines join a group.

        Returns:
            The engines because of which it is not complete, and why the sender has given up.
        """
        failed: dict[Engine, EngineError] = {}
        failed_s: dict[Engine, float] = {}
        refusal: WeightSyncError | None = None
        clock = asyncio.get_running_loop().time
        count, shift = len(members), self._shift(invite.sender, len(members))

        async def join(engine: Engine, rank: int) -> None:
            try:
                await engine.join_weight_group(replace(invite, rank_offset=rank))
            except EngineError as error:
                if refusal is None:  # else it waited for the others
                    failed[engine], failed_s[engine] = error, clock()

        try:
            async with Nursery() as nursery:
                joins = {
                    engine: nursery.start_task(
                        f"{engine.engine_id} joins", join(engine, 1 + (index + shift) % count * self._tp_size)
                    )
                    for index, engine in enumerate(members)
                }
                try:
                    await self._trainer.open_weight_group(invite)
                except WeightSyncError as error:
                    refusal = error
                    for engine, at_s in failed_s.items():
                        if at_s > clock() - _SAME_TIME_S:
                            del failed[engine]
                # The sender has given up, or all have joined.
                _, silent = await asyncio.wait(joins.values(), timeout=_ANSWER_S)
                for engine, task in joins.items():
                    if task in silent:
                        task.cancel()
                        failed[engine] = refusal or WeightSyncError("it does not answer after it has joined")
        except ExceptionGroup as group:
            raise first_error(group) from group
        return failed, refusal

    def forget(self, engine_id: str) -> None:
        """Use an engine's groups no longer: it was restarted, or has left one that was aborted."""
        self._names.pop(engine_id, None)
        self._retire(engine_id)

    def _retire(self, engine_id: str) -> None:
        self._stale |= {
            name: None for name, its in self._members.items() if engine_id in (each.engine_id for each in its)
        }

    async def close(self) -> None:
        """Leave all groups on both sides: an engine that outlives the run would keep its communicator."""
        self._stale |= dict.fromkeys(self._members)
        await self._close_stale()

    async def _close_stale(self) -> None:
        while self._stale:
            name, _ = self._stale.popitem()
            members = [each for each in self._members.pop(name) if self._names.get(each.engine_id) == name]
            await self._leave(members, name)

    async def _leave(self, members: Sequence[Engine], name: str) -> None:
        """Leave groups on both sides."""

        async def leave(engine: Engine) -> None:
            try:
                async with asyncio.timeout(_LEAVE_LIMIT_S):
                    for sender in self.senders:
                        await engine.leave_weight_group(group_of(name, sender))
            except (EngineError, TimeoutError) as error:
                log.info(
                    "engine %s has not left the group %s: %s", engine.engine_id, name, error or "no answer"
                )

        try:
            async with Nursery() as nursery:
                for engine in members:
                    nursery.start_task(f"{engine.engine_id} leaves", leave(engine))
                await self._trainer.close_weight_group(name)
        except ExceptionGroup as group:
            raise first_error(group) from group
