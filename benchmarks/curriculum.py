"""Compares drawing tasks by difficulty (`data.curriculum`) with uniform sampling, on the quickstart's task.

    python benchmarks/curriculum.py [--rows FILE] [--steps N] [--only WAY …] [--json FILE]
    python benchmarks/curriculum.py --scripted [--quick] [--json FILE]

Without `--scripted` the quickstart's job runs on real parts, SGLang and Megatron-Core, once for each way and
seed, on the first `--tasks` tasks, so that each is drawn several times: until a task has a success rate,
pools change nothing. The last 100 tasks are not trained on: every eighth version answers them, because
rewards of batches that are drawn in another way cannot be compared. Each finished run is a line of `--rows`
at once: the same command continues where it was ended, and a run that is there is not repeated. `make
quickstart` makes the model.

`--scripted` (and `--quick`) has no model: a logistic policy over the digits of an expression, trained by the
policy gradient of GRPO, draws its tasks with the same code. The reward is then the probability that the
policy answers a task right, the mean over all tasks. It shows how draws affect learning where the difficulty
of tasks differs much, and says nothing about a language model.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.config import CurriculumConfig
from async_rl.data.curriculum import Curriculum
from async_rl.data.order import TaskOrder
from async_rl.observability.evaluation_record import FILE, evaluation_record_log
from async_rl.observability.records import mean, step_record_log
from benchmarks.support.calculator_runs import MODEL, ROOT, train_calculator
from benchmarks.support.kept_rows import KeptRows
from benchmarks.support.tables import Row, argument_parser, report

STEPS: Final = 40
SEEDS: Final = (0, 1, 2)
TASKS: Final = 64
WAYS: Final[dict[str, str]] = {"uniform": "null", "curriculum": "{}"}
"""Values of `data.curriculum`."""
REACHED: Final = 0.9
HELD_OUT: Final = 100
EVALUATED_EVERY: Final = 8

GROUPS: Final = 8
"""Groups in a batch of the quickstart, and the trajectories in a group."""
LAG: Final = 2 * GROUPS * 3
"""Positions after which results count, as in the quickstart with its staleness of 2."""
SCRIPTED_STEPS: Final = 300
SCRIPTED_SEEDS: Final = 20


class CurriculumRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one run learned."""

    way: str
    seed: int
    steps: int
    tasks: int
    """The number of tasks that were trained on."""
    without_signal: float | None
    """Share of the trained groups whose rewards were all equal."""
    versions: list[int]
    """The evaluated weight versions; steps of the scripted policy."""
    rewards: list[float]
    """Their rewards on tasks that were not trained on; over all tasks for the scripted policy."""
    seconds: float = 0.0
    load: float = 0.0
    """Load average at the end, over a minute."""


def reached_at(row: CurriculumRow) -> int | None:
    """Return the first evaluated version whose reward was `REACHED`; None if there is none."""
    return next((v for v, reward in zip(row.versions, row.rewards, strict=True) if reward >= REACHED), None)


def table(rows: Sequence[CurriculumRow]) -> list[Row]:
    """Return a line for each way; figures are the median, the least and the largest of its seeds."""
    lines = []
    for way in dict.fromkeys(row.way for row in rows):
        own = [row for row in rows if row.way == way]
        reached = [reached_at(row) for row in own]
        signals = [row.without_signal for row in own]
        lines.append(
            {
                "what": way,
                "seeds": len(own),
                "mean reward": _spread([statistics.fmean(row.rewards) for row in own]),
                "last reward": _spread([row.rewards[-1] for row in own]),
                f"seeds that reach {REACHED}": sum(step is not None for step in reached),
                f"at version ({REACHED})": _spread([step for step in reached if step is not None]),
                "without signal": _spread([share for share in signals if share is not None]),
            }
        )
    return lines


def _spread(values: Sequence[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)] if values else []


def missing(
    kept: Sequence[CurriculumRow], ways: Sequence[str], steps: int, num_tasks: int
) -> Iterator[tuple[str, int]]:
    """Yield the runs that are not there yet, a seed of all ways before the next seed."""
    done = {(row.way, row.seed, row.steps, row.tasks) for row in kept}
    for seed in SEEDS:
        for way in ways:
            if (way, seed, steps, num_tasks) not in done:
                yield way, seed


def measure(kept: KeptRows[CurriculumRow], ways: Sequence[str], steps: int, num_tasks: int) -> None:
    """Run what is missing."""
    lines = (ROOT / "data" / "calculator" / "tasks.jsonl").read_text().splitlines(keepends=True)
    with tempfile.TemporaryDirectory(prefix="async-rl-curriculum-") as scratch:
        folder = Path(scratch)
        (folder / "trained.jsonl").write_text("".join(lines[:-HELD_OUT][:num_tasks]))
        (folder / "held_out.jsonl").write_text("".join(lines[-HELD_OUT:]))
        for way, seed in missing(list(kept.rows), ways, steps, num_tasks):
            name = f"{way}-seed{seed}"
            print(f"{name}: {steps} steps", file=sys.stderr)
            changes = [
                f"run.max_steps={steps}",
                f"run.seed={seed}",
                f"data.path={folder / 'trained.jsonl'}",
                f"data.validation=[{{path: {folder / 'held_out.jsonl'}}}]",
                f"data.curriculum={WAYS[way]}",
                f"evaluation.every={EVALUATED_EVERY}",
                "evaluation.at_start=true",
            ]
            run_dir = train_calculator(name, folder, changes)
            records = step_record_log(run_dir / "metrics.jsonl").read()
            done = [each for each in evaluation_record_log(run_dir / FILE).read() if each.status == "done"]
            kept.append(
                CurriculumRow(
                    way=way,
                    seed=seed,
                    steps=steps,
                    tasks=num_tasks,
                    without_signal=mean(r.groups_without_signal / r.groups for r in records if r.groups),
                    versions=[each.weight_version for each in done],
                    rewards=[each.scores["all"].reward.value or 0.0 for each in done],
                    seconds=records[-1].time_s,
                    load=os.getloadavg()[0],
                )
            )


def features_of(expressions: Sequence[str]) -> np.ndarray:
    """Return `[tasks, 11]`: how often each digit occurs in an expression, and 1."""
    counts = [[expression.count(str(digit)) for digit in range(10)] + [1] for expression in expressions]
    return np.array(counts, float)


def scripted(way: str, seed: int, features: np.ndarray, steps: int) -> CurriculumRow:
    """Train the logistic policy; its weights at the start make some digits hard."""
    rng = np.random.default_rng([seed, 7])
    weights = np.append(rng.normal(-0.2, 1.2, 10), 0.0)
    curriculum = Curriculum(CurriculumConfig(), [str(i) for i in range(len(features))], seed)
    uniform = TaskOrder(len(features), seed, shuffle=True)
    results: deque[tuple[int, int]] = deque()
    rewards: list[float] = []
    position = without = 0
    for _ in range(steps):
        gradient = np.zeros_like(weights)
        for _ in range(GROUPS):
            if len(results) >= LAG:
                task, passed = results.popleft()
                curriculum.add_result(task, GROUPS, passed)
            task = curriculum.draw(position) if way == "curriculum" else uniform.task_at(position)
            position += 1
            right = 1 / (1 + np.exp(-features[task] @ weights))
            scores = (rng.random(GROUPS) < right).astype(float)
            results.append((task, int(scores.sum())))
            without += int(scores.std() == 0)
            advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
            gradient += np.mean(advantages * (scores - right)) * features[task]
        weights += 0.05 * gradient / GROUPS
        rewards.append(float(np.mean(1 / (1 + np.exp(-features @ weights)))))
    return CurriculumRow(
        way=way,
        seed=seed,
        steps=steps,
        tasks=len(features),
        without_signal=float(without / position),
        versions=list(range(1, steps + 1)),
        rewards=rewards,
    )


def quickstart_expressions() -> list[str]:
    """Return the expressions of the quickstart's tasks, from its data or drawn as it draws them."""
    tasks = ROOT / "data" / "calculator" / "tasks.jsonl"
    if tasks.exists():
        return [json.loads(line)["expression"] for line in tasks.read_text().splitlines()]
    sys.path.insert(0, str(ROOT / "examples" / "calculator"))
    from problems import draw_expressions

    drawn: list[str] = draw_expressions(2000, np.random.default_rng(0))
    return drawn


def main() -> int:
    """Run the command."""
    parser = argument_parser(__doc__, quick="the scripted policy, three seeds of 60 steps")
    parser.add_argument("--scripted", action="store_true", help="a scripted policy in place of real parts")
    parser.add_argument("--rows", type=Path, default=ROOT / "runs" / "curriculum.jsonl", metavar="FILE")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    options = parser.parse_args()
    if options.scripted or options.quick:
        seeds, steps = (3, 60) if options.quick else (SCRIPTED_SEEDS, SCRIPTED_STEPS)
        features = features_of(quickstart_expressions()[: options.tasks])
        rows = [scripted(way, seed, features, steps) for seed in range(seeds) for way in options.only]
        return report(table(rows), f"{steps} steps of a scripted policy", options.json)
    if not MODEL.exists():
        sys.exit(f"{MODEL} is missing: run `make quickstart` once, which makes it")
    kept = KeptRows(options.rows, CurriculumRow)
    measure(kept, options.only, options.steps, options.tasks)
    rows = [row for row in kept.rows if (row.steps, row.tasks) == (options.steps, options.tasks)]
    return report(table(rows), f"{options.steps} steps of the quickstart's job", options.json)


if __name__ == "__main__":
    sys.exit(main())
