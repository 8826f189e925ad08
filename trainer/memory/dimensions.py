"""The dimensions of a model that decide how much memory it takes, from config.json, and its parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

from async_rl.config import LayoutConfig, LoraConfig
from async_rl.engines.model_facts import facts_of


class Latent(NamedTuple):
    """Sizes of multi-head latent attention."""

    query_rank: int
    """0 without a low-rank projection of queries."""
    rank: int
    plain: int
    """The part of a query's or key's head that is not rotated."""
    rotated: int
    value: int


class Dimensions(NamedTuple):
    """A model's dimensions, in elements."""

    hidden: int
    heads: int
    groups: int
    """Heads of one group share keys and values."""
    head: int
    dense: int
    """Width of a dense layer's MLP."""
    expert: int
    shared: int
    """Width of the shared expert; 0 without one."""
    shared_gate: bool
    experts: int
    top_k: int
    vocabulary: int
    tied: bool
    """Whether the output layer uses the embedding's weight."""
    query_norm: bool
    """Whether queries and keys are normalised head by head."""
    query_bias: bool
    precise_router: bool
    """Whether routers compute in float32 regardless of the model's type."""
    latent: Latent | None
    has_experts: tuple[bool, ...]
    """Of each layer."""


def dimensions_of(config: dict[str, Any]) -> Dimensions:
    """Return the dimensions in a parsed config.json of a supported model (`trainer.validate`).

    Source: `trainer.megatron.architectures`, which turns the same values into Megatron's config.
    """
    kind, facts = config["model_type"], facts_of(config)
    heads = config["num_attention_heads"]
    latent, dense, expert, shared = None, config["intermediate_size"], 0, 0
    if facts.is_moe:
        expert = config.get("moe_intermediate_size") or dense
        shared = config.get("shared_expert_intermediate_size") or expert * (
            config.get("n_shared_experts") or 0
        )
        shared = 0 if kind == "mixtral" else shared
    if kind in ("deepseek_v3", "kimi_k2"):
        latent = Latent(
            query_rank=config.get("q_lora_rank") or 0,
            rank=config["kv_lora_rank"],
            plain=config["qk_nope_head_dim"],
            rotated=config["qk_rope_head_dim"],
            value=config["v_head_dim"],
        )
    return Dimensions(
        hidden=config["hidden_size"],
        heads=heads,
        groups=config.get("num_key_value_heads") or heads,
        head=config.get("head_dim") or (128 if kind == "qwen3" else config["hidden_size"] // heads),
        dense=dense,
        expert=expert,
        shared=shared,
        shared_gate=kind == "qwen2_moe",
        experts=facts.num_experts,
        top_k=facts.top_k,
        vocabulary=facts.vocab_size,
        tied=bool(config.get("tie_word_embeddings")),
        query_norm=kind in ("qwen3", "qwen3_moe") or bool(config.get("use_qk_norm")),
        query_bias=kind in ("qwen2", "qwen2_moe") or (kind == "glm4_moe" and bool(config["attention_bias"])),
        precise_router=kind in ("deepseek_v3", "glm4_moe", "kimi_k2"),
        latent=latent,
        has_experts=tuple(layer in facts.moe_layers for layer in range(facts.num_layers)),
    )


def chunks_of(layout: LayoutConfig, stage: int, layers: int) -> list[range]:
    """Return the layers of each chunk of a pipeline stage.

    Source: megatron/core/transformer/transformer_layer.py, `get_transformer_layer_offset`.
    """
    of_stage: list[int | None] = [None] * layout.pp
    if layout.first_stage_layers is not None:
        of_stage[0] = layout.first_stage_layers
    if layout.last_stage_layers is not None:
        of_stage[-1] = layout.last_stage_layers
    given = [number for number in of_stage if number is not None]
    others = (layers - sum(given)) // max(1, layout.pp - len(given))
    sizes = [(others if number is None else number) // layout.vpp for number in of_stage]
    first = [chunk * (layers // layout.vpp) + sum(sizes[:stage]) for chunk in range(layout.vpp)]
    return [range(start, start + sizes[stage]) for start in first]


class Parameters(NamedTuple):
    """Sizes of a rank's parameters, in elements."""

    dense: list[int]
    """Those that all data-parallel ranks share."""
    experts: list[int]
    """Those of experts that are distributed over expert-parallel ranks."""


def parameters_of(
    model: Dimensions, layout: LayoutConfig, stage: int, *, value_head: bool = False
) -> Parameters:
    """Return the sizes of all parameters of a rank of a pipeline stage.

    With `value_head` they are those of a critic, which has one output per token.
    """
    dense, experts = list[int](), list[int]()
    vocabulary = -(-model.vocabulary // layout.tp) * model.hidden
    last = stage == layout.pp - 1
    if stage == 0:
        dense.append(vocabulary)
    if last:
        dense.append(model.hidden)
        if value_head:
            dense.append(model.hidden)
        elif not model.tied or stage:  # a later stage has a copy of a tied embedding
            dense.append(vocabulary)
    for chunk in chunks_of(layout, stage, len(model.has_experts)):
        for layer in chunk:
            dense += _attention(model, layout.tp)
            if not model.has_experts[layer]:
                dense += _mlp(model.hidden, model.dense // layout.tp)
                continue
            dense.append(model.experts * model.hidden)
            if model.shared:
                dense += _mlp(model.hidden, model.shared // layout.tp)
            if model.shared_gate:
                dense.append(model.hidden)
            each = _mlp(model.hidden, model.expert // layout.etp) * (model.experts // layout.ep)
            (experts if layout.ep > 1 else dense).extend(each)
    return Parameters(dense, experts)


def adapters_of(
    model: Dimensions, layout: LayoutConfig, stage: int, lora: LoraConfig, *, fused: bool = True
) -> Parameters:
    """Return the sizes of the adapters of a rank of a pipeline stage (`trainer.megatron.lora`).

    Without `fused` they are those of PEFT and of engines, in which projections that share an A have a copy
    each.
    """
    dense, experts = list[int](), list[int]()
    r, hidden = lora.rank, model.hidden

    def of_mlp(width: int) -> list[int]:
        return [r * hidden * (1 if fused else 2), r * 2 * width, r * width, r * hidden]

    for chunk in chunks_of(layout, stage, len(model.has_experts)):
        for layer in chunk:
            if "attention" in lora.targets:
                dense += [r * size for each in _projections(model, layout.tp) for size in each]
                dense += [] if fused or model.latent else [r * 2 * hidden]
            width = model.shared if model.has_experts[layer] else model.dense
            if "mlp" in lora.targets and width:
                dense += of_mlp(width // layout.tp)
            if "experts" in lora.targets and model.has_experts[layer]:
                each = of_mlp(model.expert // layout.etp) * (model.experts // layout.ep)
                (experts if layout.ep > 1 else dense).extend(each)
    return Parameters(dense, experts)


def _projections(model: Dimensions, tp: int) -> list[tuple[int, int]]:
    """Return inputs and outputs of the projections of a layer's attention on one of `tp` ranks."""
    hidden, heads, sizes = model.hidden, model.heads // tp, model.latent
    if sizes is None:
        queries_keys_values = (model.heads + 2 * model.groups) * model.head // tp
        return [(hidden, queries_keys_values), (heads * model.head, hidden)]
    query = heads * (sizes.plain + sizes.rotated)
    queries = [(hidden, query)]
    if sizes.query_rank:
        queries = [(hidden, sizes.query_rank), (sizes.query_rank, query)]
    return [
        *queries,
        (hidden, sizes.rank + sizes.rotated),
        (sizes.rank, heads * (sizes.plain + sizes.value)),
        (heads * sizes.value, hidden),
    ]


def weights_of_token(model: Dimensions) -> int:
    """Return how many weights of matrices a token passes through, with the experts that it is sent to."""
    attention = sum(inputs * outputs for inputs, outputs in _projections(model, 1))
    dense = sum(_mlp(model.hidden, model.dense))
    chosen = sum(_mlp(model.hidden, model.top_k * model.expert + model.shared)) + model.experts * model.hidden
    layers = sum(attention + (chosen if experts else dense) for experts in model.has_experts)
    return layers + model.vocabulary * model.hidden


def _mlp(hidden: int, width: int) -> list[int]:
    return [2 * width * hidden, hidden * width]


def _attention(model: Dimensions, tp: int) -> list[int]:
    norms = [model.hidden, model.hidden]
    if model.latent is not None:
        norms += [size for size in (model.latent.query_rank, model.latent.rank) if size]
    elif model.query_norm:
        norms += [model.head, model.head]
    projections = _projections(model, tp)
    biases = [projections[0][1]] if model.query_bias else []
    return [*norms, *biases, *(inputs * outputs for inputs, outputs in projections)]


def padded(sizes: list[int], to: int = 64) -> int:
    """Return the length of a buffer in which each parameter starts at a multiple of `to` elements.

    Source: megatron/core/distributed/param_and_grad_buffer.py, `_pad_start_of_param_if_needed`.
    """
    return sum(-(-size // to) * to for size in sizes)
