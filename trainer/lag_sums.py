"""Sums over a batch's trained tokens by lag and by part of the batch. Pure.

A part has some of the groups. Tokens of one group share a prompt and are compared with each other, so that
groups, not tokens, are what a batch is a sample of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from async_rl.trainer_protocol import LagFigures
from async_rl.types import Float32Array, Float64Array, Int32Array
from trainer.losses.sequences import MAX_LOG_RATIO
from trainer.megatron.packing import UNKNOWN_LAG, Targets

NUM_PARTS: Final = 4
"""Leaving out each part in turn gives four estimates whose spread can be seen. Each part takes host memory
for three gradients."""


def deal_groups(group_index: Int32Array) -> list[list[int]]:
    """Deal the groups of a batch out to `NUM_PARTS` parts, or one for each group if there are fewer.

    A batch has its groups by deadline, the oldest first; dealt out in turn, parts have similar ages.

    Args:
        group_index: `[N]`, equal for siblings.

    Returns:
        Ascending indices of trajectories for each part.
    """
    groups = np.unique(group_index)
    number = min(NUM_PARTS, len(groups))
    return [np.flatnonzero(np.isin(group_index, groups[part::number])).tolist() for part in range(number)]


class TokenSums:
    """The figures of a batch's trained tokens by lag."""

    def __init__(self, wanted: Targets, start: Float32Array, parts: Sequence[Sequence[int]]) -> None:
        """Compare the log-probs of a batch.

        Args:
            wanted: The batch's targets.
            start: `[S]`, the trainer's log-probs at the predicting positions, of all ranks.
            parts: The trajectories of each part; together all of the batch.
        """
        mask = wanted.mask
        difference = start[mask].astype(np.float64) - wanted.rollout_log_probs[mask]
        # Beyond this the loss takes a ratio for infinite, too.
        self._difference = difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        self._lag = wanted.lag[mask]
        part_of = np.zeros(wanted.trajectory.max(initial=0) + 1, np.int64)
        for number, trajectories in enumerate(parts):
            part_of[trajectories] = number
        self._part = part_of[wanted.trajectory[mask]]
        self._num_parts = len(parts)

    @property
    def lags(self) -> list[int]:
        """The lags of trained tokens, ascending, without the unknown one."""
        return [int(lag) for lag in np.unique(self._lag) if lag != UNKNOWN_LAG]

    @property
    def unknown(self) -> int:
        """The number of trained tokens of unknown lag."""
        return int((self._lag == UNKNOWN_LAG).sum())

    def figures(self, lag: int, **products: Float64Array) -> LagFigures:
        """Return the figures of a lag with the inner products of its gradients, the other fields.

        Source: k3: John Schulman, "Approximating KL Divergence" (2020).
        """
        chosen = self._lag == lag
        difference, part = self._difference[chosen], self._part[chosen]
        ratios = np.exp(difference)

        def sums(values: np.ndarray) -> tuple[float, ...]:
            return tuple(np.bincount(part, values, minlength=self._num_parts).tolist())

        return LagFigures(
            lag=lag,
            tokens=tuple(np.bincount(part, minlength=self._num_parts).tolist()),
            weights=sums(ratios),
            squares=sums(ratios**2),
            kl=sums(ratios - 1 - difference),
            **{name: tuple(map(tuple, each.tolist())) for name, each in products.items()},
        )
