"""Bytes that a layer keeps for its backward pass, and that log-probs take, tensor by tensor.

Each term is a tensor that autograd saves in megatron-core 0.16.1: the modules of Megatron's local layer spec
(`trainer.megatron.attention`, torch's RMSNorm, `transformer/mlp.py`, `transformer/moe/`), or the fused ones
of TransformerEngine on a GPU. Tensors that several operations save count once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from async_rl.config import LoraConfig
from trainer.memory.dimensions import Dimensions

FLOAT32: Final = 4

LOGITS_AT_ONCE: Final = 1 << 27
"""That of `trainer.losses.log_probs`, which loads torch."""


class Slice(NamedTuple):
    """What one rank has of a micro-batch, and how it computes."""

    tokens: int
    """Tokens after context parallelism."""
    tp: int
    cp: int
    etp: int
    longest: int
    """Tokens of the longest trajectory that a query may attend to."""
    element: int
    """Bytes of an element of the model's type."""
    fused: bool
    """Whether layers are those of TransformerEngine."""
    lora: LoraConfig | None = None
    """Adapters, whose inputs are kept in place of those of all projections."""

    def keeps_input_of(self, target: str) -> bool:
        """Whether projections keep their inputs: for the gradient of their weights, or of an adapter."""
        return self.lora is None or target in self.lora.targets

    def low(self, target: str, rows: int) -> int:
        """Return what adapters keep of `rows` rows between their factors."""
        return rows * self.lora.rank * self.element if self.lora and target in self.lora.targets else 0

    @property
    def sequence(self) -> int:
        """Tokens between layers, which sequence parallelism splits."""
        return self.tokens // self.tp

    @property
    def routed(self) -> int:
        """Rows of experts' inputs here, per chosen expert, if all experts are chosen equally often."""
        return self.sequence * self.etp


def layer_bytes(model: Dimensions, part: Slice, *, experts: bool) -> int:
    """Return what a layer keeps: its norms, attention, MLP or experts, and the two sums of its residuals."""
    residuals = 2 * part.sequence * model.hidden * part.element * keeps_inputs(part)
    elements = part.sequence * model.hidden
    norms = sum(norm_bytes(elements, part, output=kept) for kept in _kept_outputs(part, experts=experts))
    mlp = experts_bytes(model, part) if experts else _dense_bytes(model.dense, part)
    return residuals + norms + attention_bytes(model, part) + mlp


def _kept_outputs(part: Slice, *, experts: bool) -> tuple[bool, bool]:
    """Return whether what follows a layer's norms keeps their outputs; routers always do."""
    return part.keeps_input_of("attention"), experts or part.keeps_input_of("mlp")


def recomputed_bytes(model: Dimensions, part: Slice, modules: Sequence[str], *, experts: bool) -> int:
    """Return what a layer does not keep with these `recompute_modules`, of what `layer_bytes` counts.

    Source: `TransformerConfig.recompute_modules` of megatron-core 0.16.1.
    """
    e, tokens, heads = part.element, part.tokens, model.heads // part.tp
    norm = part.sequence * model.hidden
    found = {
        "moe": experts_bytes(model, part) if experts else 0,
        "mlp": 0 if experts else _dense_bytes(model.dense, part),
        "shared_experts": _shared_bytes(model, part) if experts else 0,
        "moe_act": part.routed * model.top_k * model.expert // part.etp * e if experts else 0,
    }
    found["moe_act"] *= part.keeps_input_of("experts")
    # Norms keep their inputs instead; TransformerEngine has most of them in the projections behind them.
    outputs: Sequence[bool] = _kept_outputs(part, experts=experts)
    if part.fused:
        outputs = [True] * (experts + (model.latent is not None))
    again = 0 if keeps_inputs(part) else norm * e
    found["layernorm"] = sum(norm_bytes(norm, part, output=kept) - again for kept in outputs)
    if model.latent is None:
        query, key = tokens * heads * model.head, tokens * _groups_here(model, part) * model.head
        own = 0 if part.fused else e * (2 * query * part.cp - 2 * key) + _mask_bytes(part)
        found["core_attn"] = own + tokens * heads * FLOAT32
        found["mla_up_proj"] = 0
    else:
        sizes = model.latent
        found["core_attn"] = tokens * heads * FLOAT32
        # The local attention keeps copies of its own.
        up = heads * (2 * (sizes.plain + sizes.rotated) + sizes.value) if part.fused else 0
        found["mla_up_proj"] = tokens * e * (up + 4 * sizes.rotated)
    if "moe" in modules:
        found["shared_experts"] = found["moe_act"] = 0
    return sum(found[module] for module in modules)


def keeps_inputs(part: Slice) -> bool:
    """Whether norms keep their inputs; torch's keeps a float32 copy instead of one in half precision."""
    return part.fused or part.element == FLOAT32


def norm_bytes(elements: int, part: Slice, *, output: bool = True) -> int:
    """Return what an RMSNorm keeps besides its input, which the layer before keeps.

    torch's keeps the normalised input and, for the next layer, the output; of a half-precision input it also
    keeps a float32 copy, and the normalised input is float32, too. TransformerEngine's keeps the output.
    """
    kept = part.element * output
    if not part.fused:
        # The normalised input is for the gradient of the norm's weight.
        normalised = part.lora is None
        kept += part.element * normalised if part.element == FLOAT32 else (1 + normalised) * FLOAT32
    return elements * kept


def attention_bytes(model: Dimensions, part: Slice) -> int:
    """Return what the projections, their norms, the rotation and the attention of a layer keep."""
    tokens, e, heads = part.tokens, part.element, model.heads // part.tp
    if model.latent is not None:
        return _latent_attention_bytes(model, part)
    groups = _groups_here(model, part)
    query, key = tokens * heads * model.head, tokens * groups * model.head
    # With fewer groups than tensor ranks, each gathers the whole output and takes views of it.
    output = query + 2 * key
    if model.groups < part.tp:
        output = tokens * (model.heads + 2 * model.groups) * model.head
    several = groups > 1 and model.heads > model.groups  # heads of one group are in order already
    attended = tokens * heads * FLOAT32  # the normaliser of each query
    adapters = part.low("attention", tokens + part.sequence)
    if part.fused:
        # The projection's output holds values and the norm's input; rotation makes queries and keys anew.
        kept = output + query + key + query * (several and model.query_norm)
        return e * (kept + query) + attended + adapters
    kept = 0
    if model.query_norm:
        kept += norm_bytes(query + key, part, output=False)
        if e == FLOAT32:  # the norms keep the projection's output, and of queries another copy in order
            kept += e * (output + query * several)
    kept += 4 * e * tokens * model.head  # sine and cosine, for queries and for keys
    # Queries, keys and values of each head, and results; without a mask in the order of tokens, too.
    results = 1 if part.cp > 1 or not part.keeps_input_of("attention") else 2
    kept += e * (query + 2 * query * part.cp + results * query)
    return kept + attended + _mask_bytes(part) + adapters


def _groups_here(model: Dimensions, part: Slice) -> int:
    """Return the key-value heads of a rank; tensor ranks beyond their number share one."""
    return max(1, model.groups // part.tp)


def _mask_bytes(part: Slice) -> int:
    """Return the mask of the local attention under context parallelism, as numbers that are added."""
    return part.tokens * part.tokens * part.cp * part.element if part.cp > 1 else 0


def _latent_attention_bytes(model: Dimensions, part: Slice) -> int:
    assert model.latent is not None
    sizes, tokens, e, heads = model.latent, part.tokens, part.element, model.heads // part.tp
    kept_output = part.keeps_input_of("attention")
    down = norm_bytes(part.sequence * (sizes.query_rank + sizes.rank), part, output=kept_output)
    # Projections down and the output's have a part of the sequence, projections up all of it.
    several = 2 if sizes.query_rank else 1
    down += part.low("attention", 2 * tokens + (1 + several) * part.sequence)
    if keeps_inputs(part):
        down += part.sequence * (sizes.query_rank + sizes.rank + sizes.rotated) * e
    query = tokens * heads * (sizes.plain + sizes.rotated)
    value = tokens * heads * sizes.value
    rotation = 4 * tokens * sizes.rotated * e
    if part.fused:
        return down + rotation + e * (2 * query + 2 * value) + tokens * heads * FLOAT32
    if sizes.plain + sizes.rotated == sizes.value:
        kept = e * (query + 2 * query * part.cp + 2 * value) + tokens * heads * FLOAT32
    else:  # torch's kernel for a CPU needs equal sizes; otherwise it keeps float32 and all weights
        attended = part.longest if part.cp == 1 else tokens * part.cp  # all of a packed micro-batch, masked
        kept = FLOAT32 * (query + (query + value) * part.cp + heads * tokens * attended) + e * value
    return down + rotation + kept + _mask_bytes(part)


def mlp_bytes(width: int, rows: int, part: Slice, *, target: str, scaled: bool = False) -> int:
    """Return what a gated MLP keeps: gate and up projection, SiLU, up + 0, their product, and if it is
    scaled by a gate, that product; fused: both projections and the product. The last is the input of the
    projection down.
    """
    tensors = (3 if part.fused else 6 if scaled else 5) - (not part.keeps_input_of(target))
    return rows * width * part.element * tensors


def _dense_bytes(width: int, part: Slice) -> int:
    """Return what an MLP keeps that tensor ranks split, with its adapters."""
    low = part.low("mlp", part.tokens + part.sequence) if width else 0
    return mlp_bytes(width // part.tp, part.tokens, part, target="mlp") + low


def experts_bytes(model: Dimensions, part: Slice) -> int:
    """Return what router, dispatch, routed and shared experts of a layer keep."""
    e, tokens = part.element, part.sequence
    rows = part.routed * model.top_k
    kept = rows * model.hidden * e * part.keeps_input_of("experts")  # their inputs, sorted by expert
    kept += mlp_bytes(model.expert // part.etp, rows, part, target="experts", scaled=True)
    kept += part.low("experts", 2 * rows)
    # Scores, gates and gates by expert; two maps; the chosen experts, twice, as int64.
    kept += tokens * model.experts * (3 * (FLOAT32 if model.precise_router else e) + 2)
    kept += tokens * model.top_k * 16
    return kept + _shared_bytes(model, part)


def _shared_bytes(model: Dimensions, part: Slice) -> int:
    """Return what the shared experts of a layer keep, and the product with their gate."""
    gated = part.sequence * model.hidden * part.element * model.shared_gate
    return _dense_bytes(model.shared, part) + gated


def working_bytes(model: Dimensions, part: Slice, *, experts: bool) -> int:
    """Return what a layer takes at its end, beyond what it keeps: of experts their inputs before the last
    sort, and their outputs before and after they are put together; else two gradients of an MLP's width.
    """
    if experts:
        return part.routed * model.top_k * model.hidden * part.element * (1 if part.fused else 3)
    return part.tokens * model.dense // part.tp * part.element * 2


class LogProbBytes(NamedTuple):
    """The most that log-probs take at a time, beyond the hidden states."""

    forward: int
    backward: int


def log_prob_bytes(
    rows: int, vocabulary: int, hidden: int, part: Slice, *, entropy: bool, compiled: bool
) -> LogProbBytes:
    """Return what `trainer.losses.log_probs` takes for `rows` trained rows.

    Args:
        rows: Trained tokens.
        vocabulary: This rank's part of the vocabulary.
        hidden: Size of a hidden state.
        part: The rank's part of the micro-batch.
        entropy: Whether the loss has an entropy bonus.
        compiled: Whether the functions of logits are fused, as on a GPU.
    """
    e, half = part.element, part.element < FLOAT32
    at_once = min(rows, max(1, LOGITS_AT_ONCE // vocabulary))
    logits = at_once * vocabulary
    weight, several = vocabulary * hidden, at_once < rows
    if compiled:
        forward, backward = logits * e, logits * 2 * e
    else:
        # Logits, in float32, their exponentials, and those times the logits.
        forward = logits * (e + FLOAT32 * half + 2 * FLOAT32)
        backward = logits * (e + (FLOAT32 + e) * half + FLOAT32 * entropy)
    product = 0 if compiled else logits * e * (1 + half) + weight * e * several * half
    if part.lora is not None:  # the output layer's weight has no gradient
        return LogProbBytes(forward, rows * hidden * e + backward)
    of_weight = weight * (FLOAT32 if several else e)
    return LogProbBytes(forward, rows * hidden * e + of_weight + max(backward, product))


def in_flight(stage: int, pp: int, vpp: int, micro_batches: int) -> list[int]:
    """Return for each chunk of a stage how many micro-batches it keeps activations of, at most.

    Source: megatron/core/pipeline_parallel/schedules.py, `get_pp_rank_microbatches`: 1F1B, and interleaved.
    """
    if vpp == 1:
        return [min(pp - stage, micro_batches)]
    passes = min((pp - stage - 1) * 2 + (vpp - 1) * pp + 1, micro_batches * vpp)
    counts = [0] * vpp
    for number in range(passes):
        counts[number // pp % vpp] += 1
    return counts
