"""Runs the quickstart's job synchronously and asynchronously on real parts, and compares seconds and rewards.

    python benchmarks/async_vs_sync.py [--quick] [--rows FILE] [--steps N] [--only SCHEME …] [--json FILE]
    python benchmarks/async_vs_sync.py [--rows FILE] --plot FILE | --markdown

SGLang and Megatron-Core train the quickstart's model (`make quickstart` makes it) on two cores:

    colocated     engines and trainer share both cores: all groups of a batch are generated, then they are
                  trained on, then weights are sent; two engines and two ranks (max_staleness 0).
                  Source: verl's `RayPPOTrainer.fit` with its hybrid engine, slime's `train.py --colocate`
    synchronous   the same loop, one engine on a core and one rank on the other: one of them always waits.
                  Source: slime's `train.py` without `--colocate`
    abort, retract, in_place
                  asynchronous, on the same two cores: `rollout.max_staleness` 1, 2, 4 and this
                  `weights.interrupt`

The driver, and all of Ray, run on the engine's core. Each scheme has slots for a whole batch, 64. A seed of
all schemes is run before the next seed, so that load that comes and goes meets all.

Each finished run is a line of `--rows` at once: the same command continues where it was ended, and a run that
is there is not repeated. Other load on the machine makes seconds meaningless: a row has the load that was
found (`load`, processes that wanted a core), and more than about 3 means that others were running. `--plot`
only draws the rows that are there, and needs matplotlib; `--markdown` only prints them as a table. Slower
results are shown, too.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.observability.records import StepRecord, Summary, mean, step_record_log
from benchmarks.support.calculator_runs import MODEL, ROOT, train_calculator, untrained_model
from benchmarks.support.kept_rows import KeptRows
from benchmarks.support.tables import Row, argument_parser, report

STEPS: Final = 40
SEEDS: Final = (0, 1)
SLOTS: Final = 64
"""Trajectories of a batch: 8 groups of 8."""
REACHED: Final = 0.9
"""Mean reward of `SMOOTH` steps whose time is reported; the job begins at about 0.4 and ends near 1."""
SMOOTH: Final = 5


class Scheme(msgspec.Struct, frozen=True):
    """A way to run the job."""

    name: str
    max_staleness: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.max_staleness}"

    @property
    def shares_cores(self) -> bool:
        """Whether engines and trainer run on the same cores."""
        return self.name == "colocated"

    def overrides(self) -> list[str]:
        """Return the changes to the quickstart's config."""
        interrupt = self.name if self.max_staleness else "abort"  # at 0 nothing runs when weights change
        changes = [
            f"rollout.max_staleness={self.max_staleness}",
            f"rollout.max_concurrent_trajectories={SLOTS}",
            f"weights.interrupt={interrupt}",
            f"routing.merge={'splice' if interrupt == 'in_place' else 'replace'}",
        ]
        if self.shares_cores:
            return [*changes, f"engine.max_running_requests={SLOTS // 2}"]
        return [
            *changes,
            f"engine.max_running_requests={SLOTS}",
            "engine.num_engines=1",
            "trainer.num_ranks=1",
            "trainer.layout.ep=1",
            "trainer.worker=benchmarks.support.pinned_trainer:PinnedTrainer",
        ]


SCHEMES: Final = (
    Scheme("colocated"),
    Scheme("synchronous"),
    *(Scheme(mode, bound) for bound in (1, 2, 4) for mode in ("abort", "retract", "in_place")),
)
QUICK: Final = (Scheme("colocated"), Scheme("synchronous"), Scheme("abort", 2), Scheme("in_place", 2))


class RunRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one run took and learned."""

    scheme: Scheme
    seed: int
    steps: int
    warm: bool
    """Whether the model was warm-started; without, there is nothing to learn."""
    load: float
    """Load average at its end, over a minute."""
    seconds: float
    """From the first dispatch to the end of the last step."""
    trainer_idle: float | None
    engines_idle: float | None
    step_s: float | None
    """A step of the trainer alone, mean."""
    sync_s: float | None
    staleness: float | None
    interrupted: float | None
    """Share of the trained trajectories that were interrupted."""
    mismatch: float | None
    """Mean |trainer - engine log-prob| at equal versions, nats."""
    rewards: list[float | None]
    """Of each step."""
    ends_s: list[float]
    """When each step ended."""

    @property
    def key(self) -> tuple[Scheme, int, int, bool]:
        """Return what makes two rows the same run."""
        return self.scheme, self.seed, self.steps, self.warm

    @classmethod
    def of(
        cls, scheme: Scheme, seed: int, warm: bool, records: Sequence[StepRecord], summary: Summary
    ) -> RunRow:
        """Return the row of a finished run."""
        return cls(
            scheme=scheme,
            seed=seed,
            steps=len(records),
            warm=warm,
            load=os.getloadavg()[0],
            seconds=summary.rl_seconds,
            trainer_idle=summary.trainer_idle_share,
            engines_idle=summary.engine_idle_share,
            step_s=mean(record.step_s for record in records),
            sync_s=summary.sync.mean_s,
            staleness=mean(record.staleness_mean for record in records),
            interrupted=summary.interrupted_share,
            mismatch=summary.log_prob_abs_diff_mean,
            rewards=[record.reward_mean for record in records],
            ends_s=[record.time_s for record in records],
        )


def smoothed(rewards: Sequence[float | None]) -> list[float | None]:
    """Return the mean reward of each step and the `SMOOTH` - 1 before it."""
    return [mean(rewards[max(0, end - SMOOTH) : end]) for end in range(1, len(rewards) + 1)]


def reached_s(row: RunRow) -> float | None:
    """Return when the smoothed reward first was `REACHED`; None if it never was."""
    whole = zip(row.ends_s[SMOOTH - 1 :], smoothed(row.rewards)[SMOOTH - 1 :], strict=True)
    return next((end_s for end_s, reward in whole if reward is not None and reward >= REACHED), None)


def table(rows: Sequence[RunRow]) -> list[Row]:
    """Return a line for each scheme: means over its seeds; of seconds the median, least and largest."""
    colocated = {(r.seed, r.steps): r.seconds for r in rows if r.scheme.shares_cores}
    lines = []
    for scheme in dict.fromkeys(row.scheme for row in rows):
        own = [row for row in rows if row.scheme == scheme]
        ratios = [r.seconds / whole for r in own if (whole := colocated.get((r.seed, r.steps)))]
        reached = [reached_s(row) for row in own]
        lines.append(
            {
                "what": scheme.name,
                "max_staleness": scheme.max_staleness,
                "seeds": len(own),
                "seconds": _spread([row.seconds for row in own]),
                "over colocated": _spread(ratios) if ratios else None,
                "trainer idle": mean(row.trainer_idle for row in own),
                "engines idle": mean(row.engines_idle for row in own),
                f"s to reward {REACHED}": _spread([s for s in reached if s is not None])
                if all(s is not None for s in reached)
                else None,
                "last reward": mean(smoothed(row.rewards)[-1] for row in own),
                "staleness": mean(row.staleness for row in own),
                "interrupted": mean(row.interrupted for row in own),
                "mismatch": mean(row.mismatch for row in own),
                "load": max(row.load for row in own),
            }
        )
    return lines


def _spread(values: Sequence[float]) -> list[float]:
    """Return the median, the least and the largest."""
    return [statistics.median(values), min(values), max(values)] if values else []


def markdown(lines: Sequence[Row]) -> str:
    """Return the table for the README, from the lines of `table`."""

    def spread(values: list[float] | None, digits: int) -> str:
        if not values:
            return "no"
        middle, least, most = (f"{value:.{digits}f}" for value in values)
        return middle if least == most else f"{middle} ({least} to {most})"

    reached = f"s to reward {REACHED}"
    head = ("scheme", "`max_staleness`", "s", "over colocated", "trainer idle", "engines idle", reached)
    rows = [
        (
            line["what"],
            str(line["max_staleness"]),
            spread(line["seconds"], 0),
            spread(line["over colocated"], 2),
            f"{line['trainer idle'] or 0:.0%}",
            f"{line['engines idle'] or 0:.0%}",
            spread(line[reached], 0),
            f"{line['mismatch'] or 0:.1g}",
        )
        for line in lines
    ]
    cells = [(*head, "mismatch, nats"), ("---",) * 8, *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def two_cores() -> tuple[int, int]:
    """Return two neighbouring cores of this process.

    Raises:
        SystemExit: There are none.
    """
    own = os.sched_getaffinity(0)
    for core in sorted(own):
        if core + 1 in own:
            return core, core + 1
    sys.exit(f"this process may use the cores {sorted(own)}, expected two neighbours: allow it more")


def missing(
    kept: Sequence[RunRow], schemes: Sequence[Scheme], seeds: Sequence[int], steps: int, warm: bool
) -> Iterator[tuple[Scheme, int]]:
    """Yield the runs that are not there yet, a seed of all schemes before the next seed."""
    done = {row.key for row in kept}
    for seed in seeds:
        for scheme in schemes:
            if (scheme, seed, steps, warm) not in done:
                yield scheme, seed


def measure(kept: KeptRows[RunRow], schemes: Sequence[Scheme], seeds: Sequence[int], steps: int) -> None:
    """Run what is missing."""
    engine_core, trainer_core = two_cores()
    warm = MODEL.exists()
    with tempfile.TemporaryDirectory(prefix="async-rl-sync-") as scratch:
        folder = Path(scratch)
        model = [] if warm else untrained_model(folder)
        for scheme, seed in missing(list(kept.rows), schemes, seeds, steps, warm):
            name = f"{scheme}-seed{seed}"
            print(f"{name}: {steps} steps", file=sys.stderr)
            cores = [engine_core, trainer_core] if scheme.shares_cores else [engine_core]
            changes = [f"run.max_steps={steps}", f"run.seed={seed}", *model, *scheme.overrides()]
            run_dir = train_calculator(name, folder, changes, cores)
            records = step_record_log(run_dir / "metrics.jsonl").read()
            summary = msgspec.json.decode((run_dir / "summary.json").read_bytes(), type=Summary)
            kept.append(RunRow.of(scheme, seed, warm, list(records), summary))


def plot(rows: Sequence[RunRow], path: Path) -> None:
    """Draw rewards over wall time, and beside it the seconds with the trainer's share of them."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    schemes = list(dict.fromkeys(row.scheme for row in rows))
    for index, scheme in enumerate(schemes):
        own = [row for row in rows if row.scheme == scheme]
        label = f"{scheme.name}, {scheme.max_staleness}" if scheme.max_staleness else scheme.name
        style = {"color": "black" if not scheme.max_staleness else f"C{index}"}
        for number, row in enumerate(own):
            left.plot(
                row.ends_s,
                smoothed(row.rewards),
                label=label if not number else None,
                linestyle="--" if scheme.shares_cores else "-",
                linewidth=1.2,
                **style,
            )
        middle = statistics.median(row.seconds for row in own)
        idle = mean(row.trainer_idle for row in own) or 0.0
        right.barh(label, middle * (1 - idle), **style)
        right.barh(label, middle * idle, left=middle * (1 - idle), alpha=0.35, **style)
    left.set(xlabel="seconds", ylabel=f"reward, mean of {SMOOTH} steps", title="reward over wall time")
    left.legend(fontsize=7, frameon=False)
    left.grid(alpha=0.25)
    right.invert_yaxis()
    right.set(xlabel=f"seconds of {rows[0].steps} steps; pale: the trainer waits for its batch")
    figure.savefig(path)


def main() -> int:
    """Run the command."""
    parser = argument_parser(__doc__, quick="four schemes, one seed and 3 steps, in a scratch file")
    parser.add_argument("--rows", type=Path, default=ROOT / "runs" / "async_vs_sync.jsonl", metavar="FILE")
    parser.add_argument("--steps", type=int, default=STEPS)
    names = {str(scheme): scheme for scheme in SCHEMES}
    parser.add_argument("--only", nargs="+", choices=names, default=list(names), metavar="SCHEME")
    parser.add_argument("--markdown", action="store_true", help="print the README's table of the rows")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the rows that are there")
    options = parser.parse_args()
    if options.plot is not None:
        plot(KeptRows(options.rows, RunRow).rows, options.plot)
        return 0
    if options.markdown:
        print(markdown(table(KeptRows(options.rows, RunRow).rows)))
        return 0
    if options.quick:
        with tempfile.TemporaryDirectory() as scratch:
            kept = KeptRows(Path(scratch) / "rows.jsonl", RunRow)
            measure(kept, QUICK, SEEDS[:1], 3)
            return report(table(kept.rows), "3 steps of the quickstart's job", options.json)
    if not MODEL.exists():
        sys.exit(f"{MODEL} is missing: run `make quickstart` once, which makes it")
    kept = KeptRows(options.rows, RunRow)
    measure(kept, [names[name] for name in options.only], SEEDS, options.steps)
    rows = [row for row in kept.rows if row.steps == options.steps and row.warm]
    return report(table(rows), f"{options.steps} steps of the quickstart's job", options.json)


if __name__ == "__main__":
    sys.exit(main())
