"""The order of conversations and their learning rates. Without side effects, so that a run can resume."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Literal

import msgspec
import numpy as np

from async_rl.types import TrainBatch

_FINAL_SHARE: Final = 0.1
"""The final learning rate as a share of the peak: the last steps still move the weights."""

Decay = Literal["cosine", "linear", "constant"]


class SftExample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One conversation."""

    token_ids: np.ndarray  # [n] int32
    loss_mask: np.ndarray  # [n] bool, trained on


class SftBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The input of the ranks for one optimizer step, or for one part of a validation."""

    rows: TrainBatch
    """Conversations in the form of trajectories; only tokens and mask have a meaning."""
    learning_rate: float
    """0 if only the loss is computed, and `train` is false."""
    train: bool = True


class TrainingOrder(msgspec.Struct, frozen=True, kw_only=True):
    """All steps of a run, with the examples of each."""

    batches: tuple[tuple[int, ...], ...]
    epochs: tuple[int, ...]
    """The epoch of each batch, from 0."""


def plan_batches(
    lengths: Sequence[int],
    *,
    batch_tokens: int,
    epochs: int,
    max_steps: int | None = None,
    seed: int | None = 0,
) -> TrainingOrder:
    """Put whole examples one after the other into batches of at most `batch_tokens` tokens.

    Each example occurs once per epoch, and no batch mixes two epochs. An example longer than `batch_tokens`
    is a batch of its own. Without a seed, examples keep their order.
    """
    batches: list[tuple[int, ...]] = []
    numbers: list[int] = []
    for epoch in range(epochs):
        order = list(range(len(lengths)))
        if seed is not None:
            order = np.random.default_rng((seed, epoch)).permutation(len(lengths)).tolist()
        batch: list[int] = []
        tokens = 0
        for row in order:
            if batch and tokens + lengths[row] > batch_tokens:
                batches.append(tuple(batch))
                numbers.append(epoch)
                batch, tokens = [], 0
            batch.append(row)
            tokens += lengths[row]
        batches.append(tuple(batch))
        numbers.append(epoch)
    return TrainingOrder(batches=tuple(batches[:max_steps]), epochs=tuple(numbers[:max_steps]))


def batch_of(rows: Sequence[SftExample], name: str) -> TrainBatch:
    """Convert conversations to a batch of trajectories without sampled tokens."""
    count = len(rows)
    offsets = np.array([0, *accumulate(len(row.token_ids) for row in rows)], np.int64)
    return TrainBatch(
        batch_id=name,
        trainer_version=0,
        trajectory_ids=tuple(map(str, range(count))),
        group_index=np.arange(count, dtype=np.int32),
        rewards=np.zeros(count, np.float32),
        offsets=offsets,
        token_ids=np.concatenate([row.token_ids for row in rows]).astype(np.int32, copy=False),
        loss_mask=np.concatenate([row.loss_mask for row in rows]).astype(np.bool_, copy=False),
        rollout_log_probs=np.zeros(offsets[-1], np.float32),
        weight_versions=np.zeros(offsets[-1], np.int32),
        routed_experts=None,
        routing_valid=None,
    )


def learning_rate(step: int, total_steps: int, *, peak: float, warmup_steps: int, decay: Decay) -> float:
    """Return the rate of step `step`, from 0: a linear rise to the peak, then a decay to a tenth of it.

    The step after the last one would have the final rate.

    Source: half a cosine without restarts is arXiv 1608.03983 (SGDR), equation 5.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    left = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "constant": 1.0,
    }[decay]
    return peak * (_FINAL_SHARE + (1 - _FINAL_SHARE) * left)
