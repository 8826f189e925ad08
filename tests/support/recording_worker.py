"""The real trainer worker, which also keeps a copy of every batch it was given."""

import os
import shutil
from pathlib import Path

from async_rl.trainer_protocol import StepResult
from trainer.worker import TrainerWorker

FOLDER = "ASYNC_RL_TEST_BATCHES"
"""Environment variable that names where the copies go."""


class RecordingWorker(TrainerWorker):
    """Rank 0 copies each batch before it trains on it."""

    def train_step(self, batch_path: str, step: int) -> StepResult:
        if self._rank == 0:
            folder = Path(os.environ[FOLDER])
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(batch_path, folder / f"{step}.frame")
        return super().train_step(batch_path, step)
