"""Measures the trainer's pause for a checkpoint, and how fast the checkpoint reaches the disk.

    python benchmarks/checkpoint.py [--quick] [--json FILE]

One rank of the real trainer with a model of some size and full optimizer state alternates between a
checkpoint as a run writes it (the trainer pauses while the state is copied, the rest runs beside it), the
same checkpoint waited for, and `torch.save` of the same bytes into one file, synced. A ratio is of neighbours
in one round. Steps are timed too, alone and while a checkpoint is written: on two cores the writer slows them
down.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from benchmarks.support.tables import Row, argument_parser, in_turns, report, row, timed
from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import started, trainer_config
from trainer.megatron import shards
from trainer.worker import TrainerWorker


def torch_save(worker: TrainerWorker, path: Path) -> None:
    """Write the same tensors into one file and sync it."""
    with path.open("wb") as file:
        torch.save({part.key: part.data for part in shards.parts_to_save(worker.model)}, file)
        file.flush()
        os.fsync(file.fileno())


def measure(worker: TrainerWorker, folder: Path, turns: int) -> list[Row]:
    """Measure all rows alternately, after one discarded round."""
    data = random_batch(lengths=(64,) * 4, vocab_size=4096, routing=False)
    train = timed(lambda: worker.train_on(data, 1))

    def beside() -> float:
        seconds = train()
        worker.saved_checkpoint(wait=True)
        return seconds

    def synced(work: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            os.sync()
            return timed(work)()

        return run

    def wait() -> None:
        worker.save_checkpoint(str(folder), {})
        assert worker.saved_checkpoint(wait=True).failure is None

    found = in_turns(
        turns,
        {
            "step": train,
            "copy": synced(lambda: worker.save_checkpoint(str(folder), {})),
            "beside": beside,
            "waited": synced(wait),
            "torch.save": synced(lambda: torch_save(worker, folder / "one.pt")),
        },
    )
    size = f"{worker.saved_checkpoint(wait=True).num_bytes / 1e6:.0f} MB"
    return [
        row(what, size, found[ours], reference, found[other])
        for what, ours, reference, other in (
            ("trainer's pause", "copy", "checkpoint waited for", "waited"),
            ("trainer's pause", "copy", "torch.save", "torch.save"),
            ("checkpoint to disk", "waited", "torch.save", "torch.save"),
            ("step while a checkpoint is written", "beside", "step alone", "step"),
        )
    ]


def main() -> None:
    """Measure, prints, and write JSON if requested."""
    options = argument_parser(__doc__, quick="smaller and fewer, about a minute").parse_args()
    warnings.simplefilter("ignore")
    settings = {"keep_checkpoints": 1, "micro_batch_tokens": 4096, "loss": {"check_old_log_probs_every": 0}}
    hidden, layers = (256, 4) if options.quick else (384, 6)
    with tempfile.TemporaryDirectory(prefix="async-rl-benchmark-") as name:
        folder = Path(name)
        model = build_tiny_qwen3_moe(
            folder / "model",
            vocab_size=4096,
            hidden_size=hidden,
            dense_size=2 * hidden,
            expert_size=hidden // 2,
            num_layers=layers,
            num_heads=8,
            num_groups=4,
            head_dim=hidden // 8,
            num_experts=16,
        )
        with started(trainer_config(model, replay=False, dtype="bfloat16", **settings)) as worker:
            rows = measure(worker, folder / "checkpoints", 3 if options.quick else 5)
    report(rows, "checkpoint", options.json)


if __name__ == "__main__":
    main()
