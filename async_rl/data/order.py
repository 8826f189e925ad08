"""In which order tasks are taken, of one dataset or of several. Pure in (seed, position).

A resumed run needs no more than its position, which the ledger has.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol

import numpy as np

from async_rl.types import Int64Array

_MAX_BLOCK: Final = 1000
"""Weights hold exactly over so many tasks at most, each to a thousandth; small ratios over fewer."""


class DataOrder(Protocol):
    """Which task stands at which position of an endless stream."""

    def task_at(self, position: int) -> int:
        """Index of the task at a position."""
        ...


class TaskOrder:
    """One dataset, epoch by epoch, each in an order of its own where it is shuffled."""

    def __init__(self, num_tasks: int, seed: int, shuffle: bool, *, stream: int = 0) -> None:
        """Order so many tasks.

        Args:
            num_tasks: Of the dataset.
            seed: Of the run.
            shuffle: Whether each epoch is shuffled.
            stream: Tells datasets of one run apart.
        """
        if num_tasks < 1:
            raise ValueError(f"num_tasks is {num_tasks}; expected at least 1")
        self.num_tasks = num_tasks
        self._seed = (seed, stream)
        self._shuffle = shuffle
        # Two, because a retried prompt may reach back over an epoch's edge.
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def epoch_at(self, position: int) -> int:
        """How many times all tasks have gone by before this position."""
        return position // self.num_tasks

    def task_at(self, position: int) -> int:
        """See `Order.task_at`."""
        epoch, offset = divmod(position, self.num_tasks)
        return int(self._permutation(epoch)[offset]) if self._shuffle else offset

    def _permute(self, epoch: int) -> Int64Array:
        seed, stream = self._seed
        return np.random.default_rng([seed, epoch, stream]).permutation(self.num_tasks)


class Mixture:
    """Several datasets, each in its own order and with its own epochs, mixed by weight.

    The stream is a block that comes again and again: so many places for each dataset, as evenly spread as
    they can be, so that every batch has about the shares of the whole.

    Example:
        >>> order = Mixture([100, 10], [3.0, 1.0], seed=0, shuffle=False)
        >>> [order.task_at(position) for position in range(5)]  # the second dataset's tasks begin at 100
        [0, 1, 100, 2, 3]
    """

    def __init__(
        self, sizes: Sequence[int], weights: Sequence[float] | None, seed: int, shuffle: bool
    ) -> None:
        """Mix datasets.

        Args:
            sizes: Tasks of each; their indices follow each other.
            weights: How often a task comes of each; None for every task once an epoch.
            seed: Of the run.
            shuffle: Whether each dataset is shuffled in each of its epochs.
        """
        self._places = places = list(sizes) if weights is None else _places(weights)
        self._orders = [TaskOrder(size, seed, shuffle, stream=i) for i, size in enumerate(sizes)]
        self._first = [sum(sizes[:i]) for i in range(len(sizes))]
        middles = np.concatenate([(np.arange(n) + 0.5) / n for n in places])
        owners = np.repeat(np.arange(len(places)), places)
        ranks = np.concatenate([np.arange(n) for n in places])
        spread = np.argsort(middles, kind="stable")
        self._owner, self._rank = owners[spread], ranks[spread]

    def task_at(self, position: int) -> int:
        """See `Order.task_at`."""
        block, offset = divmod(position, len(self._owner))
        owner = int(self._owner[offset])
        within = block * self._places[owner] + int(self._rank[offset])
        return self._first[owner] + self._orders[owner].task_at(within)


def _places(weights: Sequence[float]) -> list[int]:
    """How many places each weight has in a block: the smallest that is exact, or a thousand; at least one."""
    shares = np.asarray(weights, float) / np.sum(weights)
    for length in range(len(weights), _MAX_BLOCK):
        exact = shares * length
        if np.allclose(exact, np.rint(exact), rtol=0, atol=1e-9 * length) and np.rint(exact).min() >= 1:
            return [int(n) for n in np.rint(exact)]
    return [max(1, int(n)) for n in np.rint(shares * _MAX_BLOCK)]
