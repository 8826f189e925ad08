"""Ranks of the trainer whose tensors are counted on a CPU, beside what `async-rl check --memory` estimates.

Each layout starts its ranks, takes two steps and exports the weights; a dispatch mode counts the bytes of
all tensors from before the model exists.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from async_rl.config import parse_config
from benchmarks.logits_memory import PeakBytes
from tests.support.ranks import run_ranks
from tests.support.tiny_model import (
    build_tiny_deepseek_v3,
    build_tiny_dense,
    build_tiny_qwen2_moe,
    build_tiny_qwen3_moe,
)
from tests.support.train_batches import random_batch
from tests.support.trainers import trainer_config
from trainer.memory import estimate_memory
from trainer.worker import TrainerWorker

STEADY = ("weights", "gradients", "optimizer")


class Case(NamedTuple):
    """Ranks to measure."""

    model: str
    ranks: int
    layout: dict[str, int] = {}  # noqa: RUF012 - a tuple's default is never changed
    dtype: str = "float32"
    recompute: str = "none"
    trainer: dict[str, Any] = {}  # noqa: RUF012 - likewise
    """Further settings of the trainer."""


CASES = {
    "data": Case("qwen3_moe", 2, {}, "bfloat16"),
    "expert, recomputed": Case("qwen3_moe", 2, {"ep": 2}, "float32", "full"),
    "tensor and expert": Case("qwen3_moe", 2, {"tp": 2, "ep": 2}),
    "uneven pipeline": Case("qwen3_moe", 2, {"pp": 2, "first_stage_layers": 3}, "bfloat16"),
    "interleaved pipeline": Case("qwen3_moe", 2, {"pp": 2, "vpp": 2}),
    "context": Case("qwen2_moe", 2, {"cp": 2}, "bfloat16", "full"),
    "latent attention, context": Case("deepseek_v3", 2, {"cp": 2}, "bfloat16"),
} | {
    f"one rank, {' and '.join(modules)} recomputed": Case(
        kind, 1, {}, dtype, "selective", {"megatron": {"recompute_modules": modules}}
    )
    for kind, dtype, modules in (
        ("qwen3_moe", "float32", ["layernorm", "mlp", "moe"]),
        ("qwen3_moe", "bfloat16", ["core_attn"]),
        ("qwen2_moe", "bfloat16", ["shared_experts"]),
        ("deepseek_v3", "bfloat16", ["mla_up_proj"]),
    )
}


CASES |= {
    f"adapters: {name}": Case(
        kind, ranks, layout, dtype, recompute, {"lora": {"rank": 16, "targets": targets, "sync": "merged"}}
    )
    for name, kind, ranks, layout, dtype, recompute, targets in (
        ("one rank, dense", "llama", 1, {}, "float32", "none", ["attention", "mlp"]),
        ("sharded", "qwen3_moe", 2, {"tp": 2, "ep": 2}, "float32", "none", ["attention", "experts"]),
        ("recomputed", "qwen2_moe", 2, {"ep": 2}, "bfloat16", "full", ["attention", "mlp", "experts"]),
        ("latent attention", "deepseek_v3", 2, {"tp": 2, "ep": 2}, "float32", "none", ["attention"]),
    )
}


HIDDEN, VOCABULARY, EXPERT_SIZE = 160, 2048, 112
LAYERS, EXPERTS, TOP_K = 4, 16, 2
TRAJECTORY_TOKENS, MICRO_BATCH_TOKENS = 128, 512


class Compared(msgspec.Struct, frozen=True):
    """One rank of one layout, bytes."""

    layout: str
    rank: int
    peak: int
    estimated_peak: int
    steady: int
    estimated_steady: int
    fullest: str
    """When the estimated peak is."""

    @property
    def error(self) -> float:
        """Estimated over measured peak, minus 1."""
        return self.estimated_peak / self.peak - 1

    @property
    def error_beyond_steady(self) -> float:
        """The same without weights, gradients and optimizer."""
        return (self.estimated_peak - self.estimated_steady) / (self.peak - self.estimated_steady) - 1


def build_model(path: Path, kind: str) -> Path:
    """Build a model whose first layer is dense."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_layers": LAYERS,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "max_position_embeddings": 4096,
    }
    if kind == "qwen3_moe":
        heads = {"num_heads": 8, "num_groups": 4, "head_dim": HIDDEN // 8}
        return build_tiny_qwen3_moe(
            path, **common, **heads, expert_size=EXPERT_SIZE, dense_size=3 * EXPERT_SIZE, dense_layers=(0,)
        )
    if kind == "qwen2_moe":
        return build_tiny_qwen2_moe(path, **common, dense_layers=(0,))
    if kind == "deepseek_v3":
        wide = {"moe_intermediate_size": EXPERT_SIZE, "q_lora_rank": HIDDEN // 4, "num_groups": 1}
        latent = {"kv_lora_rank": HIDDEN // 4, "qk_nope_head_dim": 64, "v_head_dim": 64}
        return build_tiny_deepseek_v3(path, **common, **wide, **latent, top_groups=1)
    return build_tiny_dense(
        path,
        kind,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=2 * LAYERS,
        max_position_embeddings=4096,
    )


def config_of(case: Case, model: Path) -> dict[str, Any]:
    """Return a rank's config: two micro-batches for each of its schedule's stages."""
    replicas = case.ranks // (case.layout.get("tp", 1) * case.layout.get("pp", 1) * case.layout.get("cp", 1))
    trajectories = 2 * case.layout.get("pp", 1) * replicas * MICRO_BATCH_TOKENS // TRAJECTORY_TOKENS
    config = trainer_config(
        model,
        replay=case.model != "llama",
        dtype=case.dtype,
        num_ranks=case.ranks,
        layout=case.layout,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        recompute=case.recompute,
        groups_per_batch=trajectories // 2,
        **case.trainer,
    )
    config["rollout"] |= {"max_context_tokens": TRAJECTORY_TOKENS, "max_new_tokens": TRAJECTORY_TOKENS - 4}
    return config


def measure_rank(
    rank: int, ranks: int, jobs: dict[str, dict[str, Any]], out: Path
) -> dict[str, tuple[int, int]]:
    """Return the most bytes of one rank at a time, and those after a step, in each of several layouts."""
    warnings.simplefilter("ignore")
    found = {}
    for name, config in jobs.items():
        gc.collect()
        routing = config["routing"]["replay"] != "off"
        with PeakBytes() as counter:
            worker = TrainerWorker(config, rank, ranks, f"file://{out}/{name} address")
            worker.setup(None)
            for step in (1, 2):
                lengths = (TRAJECTORY_TOKENS,) * (2 * config["trainer"]["groups_per_batch"])
                batch = random_batch(
                    step,
                    lengths=lengths,
                    vocab_size=VOCABULARY,
                    layers=tuple(range(1, LAYERS)),
                    experts=EXPERTS,
                    top_k=TOP_K,
                    routing=routing,
                )
                worker.train_on(batch, step)
            steady = counter.alive
            worker.plan_buckets(worker.config.weights.bucket_bytes)
            worker.close()
        found[name] = counter.peak, steady
    return found


def compare(names: Iterable[str], folder: Path) -> list[Compared]:
    """Measure layouts and return a row for each of their ranks."""
    rows: list[Compared] = []
    models: dict[str, Path] = {}
    configs: dict[str, dict[str, Any]] = {}
    for name in names:
        kind = CASES[name].model
        if kind not in models:
            models[kind] = build_model(folder / kind, kind)
        configs[name] = config_of(CASES[name], models[kind])
    for ranks in sorted({CASES[name].ranks for name in configs}):
        jobs = {name: config for name, config in configs.items() if CASES[name].ranks == ranks}
        measured = run_ranks(measure_rank, ranks, jobs, folder, ranks=ranks)
        for name, config in jobs.items():
            for each in estimate_memory(parse_config(config), cuda=False).ranks:
                parts = each.moments[each.fullest]
                for rank in range(each.first, each.last + 1):
                    peak, steady = measured[rank][name]
                    expected = sum(parts[part] for part in STEADY)
                    rows.append(Compared(name, rank, peak, each.peak, steady, expected, each.fullest))
    return rows
