"""Which task comes next: the data order, its epochs, retries, and what a restarted run must give out again.

A *position* numbers every task ever given out in order; which task it is says `rollout.order`. The
ledger remembers positions, so that a restarted run neither skips nor repeats a task. Pure: no I/O, no
waiting.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from async_rl.data.order import DataOrder
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
        order: DataOrder,
        epochs: int | None,
        start: int = 0,
        pending: Iterable[int] = (),
        *,
        max_retries: int = 0,
        retry_after: int = 0,
    ) -> None:
        """Start at a position, after those that are pending from an earlier life of the run.

        Args:
            tasks: The dataset.
            order: From position to index.
            epochs: Passes over the data; None goes on for ever.
            start: First position that was never given out.
            pending: Earlier positions to give out again, first.
            max_retries: How often one position is given out again on demand.
            retry_after: So many others come in between, so that what made it fail may have passed.
        """
        self._tasks = tasks
        self._order = order
        self._end = None if epochs is None else epochs * len(tasks)
        self._cursor = start
        self._pending = deque(sorted(pending))
        self._max_retries = max_retries
        self._retry_after = retry_after
        self._given = 0
        self._retries: deque[tuple[int, int]] = deque()  # (due when so many were given out, position)
        self._retried: Counter[int] = Counter()

    def next(self) -> tuple[int, Task] | None:
        """The next position and its task, or None when the data is exhausted: until a retry, perhaps."""
        exhausted = self._end is not None and self._cursor >= self._end
        if self._pending:
            position = self._pending.popleft()
        elif self._retries and (exhausted or self._retries[0][0] <= self._given):
            _, position = self._retries.popleft()
        elif exhausted:
            return None
        else:
            position = self._cursor
            self._cursor += 1
        self._given += 1
        return position, self.task_at(position)

    def task_at(self, position: int) -> Task:
        """The task of a position."""
        return self._tasks[self._order.task_at(position)]

    def may_retry(self, position: int) -> bool:
        """Whether a task may be given out once more. What an earlier process did is not counted."""
        return self._retried[position] < self._max_retries

    def retry(self, position: int) -> None:
        """Give a task out once more, later."""
        self._retried[position] += 1
        self._retries.append((self._given + self._retry_after, position))
