"""Trainer workers that replay wrong routing rows of the right form, behind all checks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import numpy as np

from async_rl.trainer_protocol import StepResult
from async_rl.types import ExpertIdArray, Int32Array, TrainBatch
from trainer.worker import TrainerWorker

Change = Callable[[ExpertIdArray, Int32Array], ExpertIdArray]
"""Other rows of a trajectory, `[T-1, L_moe, K]`, from its rows and its tokens' weight versions, `[T]`."""


def concatenated(rows: ExpertIdArray, weight_versions: Int32Array) -> ExpertIdArray:
    """Return what appending each answer's rows to the earlier ones gives, cut to the right length.

    An answer holds the rows of the whole sequence up to its end. A call was interrupted where two tokens in
    a row were sampled by different weights.
    """
    sampled = weight_versions >= 0
    resumed = np.flatnonzero((weight_versions[1:] != weight_versions[:-1]) & sampled[1:] & sampled[:-1]) + 1
    answers = [*(rows[: end - 1] for end in resumed), rows]
    return np.concatenate(answers)[: len(rows)]


def shifted(rows: ExpertIdArray, weight_versions: Int32Array) -> ExpertIdArray:
    """Return each row at the position after its own."""
    return np.roll(rows, 1, axis=0)


def with_rows(batch: TrainBatch, change: Change) -> TrainBatch:
    """Return the batch with the changed rows of each trajectory."""
    assert batch.routed_experts is not None
    rows = batch.routed_experts.copy()
    for start, end in itertools.pairwise(batch.offsets.tolist()):
        rows[start : end - 1] = change(rows[start : end - 1].copy(), batch.weight_versions[start:end])
    return msgspec.structs.replace(batch, routed_experts=rows)


class Concatenated(TrainerWorker):
    """Trains on rows that were concatenated when calls were resumed."""

    def train_on(self, batch: TrainBatch, step: int) -> StepResult:
        """Implements `TrainerWorker.train_on`."""
        return super().train_on(with_rows(batch, concatenated), step)


class Shifted(TrainerWorker):
    """Trains on rows that are one position late."""

    def train_on(self, batch: TrainBatch, step: int) -> StepResult:
        """Implements `TrainerWorker.train_on`."""
        return super().train_on(with_rows(batch, shifted), step)
