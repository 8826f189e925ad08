"""The tokens of a micro-batch by trajectory: sums and means over whole answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch

MAX_LOG_RATIO: Final = 20.0
"""Largest logarithm of a ratio: `exp` of more than 88 is infinite in float32, and its gradient is no number.
A ratio beyond it has no gradient. Source: verl, `trainer/ppo/core_algos.py`."""

Reduce = Callable[[torch.Tensor], torch.Tensor]


def no_reduction(sums: torch.Tensor) -> torch.Tensor:
    """Return the sums unchanged: no other rank holds a part of the trajectories."""
    return sums


class Sequences(NamedTuple):
    """Maps each trained token to its trajectory, for sums and means per trajectory.

    Under context parallelism a rank holds only a part of each trajectory; `reduce` then adds sums up over
    ranks.
    """

    index: torch.Tensor
    """`[n]` int64, the trajectory of each token, below `len(lengths)`."""
    lengths: torch.Tensor
    """`[N]`, trained tokens of each trajectory, on all ranks."""
    reduce: Reduce = no_reduction
    """Adds sums, `[N]`, up over the ranks that share the trajectories."""

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of values, `[n]`, over each trajectory, `[N]`, without gradient."""
        total = torch.zeros(len(self.lengths), dtype=torch.float32, device=values.device)
        return self.reduce(total.index_add_(0, self.index, values.detach().float()))

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of values, `[n]`, over each trajectory, `[N]`, without gradient."""
        return self.sums(values) / self.lengths.clamp(min=1)
