"""The trainer's end of a distributed weight update: SGLang's process group, buckets, broadcasts.

The engine joins through its `/init_weights_update_group` and then receives one flattened uint8 broadcast
for every `/update_weights_from_distributed` with `load_format=flattened_bucket`. Both ends must agree to the
byte: the rendezvous follows `sglang.srt.utils.init_custom_process_group`, a bucket is laid out as
`async_rl.weights.buckets` says.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from async_rl.engine_protocol import GroupInvite
from async_rl.errors import WeightSyncError

log = logging.getLogger(__name__)


def open_store(host: str, port: int, world_size: int, timeout_s: float) -> c10d.Store:
    """The store at which `world_size` processes meet, for the one that is rank 0; waits for the others.

    Torch's own rendezvous would listen on all interfaces, and whoever reaches a store can write into it: this
    one listens on `host` only.

    Raises:
        RuntimeError: When the others have not come within `timeout_s`.
        OSError: When the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        # The store closes the descriptor that it is given.
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )


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
            # A process may be in several groups but has one default one, so this is not init_process_group.
            # SGLang prefixes the store with the name before torch's helper prefixes it again: so must we.
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
        """Start to send `data` to the engine's ranks."""
        work: dist.Work | None = dist.broadcast(data, src=0, group=self._group, async_op=True)
        assert work is not None, "rank 0 is a member of its own group"
        return work

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)


def send_buckets(data: Iterable[torch.Tensor], groups: Mapping[str, WeightGroup]) -> None:
    """Broadcast every bucket into every group, all groups at a time.

    A group whose engine fails is left out from then on and the others go on: whoever waits for that engine's
    answer will hear of it. Only when no group is left this raises.

    Raises:
        WeightSyncError: When every group failed.
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
