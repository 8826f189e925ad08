"""Tells a rollout worker in which user code fails from user code that fails anywhere.

A worker may lack a package, a file or a proxy. Because its attempts end early it is always free, so that it
would be given most attempts of the run, and fail them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Final

_MAX_AT_ONCE: Final = 3
"""A worker is to blame when the loops of this many tasks have raised in it before they asked for an engine,
while loops in other workers ask for engines, or did before those ended: one broken task says nothing, and
three in a row are hardly all so."""

_RECENT: Final = 16
"""The number of attempts in a worker that are remembered."""

_MIN_FAILED: Final = 8
"""A worker is to blame when its last attempts have all failed, at least so many, and most of those in other
workers succeed: half of the attempts of a hard task fail, and eight in a row only once in 256."""

_MAX_TRAJECTORIES: Final = 4096
"""Remembered failures of trajectories; the oldest are forgotten first."""


class FailingWorkers:
    """How attempts in each worker end, by its name: a worker that was restarted is the same one.

    Example:
        >>> workers = FailingWorkers()
        >>> workers.record_sampling("w1")
        >>> for number in range(3):
        ...     workers.record_failure("w0", f"trajectory-{number}", f"task-{number}", at_once=True)
        >>> workers.is_to_blame("w0", ["w1"])
        True
    """

    def __init__(self) -> None:
        """Start without attempts."""
        self._have_sampled: set[str] = set()
        """The workers in which loops have asked for engines."""
        self._at_once: dict[str, set[str]] = {}
        """The tasks whose loops have raised in a worker since one last asked for an engine."""
        self._recent: dict[str, deque[bool]] = {}
        """Whether the last attempts have succeeded."""
        self._failed_in: OrderedDict[str, str] = OrderedDict()
        """The worker in which a trajectory has failed last."""

    def record_sampling(self, worker: str) -> None:
        """Record that a loop has asked for an engine."""
        self._have_sampled.add(worker)
        self._at_once.pop(worker, None)

    def record_success(self, worker: str) -> None:
        """Record that an attempt has succeeded."""
        self._recent.setdefault(worker, deque(maxlen=_RECENT)).append(True)

    def record_failure(self, worker: str, trajectory_id: str, task_id: str, *, at_once: bool) -> None:
        """Record that an attempt has failed, `at_once` if it asked for no engine."""
        self._recent.setdefault(worker, deque(maxlen=_RECENT)).append(False)
        if at_once:
            self._at_once.setdefault(worker, set()).add(task_id)
        self._failed_in[trajectory_id] = worker
        if len(self._failed_in) > _MAX_TRAJECTORIES:
            self._failed_in.popitem(last=False)

    def pop_failed_in(self, trajectory_id: str) -> str | None:
        """Return the worker that the next attempt of a trajectory avoids, and forget it."""
        return self._failed_in.pop(trajectory_id, None)

    def num_at_once(self, worker: str) -> int:
        """Return the number of tasks whose loops have raised in a worker since one asked for an engine."""
        return len(self._at_once.get(worker, ()))

    def fail_less_elsewhere(self, worker: str, others: Collection[str]) -> bool:
        """Return whether fewer loops raise at once in another worker."""
        return min(map(self.num_at_once, others), default=1 << 30) < self.num_at_once(worker)

    def is_to_blame(self, worker: str, others: Collection[str]) -> bool:
        """Return whether attempts fail in a worker because of it, and not because of their code.

        Args:
            worker: The worker.
            others: The other workers, those that are starting included: what has worked in them before they
                ended tells as much.
        """
        number = self.num_at_once(worker)
        if number >= _MAX_AT_ONCE and any(
            2 * self.num_at_once(each) < number for each in self._have_sampled.intersection(others)
        ):
            return True
        mine = self._recent.get(worker, ())
        theirs = [result for other in others for result in self._recent.get(other, ())]
        if len(mine) < _MIN_FAILED or any(list(mine)[-_MIN_FAILED:]) or 2 * sum(theirs) <= len(theirs):
            return False
        self._recent[worker] = deque(maxlen=_RECENT)  # after its restart it is judged anew
        return True
