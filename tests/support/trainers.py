"""Trainer workers in this process, and what tests look at in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.router_replay import RouterReplayAction

from async_rl.types import TrainBatch
from trainer.megatron.model import Inputs
from trainer.megatron.packing import targets
from trainer.worker import TrainerWorker


def trainer_config(model: Path, *, replay: bool = True, **trainer: Any) -> dict[str, Any]:
    """A whole run config as plain values; `trainer` overrides fields of its `trainer` section."""
    return {
        "model": {"path": str(model), "dtype": trainer.pop("dtype", "float32")},
        "data": {"path": "unused.jsonl"},
        "rollout": {"group_size": 2, "temperature": trainer.pop("temperature", 1.0)},
        "routing": {"replay": "r3" if replay else "off"},
        "trainer": {"optimizer": {"lr": 1e-3}, "micro_batch_tokens": 64, **trainer},
    }


@contextlib.contextmanager
def started(config: dict[str, Any], checkpoints: Path | None = None) -> Iterator[TrainerWorker]:
    """A worker that is the only rank, set up, and closed with the block."""
    worker = TrainerWorker(config, 0, 1, "")
    try:
        worker.setup(None if checkpoints is None else str(checkpoints))
        yield worker
    finally:
        worker.close()


def log_probs_of(worker: TrainerWorker, batch: TrainBatch) -> np.ndarray:
    """The trainer's log-probs of the trained tokens, at the predicting positions, `[S]`."""
    placed = worker._place(batch, targets(batch, np.zeros(batch.num_trajectories, np.float32)))
    return worker._old_log_probs(placed, batch.num_tokens)


def native_rows(worker: TrainerWorker, batch: TrainBatch) -> np.ndarray:
    """The experts that the trainer itself chooses, `[S, L_moe, K] uint8`."""
    model = worker.model
    assert model.replay is not None
    placed = worker._place(batch, targets(batch, np.zeros(batch.num_trajectories, np.float32)))
    parts: list[np.ndarray] = []

    def collect(index: int, logits: torch.Tensor) -> tuple[torch.Tensor, int, None]:
        recorded = [router.get_recorded_indices() for router in model.replay.routers]
        parts.append(torch.stack(recorded, 1).numpy().astype(np.uint8))
        return logits.sum(), 0, None

    for router in model.replay.routers:
        router.set_router_replay_action(RouterReplayAction.RECORD)
    model.run([Inputs(p.inputs.token_ids, p.inputs.packed, None) for p in placed], collect, forward_only=True)
    lengths = np.diff(batch.offsets)
    rows = np.zeros((batch.num_tokens, *parts[0].shape[1:]), np.uint8)
    for part, placing in zip(parts, placed, strict=True):
        # The order of trajectories in a micro-batch is that of their lengths in its packing.
        start = 0
        ids = placing.inputs.token_ids[0].numpy()
        for length in placing.inputs.packed.lengths:
            j = next(
                j
                for j in range(batch.num_trajectories)
                if lengths[j] == length
                and np.array_equal(
                    batch.token_ids[batch.offsets[j] : batch.offsets[j + 1]], ids[start : start + length]
                )
            )
            rows[batch.offsets[j] : batch.offsets[j + 1]] = part[start : start + length]
            start += length
    return rows


def gradients(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    """The gradients of the last step, by parameter."""
    return {
        name: parameter.main_grad.clone()
        for chunk in worker.model.chunks
        for name, parameter in chunk.named_parameters()
    }


def weights(worker: TrainerWorker) -> dict[str, torch.Tensor]:
    """The weights under their Hugging Face names."""
    return {name: tensor.clone() for name, tensor in worker._export()}
