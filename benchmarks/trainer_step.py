"""Measures a trainer step with and without routing replay, with and without recomputed old log-probs.

    python benchmarks/trainer_step.py [--quick] [--json FILE]

A small Qwen3-MoE on real Megatron-Core, one rank, float32 on a CPU. A row is a whole step (forward, backward,
optimizer; a pass for old log-probs where the row says so, and with r2) against the one without replay,
alternately. Times are CPU times.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.types import TrainBatch
from benchmarks.support.tables import argument_parser, in_turns, report, row
from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import started, trainer_config

LAYERS, EXPERTS, TOP_K = 4, 16, 4

NO_PASS: dict[str, Any] = {"loss": {"check_old_log_probs_every": 0}}

VARIANTS: dict[str, dict[str, Any]] = {
    "replay off": {"replay": "off", **NO_PASS},
    "a pass for old log-probs": {"replay": "off", "loss": {"check_old_log_probs_every": 1}},
    "replay r3": {"replay": "r3", **NO_PASS},
    "replay r2": {"replay": "r2", **NO_PASS},
    "old log-probs of the engine": {"replay": "off", "loss": {"old_log_probs": "rollout"}},
    "experts recomputed": {"replay": "off", "recompute": "selective", **NO_PASS},
    "all recomputed": {"replay": "off", "recompute": "full", **NO_PASS},
    "all recomputed, replay r3": {"replay": "r3", "recompute": "full", **NO_PASS},
}
"""The first variant is the reference of the others."""


def build_model(path: Path) -> Path:
    """Build a model whose layers dominate a step, as in large models."""
    transformers.utils.logging.disable_progress_bar()
    return build_tiny_qwen3_moe(
        path,
        vocab_size=512,
        hidden_size=128,
        num_layers=LAYERS,
        head_dim=32,
        num_experts=EXPERTS,
        top_k=TOP_K,
        expert_size=96,
        max_position_embeddings=4096,
    )


def batch_of(trajectories: int, mean: int, longest: int) -> TrainBatch:
    """Build a batch with log-normal lengths."""
    rng = np.random.default_rng(0)
    drawn = (rng.lognormal(0, 0.8, trajectories) * mean / np.exp(0.32)).clip(16, longest).astype(int)
    return random_batch(
        lengths=tuple(drawn.tolist()),
        group_size=4,
        vocab_size=512,
        layers=LAYERS,
        experts=EXPERTS,
        top_k=TOP_K,
    )


def main() -> None:
    options = argument_parser(__doc__, quick="a smaller batch, 3 rounds in place of 7").parse_args()
    torch.set_num_threads(1)
    batch = batch_of(24, 128, 512) if options.quick else batch_of(64, 192, 1024)
    with tempfile.TemporaryDirectory() as scratch:
        model, warm_up = build_model(Path(scratch) / "model"), batch_of(4, 64, 128)

        def step_s(fields: dict[str, Any]) -> float:
            with started(trainer_config(model, micro_batch_tokens=4096, **fields)) as worker:
                worker.train_on(warm_up, 1)
                begin = time.process_time()
                worker.train_on(batch, 2)
                return time.process_time() - begin

        steps = {name: partial(step_s, fields) for name, fields in VARIANTS.items()}
        times = in_turns(3 if options.quick else 7, steps, warm_up=0)
    reference, *_ = VARIANTS
    size = f"{batch.num_trajectories} x {batch.num_tokens // batch.num_trajectories}"
    rows = [row(name, size, times[name], reference, times[reference]) for name in VARIANTS]
    recomputed, both = "all recomputed", "all recomputed, replay r3"
    rows.append(row(both, size, times[both], recomputed, times[recomputed]))
    report(rows, "a trainer step", options.json)


if __name__ == "__main__":
    main()
