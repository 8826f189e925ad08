"""The process groups of `weights.transport: distributed`: one for trainer rank 0 and each engine.

With a group of its own, an engine that died stalls no other engine's update.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from async_rl.engine_protocol import Engine, GroupInvite
from async_rl.errors import TrainerError, WeightSyncError
from async_rl.runtime.supervision import Nursery, first_error
from async_rl.runtime.waits import NamedLock
from async_rl.trainer_protocol import Trainer

log = logging.getLogger(__name__)


class EngineGroups:
    """Opens and closes the weight-update group of each engine."""

    def __init__(
        self,
        trainer: Trainer,
        open_port: Callable[[], Awaitable[tuple[str, int]]],
        trainer_busy: NamedLock,
        *,
        backend: str,
        tp_size: int,
        generation: int,
    ) -> None:
        """Start without groups.

        Args:
            trainer: Joins each group as rank 0.
            open_port: Returns the host and a free port where trainer rank 0 and an engine can meet.
            trainer_busy: Held while the trainer closes a group of an engine that left.
            backend: `gloo` or `nccl`.
            tp_size: Ranks of one engine in its group.
            generation: Number of trainers before this one: engines may still be in their groups, by name.
        """
        self._trainer = trainer
        self._open_port = open_port
        self._trainer_busy = trainer_busy
        self._backend = backend
        self._tp_size = tp_size
        self._generation = generation
        self._names: dict[str, str] = {}
        self._num_opened = 0

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._names

    def name_of(self, engine_id: str) -> str:
        """Returns the name of an engine's group.

        Raises:
            WeightSyncError: When it has joined none.
        """
        name = self._names.get(engine_id)
        if name is None:
            raise WeightSyncError(f"engine {engine_id} has joined no weight-update group")
        return name

    async def open_group(self, engine: Engine) -> None:
        """Let trainer rank 0 and an engine join a new group; close the engine's group before it."""
        host, port = await self._open_port()
        self._num_opened += 1
        invite = GroupInvite(
            group_name=f"weights-{engine.engine_id}-{self._generation}-{self._num_opened}",
            backend="nccl" if self._backend == "nccl" else "gloo",
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
        stale = self._names.pop(engine.engine_id, None)
        self._names[engine.engine_id] = invite.group_name
        if stale is not None:
            await self._trainer.close_weight_group(stale)

    async def close_group(self, engine_id: str) -> None:
        """Close the group of an engine that has left for good, if it has one.

        A trainer that fails at that, or is restarted meanwhile, shows it at its next call: the engine leaves.
        """
        if (name := self._names.pop(engine_id, None)) is not None:
            try:
                async with self._trainer_busy:
                    await self._trainer.close_weight_group(name)
            except TrainerError as error:
                log.warning("the weight group of engine %s was not closed: %s", engine_id, error)

    async def close(self) -> None:
        """Leave all groups."""
        for name in self._names.values():
            await self._trainer.close_weight_group(name)
        self._names.clear()
