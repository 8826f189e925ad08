"""How fast a model is on given GPUs, by the roofline model: nothing of it is measured.

A pass takes the longer of its arithmetic and its reads of memory, each at a share of what the GPU can do:

    seconds = max(FLOPs / (FLOPS_SHARE · peak), bytes / (MEMORY_SHARE · bandwidth))      on each GPU

    FLOPs of n tokens   2 · n · weights of a token + 2 · n · context · attention width
    bytes of n tokens   weights that some token needs, once; in decoding also the KV cache of all calls

Work is divided evenly among GPUs. Launching kernels, sampling, and what GPUs send each other are left out, so
that real engines and trainers are slower.

**Sources**: the roofline model, Williams et al., CACM 52(4), 2009. FLOPs, Kaplan et al., arXiv 2001.08361,
section 2.1: 2 for each weight and token forward, twice as many backward, and attention. Pipelines, Narayanan
et al., arXiv 2104.04473, section 2.2: stages idle (stages - 1) / micro-batches of the time of their work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from async_rl.config import Config, SGLangEngines, old_log_probs_reason
from async_rl.engines.model_facts import facts_of
from async_rl.planning.workload import Workload

FLOPS_SHARE: Final = 0.5
"""Of the peak, in matrix products. An assumption, for dense models: PaLM trained at 0.46 (arXiv 2204.02311,
table 3). Small experts reach less."""
MEMORY_SHARE: Final = 0.8
"""Of the bandwidth, in reads of large tensors. An assumption."""

_CHUNK: Final = 8192
"""Tokens that an engine prefills at once: SGLang's `chunked_prefill_size` on GPUs of 60 GB or more."""
_ELEMENT: Final = 2
"""Bytes of bfloat16."""


class GpuPeaks(NamedTuple):
    """What one GPU can do at most."""

    flops_per_s: float
    """Dense products in bfloat16."""
    memory_bytes_per_s: float


DEVICES: Final = {"H100": GpuPeaks(989e12, 3.35e12), "H200": GpuPeaks(989e12, 4.8e12)}
"""The SXM modules. Source: NVIDIA's data sheets; theirs has twice the FLOPs, of sparse products."""


class ModelShape(NamedTuple):
    """What decides how much a token costs, in elements."""

    dense: int
    """Weights of matrices that every token passes, the output layer included."""
    expert: int = 0
    """Weights of one routed expert of one layer."""
    moe_layers: int = 0
    experts: int = 0
    top_k: int = 0
    attention: int = 0
    """Width of queries and of values, over all heads and layers."""
    kv: int = 0
    """KV cache of a token."""
    kv_heads: int = 1
    """GPUs over which the KV cache of a token can be divided."""

    @property
    def of_token(self) -> int:
        """Weights that one token passes."""
        return self.dense + self.moe_layers * self.top_k * self.expert

    def read_by(self, tokens: float) -> float:
        """Weights that at least one of some tokens passes, if routers choose all experts equally often.

        Source: of E experts, of which each token has k, n tokens miss one with probability (1 - k / E)^n.
        """
        if not self.experts:
            return self.dense
        missed: float = (1 - self.top_k / self.experts) ** tokens
        return self.dense + self.moe_layers * self.experts * (1 - missed) * self.expert


def shape_of(model: Mapping[str, Any], parameters: int) -> ModelShape:
    """Return the shape of a model from its parsed config.json and the number of all its parameters."""
    facts, hidden, heads = facts_of(dict(model)), model["hidden_size"], model["num_attention_heads"]
    expert = 3 * hidden * (model.get("moe_intermediate_size") or model["intermediate_size"])
    expert *= facts.is_moe
    # One row of the embedding is read for a token; the output layer, which may be the same, is read whole.
    embedding = 0 if model.get("tie_word_embeddings") else facts.vocab_size * hidden
    if rank := model.get("kv_lora_rank"):
        rotated = model["qk_rope_head_dim"]
        widths, kv, kv_heads = model["qk_nope_head_dim"] + rotated + model["v_head_dim"], rank + rotated, 1
    else:
        head, kv_heads = model.get("head_dim") or hidden // heads, model.get("num_key_value_heads") or heads
        widths, kv = 2 * head, 2 * kv_heads * head
    return ModelShape(
        dense=parameters - embedding - len(facts.moe_layers) * facts.num_experts * expert,
        expert=expert,
        moe_layers=len(facts.moe_layers),
        experts=facts.num_experts,
        top_k=facts.top_k,
        attention=facts.num_layers * heads * widths,
        kv=facts.num_layers * kv,
        kv_heads=kv_heads,
    )


def decode_s(model: ModelShape, device: GpuPeaks, gpus: int, calls: float, context: float) -> float:
    """Return the seconds of a decode step.

    Args:
        model: The model.
        device: One of the engine's GPUs.
        gpus: GPUs of the engine, over which tensors are divided.
        calls: Running calls.
        context: Tokens that a call attends to, on average.
    """
    cached = calls * context * model.kv / min(gpus, model.kv_heads)
    read = model.read_by(calls) / gpus + cached
    return max(
        _flops(model, calls, context) / gpus / (FLOPS_SHARE * device.flops_per_s),
        read * _ELEMENT / (MEMORY_SHARE * device.memory_bytes_per_s),
    )


def prefill_s(model: ModelShape, device: GpuPeaks, gpus: int, context: float) -> float:
    """Return the seconds of a token that an engine prefills among others, `context` being that of a call."""
    read_s = model.read_by(_CHUNK) * _ELEMENT / gpus / (MEMORY_SHARE * device.memory_bytes_per_s)
    computed_s = _flops(model, 1, context / 2) / gpus / (FLOPS_SHARE * device.flops_per_s)
    return max(computed_s, read_s / _CHUNK)


def train_s(
    model: ModelShape, device: GpuPeaks, ranks: int, context: float, *, passes: float, idle: float = 0.0
) -> float:
    """Return the seconds of a trained token.

    Args:
        model: The model.
        device: The GPU of one rank.
        ranks: Ranks, all of which work on the batch.
        context: Tokens that one attends to, on average.
        passes: Forward passes that the work is worth: 3 for a forward and backward pass.
        idle: Idle time over time of work, of a pipeline.
    """
    return passes * (1 + idle) * _flops(model, 1, context) / ranks / (FLOPS_SHARE * device.flops_per_s)


def _flops(model: ModelShape, tokens: float, context: float) -> float:
    return 2 * tokens * (model.of_token + context * model.attention)


def training_passes(config: Config) -> float:
    """Return how many forward passes the work on a token is worth, by the settings of the trainer."""
    trainer, loss = config.trainer, config.trainer.loss
    # Frozen weights have no gradients of their own, which are half of a backward pass.
    update = (3 if trainer.lora is None else 2) + (trainer.recompute in ("full", "offload"))
    before = (old_log_probs_reason(config) is not None) + bool(loss.kl.coefficient)
    if loss.advantages == "gae":  # the critic's values, and its own update
        before, update = before + 1, 2 * update
    return trainer.epochs_per_batch * update + before


def pipeline_idle(config: Config, batch_tokens: float) -> float:
    """Return the idle time of pipeline stages over the time of their work, in updates of a batch."""
    trainer, layout = config.trainer, config.trainer.layout
    replicas = trainer.num_ranks / (layout.tp * layout.pp * layout.cp)
    update = batch_tokens / trainer.updates_per_batch / replicas
    return (layout.pp - 1) / layout.vpp / max(1.0, update / trainer.micro_batch_tokens)


def speeds_on(device: GpuPeaks, model: ModelShape, config: Config, workload: Workload) -> dict[str, float]:
    """Return speeds of a job as fields of a `Workload`, of which only the lengths count here.

    A decode step is the straight line through its times with half and with all slots in use.
    """
    engine = config.engine
    gpus, slots = engine.tp_size if isinstance(engine, SGLangEngines) else 1, engine.max_running_requests
    context = workload.mean_context
    full_s = decode_s(model, device, gpus, slots, context)
    per_call_s = min(full_s, 2 * (full_s - decode_s(model, device, gpus, slots / 2, context))) / slots
    tokens = config.batch_trajectories * workload.trajectory_tokens
    token_s = train_s(
        model,
        device,
        config.trainer.num_ranks,
        context,
        passes=training_passes(config),
        idle=pipeline_idle(config, tokens),
    )
    return {
        "decode_base_s": full_s - per_call_s * slots,
        "decode_per_call_s": per_call_s,
        "prefill_tokens_per_s": 1 / prefill_s(model, device, gpus, context),
        "train_tokens_per_s": 1 / token_s,
    }
