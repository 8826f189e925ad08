"""Divides weights into buckets: flat byte arrays of tensors, concatenated without gaps.

The layout equals that of `sglang.srt.weight_sync.tensor_bucket` byte for byte: engines split buckets by the
names, dtypes and shapes in the request. The transports `distributed` and `tensor` send weights in buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from async_rl.engine_protocol import TensorSpec
from async_rl.errors import WeightSyncError


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Return the description of a tensor for an engine."""
    return TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def bytes_of(specs: Iterable[TensorSpec]) -> int:
    """Return the bytes of some tensors."""
    return sum(spec.num_bytes for spec in specs)


def plan_buckets(specs: Iterable[TensorSpec], bucket_bytes: int) -> tuple[tuple[TensorSpec, ...], ...]:
    """Divide tensors, in order, into buckets of at most `bucket_bytes`; a larger tensor is alone in one.

    A bucket also ends where the next tensor would not be aligned to its element size, which the engine
    refuses. It never ends between tensors that the engine must receive together, see `_FUSED`.
    """
    buckets: list[tuple[TensorSpec, ...]] = []
    current: list[TensorSpec] = []
    filled = 0
    for unit in inseparable(list(specs)):
        itemsize, size = getattr(torch, unit[0].dtype).itemsize, bytes_of(unit)
        if current and (filled + size > bucket_bytes or filled % itemsize):
            buckets.append(tuple(current))
            current, filled = [], 0
        current += unit
        filled += size
    if current:
        buckets.append(tuple(current))
    return tuple(buckets)


_FUSED = (".self_attn.q_a_proj.weight", ".self_attn.kv_a_proj_with_mqa.weight")
"""SGLang fuses these two into one parameter if they arrive in one update, and silently drops a single one.

Source: sglang/srt/models/deepseek_common/deepseek_weight_loader.py, `cached_a_proj` of `load_weights`.
"""


def inseparable(specs: list[TensorSpec]) -> Iterator[list[TensorSpec]]:
    """Yield the tensors in order: those from one of a fused pair to the other together, others alone."""
    place = {spec.name: i for i, spec in enumerate(specs)}
    begin = 0
    while begin < len(specs):
        end = begin
        for mine, other in (_FUSED, _FUSED[::-1]):
            if specs[begin].name.endswith(mine):
                end = max(begin, place.get(specs[begin].name.removesuffix(mine) + other, begin))
        yield specs[begin : end + 1]
        begin = end + 1


def largest_of(buckets: Sequence[Sequence[TensorSpec]]) -> int:
    """Return the bytes of the largest bucket."""
    return max((bytes_of(bucket) for bucket in buckets), default=0)


def fill_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]],
    buckets: Sequence[Sequence[TensorSpec]],
    buffers: Sequence[torch.Tensor],
) -> Iterator[torch.Tensor]:
    """Yield each bucket's bytes, `[n] uint8`, in the buffers alternately.

    Args:
        tensors: Names and tensors in the order of the plan.
        buckets: The plan that the engines received.
        buffers: `[largest_of(buckets)] uint8` each. The first bucket is in the first one.

    Raises:
        WeightSyncError: When a tensor differs from the plan.
    """
    source = iter(tensors)
    for bucket, buffer in zip(buckets, itertools.cycle(buffers), strict=False):
        filled = 0
        for spec in bucket:
            name, tensor = next(source, ("nothing", torch.empty(0)))
            if spec_of(name, tensor) != spec:
                raise WeightSyncError(
                    f"the trainer exported {spec_of(name, tensor)}, but the engines expect {spec}"
                )
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            buffer[filled : filled + len(flat)].copy_(flat)
            filled += len(flat)
        yield buffer[:filled]
