"""Draws tasks by their difficulty: from pools by success rate, and past a gate.

```
 results of groups ─► success rate of a task ─► its pool ─┐
 gate ──────────────► when it may be drawn first ─────────┴─► draw(position): a pool by weight times size,
                                                              then its task that was drawn longest ago
```

A draw is a pure function of the seed, its position and the results so far. Where results are applied in an
order that does not depend on time, as `run.curriculum_order` does, so are all draws. A draw or a result costs
O(log tasks).
"""

from __future__ import annotations

import hashlib
import heapq
import zlib
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from async_rl.config import CurriculumConfig

UNSEEN: Final = "unseen"
"""The pool of tasks without a success rate."""

_CLOSED: Final = -1
"""The pool of tasks that the gate has not let in yet."""


class TaskProgress(msgspec.Struct, kw_only=True):
    """What is known of one task."""

    scored: float = 0.0
    """Its scored trajectories; earlier groups count less and less."""
    passed: float = 0.0
    """Those of them that passed."""
    drawn: int = -1
    """The position at which it was drawn last; -1 for never."""


class Curriculum:
    """The pools of a run's tasks.

    Example:
        >>> curriculum = Curriculum(CurriculumConfig(), ["a", "b"], seed=0)
        >>> first = curriculum.draw(0)
        >>> curriculum.draw(1) == first  # "b" if the first was "a"
        False
        >>> curriculum.add_result(first, scored=8, passed=8)
        >>> curriculum.sizes
        {'unseen': 1, 'hard': 0, 'medium': 0, 'easy': 1}
    """

    def __init__(
        self,
        settings: CurriculumConfig,
        task_ids: Sequence[str],
        seed: int,
        *,
        shuffle: bool = True,
        opens_at: Sequence[float] | None = None,
        progress: Iterable[tuple[int, TaskProgress]] = (),
    ) -> None:
        """Put all tasks into their pools; O(tasks).

        Args:
            settings: Pools and weights.
            task_ids: The ids of the tasks, at least one.
            seed: The seed of the run.
            shuffle: Whether tasks that were never drawn come in an order of the seed; else in their own.
            opens_at: The number of draws before each task may be drawn; None lets in all of them.
            progress: What is known of tasks, by index.
        """
        self._settings = settings
        self._seed = seed
        self._names = (UNSEEN, *(pool.name for pool in settings.pools))
        self._weights = (settings.unseen_weight, *(pool.weight for pool in settings.pools))
        self._ranks = [zlib.crc32(f"{seed} {task_id}".encode()) if shuffle else 0 for task_id in task_ids]
        self._progress = [TaskProgress() for _ in task_ids]
        for task, known in progress:
            self._progress[task] = known
        opening = [0.0] * len(task_ids) if opens_at is None else opens_at
        self._to_open = [(opens, task) for task, opens in enumerate(opening) if opens > 0]
        heapq.heapify(self._to_open)
        self._pool_of = [_CLOSED if opens > 0 else self._pool_by_rate(i) for i, opens in enumerate(opening)]
        self._members: list[list[tuple[int, int, int]]] = [[] for _ in self._names]
        """Heaps of (drawn, rank, task); an entry that no longer describes its task is discarded when it is
        reached."""
        self._sizes = [0] * len(self._names)
        for task, pool in enumerate(self._pool_of):
            if pool != _CLOSED:
                self._members[pool].append(self._entry(task))
                self._sizes[pool] += 1
        for heap in self._members:
            heapq.heapify(heap)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of tasks in each pool that may be drawn, by the pool's name."""
        return dict(zip(self._names, self._sizes, strict=True))

    def pool_of(self, task: int) -> str:
        """Return the name of the pool of a task that may be drawn."""
        return self._names[self._pool_of[task]]

    def progress_of(self, task: int) -> TaskProgress:
        """Return what is known of a task."""
        return self._progress[task]

    def add_result(self, task: int, scored: float, passed: float) -> None:
        """Add the result of a group: its scored trajectories, and those that passed."""
        known, memory = self._progress[task], self._settings.memory
        known.scored = memory * known.scored + scored
        known.passed = memory * known.passed + passed
        if self._pool_of[task] != _CLOSED:
            self._move(task, self._pool_by_rate(task))

    def draw(self, position: int) -> int:
        """Return the task of a new position, and count it as drawn there."""
        while self._to_open and (self._to_open[0][0] <= position or not any(self._sizes)):
            _, task = heapq.heappop(self._to_open)
            self._move(task, self._pool_by_rate(task))
        if position < self._settings.warm_up:
            pool = min((i for i, size in enumerate(self._sizes) if size), key=self._oldest_of)
        else:
            pool = self._choose_pool(position)
        *_, task = self._oldest_of(pool)
        self._progress[task].drawn = position
        heapq.heapreplace(self._members[pool], self._entry(task))
        return task

    def _oldest_of(self, pool: int) -> tuple[int, int, int]:
        """Return the entry of the task of a pool that was drawn longest ago."""
        heap = self._members[pool]
        while (entry := heap[0]) != self._entry(entry[-1]) or self._pool_of[entry[-1]] != pool:
            heapq.heappop(heap)
        return entry

    def _choose_pool(self, position: int) -> int:
        """Choose a pool by weight times size, so that a small pool is not drawn again and again."""
        shares = [weight * size for weight, size in zip(self._weights, self._sizes, strict=True)]
        if not any(shares):  # only tasks of weight 0 are left
            shares = [float(size) for size in self._sizes]
        digest = hashlib.blake2b(f"{self._seed} {position}".encode(), digest_size=8).digest()
        left = int.from_bytes(digest) / 2**64 * sum(shares)
        chosen = 0
        for pool, share in enumerate(shares):
            if not share:
                continue
            chosen = pool
            if left < share:
                break
            left -= share
        return chosen

    def _pool_by_rate(self, task: int) -> int:
        known = self._progress[task]
        if not known.scored:
            return 0
        rate = known.passed / known.scored
        bounds = (pool.up_to for pool in self._settings.pools)
        return next((i for i, up_to in enumerate(bounds, start=1) if rate <= up_to), len(self._names) - 1)

    def _entry(self, task: int) -> tuple[int, int, int]:
        return self._progress[task].drawn, self._ranks[task], task

    def _move(self, task: int, pool: int) -> None:
        before = self._pool_of[task]
        if pool == before:
            return
        if before != _CLOSED:
            self._sizes[before] -= 1
        self._pool_of[task] = pool
        self._sizes[pool] += 1
        heapq.heappush(self._members[pool], self._entry(task))
