"""Decides which task comes next: data order, epochs, retries, and what a restarted run must dispatch again.

A *position* numbers every task ever dispatched, in order; `data/order.py` maps it to a task. The ledger
records positions, so that a restarted run neither skips nor repeats a task. Nothing here does I/O or waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from async_rl.data.order import DataOrder
from async_rl.observability.metrics import Metrics
from async_rl.types import Task


class TaskRetries:
    """Decides whether the task of a lost group is dispatched once more.

    The queue and the manager request retries, and the feeder dispatches them.

    Example:
        >>> retries = TaskRetries(max_retries=1, retry_after=2)
        >>> retries.retry_task(position=7, reason="too_stale")
        True
        >>> retries.retry_task(position=7, reason="too_stale")
        False
    """

    def __init__(self, *, max_retries: int = 0, retry_after: int = 0, metrics: Metrics | None = None) -> None:
        """Start without retries. Those of an earlier process are not counted.

        Args:
            max_retries: How often one position is retried.
            retry_after: How many other tasks come in between, so that the cause of the failure may pass.
            metrics: Counts retries by reason.
        """
        self._max_retries = max_retries
        self._retry_after = retry_after
        self._metrics = metrics
        self._num_dispatched = 0
        self._due: deque[tuple[int, int]] = deque()  # (due after this number of dispatches, position)
        self._num_retries: Counter[int] = Counter()
        self.changed = asyncio.Event()
        """Set when a retry was added, or may be: the dispatcher waits for it when the data is exhausted."""

    def may_retry(self, position: int) -> bool:
        """Return whether a task may be dispatched once more."""
        return self._num_retries[position] < self._max_retries

    def retry_task(self, position: int, reason: str) -> bool:
        """Schedule a task once more, if it has retries left, and return whether it has."""
        if not self.may_retry(position):
            return False
        self._num_retries[position] += 1
        self._due.append((self._num_dispatched + self._retry_after, position))
        if self._metrics is not None:
            self._metrics.task_retries_total.labels(reason).inc()
        self.changed.set()
        return True

    def pop_due(self, *, exhausted: bool) -> int | None:
        """Return the position of the next retry that is due; when the data is exhausted, every retry is."""
        if self._due and (exhausted or self._due[0][0] <= self._num_dispatched):
            return self._due.popleft()[1]
        return None

    def count_dispatch(self) -> None:
        """Count one dispatched task, first or retried."""
        self._num_dispatched += 1


class Feeder:
    """Returns (position, task) pairs until the epochs are over."""

    def __init__(
        self,
        tasks: Sequence[Task],
        order: DataOrder,
        epochs: int | None,
        start: int = 0,
        pending: Iterable[int] = (),
        retries: TaskRetries | None = None,
    ) -> None:
        """Start at a position, after those that are pending from before a restart.

        Args:
            tasks: The dataset.
            order: Maps positions to indices of tasks.
            epochs: Passes over the data; None repeats forever.
            start: The first position that was never dispatched.
            pending: Earlier positions to dispatch again, first.
            retries: Retries of tasks, shared with the queue; None allows none.
        """
        self._tasks = tasks
        self._order = order
        self._end = None if epochs is None else epochs * len(tasks)
        self._cursor = start
        self._pending = deque(sorted(pending))
        self.retries = retries or TaskRetries()

    def next_task(self) -> tuple[int, Task] | None:
        """Return the next position and its task; None if the data is exhausted and no retry is due."""
        exhausted = self._end is not None and self._cursor >= self._end
        if self._pending:
            position = self._pending.popleft()
        elif (retried := self.retries.pop_due(exhausted=exhausted)) is not None:
            position = retried
        elif exhausted:
            return None
        else:
            position = self._cursor
            self._cursor += 1
        self.retries.count_dispatch()
        return position, self.task_at(position)

    def task_at(self, position: int) -> Task:
        """Return the task of a position."""
        return self._tasks[self._order.task_at(position)]
