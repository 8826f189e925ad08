"""How much better than its siblings a trajectory was."""

from __future__ import annotations

import numpy as np

from async_rl.errors import DataError
from async_rl.types import Float32Array, Int32Array

EPSILON = 1e-6
"""Keeps a group of equal rewards from dividing by zero; rewards of another scale than 1e-6 do not feel it."""


def group_advantages(rewards: Float32Array, group_index: Int32Array, *, normalize: bool) -> Float32Array:
    """Reward minus the group's mean, divided by the group's standard deviation if asked.

    A group whose rewards are all equal gets zeros, and so does a group of one.

    Args:
        rewards: `[N]`.
        group_index: `[N]`, equal for siblings.
        normalize: Divide by the standard deviation (of the population) of the group.

    Returns:
        `[N] float32`.

    Raises:
        DataError: When a reward is not finite.

    Source: arXiv 2402.03300 (GRPO), section 4.1.2; without the division arXiv 2503.20783 (Dr. GRPO).
    """
    if not np.isfinite(rewards).all():
        where = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise DataError(
            f"the reward of trajectory {where} of the batch is {rewards[where]}, expected a finite number"
        )
    values = rewards.astype(np.float64)
    _, group, size = np.unique(group_index, return_inverse=True, return_counts=True)
    advantages = values - (np.bincount(group, values) / size)[group]
    if normalize:
        deviation = np.sqrt(np.bincount(group, advantages**2) / size)
        advantages /= deviation[group] + EPSILON
    return advantages.astype(np.float32)
