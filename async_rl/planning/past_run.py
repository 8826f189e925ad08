"""What a past run recorded of its own times: the trajectories it sampled, and where engines spent theirs.

```
 trajectories.sqlite, trajectories/ ─► PastTrajectory: turns with lengths, waits, seconds in engines
 metrics.jsonl                      ─► StepRecord: seconds of step, update and wait
                                    ─► `RecordedTasks`: the same trajectories, for a simulation
```
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np

from async_rl.config import Config, load_config
from async_rl.errors import ConfigError, CorruptFrame
from async_rl.observability.records import StepRecord, step_record_log
from async_rl.planning.coarse_engine import MARKS
from async_rl.planning.workload import WARM_UP, EndlessTasks, PlannedTurn, Workload, with_engines
from async_rl.store.archive import FILE, ArchiveReader, ArchiveRow
from async_rl.types import Float64Array, Int32Array, Sampled, Trajectory, root_of

_MIN_STEPS: Final = 4
"""The fewest steps of a steady state from which rates are taken."""

_MIN_KEPT: Final = 3
"""The fewest steps of it with trajectories in the archive."""

_MIN_TRAJECTORIES: Final = 16


class TurnCalls(NamedTuple):
    """The engine calls of one turn. Times are seconds since 1970."""

    engine_id: str
    begin_s: float
    """When its first call was sent; later by `waited_s` where updates interrupted it."""
    first_token_s: float
    """Seconds until its first token; of all its calls together, where updates interrupted it."""
    end_s: float
    sampled: int
    prefilled: int
    num_calls: int
    waited_s: float = 0.0
    """Seconds without a call, in which engines took weights or none served."""


class PastTrajectory(NamedTuple):
    """One trajectory of a past run."""

    group_id: str
    turns: list[PlannedTurn]
    """In real tokens; the last one is the time after the last turn, as `PlannedTurn.sampled` says."""
    calls: list[TurnCalls]

    @property
    def sampled(self) -> int:
        """The tokens that the policy wrote."""
        return sum(turn.sampled for turn in self.turns)


class PastRun(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a run."""

    config: Config
    """With as many engines as have calls in the steady state."""
    records: list[StepRecord]
    """All steps, or those from some step on."""
    trajectories: list[PastTrajectory]
    """Trained ones of the steady state, as far as the archive has them, in the order of their ends."""
    calls: list[TurnCalls]
    """Of all trajectories that the archive has, but for those of earlier steps."""
    settled_s: dict[int, float]
    """When each step was settled, seconds since 1970, as far as the archive has trajectories of it."""

    @property
    def num_warm_up(self) -> int:
        """The number of steps before the steady state."""
        return max(1, len(self.records) // WARM_UP)

    @property
    def steady_steps(self) -> list[int]:
        """The last step of the warm-up, with whose end the steady state begins, and those after it."""
        return [each.step for each in self.records[self.num_warm_up - 1 :]]

    @property
    def whole_until_s(self) -> float:
        """The moment until which the record of calls is nearly whole, seconds since 1970.

        Later ones are those of trajectories that the run has not finished, too. Of them nothing is recorded.
        """
        lasted_s = [each.calls[-1].end_s - each.calls[0].begin_s for each in self.trajectories]
        return max(self.settled_s.values()) - float(np.percentile(lasted_s, 90))


def read_past_run(folder: Path, first_step: int = 0) -> PastRun:
    """Read the record of a run, which may be running.

    Args:
        folder: The run's folder.
        first_step: The record of earlier steps is left out.

    Raises:
        ConfigError: It is no run's folder, or its record does not suffice; the message says what is missing.
    """
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} has no config.yaml: name the folder of a run that `async-rl train` made")
    config = load_config(folder / "config.yaml")
    every = step_record_log(folder / "metrics.jsonl").read()
    records = [record for record in every if record.step >= first_step]
    steady = len(records) - max(1, len(records) // WARM_UP)
    if steady < _MIN_STEPS:
        raise ConfigError(
            f"{folder} has the records of {len(records)} steps, and a simulation is fitted to at least "
            f"{_MIN_STEPS + 1}, because the first ones fill queue and engines: let the run go on"
        )
    reader = ArchiveReader(folder / FILE)
    try:
        rows = reader.find_rows("attempt = 1", order="number")
        _check_rows(folder, rows)
        rows = [row for row in rows if row.step is None or row.step >= first_step]
        found = [(row.step, each) for row in rows if (each := _read_trajectory(reader, row)) is not None]
        settled = dict(reader.find_settled_steps())
    finally:
        reader.close()
    first = records[-steady].step
    past = [each for step, each in found if step is not None and step >= first]
    if len(past) < _MIN_TRAJECTORIES:
        raise ConfigError(
            f"{folder} keeps {len(past)} trained trajectories with times of their turns, and a simulation "
            f"needs at least {_MIN_TRAJECTORIES}: raise run.keep_trajectories; runs of earlier versions did "
            "not record these times"
        )
    calls = [call for _, each in found for call in each.calls]
    served = {call.engine_id for each in past for call in each.calls}
    config = with_engines(config, len(served))
    run = PastRun(config=config, records=records, trajectories=past, calls=calls, settled_s=settled)
    if (kept := len(settled.keys() & run.steady_steps)) < _MIN_KEPT:
        raise ConfigError(
            f"{folder} keeps trajectories of {kept} of its last {steady + 1} steps, and a simulation needs "
            f"those of at least {_MIN_KEPT}: raise run.keep_trajectories"
        )
    return run


def _check_rows(folder: Path, rows: Sequence[ArchiveRow]) -> None:
    branch = next(
        (row.trajectory_id for row in rows if root_of(row.trajectory_id) != row.trajectory_id), None
    )
    if branch is not None:
        raise ConfigError(
            f"{folder}: trajectory {branch} is a branch, and a simulation cannot express trajectories that "
            "branch or have several conversations"
        )


def _read_trajectory(reader: ArchiveReader, row: ArchiveRow) -> PastTrajectory | None:
    """Return what a trajectory recorded; None without a file or the times of its turns."""
    try:
        item, events = reader.read_trajectory(row.trajectory_id)
    except (ConfigError, CorruptFrame, OSError):
        return None
    began_s = next((each.unix_s for each in events if each.what == f"attempt {row.attempt} begins"), None)
    if began_s is None or not item.trajectory.turns:
        return None
    return _past_trajectory(item.trajectory, began_s)


def _past_trajectory(trajectory: Trajectory, attempt_s: float) -> PastTrajectory | None:
    engine_at: dict[int, str] = {}
    position = 0
    for segment in trajectory.segments:
        position += len(segment.token_ids)
        if isinstance(segment, Sampled):
            engine_at[position] = segment.engine_id
    turns: list[PlannedTurn] = []
    calls: list[TurnCalls] = []
    before_s, position = 0.0, 0
    for turn in trajectory.turns:
        if turn.began_s is None:
            return None
        turns.append(
            PlannedTurn(max(0.0, turn.began_s - before_s), turn.start - position, turn.end - turn.start)
        )
        before_s, position = turn.began_s + turn.duration_s, turn.end
        calls.append(
            TurnCalls(
                engine_id=engine_at.get(turn.end, ""),
                begin_s=attempt_s + before_s - turn.engine_s,
                first_token_s=turn.first_token_s,
                end_s=attempt_s + before_s,
                sampled=turn.end - turn.start,
                prefilled=turn.prefilled_tokens,
                num_calls=1 + turn.num_interruptions,
                waited_s=max(0.0, turn.duration_s - turn.engine_s),
            )
        )
    outcome = trajectory.outcome
    after_s = outcome.finished_s - outcome.started_s - before_s
    turns = [turn for turn in turns if turn.sampled]
    return PastTrajectory(trajectory.group_id, [*turns, PlannedTurn(max(0.0, after_s), 0, 0)], calls)


class RecordedTasks(EndlessTasks):
    """The groups of a past run, over and over, in another order each time.

    A task keeps its own siblings, whose lengths go together. If a group has more siblings than were recorded,
    some come twice.
    """

    def __init__(
        self,
        trajectories: Iterable[PastTrajectory],
        workload: Workload,
        scale: int,
        seed: int,
        group_size: int,
    ) -> None:
        super().__init__(workload, scale, seed, group_size)
        groups: defaultdict[str, list[PastTrajectory]] = defaultdict(list)
        for trajectory in trajectories:
            groups[trajectory.group_id].append(trajectory)
        self._groups = list(groups.values())
        self._lengths = np.sort([each.sampled for group in self._groups for each in group])

    def answers(self, index: int) -> list[int]:
        """Implements `EndlessTasks.answers`."""
        return [sum(turn.sampled for turn in turns) for turns in self.turns(index)]

    def turns(self, index: int) -> list[list[PlannedTurn]]:
        """Implements `EndlessTasks.turns`."""
        number = len(self._groups)
        order = random.Random(f"{self._seed}/{index // number}").sample(range(number), number)
        group = self._groups[order[index % number]]
        draw = random.Random(f"{self._seed}/{index}")
        wholes, rest = divmod(self.group_size, len(group))
        return [self._scaled(each) for each in group * wholes + draw.sample(group, rest)]

    def _scaled(self, trajectory: PastTrajectory) -> list[PlannedTurn]:
        scale = self._scale
        return [
            PlannedTurn(turn.wait_s, max(MARKS, turn.read // scale), max(1, round(turn.sampled / scale)))
            if turn.sampled
            else turn
            for turn in trajectory.turns
        ]

    def ks_distance(self, answers: Int32Array) -> float:
        """Implements `EndlessTasks.ks_distance`, for those that were recorded."""
        ours = np.sort(np.asarray(answers) * self._scale)
        at = np.concatenate([ours, self._lengths])
        seen, law = (np.searchsorted(some, at, side="right") / len(some) for some in (ours, self._lengths))
        return float(np.abs(seen - law).max())


class Intervals:
    """Intervals of time, which may overlap: how many there are, on average, between two moments."""

    def __init__(
        self,
        begins: Sequence[float] | Float64Array,
        ends: Sequence[float] | Float64Array,
        weights: Float64Array | None = None,
    ) -> None:
        """Take intervals, each of which counts as many times as its weight says, or once."""
        self._origin = float(min(begins, default=0.0))  # sums of seconds since 1970 have few digits left
        weights = np.ones(len(begins)) if weights is None else weights
        self._edges = [self._sums_of(np.asarray(each) - self._origin, weights) for each in (begins, ends)]

    @staticmethod
    def _sums_of(edges: Float64Array, weights: Float64Array) -> tuple[Float64Array, ...]:
        """Sort edges; return them, and the sums of weights and of weighted edges before each."""
        order = np.argsort(edges)
        edges, weights = edges[order], weights[order]
        return edges, *(np.concatenate([[0.0], np.cumsum(each)]) for each in (weights, weights * edges))

    def seconds_until(self, moments: Float64Array) -> Float64Array:
        """Return the length of all parts before each moment, those of all intervals together."""
        moments = moments - self._origin
        length: Float64Array = np.zeros_like(moments)
        for (edges, weights, weighted), sign in zip(self._edges, (1, -1), strict=True):
            passed = np.searchsorted(edges, moments, side="right")
            length = length + sign * (moments * weights[passed] - weighted[passed])
        return length

    def seconds_between(self, begins: Float64Array, ends: Float64Array) -> Float64Array:
        """Return the length of all parts between each begin and end."""
        return self.seconds_until(ends) - self.seconds_until(begins)

    def mean_number(self, begins: Float64Array, ends: Float64Array) -> Float64Array:
        """Return how many there are on average between each begin and end."""
        return self.seconds_between(begins, ends) / np.maximum(ends - begins, 1e-9)

    def joined(self) -> Intervals:
        """Return the moments at which there is at least one."""
        (begins, *_), (ends, *_) = self._edges
        # After n ends, the next begins another stretch unless it begins before the n-th end.
        first = np.r_[True, begins[1:] > ends[:-1]][: len(begins)]
        return Intervals(
            begins[first] + self._origin, ends[np.r_[first[1:], True][: len(ends)]] + self._origin
        )
