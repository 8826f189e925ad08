"""The trainer's end of a distributed weight update: SGLang's process group, buckets, broadcasts.

The engine joins through its `/init_weights_update_group` and then receives one flattened uint8 broadcast
for every `/update_weights_from_distributed` with `load_format=flattened_bucket`. Both ends must agree to the
byte: the rendezvous follows `sglang.srt.utils.init_custom_process_group`, the layout of a bucket
`sglang.srt.weight_sync.tensor_bucket` (tensors one after the other, each aligned to its own element size).
"""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from async_rl.engines.protocol import GroupInvite, TensorSpec
from async_rl.errors import WeightSyncError

log = logging.getLogger(__name__)


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describe a tensor as an engine is told of it."""
    return TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def size_of(spec: TensorSpec) -> int:
    """Bytes of the tensor."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return math.prod(spec.shape) * dtype.itemsize


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """Cut tensors, in their order, into buckets of at most `bucket_bytes`; what is larger stands alone.

    A bucket also ends where the next tensor would not be aligned to its element size: the engine refuses
    that. It never ends between tensors that the engine must get at once, see `_FUSED`.
    """
    buckets: list[tuple[TensorSpec, ...]] = []
    current: list[TensorSpec] = []
    filled = 0
    for unit in _inseparable(list(specs)):
        itemsize, size = getattr(torch, unit[0].dtype).itemsize, sum(map(size_of, unit))
        if current and (filled + size > bucket_bytes or filled % itemsize):
            buckets.append(tuple(current))
            current, filled = [], 0
        current += unit
        filled += size
    if current:
        buckets.append(tuple(current))
    return tuple(buckets)


_FUSED = (".self_attn.q_a_proj.weight", ".self_attn.kv_a_proj_with_mqa.weight")
"""SGLang makes one parameter of these two when they come in one update, and drops a single one in silence.

Source: sglang/srt/models/deepseek_common/deepseek_weight_loader.py, `cached_a_proj` of `load_weights`.
"""


def _inseparable(specs: list[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """The tensors in their order, each alone but for those from one of a fused pair to the other."""
    place = {spec.name: i for i, spec in enumerate(specs)}
    begin = 0
    while begin < len(specs):
        end = begin
        for mine, other in (_FUSED, _FUSED[::-1]):
            if specs[begin].name.endswith(mine):
                end = max(begin, place.get(specs[begin].name.removesuffix(mine) + other, begin))
        yield specs[begin : end + 1]
        begin = end + 1


def fill_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]],
    buckets: tuple[tuple[TensorSpec, ...], ...],
    device: torch.device,
) -> Iterator[torch.Tensor]:
    """Yield each bucket's bytes, `[n] uint8` on the device; one buffer is reused for all of them.

    Args:
        tensors: In the order of the plan.
        buckets: The plan that the engines were told.
        device: Where the process group broadcasts from.

    Raises:
        WeightSyncError: When a tensor is not the one the plan names.
    """
    source = iter(tensors)
    largest = max((sum(map(size_of, bucket)) for bucket in buckets), default=0)
    buffer = torch.empty(largest, dtype=torch.uint8, device=device)
    for bucket in buckets:
        filled = 0
        for spec in bucket:
            name, tensor = next(source, ("nothing", torch.empty(0)))
            if spec_of(name, tensor) != spec:
                raise WeightSyncError(
                    f"the trainer exported {spec_of(name, tensor)}, but the engines were told of {spec}"
                )
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            buffer[filled : filled + len(flat)].copy_(flat)
            filled += len(flat)
        yield buffer[:filled]


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
