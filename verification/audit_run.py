"""Audits a run from its files alone: `python -m verification.audit_run RUN_DIR --diary FILE`.

```
 RUN_DIR/ledger.sqlite · checkpoints/ · metrics.jsonl · summary.json ─┐
                                                                      ├─► a line for each check
 FILE: what the trainer did, by its own account ──────────────────────┘
```

The module imports nothing of the program: a mistake that the program and its tests share must not hide here.
A check whose subject is missing fails. Exit codes: 0 all checks hold, 1 one does not, 2 wrong arguments.

The diary has a JSON object per line. `{"type": "set up", "step": 4}` is a start of the trainer at the
checkpoint of step 4, or at 0. `{"type": "trained", "step": 5, "version": 4, "trajectory_ids": ["a", "b"],
"oldest": [3, 4], "group_ids": ["g"]}` is a step; `version` is that of the trainer's weights before it and
`oldest` that of the oldest trained token of each trajectory. `{"type": "saving", "step": 6, "positions":
{"g": 7}}` comes before a checkpoint, after which the ledger may forget which group had which data position.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

_DISPATCHED_AGAIN: Final = ("restart", "corrupt")
"""Reasons of drops that do not use up a position."""


class Result(NamedTuple):
    """The result of one check."""

    check: str
    holds: bool
    detail: str


class RunFiles:
    """Reads the files of a run; a file that is missing or damaged raises where it is used."""

    def __init__(
        self, folder: Path, diary: Path, max_staleness: int | None = None, num_steps: int | None = None
    ) -> None:
        self.folder, self._diary = folder, diary
        self._max_staleness, self._num_steps = max_staleness, num_steps
        self.unrecorded: Collection[int] = ()

    @cached_property
    def diary(self) -> dict[str, list[dict[str, Any]]]:
        """The entries of the diary by type, also steps that were undone."""
        entries: dict[str, list[dict[str, Any]]] = {}
        for entry in _read_lines(self._diary):
            entries.setdefault(entry["type"], []).append(entry)
        return entries

    @cached_property
    def steps(self) -> dict[int, dict[str, Any]]:
        """The steps in the final weights: to load a checkpoint undoes the steps after it."""
        steps: dict[int, dict[str, Any]] = {}
        for entry in _read_lines(self._diary):
            kind, step, last = entry["type"], entry["step"], len(steps)
            if step not in {"set up": range(last + 1), "trained": [last + 1], "saving": [last]}[kind]:
                raise ValueError(f"the diary has {kind!r} of step {step} after step {last}")
            if kind == "trained":
                steps[step] = entry
            steps = {done: steps[done] for done in steps if done <= step}
        if not steps:
            raise ValueError("the diary has no step")
        return steps

    @cached_property
    def trained_positions(self) -> Counter[int]:
        """How often each position is in the final weights."""
        known = dict(self.query("SELECT group_id, position FROM groups"))
        for entry in self.diary.get("saving", []):
            known |= entry["positions"]
        return Counter(known[group_id] for entry in self.steps.values() for group_id in entry["group_ids"])

    @cached_property
    def num_steps(self) -> int:
        """The step at which the run should have ended; without one, the last of the diary."""
        return len(self.steps) if self._num_steps is None else self._num_steps

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The totals that the driver wrote at its end."""
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_bytes())
        return summary

    @cached_property
    def max_staleness(self) -> int:
        """The bound, by default that of the summary."""
        return int(self.summary["max_staleness"]) if self._max_staleness is None else self._max_staleness

    @cached_property
    def rows(self) -> list[tuple[str, int | None, str, int | None, str | None]]:
        """The ledger's trajectories: id, position, state, step, reason."""
        return self.query(
            "SELECT trajectory_id, position, state, step, reason "
            "FROM trajectories LEFT JOIN groups USING (group_id)"
        )

    @cached_property
    def counts(self) -> Counter[str]:
        """The ledger's trajectories by state, and the dropped ones by reason; also those without a row."""
        counts = Counter(reason or state for _, _, state, _, reason in self.rows)
        for state, reason, number in self.query("SELECT state, reason, number FROM folded"):
            counts[reason or state] += number
        return counts

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        """Query the ledger."""
        path = quote(str((self.folder / "ledger.sqlite").absolute()))
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return database.execute(statement).fetchall()


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a file of JSON objects; a kill may have left a part of a last one."""
    return [json.loads(line) for line in path.read_bytes().rpartition(b"\n")[0].splitlines()]


def _steps(run: RunFiles) -> tuple[bool, str]:
    wanted = list(range(1, run.num_steps + 1))
    versions = [entry["version"] + 1 for entry in run.steps.values()]
    recorded = [record["step"] for record in _read_lines(run.folder / "metrics.jsonl")]
    return (
        list(run.steps) == versions == wanted
        and recorded == [step for step in wanted if step in recorded or step not in run.unrecorded],
        f"{len(run.steps)} of {run.num_steps} in the diary, {len(recorded)} in metrics.jsonl",
    )


def _trained_once(run: RunFiles) -> tuple[bool, str]:
    trajectories = Counter(name for entry in run.steps.values() for name in entry["trajectory_ids"])
    counted = (trajectories, run.trained_positions)
    twice = [name for numbers in counted for name, times in numbers.items() if times > 1]
    return (
        not twice and all(counted),
        f"{len(trajectories)} trajectories of {len(run.trained_positions)} positions, twice: {twice}",
    )


def _staleness(run: RunFiles) -> tuple[bool, str]:
    entries = run.diary["trained"]
    oldest = [(entry["version"], version) for entry in entries for version in entry["oldest"]]
    number = sum(len(entry["trajectory_ids"]) for entry in entries)
    worst = max(trainer - version for trainer, version in oldest)
    return (
        worst <= run.max_staleness
        and len(oldest) == number
        and all(0 <= version <= trainer for trainer, version in oldest),
        f"at most {worst} of {run.max_staleness} versions; {len(oldest)} of {number} trajectories have one",
    )


def _agrees(run: RunFiles) -> tuple[bool, str]:
    step_of = {name: step for step, entry in run.steps.items() for name in entry["trajectory_ids"]}
    wrong = [name for name, _, _, step, _ in run.rows if step != step_of.get(name)]
    ((folded,),) = run.query("SELECT coalesce(max(value), 0) FROM meta WHERE key = 'folded_step'")
    known = {step for (step,) in run.query("SELECT step FROM steps")}
    strange = sorted(known ^ {step for step in run.steps if step >= max(folded, 1)})
    return (
        not wrong and not strange and run.counts["trained"] == len(step_of),
        f"{run.counts['trained']} and {len(step_of)} trained, disagreeing rows: {wrong}, steps: {strange}",
    )


def _positions(run: RunFiles) -> tuple[bool, str]:
    ((cursor,),) = run.query(
        "SELECT max(value) FROM (SELECT value FROM meta WHERE key = 'cursor' "
        "UNION ALL SELECT max(position) + 1 FROM groups)"
    )
    trained = set(run.trained_positions)
    waiting = {position for (position,) in run.query("SELECT position FROM pending")}
    waiting |= {position for _, position, state, _, _ in run.rows if state in ("in_flight", "queued")}
    spent = {position for _, position, *_, reason in run.rows if reason not in (None, *_DISPATCHED_AGAIN)}
    skipped = sorted(set(range(cursor)) - trained - waiting - spent)
    # Of positions whose trajectories were all dropped, and folded, only the number of trajectories is left.
    folded = sum(
        number
        for reason, number in run.query("SELECT reason, number FROM folded WHERE state = 'dropped'")
        if reason not in _DISPATCHED_AGAIN
    )
    beyond, again = sorted(trained - set(range(cursor))), sorted(trained & waiting)
    return (
        len(skipped) <= folded and not beyond and not again,
        f"{cursor} positions, {len(trained)} trained, {len(waiting)} outstanding; without a trace: {skipped} "
        f"({folded} may be dropped), never dispatched: {beyond}, trained and outstanding: {again}",
    )


def _accounts(run: RunFiles) -> tuple[bool, str]:
    summary = run.summary["trajectories"]
    states = {state: summary[state] for state in ("trained", "in_flight", "queued")}
    told, found = Counter(states | summary["dropped"]), run.counts
    differing = {key: (told[key], found[key]) for key in told | found if told[key] != found[key]}
    lone = run.query("PRAGMA foreign_key_check") + run.query(
        "SELECT group_id FROM groups EXCEPT SELECT group_id FROM trajectories"
    )
    outstanding = found["in_flight"] + found["queued"]
    dropped = found.total() - outstanding - found["trained"]
    return (
        summary["dispatched"] == found.total() > 0 and not differing and not lone,
        f"{summary['dispatched']} dispatched = {found['trained']} trained + {outstanding} outstanding + "
        f"{dropped} dropped; the summary and the tables have {differing}, lone rows: {lone}",
    )


def _checkpoint(run: RunFiles) -> tuple[bool, str]:
    newest = max(int(path.name[5:]) for path in (run.folder / "checkpoints").glob("step_*[0-9]"))
    known = [step for (step,) in run.query("SELECT step FROM steps ORDER BY step")]
    return (
        newest in known and newest in run.steps,
        f"it is of step {newest}, the ledger's last is {max(known, default=0)}, the diary's {max(run.steps)}",
    )


CHECKS: Final[dict[str, Callable[[RunFiles], tuple[bool, str]]]] = {
    "the run reached its steps, each done once": _steps,
    "no trajectory or position was trained twice": _trained_once,
    "the staleness bound held": _staleness,
    "the ledger and the trainer's diary agree": _agrees,
    "no position was skipped or repeated": _positions,
    "the ledger accounts for every trajectory": _accounts,
    "the ledger knows the newest checkpoint": _checkpoint,
}


def audit(
    folder: Path,
    diary: Path,
    max_staleness: int | None = None,
    num_steps: int | None = None,
    unrecorded: Collection[int] = (),
) -> list[Result]:
    """Return the result of each check of a run that has ended.

    Args:
        folder: The run's folder.
        diary: What the trainer did, by its own account.
        max_staleness: The bound in versions; None for that of the summary.
        num_steps: The step at which the run should have ended; None for the last of the diary.
        unrecorded: Steps whose line in `metrics.jsonl` a power cut may have taken.
    """
    run = RunFiles(folder, diary, max_staleness, num_steps)
    run.unrecorded = unrecorded
    results = []
    for name, check in CHECKS.items():
        try:
            results.append(Result(name, *check(run)))
        except (OSError, sqlite3.Error, ValueError, LookupError, TypeError) as error:
            results.append(Result(name, False, f"cannot be checked: {type(error).__name__}: {error}"))
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each check; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m verification.audit_run")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--diary", type=Path, required=True, help="what the trainer did, by its own account")
    parser.add_argument("--max-staleness", type=int, help="versions; by default the run's")
    parser.add_argument("--steps", type=int, help="the step at which the run should have ended")
    options = parser.parse_args(arguments)
    results = audit(options.run_dir, options.diary, options.max_staleness, options.steps)
    for check, holds, detail in results:
        print(f"{'held' if holds else 'VIOLATED':8}  {check:48}  {' '.join(detail.split())}")
    return int(not all(result.holds for result in results))


if __name__ == "__main__":
    sys.exit(main())
