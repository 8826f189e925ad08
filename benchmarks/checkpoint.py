"""Measures the trainer's pause for a checkpoint, and how fast the checkpoint reaches the disk.

python benchmarks/checkpoint.py [--quick] [--json FILE]

One rank of the real trainer with a model of some size and full optimizer state alternates between a
checkpoint as a run writes it (the trainer pauses while the state is copied, the rest runs beside it), the
same checkpoint waited for, and `torch.save` of the same bytes into one file, synced. A ratio is of neighbours
in one round. Steps are timed too, alone and while a checkpoint is written: on two cores the writer slows them
down.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from async_rl.types import TrainBatch
from trainer.megatron import shards
from trainer.worker import TrainerWorker


class Row(msgspec.Struct, kw_only=True):
    """One line of the table."""

    what: str
    measured: str
    reference: str
    ratio: float
    ratio_low: float
    ratio_high: float


def build_model(path: Path, hidden: int, layers: int) -> Path:
    """Writes a Qwen3-MoE model with random weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # once the trainer has prepared its imports

    config = Qwen3MoeConfig(  # type: ignore[call-arg]  # transformers makes its __init__ at import
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


def batch() -> TrainBatch:
    """Returns four trajectories of 64 tokens, in two groups."""
    count, length = 4, 64
    rng = np.random.default_rng(0)
    mask = np.tile(np.arange(length) >= length // 2, count)
    return TrainBatch(
        batch_id="b",
        trainer_version=0,
        trajectory_ids=tuple(f"{i:032x}" for i in range(count)),
        group_index=np.repeat(np.arange(2, dtype=np.int32), 2),
        rewards=np.asarray([0, 1, 0, 1], np.float32),
        offsets=np.arange(count + 1, dtype=np.int64) * length,
        token_ids=rng.integers(0, 4096, count * length).astype(np.int32),
        loss_mask=mask,
        rollout_log_probs=np.where(mask, -8.0, 0.0).astype(np.float32),
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        routed_experts=None,
        routing_valid=None,
    )


def seconds(call: Callable[[], object]) -> float:
    """Returns the duration of a call, seconds."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def torch_save(worker: TrainerWorker, path: Path) -> None:
    """Writes the same tensors into one file and syncs it."""
    with path.open("wb") as file:
        torch.save({part.key: part.data for part in shards.parts_to_save(worker.model)}, file)
        file.flush()
        os.fsync(file.fileno())


def measure(worker: TrainerWorker, folder: Path, turns: int) -> list[Row]:
    """Measures all rows alternately, after one discarded round."""
    data, step = batch(), 1
    times: dict[str, list[float]] = {
        name: [] for name in ("step", "copy", "beside", "written", "waited", "torch.save")
    }
    for turn in range(turns + 1):
        seen = {"step": seconds(lambda: worker.train_on(data, step))}
        os.sync()
        begin = time.perf_counter()
        worker.save_checkpoint(str(folder), {})
        seen["copy"] = time.perf_counter() - begin
        seen["beside"] = seconds(lambda: worker.train_on(data, step))
        worker.saved_checkpoint(wait=True)
        seen["written"] = time.perf_counter() - begin
        os.sync()

        def wait() -> None:
            worker.save_checkpoint(str(folder), {})
            assert worker.saved_checkpoint(wait=True).failure is None

        seen["waited"] = seconds(wait)
        os.sync()
        seen["torch.save"] = seconds(lambda: torch_save(worker, folder / "one.pt"))
        if turn:
            for name, value in seen.items():
                times[name].append(value)
    num_bytes = worker.saved_checkpoint(wait=True).num_bytes
    size = f"{num_bytes / 1e6:.0f} MB"
    rate = {name: f"{num_bytes / np.median(times[name]) / 1e6:.0f} MB/s" for name in ("waited", "torch.save")}
    return [
        row(f"trainer's pause, {size}", times, "copy", "waited", "checkpoint waited for"),
        row(f"trainer's pause, {size}", times, "copy", "torch.save", "torch.save"),
        row(f"checkpoint to disk, {rate['waited']}", times, "waited", "torch.save", rate["torch.save"]),
        row("step while a checkpoint is written", times, "beside", "step", "step alone"),
    ]


def row(what: str, times: dict[str, list[float]], ours: str, other: str, reference: str) -> Row:
    """Builds a row of medians and of the quartiles of the rounds' ratios."""
    ratios = np.asarray(times[ours]) / np.asarray(times[other])
    low, middle, high = np.percentile(ratios, [25, 50, 75])
    return Row(
        what=what,
        measured=f"{1e3 * np.median(times[ours]):.0f} ms",
        reference=f"{reference}: {1e3 * np.median(times[other]):.0f} ms",
        ratio=float(middle),
        ratio_low=float(low),
        ratio_high=float(high),
    )


def show(rows: list[Row]) -> None:
    """Prints the rows as a table."""
    table = Table(title="checkpoint")
    for column in ("", "ours", "reference", "ratio", "quartiles"):
        table.add_column(column, justify="right" if column in ("ratio", "quartiles") else "left")
    for r in rows:
        table.add_row(
            r.what, r.measured, r.reference, f"{r.ratio:.3f}", f"{r.ratio_low:.3f}-{r.ratio_high:.3f}"
        )
    Console(width=140).print(table)


def main() -> None:
    """Measures, prints, and writes JSON if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer, about a minute")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp(prefix="async-rl-benchmark-"))
    try:
        model = build_model(folder / "model", 256 if options.quick else 384, 4 if options.quick else 6)
        config = {
            "model": {"path": str(model), "dtype": "bfloat16"},
            "data": {"path": "unused.jsonl"},
            "rollout": {"group_size": 2},
            "routing": {"replay": "off"},
            "trainer": {"keep_checkpoints": 1},
        }
        worker = TrainerWorker(config, 0, 1, "")
        worker.setup(None)
        rows = measure(worker, folder / "checkpoints", 3 if options.quick else 5)
        worker.close()
    finally:
        shutil.rmtree(folder)
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps(msgspec.to_builtins(rows), indent=1))


if __name__ == "__main__":
    main()
