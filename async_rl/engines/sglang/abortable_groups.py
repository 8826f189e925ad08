"""Patches SGLang so that it receives from several senders at a time, and so that a broadcast can be aborted.

SGLang waits in a broadcast without a limit. Engines share a group with each sender, so one that is stopped in
the middle would stop all. With this, an engine tells the sender that it lives, and returns from a broadcast
that is aborted; its update request fails, and it takes the weights in another group. Like the launchers that
install it, this runs in the server's processes only.
"""

# mypy: disable-error-code="import-untyped, no-untyped-call"
# (SGLang has no type marker.)

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist

from async_rl.engines.group_liveness import (
    Broadcast,
    Connection,
    GroupHeartbeat,
    blocking_waits,
    wait_until,
)
from async_rl.engines.sglang.aborted_rows import SUPPORTED, hash_source
from async_rl.engines.sglang.group_names import are_joined, split_groups
from async_rl.errors import ABORTED, WeightSyncError

_SOURCE: Final = "88c2f945ea177be270c6a24ad979f86427c3067f0b497885673aabbaf38ee0cd"
"""sha256 of the source of the class that is patched."""

_CHECK_S: Final = 0.2
"""Interval in which an engine looks whether a broadcast is aborted."""


class GroupMember:
    """A rank of an engine in the group of one sender."""

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        """Tell the sender from now on that this process lives."""
        self._group = group
        self._heartbeat = GroupHeartbeat(group, rank)
        self._work: Broadcast | None = None
        self._is_connected = False

    def begin_receiving(self, data: torch.Tensor, *, in_parts: bool) -> None:
        """Begin to fill `data` by the sender's next broadcast.

        Raises:
            RuntimeError: When another member has failed.
            WeightSyncError: When the sender has aborted the group.
        """
        if not self._is_connected:
            connection = Connection(self._group, data.device)
            wait_until(connection.is_completed, self._heartbeat.check_aborted, _CHECK_S)
            connection.wait()  # raises what it failed with
            self._is_connected = True
        self._work = Broadcast(data, self._group, in_parts=in_parts)

    def end_receiving(self) -> None:
        """Wait until it is filled.

        Raises:
            RuntimeError: When another member has failed.
            WeightSyncError: When the sender has aborted the group.
        """
        assert self._work is not None, "this rank is a member, and receives"
        wait_until(self._work.is_completed, self._heartbeat.check_aborted, _CHECK_S)
        self._work.wait()  # raises what it failed with
        self._work = None
        self._heartbeat.count_received()

    def abandon(self) -> None:
        """Use the group no longer. It is not destroyed, which would wait for what it receives."""
        self._heartbeat.stop()
        if dist.get_backend(self._group) == "nccl":
            self._group._get_backend(torch.device("cuda")).abort()

    def leave(self) -> None:
        """Stop telling the sender anything."""
        self._heartbeat.stop()


def receive(members: Sequence[GroupMember], data: Sequence[torch.Tensor], *, in_parts: bool) -> None:
    """Receive the next broadcast of several senders at the same time.

    Raises:
        RuntimeError: When another member of a group has failed. No group is of use then.
        WeightSyncError: When a sender has aborted its group.
    """
    try:
        for member, part in zip(members, data, strict=True):
            member.begin_receiving(part, in_parts=in_parts)
        for member in members:
            member.end_receiving()
    except (RuntimeError, WeightSyncError):
        for member in members:
            member.abandon()
        raise


RECEIVED, WAS_ABORTED, FAILED = range(3)
"""How receiving has ended on a rank, the worst last."""


def worst_of(ranks: dist.ProcessGroup | None, end: int) -> int:
    """Return the worst end on the tensor-parallel ranks of this engine; None stands for this one alone.

    SGLang answers what its first rank does: without this, an engine could report a version of which another
    rank lacks the last bucket, or that it was stopped from outside when it has failed itself.
    """
    if ranks is None:
        return end
    worst = torch.tensor([end], dtype=torch.int32)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=ranks)
    return int(worst)


def make_groups_abortable() -> None:
    """Patch SGLang in this process.

    Raises:
        SystemExit: When the installed SGLang is not the one that the patch was written for.
    """
    from sglang.srt.model_executor.model_runner_components import weight_updater as module
    from sglang.srt.runtime_context import get_parallel

    updater = module.WeightUpdater
    if (found := hash_source(updater)) != _SOURCE:
        sys.exit(
            f"async_rl patches {updater.__module__} as it is in sglang {SUPPORTED}, but what is installed "
            f"differs (sha256 {found}, expected {_SOURCE}): install sglang=={SUPPORTED}"
        )
    init_group, destroy_group = updater.init_weights_update_group, updater.destroy_weights_update_group
    receive_whole = updater.receive_weights_from_distributed
    members: dict[str, GroupMember] = {}

    def join(
        self: Any,
        master_address: Any,
        master_port: Any,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
    ) -> tuple[bool, str]:
        with blocking_waits():
            answer: tuple[bool, str] = init_group(
                self, master_address, master_port, rank_offset, world_size, group_name, backend
            )
        if answer[0]:
            group = self._model_update_group[group_name]
            try:
                members[group_name] = GroupMember(group, rank_offset + self.tp_rank)
            except RuntimeError as error:  # the sender has given the group up
                return False, str(error)
        return answer

    def receive_weights(
        self: Any, *, names: Any, dtypes: Any, shapes: Any, group_name: str, load_format: str | None = None
    ) -> Any:
        if load_format != "flattened_bucket":
            return receive_whole(
                self,
                names=names,
                dtypes=dtypes,
                shapes=shapes,
                group_name=group_name,
                load_format=load_format,
            )
        groups, begin = split_groups(group_name, len(names)), 0
        buckets, failure, end = [], "", RECEIVED
        try:
            for _, count in groups:
                part = slice(begin, begin := begin + count)
                buckets.append(
                    module.FlattenedTensorBucket.empty(names[part], dtypes[part], shapes[part], self.device)
                )
            data = [bucket.get_flattened_tensor() for bucket in buckets]
            receive([members[name] for name, _ in groups], data, in_parts=are_joined(group_name))
        except (RuntimeError, WeightSyncError) as error:
            failure = str(error)
            end = WAS_ABORTED if failure.startswith(ABORTED) else FAILED
        parallel = get_parallel()
        ranks = parallel.tp_group.cpu_group if parallel.tp_size > 1 else None
        if (worst := worst_of(ranks, end)) != RECEIVED:
            update = groups[0][0].rpartition("-")[0]  # of all senders
            for name in [name for name in members if name.startswith(update)]:
                members.pop(name).abandon()
                del self._model_update_group[name]
            if worst > end:  # what this rank says is what the driver hears
                failure = f"{ABORTED * (worst == WAS_ABORTED)}another rank of this engine did not receive"
            raise WeightSyncError(failure)
        return [tensor for bucket in buckets for tensor in bucket.reconstruct_tensors()]

    def leave(self: Any, group_name: str) -> Any:
        if group_name in members:
            members.pop(group_name).leave()
        return destroy_group(self, group_name)

    updater.init_weights_update_group = join
    updater.receive_weights_from_distributed = receive_weights
    updater.destroy_weights_update_group = leave
