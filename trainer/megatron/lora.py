"""Low-rank adapters on the projections of a frozen model.

```
y = W x + (alpha / rank) B A x        A [rank, in] random, B [out, rank] 0: it starts as the model itself

projection            A                        B                        over tensor ranks
split by columns      whole, on each rank      rows, as those of W      A's sum over parts of the sequence
split by rows         columns, as those of W   whole, on each rank      B's sum over parts of the sequence
not split             whole, on each rank      whole, on each rank      both sums over parts of the sequence
of experts            one of the first two     one of the first two     the whole one's sum over ranks
```

Ranks that share a sequence exchange only `A x`, of `rank` numbers a token. A fused projection (queries, keys
and values; gate and up) has one A. The low-rank projections of latent attention are not fused, and those down
to the latents are not split. What is whole on several ranks is the same on each: it is drawn from its name,
and its gradient is summed over them (`sequence_parallel`, `sum_over_expert_tensor_ranks`).

Source: arXiv 2106.09685, section 4.1 for the product and its scale, 4.2 for what memory it saves; the
distribution of A is that of Microsoft's loralib and of PEFT (Kaiming-uniform with a = sqrt 5).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.utils import unwrap_model

from async_rl.config import LoraConfig

_IN_MODULES = ".lora."
"""Names of parameters that contain this are of adapters."""

Split = Literal["columns", "rows", "none"]
"""How tensor ranks split a projection: as Megatron's column-parallel or row-parallel ones, or not at all."""

_ATTENTION: Final[dict[str, Split]] = {
    "linear_qkv": "columns",
    "linear_q_proj": "columns",
    "linear_q_down_proj": "none",
    "linear_q_up_proj": "columns",
    "linear_kv_down_proj": "none",
    "linear_kv_up_proj": "columns",
    "linear_proj": "rows",
}
"""The projections of attention; those with a direction are of latent attention."""


@dataclass(frozen=True)
class AdaptedWeight:
    """This rank's part of a frozen weight, and of its adapter."""

    name: str
    """Of its projection in the whole model: `decoder.layers.3.mlp.experts.experts.7.linear_fc1`."""
    weight: torch.nn.Parameter
    """`[out, in]`, this rank's part."""
    a: torch.nn.Parameter
    """`[rank, in]`."""
    b: torch.nn.Parameter
    """`[out, rank]`."""
    scale: float
    """alpha over rank."""
    split: Split
    expert: bool

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """The ranks that share the weight."""
        if self.expert:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()

    def split_dim(self, factor: torch.nn.Parameter) -> int | None:
        """Return the dimension by which these ranks split a factor; None if each has the whole."""
        if self.split == "columns":
            return 0 if factor is self.b else None
        return 1 if self.split == "rows" and factor is self.a else None

    def merged(self) -> torch.Tensor:
        """Return the weight with its adapter: computed in float64 and rounded once, so that it does not
        depend on how ranks split it.
        """
        product = self.b.detach().double() @ self.a.detach().double()
        merged = product.mul_(self.scale).add_(self.weight.detach()).to(self.weight.dtype)
        tensor_parallel.copy_tensor_model_parallel_attributes(merged, self.weight)
        return merged

    def draw(self, seed: int) -> None:
        """Draws A, as every rank and layout draws it, and sets B to 0."""
        ranks = self.tensor_group.size() if self.split == "rows" else 1
        inputs = self.a.shape[1] * ranks
        digest = hashlib.sha256(f"{seed} {self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = 1 / math.sqrt(inputs)
        drawn = torch.empty(len(self.a), inputs).uniform_(-bound, bound, generator=generator)
        if ranks > 1:
            drawn = drawn.chunk(ranks, 1)[self.tensor_group.rank()]
        with torch.no_grad():
            self.a.copy_(drawn)
            self.b.zero_()

    def mark(self) -> None:
        """Mark both factors for Megatron's sums of gradients and for its gradient norm."""
        group = self.tensor_group
        for factor in (self.a, self.b):
            factor.allreduce = getattr(self.weight, "allreduce", True)
            dim = self.split_dim(factor)
            if dim is None and not self.expert:
                factor.sequence_parallel = group.size() > 1
            else:
                factor.tensor_model_parallel = True
                factor.partition_dim, factor.partition_stride = dim or 0, 1
            if dim is None and self.expert:
                # A norm counts what is not parallel on the first tensor rank only, which may not be the first
                # of those that share an expert: above, the factor is marked as parallel.
                factor.shared = group.rank() > 0
                factor.sum_over_expert_tensor_ranks = group.size() > 1
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(factor)

    def sharded(self) -> list[ShardedTensor | ShardedTensorFactory]:
        """Return both factors as parts of global tensors, as `MegatronModule.sharded_state_dict` does."""
        group = self.tensor_group
        if self.expert:
            replica = parallel_state.get_expert_data_parallel_rank()
        else:
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        ranks, rank = group.size(), group.rank()
        found: list[ShardedTensor | ShardedTensorFactory] = []
        for letter, factor in (("A", self.a), ("B", self.b)):
            dim = self.split_dim(factor)
            split = () if dim is None else ((dim, rank, ranks),)
            place = (0, rank if dim is None else 0, replica)
            part = ShardedTensor.from_rank_offsets(
                f"{self.name}.lora_{letter}", factor, *split, replica_id=place
            )
            gated = letter == "B" and self.name.endswith("linear_fc1")
            found.append(apply_swiglu_sharded_factory(part, (), True) if gated else part)
        return found


class Adapter(torch.nn.Module):
    """The adapter of one projection: what is added to its output."""

    def __init__(
        self, linear: torch.nn.Module, name: str, lora: LoraConfig, *, split: Split, expert: bool
    ) -> None:
        """Add the adapter; `attach_adapters` lets the projection use it.

        Args:
            linear: The projection, whose weight is on its device.
            name: The projection's name in the whole model.
            lora: Rank and scale.
            split: How tensor ranks split the projection.
            expert: Whether it is of an expert: dispatchers, not projections, exchange tokens then.
        """
        super().__init__()
        rows, columns = linear.weight.shape
        self.a = torch.nn.Parameter(linear.weight.new_empty(lora.rank, columns))
        self.b = torch.nn.Parameter(linear.weight.new_empty(rows, lora.rank))
        self.scale = lora.alpha / lora.rank
        weight = AdaptedWeight(name, linear.weight, self.a, self.b, self.scale, split, expert)
        self.weights = [weight]
        self._group = None if expert or weight.tensor_group.size() == 1 else weight.tensor_group
        self._split = split
        self.enabled = True

    def add_to(self, output: torch.Tensor, input_: torch.Tensor, *_: Any) -> torch.Tensor:
        """Return the projection's output plus the adapter's, `[..., out]` for inputs `[..., in]`."""
        low = torch.nn.functional.linear(input_, self.a) * self.scale
        if self._group is not None and self._split == "columns":
            low = gather_from_sequence_parallel_region(low, group=self._group)
        elif self._group is not None and self._split == "rows":
            low = reduce_scatter_to_sequence_parallel_region(low, group=self._group)
        flat = output.reshape(-1, output.shape[-1])
        return torch.addmm(flat, low.reshape(-1, low.shape[-1]), self.b.t()).view_as(output)


class GroupedAdapter(torch.nn.Module):
    """The adapters of one projection of all experts of a rank, which TransformerEngine computes at once."""

    def __init__(self, linear: Any, names: Sequence[str], lora: LoraConfig, *, split: Split) -> None:
        """Add the adapters; `names` are those of the projections in the whole model, one for each expert."""
        from megatron.core.extensions.transformer_engine import TEGroupedLinear

        super().__init__()
        rows, columns = linear.weight0.shape
        make = partial(
            TEGroupedLinear,
            len(names),
            parallel_mode=None,
            config=linear.config,
            init_method=torch.nn.init.zeros_,
            bias=False,
            skip_bias_add=False,
            is_expert=True,
        )
        self.a, self.b = make(columns, lora.rank), make(lora.rank, rows)
        self.scale = lora.alpha / lora.rank
        self.weights = [
            AdaptedWeight(
                name,
                *(getattr(each, f"weight{number}") for each in (linear, self.a, self.b)),
                self.scale,
                split,
                True,
            )
            for number, name in enumerate(names)
        ]
        self.enabled = True

    def add_to(self, output: torch.Tensor, input_: torch.Tensor, splits: list[int]) -> torch.Tensor:
        """Return the projections' outputs plus the adapters', `[n, out]` for inputs `[n, in]`."""
        low, _ = self.a(input_, splits)
        added, _ = self.b(low * self.scale, splits)
        return output + added


def attach_adapters(chunk: torch.nn.Module, lora: LoraConfig, seed: int) -> None:
    """Freezes all weights of a chunk and gives the targeted projections adapters.

    Args:
        chunk: Its weights are loaded and on their device.
        lora: Rank, scale and targets.
        seed: A is drawn from it and the projection's name.
    """
    model = unwrap_model(chunk)
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        prefix, mlp = f"decoder.layers.{layer.layer_number - 1}", layer.mlp
        if "attention" in lora.targets:
            for name, split in _ATTENTION.items():
                if hasattr(layer.self_attention, name):
                    linear = getattr(layer.self_attention, name)
                    _attach(linear, f"{prefix}.self_attention.{name}", lora, split=split)
        if not isinstance(mlp, MoELayer):
            if "mlp" in lora.targets:
                _attach_mlp(mlp, f"{prefix}.mlp", lora)
            continue
        if "mlp" in lora.targets and mlp.shared_experts is not None:
            _attach_mlp(mlp.shared_experts, f"{prefix}.mlp.shared_experts", lora)
        if "experts" in lora.targets:
            _attach_experts(mlp.experts, f"{prefix}.mlp.experts.experts", lora)
    for weight in adapted_weights([model]):
        weight.mark()
        weight.draw(seed)
    if model.pre_process:
        # Layers that are computed again have no gradient when their input needs none.
        model.embedding.register_forward_hook(_require_gradient)


def _require_gradient(_: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def _attach(linear: Any, name: str, lora: LoraConfig, *, split: Split, expert: bool = False) -> None:
    linear.lora = Adapter(linear, name, lora, split=split, expert=expert)
    if hasattr(linear, "return_layernorm_output"):  # TransformerEngine's, with the norm before it
        linear.return_layernorm_output = True
        linear.forward = partial(_forward_after_norm, linear.lora, linear.forward)
    else:
        linear.forward = partial(_forward, linear.lora, linear.forward)


def _attach_mlp(mlp: Any, name: str, lora: LoraConfig, *, expert: bool = False) -> None:
    _attach(mlp.linear_fc1, f"{name}.linear_fc1", lora, split="columns", expert=expert)
    _attach(mlp.linear_fc2, f"{name}.linear_fc2", lora, split="rows", expert=expert)


def _attach_experts(experts: Any, name: str, lora: LoraConfig) -> None:
    first = parallel_state.get_expert_model_parallel_rank() * experts.num_local_experts
    names = [f"{name}.{first + number}" for number in range(experts.num_local_experts)]
    if hasattr(experts, "local_experts"):
        for expert, each in zip(experts.local_experts, names, strict=True):
            _attach_mlp(expert, each, lora, expert=True)
        return
    splits: tuple[tuple[str, Split], ...] = (("linear_fc1", "columns"), ("linear_fc2", "rows"))
    for kind, split in splits:
        linear = getattr(experts, kind)
        of_experts = [f"{each}.{kind}" for each in names]
        linear.lora = GroupedAdapter(linear, of_experts, lora, split=split)
        linear.forward = partial(_forward, linear.lora, linear.forward)


def _forward(adapter: Any, original: Callable[..., Any], input_: torch.Tensor, *rest: Any) -> Any:
    output, bias = original(input_, *rest)
    return (adapter.add_to(output, input_, *rest) if adapter.enabled else output), bias


def _forward_after_norm(adapter: Adapter, original: Callable[..., Any], input_: torch.Tensor) -> Any:
    output, *bias = original(input_)
    # The output is a pair itself unless the layer also returns its bias.
    output, normalised, bias = (output, bias[1], bias[0]) if bias[1:] else (*output, bias[0])
    return (adapter.add_to(output, normalised) if adapter.enabled else output), bias


def adapters(chunks: Sequence[torch.nn.Module]) -> Iterator[Adapter | GroupedAdapter]:
    """Yield the adapters of a model's chunks on this rank."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Adapter | GroupedAdapter):
                yield module


def adapted_weights(chunks: Sequence[torch.nn.Module]) -> Iterator[AdaptedWeight]:
    """Yield the weights with adapters of a model's chunks on this rank, layer by layer."""
    for adapter in adapters(chunks):
        yield from adapter.weights


def is_of_adapter(name: str) -> bool:
    """Whether a parameter of a chunk, or an entry of its state, is of an adapter."""
    return _IN_MODULES in name


def sum_expert_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """Sum gradients of what ranks that share experts have whole; Megatron knows no such parameter."""
    group = parallel_state.get_expert_tensor_parallel_group()
    if group.size() == 1:
        return
    for chunk in chunks:
        for parameter in chunk.parameters():
            if getattr(parameter, "sum_over_expert_tensor_ranks", False):
                dist.all_reduce(parameter.main_grad, group=group)
