"""The process groups of `weights.transport: distributed`: one for trainer rank 0 and each engine.

With a group of its own, an engine that died stalls no other engine's update.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Final

from async_rl.engine_protocol import Engine, GroupInvite
from async_rl.errors import EngineError, TrainerError, WeightSyncError
from async_rl.runtime.supervision import Nursery, first_error
from async_rl.runtime.waits import NamedLock
from async_rl.trainer_protocol import Trainer
from async_rl.weights.delta_delivery import WeightRoutes

log = logging.getLogger(__name__)

_LEAVE_LIMIT_S: Final = 30.0
"""How long an engine may take to leave its group at the end of a run, which then ends all the same."""


class EngineGroups:
    """Opens and closes the weight-update group of each engine."""

    def __init__(
        self,
        trainer: Trainer,
        routes: WeightRoutes,
        trainer_busy: NamedLock,
        *,
        tp_size: int,
    ) -> None:
        """Start without groups.

        Args:
            trainer: Joins each group as rank 0.
            routes: Has the addresses where trainer rank 0 and an engine can meet.
            trainer_busy: Held while the trainer closes a group of an engine that left.
            tp_size: Ranks of one engine in its group.
        """
        self._trainer = trainer
        self._routes = routes
        self._trainer_busy = trainer_busy
        self._tp_size = tp_size
        self._groups: dict[str, tuple[str, Engine]] = {}
        """By engine: the group's name, and the engine."""
        self.opening = NamedLock("trainer lock")
        """Held while a group is opened: trainer rank 0 opens one at a time anyway. So each port is in use
        before the next one is chosen, and an engine's time limit begins with its turn."""

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._groups

    def name_of(self, engine_id: str) -> str:
        """Return the name of an engine's group.

        Raises:
            WeightSyncError: When it has joined none.
        """
        if engine_id not in self._groups:
            raise WeightSyncError(f"engine {engine_id} has joined no weight-update group")
        return self._groups[engine_id][0]

    async def open_group(self, engine: Engine) -> None:
        """Let trainer rank 0 and an engine join a new group; close the engine's group before it.

        The caller holds `opening`.
        """
        host, port = await self._routes.open_port()
        invite = GroupInvite(
            # The engine may still be in groups of earlier trainers and runs, and knows them by name.
            group_name=f"weights-{engine.engine_id}-{secrets.token_hex(8)}",
            backend="nccl" if self._routes.weight_backend == "nccl" else "gloo",
            host=host,
            port=port,
            world_size=1 + self._tp_size,
            rank_offset=1,
        )
        try:
            async with Nursery() as nursery:
                nursery.start_task("trainer joins", self._trainer.open_weight_group(invite))
                nursery.start_task("engine joins", engine.join_weight_group(invite))
        except ExceptionGroup as group:
            raise first_error(group) from group
        stale = self._groups.pop(engine.engine_id, None)
        self._groups[engine.engine_id] = invite.group_name, engine
        if stale is not None:
            await self._trainer.close_weight_group(stale[0])

    async def close_group(self, engine_id: str) -> None:
        """Close the group of an engine that has left for good, if it has one.

        A trainer that fails at that, or is restarted meanwhile, shows it at its next call: the engine leaves.
        """
        if (group := self._groups.pop(engine_id, None)) is not None:
            try:
                async with self._trainer_busy:
                    await self._trainer.close_weight_group(group[0])
            except TrainerError as error:
                log.warning("the weight group of engine %s was not closed: %s", engine_id, error)

    async def close(self) -> None:
        """Leave all groups on both sides: an engine that outlives the run would keep its communicator."""
        try:
            async with Nursery() as nursery:
                for engine_id, (name, engine) in self._groups.items():
                    nursery.start_task(f"{engine_id} leaves", _leave_group(engine, name))
                for name, _ in self._groups.values():
                    await self._trainer.close_weight_group(name)
        except ExceptionGroup as group:
            raise first_error(group) from group
        self._groups.clear()


async def _leave_group(engine: Engine, name: str) -> None:
    try:
        async with asyncio.timeout(_LEAVE_LIMIT_S):
            await engine.leave_weight_group(name)
    except (EngineError, TimeoutError) as error:
        log.warning("engine %s has not left its weight group: %s", engine.engine_id, error or "no answer")
