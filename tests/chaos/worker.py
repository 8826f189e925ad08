"""The real trainer worker, with a diary of what it trained, which is independent of the ledger."""

from __future__ import annotations

import os
from pathlib import Path

from async_rl.codec import read_frame
from async_rl.trainer_protocol import StepResult, TrainerState
from async_rl.types import TrainBatch
from tests.chaos.diary import DIARY, Entry, SetUp, Trained, write
from trainer.worker import TrainerWorker


class DiaryWorker(TrainerWorker):
    """Records, on rank 0, the step of each start and every completed step."""

    def setup(self, checkpoint_dir: str | None) -> TrainerState:
        state = super().setup(checkpoint_dir)
        self._note(SetUp(step=state.step, pid=os.getpid()))
        return state

    def train_step(self, batch_path: str, step: int) -> StepResult:
        result = super().train_step(batch_path, step)
        if self._rank == 0:
            batch = read_frame(batch_path, TrainBatch)
            oldest = []
            for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
                sampled = batch.weight_versions[start:end][batch.loss_mask[start:end]]
                oldest.append(int(sampled.min()))
            self._note(
                Trained(
                    step=step,
                    version=batch.trainer_version,
                    trajectory_ids=batch.trajectory_ids,
                    oldest=tuple(oldest),
                )
            )
        return result

    def _note(self, entry: Entry) -> None:
        if self._rank == 0:
            write(Path(os.environ[DIARY]), entry)
