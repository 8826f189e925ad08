"""Advantages: how much better than its baseline a conversation was, one number for all of its tokens.

| estimator | baseline | scale |
|---|---|---|
| `grpo` | the group's mean | the group's standard deviation |
| `dr_grpo` | the group's mean | none |
| `rloo` | the mean of the other attempts | none |
| `reinforce++` | the batch's mean | the batch's standard deviation |
| `reinforce++_baseline` | the group's mean | the batch's standard deviation |

Papers compare attempts at a task. An attempt may have several conversations, which are not independent
samples: together they have one vote in every mean and deviation, shared equally. So have its turns, where
each has a return of its own (`trainer.losses.turns`). An attempt of one conversation is the papers' case.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from async_rl.errors import DataError
from async_rl.types import BoolArray, Float32Array, Int32Array, Int64Array

EPSILON = 1e-6
"""Prevents a division by zero when all rewards are equal; negligible for rewards of any usual scale."""

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline"]


def estimate_advantages(
    estimator: Estimator,
    rewards: Float32Array,
    group_index: Int32Array,
    attempt_index: Int32Array,
    weights: np.ndarray | None = None,
) -> Float32Array:
    """Returns the advantages of a batch's trajectories, or of its turns or tokens.

    Standard deviations are those of the population, and a batch's mean and deviation count every attempt
    once. In contrast, verl and TRL divide the squares of a group by G - 1, and verl whitens a batch token by
    token.

    All estimators but `reinforce++` return zeros for a group whose rewards are equal, and for a group that
    has fewer than two attempts with a vote.

    Args:
        estimator: One of the rows of the module's table.
        rewards: `[N]`.
        group_index: `[N]`, equal for the trajectories of a group.
        attempt_index: `[N]`, equal for the conversations of an attempt.
        weights: `[N]`, the parts in their attempt's vote, relative to each other. What has no part has the
            advantage 0. None: equal parts.

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
    weights = np.ones(len(rewards)) if weights is None else weights.astype(np.float64)
    counted = weights > 0
    if estimator != "reinforce++":  # whose baseline needs no sibling
        counted = counted & ~lacks_baseline(group_index, attempt_index, counted)
    values = rewards.astype(np.float64)
    _, attempt = np.unique(attempt_index, return_inverse=True)
    _, group = np.unique(group_index, return_inverse=True)
    weights = weights * counted
    votes = np.bincount(attempt, weights)[attempt]
    share = np.divide(weights, votes, out=np.zeros_like(weights), where=counted)  # of its attempt's vote
    attempts = np.maximum(np.bincount(group, share), 1)  # that vote, by group
    centred = values - (np.bincount(group, share * values) / attempts)[group]
    match estimator:
        case "grpo":
            deviation = np.sqrt(np.bincount(group, share * centred**2) / attempts)
            advantages = centred / (deviation[group] + EPSILON)
        case "dr_grpo":
            advantages = centred
        case "rloo":
            # The mean of the other attempts is the group's mean without the attempt's own vote.
            own = np.bincount(attempt, share * centred)[attempt]
            advantages = centred + own / np.maximum(attempts - 1, 1)[group]
        case "reinforce++":
            advantages = _whitened(values, share)
        case "reinforce++_baseline":
            advantages = _whitened(centred, share)
        case _:
            known = ", ".join(get_args(Estimator))
            raise ValueError(f"the estimator is {estimator!r}; expected one of {known}")
    return np.where(counted, advantages, 0).astype(np.float32)


def lacks_baseline(group_index: Int32Array, attempt_index: Int32Array, counted: BoolArray) -> BoolArray:
    """Returns which trajectories have no other attempt of their group to be compared with, `[N]`.

    Args:
        group_index: `[N]`, equal for the trajectories of a group.
        attempt_index: `[N]`, equal for the conversations of an attempt.
        counted: `[N]`, whether a trajectory counts.
    """
    pairs = np.unique(np.stack([group_index, attempt_index])[:, counted], axis=1)
    groups, voting = np.unique(pairs[0], return_counts=True)
    lacks: BoolArray = ~np.isin(group_index, groups[voting > 1])
    return lacks


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


def _whitened(values: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Returns the values, `[N]`, centred and scaled over the attempts of the batch, which they share in."""
    attempts = max(share.sum(), 1.0)
    centred = values - (share * values).sum() / attempts
    return centred / (np.sqrt((share * centred**2).sum() / attempts) + EPSILON)
