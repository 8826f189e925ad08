"""Names what a config leaves at Megatron's or the trainer's default, and what the alternative would give.

Bytes are estimates of `trainer.memory`; nothing here has been measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from async_rl.config import Config
from async_rl.engines.model_facts import read_config
from trainer.memory.dimensions import dimensions_of
from trainer.memory.estimate import element_bytes, estimate_memory, largest_micro_batch, optimizer_bytes
from trainer.passthrough import Situation, situation_of


class Alternative(NamedTuple):
    """A setting that the config leaves at its default."""

    name: str
    now: str
    gives: str
    """Another value, and what it gives or costs."""


def describe(config: Config) -> list[str]:
    """Return a table of what the config leaves at its default, a line each; empty where nothing applies."""
    at = situation_of(config)
    rows = [row for row in _alternatives(at) if row.name not in at.values]
    if not rows:
        return []
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [
        "left at its default (trainer.megatron, unless it says otherwise), and what another value gives:",
        *(f"  {row.name:<{names}}  {row.now:<{values}}  {row.gives}" for row in rows),
    ]


def _alternatives(at: Situation) -> Iterator[Alternative]:
    yield from _of_experts(at)
    trainer, layout = at.config.trainer, at.config.trainer.layout
    if at.fused and trainer.lora is None:
        yield Alternative(
            "fp8",
            "null",
            "hybrid, with fp8_recipe=blockwise or mxfp8: matrix products of 8 bits; engines serve "
            "bfloat16, so the log-prob mismatch grows",
        )
    yield from _of_optimizer(at)
    replicas = trainer.num_ranks // (layout.tp * layout.pp)
    if at.on_gpu and replicas > 1 and not trainer.overlap_grad_reduce:
        rank = estimate_memory(at.config, cuda=True).ranks[0]
        gradients = rank.moments[rank.fullest]["gradients"]
        yield Alternative(
            "trainer.overlap_grad_reduce",
            "false",
            f"true: the {_size(gradients)} of gradients of a rank are summed during the backward pass",
        )


def _of_optimizer(at: Situation) -> Iterator[Alternative]:
    if not at.fused or at.values.get("optimizer_cpu_offload"):
        return
    rank = estimate_memory(at.config, cuda=True).ranks[0]
    held, each = rank.moments[rank.fullest]["optimizer"], optimizer_bytes(at.config)
    if not at.values.get("use_precision_aware_optimizer"):
        saved = int(held * 4 / each.device)
        yield Alternative(
            "use_precision_aware_optimizer",
            "false",
            f"true with exp_avg_dtype and exp_avg_sq_dtype=bfloat16: {_size(saved)} less for each rank; "
            "moments are rounded",
        )
    moved = int(held * (each.device + 4) / each.device)
    yield Alternative(
        "optimizer_cpu_offload",
        "false",
        f"true with use_precision_aware_optimizer: {_size(held)} less for each rank, {_size(moved)} more of "
        "host memory; CPUs take the optimizer's step",
    )


def _of_experts(at: Situation) -> Iterator[Alternative]:
    if not at.num_experts:
        return
    config, layout = at.config, at.config.trainer.layout
    model, element = dimensions_of(read_config(config.model.path)), element_bytes(config)
    tokens = largest_micro_batch(config)[0] // layout.cp // layout.tp
    if not at.precise_router and config.model.dtype == "bfloat16":
        more = 3 * tokens * model.experts * 2
        yield Alternative(
            "moe_router_dtype",
            "null",
            f"fp32: scores and gates are not rounded to bfloat16; {_size(more)} per layer and micro-batch",
        )
    if not at.on_gpu or layout.ep * layout.etp == 1:
        return
    if at.values.get("moe_token_dispatcher_type") != "flex":
        sent = 4 * tokens * model.top_k * model.hidden * element  # there and back, forward and backward
        yield Alternative(
            "moe_token_dispatcher_type",
            "alltoall",
            f"flex with moe_enable_deepep and moe_router_dtype=fp32: DeepEP sends the {_size(sent)} per "
            "layer and micro-batch, and sorts them in the same kernels",
        )
        if model.shared:
            share = model.shared / (model.shared + model.top_k * model.expert)
            yield Alternative(
                "moe_shared_expert_overlap",
                "false",
                f"true: {share:.0%} of the experts' work runs while tokens are exchanged; alltoall only",
            )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
