"""The real trainer worker, which also keeps a copy of every batch it was given."""

import os
from pathlib import Path

from async_rl.codec import write_frame
from async_rl.store.frames import read_trajectories
from async_rl.trainer_protocol import StepResult
from async_rl.types import TakenBatch
from trainer.worker import TrainerWorker

FOLDER = "ASYNC_RL_TEST_BATCHES"
"""Environment variable that names where the copies go."""


class RecordingWorker(TrainerWorker):
    """Rank 0 copies each batch before it trains on it."""

    def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        self._given = batch  # with the paths of this node
        return super().read_batch(batch)

    def train_step(self, batch: TakenBatch, step: int) -> StepResult:
        if self._rank == 0:
            folder = Path(os.environ[FOLDER])
            folder.mkdir(parents=True, exist_ok=True)
            write_frame(folder / f"{step}.frame", read_trajectories(self._given))
        return super().train_step(batch, step)
