"""Training state as parts of global tensors, which are saved under one layout and loaded under another.

```
decoder.layers.3.mlp.experts.experts.7.linear_fc2.weight     a parameter: one tensor per layer and expert
optimizer.state.exp_avg.<parameter>, .exp_avg_sq.            the moments of Adam
optimizer.state.fp32_param.<parameter>                       the float32 main copy of a bfloat16 parameter
critic.<any of these>                                        of the value model, if there is one
decoder.layers.3.self_attention.linear_qkv.lora_A            a factor of an adapter, in place of all others
random.<generator>                                           `[ranks, n]`, usable only by the same layout
```

Megatron's model describes each parameter as a part of a tensor (`sharded_state_dict`). With one tensor per
layer and expert, names do not depend on pipeline stages or expert ranks, nor on the layer spec
(`trainer.megatron.names`). The distributed optimizer holds flat
ranges of parameters. Each rank writes the boxes that make up its ranges (`boxes`), parameters included, so
that ranks share the work and nothing is gathered. Megatron's own formats either gather whole buffers on each
rank (`fully_reshardable`) or can be loaded only under the layout that wrote them (`dp_reshardable`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model

from async_rl.errors import CheckpointError
from trainer.megatron.lora import adapted_weights
from trainer.megatron.model import MegatronModel
from trainer.megatron.names import portable_names

_MOMENTS = ("exp_avg", "exp_avg_sq")

TensorPart = ShardedTensor
"""A part of a global tensor: `key`, `data`, `global_shape`, `global_offset`."""
Sharded = ShardedTensor | ShardedTensorFactory


class _HeldShard(NamedTuple):
    """The part of a parameter that an optimizer of this rank holds."""

    parameter: torch.nn.Parameter
    main: torch.Tensor
    """The tensor that the optimizer updates: the parameter, a float32 copy, or a flat range of either."""
    optimizer: torch.optim.Optimizer
    start: int
    """Start of the range in the flattened parameter."""
    ranged: bool
    """Whether other data-parallel ranks hold the other ranges; otherwise they hold the same tensor."""


def parameter_parts(chunks: Sequence[torch.nn.Module]) -> list[TensorPart]:
    """Return this rank's trained parameters as views, and all buffers if none is frozen."""
    return [part for sharded in _sharded(chunks) for part in _parts(sharded, sharded.data)]


def parts_held_once(chunks: Sequence[torch.nn.Module]) -> list[TensorPart]:
    """Return those of `parameter_parts` that no earlier rank has, too."""
    return [part for part in parameter_parts(chunks) if is_main_replica(part.replica_id)]


def parts_to_save(model: MegatronModel) -> list[TensorPart]:
    """Return the parts of a model that this rank writes, as views; all ranks together write all once."""
    held = {id(each.parameter): each for each in _held(model)}
    parts: list[TensorPart] = []
    for sharded in _sharded(model.chunks):
        each = held.get(id(sharded.data))
        if each is None or not each.ranged:
            parts += _parts(sharded, sharded.data)
        else:
            flat = sharded.data.detach().view(-1)
            parts += _parts(sharded, flat[each.start : each.start + each.main.numel()], each)
    if optimizer_step(model):
        parts += _optimizer_state(model)
    return [part for part in parts if is_main_replica(part.replica_id)]


def parts_to_load(model: MegatronModel, *, optimizer: bool) -> list[TensorPart]:
    """Return the parts that loading overwrites; with `optimizer`, it creates and includes its state."""
    parts = parameter_parts(model.chunks)
    if optimizer:
        for each in _held(model):
            if hasattr(each.optimizer, "initialize_state"):  # TransformerEngine's, with types of its own
                each.optimizer.initialize_state(each.main, store_param_remainders=False)
                continue
            for name in _MOMENTS:
                each.optimizer.state[each.main].setdefault(name, torch.zeros_like(each.main.data))
        parts += _optimizer_state(model)
    return parts


def of_critic(parts: Sequence[TensorPart]) -> list[TensorPart]:
    """Return a value model's parts under the names that they have beside the policy's."""
    return [replace(part, key=f"critic.{part.key}") for part in parts]


def optimizer_step(model: MegatronModel) -> int:
    """Return the number of updates in the moments, equal for all parameters; 0 before the first update."""
    for each in _held(model):
        state = each.optimizer.state.get(each.main, {})
        groups = each.optimizer.param_groups
        return int(state["step"]) if "step" in state else int(groups[0].get("step", 0))
    return 0


def set_optimizer_step(model: MegatronModel, step: int) -> None:
    """Set the number of updates in the moments."""
    for each in _held(model):
        if not isinstance(each.optimizer, torch.optim.Adam):  # a fused optimizer counts by group
            for group in each.optimizer.param_groups:
                group["step"] = step
            continue
        group = each.optimizer.param_groups[0]
        on_device = group.get("fused") or group.get("capturable")
        each.optimizer.state[each.main]["step"] = torch.tensor(
            float(step), dtype=torch.float32, device=each.main.device if on_device else "cpu"
        )


def random_state() -> dict[str, TensorPart]:
    """Return a copy of the generators' states, by name, for loading and `set_random_state`."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["device"] = torch.cuda.get_rng_state()
    for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        states[f"megatron.{name}"] = state
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return {
        name: TensorPart(
            f"random.{name}",
            state[None].clone(),
            torch.uint8,
            (1, len(state)),
            (ranks, len(state)),
            (rank, 0),
            None,
        )
        for name, state in states.items()
    }


def set_random_state(model: MegatronModel, states: dict[str, TensorPart]) -> None:
    """Restores the generators' states."""
    bytes_of = {name: part.data[0].cpu() for name, part in states.items()}
    torch.set_rng_state(bytes_of.pop("cpu"))
    if model.device.type == "cuda":
        torch.cuda.set_rng_state(bytes_of.pop("device"))
    tensor_parallel.get_cuda_rng_tracker().set_states(
        {name.removeprefix("megatron."): state for name, state in bytes_of.items()}
    )


def _sharded(chunks: Sequence[torch.nn.Module]) -> Iterator[Sharded]:
    for chunk in chunks:
        model = unwrap_model(chunk)
        if not all(parameter.requires_grad for parameter in model.parameters()):
            # Frozen weights are those of the model's folder.
            for each in adapted_weights([model]):
                yield from each.sharded()
            continue
        state = model.sharded_state_dict(metadata={"singleton_local_shards": True})
        # The others are extra states of TransformerEngine's layers: the scales of eight-bit training.
        tensors = [value for value in nested_values(state) if isinstance(value, Sharded)]
        names = portable_names(value.key for value in tensors)
        for value in tensors:
            value.key = names[value.key]
            if isinstance(value, ShardedTensor) and value.allow_shape_mismatch:
                # A row per token, and rows of padding, in which layouts differ (`HFBridge.build_chunks`).
                # A value model's output layer has a single row.
                rows, *rest = value.global_shape
                value.global_shape = (min(rows, model.vocab_size), *rest)
            yield value


def _held(model: MegatronModel) -> Iterator[_HeldShard]:
    optimizer = model.optimizer
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    of_main = {
        id(getattr(parameter, "main_param", parameter)): parameter
        for chunk in model.chunks
        for parameter in chunk.parameters()
        if parameter.requires_grad
    }
    for part in parts:
        if part.optimizer is None:  # a rank without experts of its own
            continue
        if not isinstance(part, DistributedOptimizer):
            for group in part.optimizer.param_groups:
                for main in group["params"]:
                    yield _HeldShard(of_main[id(main)], main, part.optimizer, start=0, ranged=False)
            continue
        for parameter, (group_index, index) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group_index]["params"][index]
            start = part._get_model_param_range_map(parameter)["param"].start
            yield _HeldShard(parameter, *_stepped(part.optimizer, main), start=start, ranged=True)


def _stepped(
    optimizer: torch.optim.Optimizer, main: torch.Tensor
) -> tuple[torch.Tensor, torch.optim.Optimizer]:
    """Return the tensor that is updated, and the optimizer that does it: with Megatron's CPU offload they
    are a float32 copy on the host, and one of several optimizers.
    """
    if not isinstance(optimizer, HybridDeviceOptimizer):
        return main, optimizer
    inner = optimizer.param_to_inner_param[main]
    for part in optimizer.sub_optimizers:
        if any(inner is each for group in part.param_groups for each in group["params"]):
            return inner, part
    raise AssertionError("every parameter has an optimizer")


def _optimizer_state(model: MegatronModel) -> list[TensorPart]:
    sharded_of = {id(sharded.data): sharded for sharded in _sharded(model.chunks)}
    parts: list[TensorPart] = []
    for each in _held(model):
        state = each.optimizer.state[each.main]
        tensors = {name: state[name] for name in _MOMENTS}
        if each.parameter.dtype != torch.float32:
            # TransformerEngine's precision-aware optimizer keeps it in its state.
            tensors["fp32_param"] = state.get("master_param", each.main)
        for name, tensor in tensors.items():
            parts += [
                replace(part, key=f"optimizer.state.{name}.{part.key}")
                for part in _parts(sharded_of[id(each.parameter)], tensor, each)
            ]
    return parts


def _parts(sharded: Sharded, values: torch.Tensor, held: _HeldShard | None = None) -> list[TensorPart]:
    """Return a tensor of a parameter's shape, or the held range of one, as parts of global tensors.

    Args:
        sharded: Megatron's description of the parameter; it yields several tensors where Megatron fuses them.
        values: The tensor whose views are the data of the parts.
        held: The range of the flattened parameter that the values are; None: the whole parameter.
    """
    whole = sharded.data.detach()
    wholes = [sharded] if isinstance(sharded, ShardedTensor) else list(nested_values(sharded.build()))
    start = 0 if held is None else held.start
    flat = values.detach().view(-1)
    parts = []
    for each in wholes:
        if each.prepend_axis_num or not each.data.is_contiguous():
            raise CheckpointError(
                f"{each.key} has a memory layout that cannot be resharded: expected a contiguous tensor"
            )
        begin = each.data.storage_offset() - whole.storage_offset()
        stored = each.data.numel()
        if each.allow_shape_mismatch:  # without rows of padding
            stored = min(stored, (each.global_shape[0] - each.global_offset[0]) * each.data[0].numel())
        first = max(start, begin) - begin
        last = min(start + flat.numel(), begin + stored) - begin
        position = first + begin - start
        replica = each.replica_id
        if held is not None and held.ranged:
            replica = (*replica[:2], 0)  # other data-parallel ranks hold other ranges
        for box in boxes(tuple(each.local_shape), first, last):
            size = math.prod(box.sizes)
            data = flat[position : position + size].view(box.sizes)
            position += size
            parts.append(
                TensorPart(
                    each.key,
                    data,
                    data.dtype,
                    box.sizes,
                    each.global_shape,
                    tuple(a + b for a, b in zip(each.global_offset, box.offsets, strict=True)),
                    None,  # no regular grid
                    replica,
                )
            )
    return parts


class Box(NamedTuple):
    """A part of a tensor: a contiguous range of indices in each dimension.

    The distributed optimizer splits parameters where a buffer is full, even in the middle of a row.
    Checkpoints describe parts of tensors only as boxes:

    ```
    . . . x x      a range of a [4, 5] tensor, from 3 to 17:
    x x x x x          the end of row 0, rows 1 and 2, the beginning of row 3
    x x x x x
    x x . . .
    ```
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Split the range `[start, stop)` of a flattened tensor into at most `2 len(shape) - 1` boxes.

    Args:
        shape: The tensor's shape.
        start: Index of the first element, in row-major order.
        stop: Index after the last element.

    Yields:
        Boxes in the order of their elements; each holds a contiguous range.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # complete rows
    if first > last:  # the range lies inside one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    begin = index * math.prod(shape[1:])
    for box in boxes(shape[1:], start - begin, stop - begin):
        yield Box((index, *box.offsets), (1, *box.sizes))
