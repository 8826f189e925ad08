"""Advantages: how much better than its baseline a trajectory was, one number for all of its tokens.

| estimator | baseline | scale |
|---|---|---|
| `grpo` | the group's mean | the group's standard deviation |
| `dr_grpo` | the group's mean | none |
| `rloo` | the mean of the siblings | none |
| `reinforce++` | the batch's mean | the batch's standard deviation |
| `reinforce++_baseline` | the group's mean | the batch's standard deviation |
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from async_rl.errors import DataError
from async_rl.types import Float32Array, Int32Array, Int64Array

EPSILON = 1e-6
"""Prevents a division by zero when all rewards are equal; negligible for rewards of any usual scale."""

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline"]


def estimate_advantages(estimator: Estimator, rewards: Float32Array, group_index: Int32Array) -> Float32Array:
    """Returns the advantages of a batch's trajectories.

    Standard deviations are those of the population, and a batch's mean and deviation count every trajectory
    once. In contrast, verl and TRL divide the squares of a group by G - 1, and verl whitens a batch token by
    token.

    All estimators but `reinforce++` return zeros for a group whose rewards are equal, and for a group of one.

    Args:
        estimator: One of the rows of the module's table.
        rewards: `[N]`.
        group_index: `[N]`, equal for siblings.

    Returns:
        `[N] float32`.

    Raises:
        DataError: When a reward is not finite.

    Source: `grpo`: arXiv 2402.03300, section 4.1.2; `dr_grpo`: arXiv 2503.20783, section 3; `rloo`: arXiv
    2402.14740, equation 8; `reinforce++` and its baseline: arXiv 2501.03262, section 3.
    """
    if not np.isfinite(rewards).all():
        where = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise DataError(
            f"the reward of trajectory {where} of the batch is {rewards[where]}, expected a finite number"
        )
    values = rewards.astype(np.float64)
    _, group, size = np.unique(group_index, return_inverse=True, return_counts=True)
    centred = values - (np.bincount(group, values) / size)[group]
    match estimator:
        case "grpo":
            advantages = centred / (np.sqrt(np.bincount(group, centred**2) / size)[group] + EPSILON)
        case "dr_grpo":
            advantages = centred
        case "rloo":
            # reward - (sum of the others) / (G - 1) is the centred reward times G / (G - 1).
            siblings = size[group]
            advantages = centred * siblings / np.maximum(siblings - 1, 1)
        case "reinforce++":
            advantages = _whitened(values)
        case "reinforce++_baseline":
            advantages = _whitened(centred)
        case _:
            known = ", ".join(get_args(Estimator))
            raise ValueError(f"the estimator is {estimator!r}; expected one of {known}")
    return advantages.astype(np.float32)


def longest_answers(weight_versions: Int32Array, offsets: Int64Array) -> Int64Array:
    """Returns the length in tokens of each trajectory's longest answer, a run of sampled tokens.

    Masked tokens count as well: a token that is too stale, or that a sibling branch trains, was still
    generated.

    Args:
        weight_versions: `[S]`, -1 for tokens that were not sampled.
        offsets: `[N + 1]`, the bounds of the trajectories; none is empty.

    Returns:
        `[N] int64`.
    """
    sampled = weight_versions >= 0
    begins = sampled & ~np.roll(sampled, 1)
    begins[offsets[:-1]] = True  # also where nothing is sampled: a run of no tokens
    starts = np.flatnonzero(begins)
    answers = np.add.reduceat(sampled.astype(np.int64), starts)
    longest: Int64Array = np.maximum.reduceat(answers, np.searchsorted(starts, offsets[:-1]))
    return longest


def overlong_penalty(lengths: Int64Array, longest: int, buffer: int) -> Float32Array:
    """Returns the penalty of answers that approach the longest length allowed: 0 at the start of the buffer,
    then to -1.

    `0` up to `longest - buffer` tokens, `((longest - buffer) - length) / buffer` from there on, `-1` beyond
    `longest`.

    Args:
        lengths: `[N]`, tokens of each trajectory's longest answer.
        longest: The longest length allowed, in tokens.
        buffer: The number of tokens before `longest` over which the penalty grows; at least 1.

    Returns:
        `[N] float32`, to be added to rewards.

    Source: arXiv 2503.14476 (DAPO), equation 13.
    """
    return np.clip((longest - buffer - lengths) / buffer, -1.0, 0.0).astype(np.float32)


def _whitened(values: np.ndarray) -> np.ndarray:
    """Returns the values centred and scaled over the batch."""
    return (values - values.mean()) / (values.std() + EPSILON)
