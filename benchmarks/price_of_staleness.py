"""Trains the quickstart's task at several staleness bounds, and measures what stale tokens are worth.

    python benchmarks/price_of_staleness.py [--quick] [--out FOLDER] [--steps N] [--json FILE]
        [--bounds 0 2 4 8] [--corrections truncated rollout uncorrected] [--seeds 0 1]
    python benchmarks/price_of_staleness.py [--out FOLDER] --plot FILE

The quickstart's model (`make quickstart` makes it) is trained by the real loop, SGLang and Megatron-Core with
partial rollouts, in smaller batches and with more trajectories in flight than the quickstart has, once for
each bound, correction and seed:

    truncated    decoupled PPO around log-probs of the trainer, importance weights cut at 2 (the default)
    rollout      PPO around the engine's log-probs: its clip is the only correction
    uncorrected  decoupled PPO around log-probs of the trainer, without importance weights

At a quarter of its steps, where the policy learns most, each run stops, its newest step is captured and
priced (`async-rl price`), and the run continues. One line a run is appended to FOLDER/rows.jsonl. A run that
is there is not repeated, and one that was cut off continues from its checkpoint. The tables are of all rows
that are there, of this and earlier calls:

    reward    mean over the trained tokens, up to the number that all runs with as many steps have
    gain      reward of the last minus the first fifth of the steps, per million trained tokens
    sample share, direction, worth, cosine, halves
              of the captured step by lag: docs/design/staleness.md

Figures are means over seeds, with the range of the seeds in brackets. `--plot` only draws the rows that are
there, and needs matplotlib.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from pathlib import Path
from typing import Any, Final

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.cli.price import Prices
from async_rl.observability.records import StepRecord, step_record_log
from benchmarks.support.tables import Row, argument_parser, report, show

ROOT: Final = Path(__file__).parent.parent

CORRECTIONS: Final = {
    "truncated": (),
    "rollout": ("trainer.loss.old_log_probs=rollout", "trainer.loss.importance.level=off"),
    "uncorrected": ("trainer.loss.importance.level=off", "trainer.loss.uncorrected=true"),
}

SMOOTH: Final = 5
"""Steps over which the rewards of the plot are means."""

CHECKPOINT_EVERY: Final = 5
"""Steps; the captured step is trained from the checkpoint before it."""


class PricedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run, a line of `rows.jsonl`."""

    bound: int
    correction: str
    seed: int
    steps: int
    trained_tokens: list[int]
    """Of each step."""
    rewards: list[float]
    """Of each step, the mean of its batch."""
    seconds: float
    """From the first dispatch to the end of the last step, without the restart."""
    staleness_mean: float
    prices: Prices

    @property
    def job(self) -> tuple[int, str, int, int]:
        """What tells it from others."""
        return self.bound, self.correction, self.seed, self.steps

    @property
    def gain(self) -> float:
        """Reward gained per million trained tokens, from the first to the last fifth of the steps."""
        fifth = max(1, len(self.rewards) // 5)
        gained = statistics.fmean(self.rewards[-fifth:]) - statistics.fmean(self.rewards[:fifth])
        between = sum(self.trained_tokens[fifth:]) if len(self.rewards) > fifth else self.trained_tokens[0]
        return gained / between * 1e6

    def reward_within(self, budget: int) -> float:
        """Return the mean reward over the first tokens, as many as the budget has."""
        total, left = 0.0, budget
        for tokens, reward in zip(self.trained_tokens, self.rewards, strict=True):
            counted = min(tokens, left)
            total, left = total + counted * reward, left - counted
        return total / (budget - left) if budget > left else math.nan


JOB: Final = (
    "trainer.groups_per_batch=4",
    "rollout.max_concurrent_trajectories=256",
    "engine.max_running_requests=128",
    "engine.max_total_tokens=32768",
)
"""The quickstart has half a batch in flight, and no token older than two versions whatever the bound. Here
up to eight batches are in flight, so that the bound is what limits the age."""

QUICK: Final = ("engine.num_engines=1", "trainer.num_ranks=1", "trainer.layout.ep=1")
"""The fewest processes."""


def run_command(log: Path, *arguments: str) -> str:
    """Run a command of `async-rl` and return its standard output; the program ends if it fails."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    with log.open("a") as file:
        done = subprocess.run(
            [sys.executable, "-m", "async_rl.cli.main", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            check=False,
        )
        file.write(done.stdout)
    if done.returncode:
        sys.exit(f"async-rl {arguments[0]} failed with {done.returncode}:\n{log.read_text()[-3000:]}")
    return done.stdout


def train_and_price(
    folder: Path, bound: int, correction: str, seed: int, steps: int, overrides: Sequence[str]
) -> PricedRun:
    """Train a quarter of the steps, price the newest one, and train the rest."""
    name = f"bound{bound}-{correction}-seed{seed}-steps{steps}"
    run, log, prices = folder / name, folder / f"{name}.log", folder / f"{name}.prices.json"
    settings = (
        f"run.name={name}",
        f"run.dir={folder}",
        f"run.seed={seed}",
        f"rollout.max_staleness={bound}",
        f"trainer.checkpoint_every={CHECKPOINT_EVERY}",
        *JOB,
        *CORRECTIONS[correction],
        *overrides,
    )
    train = ("train", "examples/calculator/config.yaml", *settings)
    if not prices.exists():
        run_command(log, *train, f"run.max_steps={max(1, steps // 4)}")
        run_command(log, "capture", str(run))
        prices.write_text(run_command(log, "price", str(run), "--json"))
    run_command(log, *train, f"run.max_steps={steps}")
    records: Sequence[StepRecord] = step_record_log(run / "metrics.jsonl").read()
    return PricedRun(
        bound=bound,
        correction=correction,
        seed=seed,
        steps=steps,
        trained_tokens=[record.trained_tokens for record in records],
        rewards=[record.reward_mean or 0.0 for record in records],
        seconds=sum(record.wait_s + record.step_s + record.handover_s for record in records),
        staleness_mean=statistics.fmean(record.staleness_mean for record in records),
        prices=msgspec.json.decode(prices.read_bytes(), type=Prices),
    )


def read_rows(path: Path) -> list[PricedRun]:
    """Return the runs that are done."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=PricedRun) for line in lines]


def spread(values: Iterable[float | None]) -> list[float] | float | None:
    """Return the mean and the range of what was measured, as a cell of a table."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    mean = statistics.fmean(known)
    return [mean, min(known), max(known)] if len(known) > 1 else mean


def by_job(rows: Sequence[PricedRun]) -> Iterator[tuple[Row, list[PricedRun]]]:
    """Yield the runs that differ in their seeds only, and the first cells of their line."""
    for steps, correction, bound in sorted({(row.steps, row.correction, row.bound) for row in rows}):
        same = [row for row in rows if (row.steps, row.correction, row.bound) == (steps, correction, bound)]
        yield {"steps": steps, "correction": correction, "bound": bound, "seeds": len(same)}, same


def reward_table(rows: Sequence[PricedRun]) -> list[Row]:
    """Return reward per trained token, by bound and correction."""
    table = []
    for first, same in by_job(rows):
        budget = min(sum(row.trained_tokens) for row in rows if row.steps == first["steps"])
        figures: dict[str, Any] = {
            "staleness": spread(row.staleness_mean for row in same),
            "reward": spread(row.reward_within(budget) for row in same),
            "gain": spread(row.gain for row in same),
            "trained tokens/s": spread(sum(row.trained_tokens) / row.seconds for row in same),
            "proposed": " ".join(
                str(row.prices.proposal.bound) if row.prices.proposal else "-" for row in same
            ),
        }
        table.append(first | figures)
    return table


def lag_table(rows: Sequence[PricedRun]) -> list[Row]:
    """Return the prices of the captured steps by lag."""
    table = []
    for first, same in by_job(rows):
        for lag in sorted({each.lag for row in same for each in row.prices.lags}):
            prices = [each for row in same for each in row.prices.lags if each.lag == lag]
            table.append(
                first
                | {"lag": lag}
                | {"tokens": sum(each.tokens for each in prices)}
                | {
                    name.replace("_", " "): spread(getattr(each, name) for each in prices)
                    for name in ("sample_share", "direction", "worth", "cosine", "halves")
                }
            )
    return table


def plot(rows: Sequence[PricedRun], path: Path) -> None:
    """Draw rewards over trained tokens by bound, and beside it the effective sample sizes by lag."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for index, bound in enumerate(sorted({row.bound for row in rows})):
        for number, row in enumerate(row for row in rows if row.bound == bound):
            tokens = list(accumulate(row.trained_tokens))
            means = [statistics.fmean(row.rewards[max(0, i - SMOOTH) : i]) for i in range(1, len(tokens) + 1)]
            label = None if number else f"bound {bound}"
            left.plot([n / 1e3 for n in tokens], means, color=f"C{index}", linewidth=1, label=label)
    for correction, marker in zip(CORRECTIONS, "ox^", strict=True):
        own = [each for row in rows if row.correction == correction for each in row.prices.lags]
        label = f"{correction}, {len(own)} captured lags"
        right.plot([each.lag for each in own], [each.sample_share for each in own], marker, label=label)
    left.set(xlabel="trained tokens, thousands", ylabel=f"reward, mean of {SMOOTH} steps")
    right.set(xlabel="lag, versions", ylabel="effective sample size / tokens")
    for axes in (left, right):
        axes.legend(fontsize=8, frameon=False)
        axes.grid(alpha=0.25)
    figure.savefig(path)


def main() -> int:
    """Run what is missing, and print the tables."""
    parser = argument_parser(__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "price_of_staleness", metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=120, help="steps of each run; default: 120")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=list(CORRECTIONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="dotted.key=value",
        help="changes to all runs; use an --out of their own",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the rows that are there")
    parser.add_argument("--quick", action="store_true", help="one run of 16 steps, one engine and one rank")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.bounds, options.corrections, options.seeds = 16, [2], ["truncated"], [0]
        options.set = [*QUICK, *options.set]
    folder: Path = options.out.absolute()
    if options.plot is not None:
        plot(read_rows(folder / "rows.jsonl"), options.plot)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    done = {row.job for row in read_rows(path)}
    for seed, bound, correction in product(options.seeds, options.bounds, options.corrections):
        if (bound, correction, seed, options.steps) in done:
            continue
        print(f"training at bound {bound}, {correction}, seed {seed}", file=sys.stderr)
        row = train_and_price(folder, bound, correction, seed, options.steps, options.set)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
    rows = read_rows(path)
    show(lag_table(rows), "captured steps, by lag", stderr=options.json == "-")
    return report(reward_table(rows), "rewards", options.json)


if __name__ == "__main__":
    sys.exit(main())
