"""Assembles the state of a run for the live page, which shows it between two steps. No I/O."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import msgspec

from async_rl.observability.diagnosis import Diagnosis, EngineView, phrase
from async_rl.observability.failures import FailureRow
from async_rl.observability.formatting import abbreviate_ids
from async_rl.observability.page.tiles import FlowStage, stages
from async_rl.observability.records import Figure, StepRecord, TrajectoryCounts, seconds_left
from async_rl.runtime.waits import Waits
from async_rl.types import Task

TRAINING: Final = "training"
"""The phase of a run in which it takes its steps."""

NUM_SLOWEST: Final = 12

_MAX_ENGINES: Final = 48
"""Rows of the engine table: engines that do not serve first, then the busiest; others are only counted."""

_CALLS: Final = frozenset({"chunk", "first chunk"})
"""Kinds of waits whose target is an engine."""


class InProgress(Protocol):
    """A running trajectory, as far as the page shows it."""

    task: Task
    started_s: float
    """The start time on the run's clock."""

    @property
    def trajectory_id(self) -> str:
        """The trajectory's id."""
        ...

    @property
    def num_turns(self) -> int:
        """The number of finished turns."""
        ...

    @property
    def num_tokens(self) -> int:
        """The number of tokens of finished engine calls."""
        ...


class SlowTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One of the trajectories that have been running for longest."""

    trajectory_id: str
    shown_id: str
    """Its beginning, as `async-rl inspect` shows it, too."""
    task_id: str
    age_s: float
    turn: int
    """The number of the current turn, from 1."""
    tokens: int
    engine: str
    """The engine that the trajectory waits for; empty if it waits for something else."""
    waits_for: str
    waits_s: float


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run at one moment."""

    phase: str
    state: str
    """`moving`, `quiet`, `overdue` or `stalled`, see `async_rl.observability.diagnosis`."""
    step: int
    max_steps: int
    elapsed_s: Figure
    """Seconds since the first trajectory of the run was dispatched, earlier incarnations included."""
    remaining_s: Figure
    """Estimated from the duration of the last steps; None unless the run trains."""
    stages: Sequence[FlowStage]
    """The stages of the dispatched trajectories; empty before the first one."""
    engines: Sequence[EngineView]
    engines_more: int
    """The number of engines that the table leaves out."""
    engines_by_state: dict[str, int]
    slowest: Sequence[SlowTrajectory]
    report: str
    """What the run waits for, in the words of `async-rl doctor`."""
    failures: Sequence[FailureRow] = ()
    """Why attempts of the whole run did not succeed."""


def look(
    *,
    phase: str,
    max_steps: int,
    elapsed_s: Figure,
    records: Sequence[StepRecord],
    counts: TrajectoryCounts | None,
    engines: Sequence[EngineView],
    waits: Waits,
    diagnosis: Diagnosis,
    running: Iterable[InProgress],
    failures: Sequence[FailureRow] = (),
) -> Now:
    """Return the present state of the run."""
    by_state: dict[str, int] = {}
    for engine in engines:
        by_state[engine.state] = by_state.get(engine.state, 0) + 1
    first = sorted(engines, key=lambda engine: (engine.state == "serving", -engine.calls))
    shown = sorted(first[:_MAX_ENGINES], key=lambda engine: _natural(engine.engine_id))
    step = records[-1].step if records else 0
    return Now(
        phase=phase,
        state=diagnosis.state,
        step=step,
        max_steps=max_steps,
        elapsed_s=elapsed_s,
        remaining_s=seconds_left([record.time_s for record in records], max_steps - step)
        if phase == TRAINING
        else None,
        stages=[]
        if counts is None
        else stages(
            trained=counts.trained, dropped=counts.dropped, queued=counts.queued, in_flight=counts.in_flight
        ),
        engines=shown,
        engines_more=len(engines) - len(shown),
        engines_by_state=by_state,
        slowest=slowest(running, waits),
        report=_report(diagnosis),
        failures=failures,
    )


def _report(diagnosis: Diagnosis) -> str:
    """Return the doctor's text, or only what the run waits for while it makes progress."""
    if diagnosis.state != "moving" or not diagnosis.causes:
        return diagnosis.text
    return "\n  <- ".join(diagnosis.causes[0].chain)


def slowest(running: Iterable[InProgress], waits: Waits) -> list[SlowTrajectory]:
    """Return the trajectories that have been running for longest, and what each of them waits for."""
    everything = list(running)
    chosen = heapq.nsmallest(NUM_SLOWEST, everything, key=lambda trajectory: trajectory.started_s)
    shown = abbreviate_ids(
        [trajectory.trajectory_id for trajectory in chosen], (each.trajectory_id for each in everything)
    )
    ids = {trajectory.trajectory_id for trajectory in chosen}
    # Waits are in the order in which they began: the last one of each trajectory is the innermost.
    inner = {wait.actor.who.id: wait for wait in list(waits.open) if wait.actor.who.id in ids}
    now = waits.clock()
    views = []
    for trajectory, shown_id in zip(chosen, shown, strict=True):
        wait = inner.get(trajectory.trajectory_id)
        why = wait.why() if wait is not None and wait.why is not None else None
        views.append(
            SlowTrajectory(
                trajectory_id=trajectory.trajectory_id,
                shown_id=shown_id,
                task_id=trajectory.task.task_id,
                age_s=now - trajectory.started_s,
                turn=trajectory.num_turns + 1,
                tokens=trajectory.num_tokens,
                engine=wait.target if wait is not None and wait.on in _CALLS else "",
                waits_for=phrase(wait.on, wait.target, why) if wait is not None else "at work",
                waits_s=now - wait.since_s if wait is not None else 0.0,
            )
        )
    return views


def _natural(name: str) -> tuple[int, str]:
    """A sort key that puts `engine-2` before `engine-10`."""
    return len(name), name
