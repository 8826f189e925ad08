"""The real trainer worker, with a diary of what it trained, which is independent of the ledger."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.store.frames import read_trajectories
from async_rl.trainer_protocol import StepResult, TrainerState
from async_rl.types import TakenBatch, TrainBatch
from trainer.worker import TrainerWorker
from verification.chaos.engine_faults import FAULTS, append, row_digests
from verification.diary import DIARY, Entry, SetUp, saving, trained, write


class DiaryWorker(TrainerWorker):
    """Records, on rank 0, the step of each start, every completed step, and the routing rows it replayed."""

    def setup(self, checkpoint_dir: str | None) -> TrainerState:
        state = super().setup(checkpoint_dir)
        self._note(SetUp(step=state.step))
        return state

    def train_step(self, taken: TakenBatch, step: int) -> StepResult:
        result = super().train_step(taken, step)
        if self._rank == 0:
            batch = read_trajectories(taken)
            self._note(trained(taken, batch, step))
            append(Path(os.environ[FAULTS]) / "trained.bin", _replayed_rows(batch).tobytes())
        return result

    def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        if self._rank == 0:
            self._note(saving(extra["weight_version"], directory))
        super().save_checkpoint(directory, extra)

    def _note(self, entry: Entry) -> None:
        if self._rank == 0:
            write(Path(os.environ[DIARY]), entry)


def _replayed_rows(batch: TrainBatch) -> np.ndarray:
    """Return the digests of all valid routing rows of a batch."""
    if batch.routed_experts is None or batch.routing_valid is None:
        return np.zeros(0, np.uint64)
    digests = [np.zeros(0, np.uint64)]
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        of_all = row_digests(batch.token_ids[start:end], batch.routed_experts[start:end], 0)
        digests.append(of_all[batch.routing_valid[start:end]])
    return np.concatenate(digests)
