"""Maps positions to tasks by difficulty; a resumed run draws what it would have drawn without a restart.

```
 position ─► outstanding, pending or drawn last? ── yes ─► its task, from the ledger
                         │ no: a new one
                         ▼
       results that are due ─► Curriculum.draw ─► the ledger records both, in one change
```
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from async_rl.config import Config, CurriculumConfig
from async_rl.data.curriculum import Curriculum, TaskProgress
from async_rl.errors import ConfigError
from async_rl.observability.metrics import Metrics
from async_rl.runtime.loading import load_object
from async_rl.store.ledger import DrawnTask, Ledger
from async_rl.types import Task

_LAG: Final = 2
"""Results count this many times the number of outstanding groups later. Without drops a group has ended by
then: until its deadline as many groups are trained as may be outstanding, and as many are outstanding."""


def result_lag(config: Config) -> int | None:
    """Return after how many positions draws count the result of a group; None without a curriculum."""
    return None if config.data.curriculum is None else _LAG * config.max_outstanding_groups


class CurriculumOrder:
    """Implements `DataOrder` with the draws of a curriculum; new positions come once each, in order."""

    def __init__(self, config: Config, tasks: Sequence[Task], ledger: Ledger, metrics: Metrics) -> None:
        """Continue from what the ledger has, after its rollback.

        Raises:
            ConfigError: The gate cannot be loaded, or returns something else than a number.
        """
        settings = config.data.curriculum
        assert settings is not None, "the config has a curriculum"
        self._tasks = tasks
        self._index = {task.task_id: index for index, task in enumerate(tasks)}
        self._ledger = ledger
        self._metrics = metrics
        self.curriculum = Curriculum(
            settings,
            [task.task_id for task in tasks],
            config.run.seed,
            shuffle=config.data.shuffle,
            opens_at=opening_positions(settings, tasks),
            progress=[
                (index, TaskProgress(scored=each.scored, passed=each.passed, drawn=each.drawn))
                for each in ledger.drawn_tasks()
                if (index := self._index.get(each.task_id)) is not None
            ],
        )
        self._show_sizes()

    def task_at(self, position: int) -> int:
        """Implements `DataOrder.task_at`; draws a task for a new position."""
        recorded = self._ledger.task_at(position)
        if recorded is not None and recorded in self._index:
            return self._index[recorded]
        curriculum, changed = self.curriculum, set[int]()
        for result in self._ledger.due_results(position):
            if (task := self._index.get(result.task_id)) is not None:
                curriculum.add_result(task, result.scored, result.passed)
                changed.add(task)
        drawn = curriculum.draw(position)
        changed.add(drawn)
        self._ledger.record_draw(
            position, self._tasks[drawn].task_id, [self._describe(task) for task in sorted(changed)]
        )
        self._metrics.curriculum_draws_total.labels(curriculum.pool_of(drawn)).inc()
        self._show_sizes()
        return drawn

    def _describe(self, task: int) -> DrawnTask:
        known = self.curriculum.progress_of(task)
        return DrawnTask(self._tasks[task].task_id, known.scored, known.passed, known.drawn)

    def _show_sizes(self) -> None:
        for pool, size in self.curriculum.sizes.items():
            self._metrics.curriculum_tasks.labels(pool).set(size)


def opening_positions(settings: CurriculumConfig, tasks: Sequence[Task]) -> list[float] | None:
    """Return the number of draws before each task may be drawn, as the gate says; None without a gate.

    Raises:
        ConfigError: The gate cannot be loaded, or returns something else than a number.
    """
    if settings.gate is None:
        return None
    gate = load_object(settings.gate, what="gate")
    return [_opening_position(settings, gate, task) for task in tasks]


def _opening_position(settings: CurriculumConfig, gate: Any, task: Task) -> float:
    where = f"data.curriculum.gate {settings.gate}"
    try:
        opens = gate(task, **settings.gate_args)
    except Exception as error:  # of the user's code
        raise ConfigError(
            f"{where} raised {type(error).__name__}: {error}, for the task {task.task_id}"
        ) from error
    if isinstance(opens, int | float) and not math.isnan(opens):
        return float(opens)
    raise ConfigError(
        f"{where} returned {opens!r:.100} for the task {task.task_id}; expected a number of draws, 0 to let "
        "the task in at once"
    )
