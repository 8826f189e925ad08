"""Batches on their way to the trainer: made of ready groups, and settled after the trainer's step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final

from async_rl.errors import DataError, InvariantError, NodeUnreachable
from async_rl.runtime.threads import run_uncancellable
from async_rl.runtime.waits import waiting
from async_rl.store.outstanding import OutstandingGroups
from async_rl.store.packing import Packed, Packer
from async_rl.types import TakenBatch, root_of

log = logging.getLogger(__name__)

MAX_DAMAGED_GROUPS: Final = 64
"""The run ends after this many damaged groups without a batch in between."""

MAX_INCOMPLETE_BATCHES: Final = 64
"""The run ends after this many batches in a row whose frames nodes have lost."""


class BatchDelivery:
    """Makes batches of ready groups and remembers them until their step is settled."""

    def __init__(
        self,
        groups: OutstandingGroups,
        packer: Packer,
        executor: Executor,
        read_batch: Callable[[TakenBatch], Awaitable[Mapping[str, str]]],
    ) -> None:
        """Start without batches: the groups of an earlier process's batches are still queued.

        Args:
            groups: The groups that batches are made of.
            packer: Makes batches.
            executor: Runs the packer.
            read_batch: Lets the trainer read and verify the frames of a batch, as `Trainer.read_batch`.
        """
        self._groups = groups
        self._packer = packer
        self._executor = executor
        self._read_batch = read_batch
        self._packing = False
        self._num_incomplete = 0
        """Batches in a row with frames that nodes have lost."""
        self._num_damaged = 0
        """Damaged groups since the last batch."""
        self._taken: set[str] = set()

    @property
    def in_progress(self) -> bool:
        """Whether a batch is being packed or has been taken: its groups will free their frames."""
        return self._packing or bool(self._taken)

    async def pack_batch(self, version: int, group_ids: Sequence[str]) -> TakenBatch | None:
        """Pack ready groups and let the trainer read them, which has them afterwards.

        Cancelled, they stay ready.

        Args:
            version: The version that consumes the batch.
            group_ids: The groups, in the order of the batch.

        Returns:
            None when some groups cannot be trained on; these are dropped, or go back in flight when a node
            has lost frames of them. Also when a node that has some of the frames does not answer; the groups
            stay ready.

        Raises:
            DataError: Too many groups in a row are damaged.
            TrainerError: The trainer failed.
        """
        stored = [self._groups.stored_group(group_id) for group_id in group_ids]
        self._packing = True
        try:
            with self._groups.claim(group_ids):
                packed, cancelled = await run_uncancellable(
                    self._executor, lambda: self._packer.pack_groups(version, stored)
                )
                if packed.batch is not None and cancelled is None:
                    with waiting("frames", packed.batch.batch_id):
                        flaws = await self._read_batch(packed.batch)
                        packed = await self._without_damaged(packed, packed.batch, flaws)
        except NodeUnreachable as error:
            log.warning("the batch of version %d waits: %s", version, error)
            self._groups.wait_for_node(error.node)
            return None
        finally:
            self._packing = False
        for group_id, reason in packed.unusable.items():
            self._groups.drop_and_retry(group_id, reason)
        for group_id, root_ids in packed.missing.items():
            self._groups.reopen_group(group_id, root_ids)
        if cancelled is not None:
            raise cancelled
        if packed.batch is None:
            self._num_damaged += sum(reason == "corrupt" for reason in packed.unusable.values())
            if self._num_damaged >= MAX_DAMAGED_GROUPS:
                machine = f"node {packed.node}" if packed.node else "this machine"
                raise DataError(
                    f"{self._num_damaged} finished groups in a row cannot be read back from the spool; the "
                    f"last one: {packed.flaw}; check disk and memory of {machine}, and that only one job "
                    "writes into the run folder"
                )
            self._num_incomplete += bool(packed.missing)
            if self._num_incomplete >= MAX_INCOMPLETE_BATCHES:
                raise DataError(
                    f"in {self._num_incomplete} batches in a row frames were missing that node {packed.node} "
                    "had stored; check its disk, and that nothing else deletes files in queue.spool_dir"
                )
            return None
        self._num_damaged = self._num_incomplete = 0
        self._groups.take_groups(packed.batch, packed.too_stale)
        self._taken.add(packed.batch.batch_id)
        return packed.batch

    async def settle_batch(self, batch: TakenBatch, step: int) -> asyncio.CancelledError | None:
        """Record that a step has trained a batch, and delete its frames.

        Returns:
            A cancellation that arrived meanwhile. The batch is settled: the caller raises it when its own
            state says so.

        Raises:
            InvariantError: When the batch was settled before.
            AsyncRLError: When the ledger cannot be written; the batch may or may not be settled.
        """
        if batch.batch_id not in self._taken:
            raise InvariantError(f"batch {batch.batch_id} is settled already, or was never taken")
        self._groups.record_trained(batch, step)
        self._groups.discard_trained(batch)
        # Before a checkpoint claims the step.
        flush = partial(self._groups.flush_ledger, durable=True)
        _, cancelled = await run_uncancellable(self._executor, flush)
        self._taken.remove(batch.batch_id)
        return cancelled

    async def _without_damaged(self, packed: Packed, batch: TakenBatch, flaws: Mapping[str, str]) -> Packed:
        """Return a packed batch, or its groups with damaged or missing frames where there are some.

        Raises:
            NodeUnreachable: A node does not answer which of these frames it has.
        """
        if not flaws:
            return packed
        flawed = [each for each in batch.trajectories if each.trajectory_id in flaws]
        missing = await asyncio.to_thread(self._groups.find_missing, flawed)
        groups = dict(zip(batch.trajectory_ids, (batch.group_ids[i] for i in batch.group_index), strict=True))
        unusable: dict[str, str] = {}
        lost: dict[str, set[str]] = {}
        flaw = node = ""
        for each in flawed:
            name, group_id = each.trajectory_id, groups[each.trajectory_id]
            if name in missing:
                lost.setdefault(group_id, set()).add(root_of(name))
                continue
            flaw, node = flaws[name], each.node
            log.warning("trajectory %s cannot be trained on: %s", name, flaw)
            unusable[group_id] = "corrupt"
        if missing:
            nodes = sorted({each.node for each in flawed if each.trajectory_id in missing})
            node = node or nodes[0]
            log.warning("%s no longer have the frames of %d trajectories", ", ".join(nodes), len(missing))
        lost = {group_id: names for group_id, names in lost.items() if group_id not in unusable}
        return Packed(unusable=unusable, flaw=flaw, node=node, missing=lost)
