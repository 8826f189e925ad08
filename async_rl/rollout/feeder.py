"""Which task comes next: the data order, its epochs, and what a restarted run must give out again.

A *position* numbers every task ever given out in order (epoch · rows + index within the epoch's permutation);
the ledger remembers positions, so that a restarted run neither skips nor repeats a task. Pure: no I/O, no
waiting.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from async_rl.rollout.dataset import TaskOrder
from async_rl.types import Task


class Feeder:
    """Gives out (position, task) pairs until the epochs are over.

    Example:
        >>> feeder = Feeder(tasks, TaskOrder(len(tasks), seed=0, shuffle=True), epochs=1)
        >>> position, task = feeder.next()
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        order: TaskOrder,
        epochs: int | None,
        start: int = 0,
        pending: Iterable[int] = (),
    ) -> None:
        """Start at a position, after those that are pending from an earlier life of the run.

        Args:
            tasks: The dataset.
            order: From position to index.
            epochs: Passes over the data; None goes on for ever.
            start: First position that was never given out.
            pending: Earlier positions to give out again, first.
        """
        self._tasks = tasks
        self._order = order
        self._end = None if epochs is None else epochs * len(tasks)
        self._cursor = start
        self._pending = deque(sorted(pending))

    def next(self) -> tuple[int, Task] | None:
        """The next position and its task, or None when the data is exhausted."""
        if self._pending:
            position = self._pending.popleft()
        elif self._end is not None and self._cursor >= self._end:
            return None
        else:
            position = self._cursor
            self._cursor += 1
        return position, self.task_at(position)

    def task_at(self, position: int) -> Task:
        """The task of a position."""
        return self._tasks[self._order.task_at(position)]
