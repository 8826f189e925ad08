"""The tokens of a micro-batch by trajectory: sums and means over whole answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Reduce = Callable[[torch.Tensor], torch.Tensor]


def no_reduction(sums: torch.Tensor) -> torch.Tensor:
    """No other rank has a part of the trajectories."""
    return sums


class Sequences(NamedTuple):
    """To which trajectory each trained token belongs.

    Under context parallelism a rank has a part of each trajectory only: sums go over the ranks by `reduce`.
    """

    index: torch.Tensor
    """`[n]` int64, the trajectory of each token, below `len(lengths)`."""
    lengths: torch.Tensor
    """`[N]`, trained tokens of each trajectory, on all ranks."""
    reduce: Reduce = no_reduction
    """Adds `[N]` up over the ranks that share the trajectories."""

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of `[n]` over each trajectory, `[N]`; without gradient."""
        total = torch.zeros(len(self.lengths), dtype=torch.float32, device=values.device)
        return self.reduce(total.index_add_(0, self.index, values.detach().float()))

    def means(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of `[n]` over each trajectory, `[N]`; without gradient."""
        return self.sums(values) / self.lengths.clamp(min=1)
