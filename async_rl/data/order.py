"""The order of tasks, of one dataset or of several: a pure function of (seed, position).

A resumed run needs only its position, which the ledger records.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol

import numpy as np

from async_rl.types import Int64Array

_MAX_BLOCK: Final = 1000
"""The most tasks of a block over which weights hold exactly, to a thousandth; small ratios need fewer."""


class DataOrder(Protocol):
    """Maps the positions of an endless stream to tasks."""

    def task_at(self, position: int) -> int:
        """Return the index of the task at a position."""
        ...


class TaskOrder:
    """The order of one dataset: epoch by epoch, each shuffled differently if shuffling is on."""

    def __init__(self, num_tasks: int, seed: int, shuffle: bool, *, stream: int = 0) -> None:
        """Order `num_tasks` tasks.

        Args:
            num_tasks: The size of the dataset.
            seed: The seed of the run.
            shuffle: Whether each epoch is shuffled.
            stream: Distinguishes the datasets of one run.
        """
        if num_tasks < 1:
            raise ValueError(f"num_tasks is {num_tasks}; expected at least 1")
        self.num_tasks = num_tasks
        self._seed = (seed, stream)
        self._shuffle = shuffle
        # Two, because a retried task may belong to the previous epoch.
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def task_at(self, position: int) -> int:
        """Implements `DataOrder.task_at`."""
        epoch, offset = divmod(position, self.num_tasks)
        return int(self._permutation(epoch)[offset]) if self._shuffle else offset

    def _permute(self, epoch: int) -> Int64Array:
        seed, stream = self._seed
        return np.random.default_rng([seed, epoch, stream]).permutation(self.num_tasks)


class Mixture:
    """Several datasets, each in its own order and with its own epochs, mixed by weight.

    The stream repeats one block, in which each dataset has a number of slots. They are spread as evenly as
    possible, so that every batch has about the same shares as the whole.

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
            sizes: The number of tasks of each dataset; their indices are consecutive.
            weights: The sampling weight of each dataset; None takes every task once per epoch.
            seed: The seed of the run.
            shuffle: Whether each dataset is shuffled in each of its epochs.
        """
        self._slots = slots = list(sizes) if weights is None else _slots_per_block(weights)
        self._orders = [TaskOrder(size, seed, shuffle, stream=i) for i, size in enumerate(sizes)]
        self._first = [sum(sizes[:i]) for i in range(len(sizes))]
        middles = np.concatenate([(np.arange(n) + 0.5) / n for n in slots])
        owners = np.repeat(np.arange(len(slots)), slots)
        ranks = np.concatenate([np.arange(n) for n in slots])
        spread = np.argsort(middles, kind="stable")
        self._owner, self._rank = owners[spread], ranks[spread]

    def task_at(self, position: int) -> int:
        """Implements `DataOrder.task_at`."""
        block, offset = divmod(position, len(self._owner))
        owner = int(self._owner[offset])
        within = block * self._slots[owner] + int(self._rank[offset])
        return self._first[owner] + self._orders[owner].task_at(within)


def _slots_per_block(weights: Sequence[float]) -> list[int]:
    """Return the slots of each weight in the smallest exact block, or in one of a thousand; at least one."""
    shares = np.asarray(weights, float) / np.sum(weights)
    for length in range(len(weights), _MAX_BLOCK):
        exact = shares * length
        if np.allclose(exact, np.rint(exact), rtol=0, atol=1e-9 * length) and np.rint(exact).min() >= 1:
            return [int(n) for n in np.rint(exact)]
    return [max(1, int(n)) for n in np.rint(shares * _MAX_BLOCK)]
