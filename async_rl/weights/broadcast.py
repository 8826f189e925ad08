"""The trainer's side of a distributed weight update: joins SGLang's process group and broadcasts buckets.

The engine joins through its `/init_weights_update_group` and then receives one flattened uint8 broadcast for
every `/update_weights_from_distributed` with `load_format=flattened_bucket`. Both sides must use the same
format: the rendezvous follows `sglang.srt.utils.init_custom_process_group`, and `async_rl.weights.buckets`
defines the layout of a bucket.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from async_rl.engine_protocol import GroupInvite
from async_rl.errors import WeightSyncError

_BLOCKING_WAIT: Final = "TORCH_NCCL_BLOCKING_WAIT"

log = logging.getLogger(__name__)


def open_store(host: str, port: int, world_size: int, timeout_s: float) -> c10d.Store:
    """Open the store of a group as rank 0 of `world_size` processes, and wait for the others.

    Torch's own rendezvous would listen on all interfaces, and any process that reaches a store can write into
    it: this store listens on `host` only.

    Raises:
        RuntimeError: When the others have not joined within `timeout_s`.
        OSError: When the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        # The store closes the descriptor that it receives.
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )


@contextmanager
def blocking_waits() -> Iterator[None]:
    """Make `wait()` of NCCL groups that are created within the block raise when a peer fails, as Gloo's.

    By default it returns at once, and torch's watchdog ends the whole process when the peer stays away. With
    this variable a group has no watchdog: `wait()` blocks, and aborts the group before it raises. Torch reads
    it when a group is created (`ProcessGroupNCCL.cpp`, the constructor and `synchronizeInternal`), so the
    groups of training keep their watchdogs.
    """
    before = os.environ.get(_BLOCKING_WAIT)
    os.environ[_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING_WAIT]
        else:
            os.environ[_BLOCKING_WAIT] = before


class WeightGroup:
    """Rank 0 of one process group that an engine's ranks have joined."""

    def __init__(self, invite: GroupInvite, timeout_s: float) -> None:
        """Open the rendezvous and wait until the engine has joined.

        Raises:
            WeightSyncError: When it has not within `timeout_s`.
        """
        self.name = invite.group_name
        timeout = timedelta(seconds=timeout_s)
        try:
            store = open_store(invite.host, invite.port, invite.world_size, timeout_s)
            # Not init_process_group: it would create the default group, and a process can have only one.
            # SGLang prefixes the store with the name before torch's helper prefixes it again; so does this.
            with blocking_waits():
                self._group, _ = c10d._new_process_group_helper(
                    invite.world_size,
                    0,
                    [],
                    c10d.Backend(invite.backend),
                    c10d.PrefixStore(invite.group_name, store),
                    group_name=c10d.GroupName(invite.group_name),
                    timeout=timeout,
                )
        except (RuntimeError, OSError) as e:
            raise WeightSyncError(
                f"the engine did not join the weight-update group {self.name} at "
                f"{invite.host}:{invite.port} within {timeout_s} s: {e}"
            ) from e
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(invite.world_size)}

    def broadcast(self, data: torch.Tensor) -> dist.Work:
        """Start sending `data` to the engine's ranks."""
        work: dist.Work | None = dist.broadcast(data, src=0, group=self._group, async_op=True)
        assert work is not None, "rank 0 is a member of its own group"
        return work

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)


def send_buckets(data: Iterable[torch.Tensor], groups: Mapping[str, WeightGroup]) -> None:
    """Broadcast every bucket into all groups at the same time.

    A group whose engine fails is left out from then on, and the others continue: the engine's own update
    request reports the failure.

    Raises:
        WeightSyncError: When every group has failed.
    """
    alive = dict(groups)
    if not groups:
        return
    for bucket in data:
        if not alive:
            raise WeightSyncError(f"every weight-update group failed: {', '.join(groups)}")
        works = {}
        for name, group in list(alive.items()):
            try:
                works[name] = group.broadcast(bucket)
            except RuntimeError as e:
                _leave_out(alive, name, e)
        for name, work in works.items():
            try:
                work.wait()
            except RuntimeError as e:
                _leave_out(alive, name, e)
    if not alive:
        raise WeightSyncError(f"every weight-update group failed: {', '.join(groups)}")


def _leave_out(alive: dict[str, WeightGroup], name: str, error: RuntimeError) -> None:
    log.warning("sending weights into group %s failed: %s", name, error)
    del alive[name]
