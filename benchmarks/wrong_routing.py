"""Shows which metric tells wrong routing rows from right ones, in the real loop in bfloat16.

    python benchmarks/wrong_routing.py [--steps N] [--json FILE] [--plot FILE]

The quickstart's model (`make quickstart` makes it) is trained by the real loop, SGLang and Megatron-Core with
partial rollouts, in four ways:

    correct       the newest full-sequence rows replace the earlier ones
    concatenated  the rows of each answer are appended to the earlier ones, and cut to length
    shifted       each row is at the next position
    none          no replay: the trainer routes by itself

The wrong rows have the right form and are put in place behind all checks. Each way is trained twice:

    old_log_probs: rollout    `ppo_kl_bypass` compares the trainer with the engine, and rises with wrong rows
    old_log_probs: recompute  `ppo_kl` (two updates per batch) compares the trainer with itself: wrong rows
                              are in both of its passes, so it proves nothing

The mismatch at lag 0 (`lag0_log_prob_abs_diff`) is the proof in both. The program exits with 1 if wrong rows
do not raise it above the correct ones' mean. `--plot` draws a JSON file of before and needs matplotlib.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.observability.records import step_record_log
from benchmarks.support.calculator_runs import train_calculator
from benchmarks.support.tables import argument_parser, report

VARIANTS: Final = {
    "correct": (),
    "concatenated": ("trainer.worker=benchmarks.support.wrong_rows:Concatenated",),
    "shifted": ("trainer.worker=benchmarks.support.wrong_rows:Shifted",),
    "none": ("routing.replay=off",),
}
MODES: Final = {
    "rollout": ("trainer.loss.old_log_probs=rollout", "trainer.updates_per_batch=1"),
    "recompute": ("trainer.loss.old_log_probs=recompute", "trainer.updates_per_batch=2"),
}


class Row(msgspec.Struct, frozen=True):
    """One step of one run."""

    variant: str
    old_log_probs: str
    step: int
    ppo_kl: float | None
    """`ppo_kl_bypass` with `old_log_probs: rollout`; nats."""
    mismatch: float | None
    """Mean |trainer - engine log-prob| at equal versions, nats."""
    interrupted: int
    """Trajectories of the batch that were interrupted and resumed."""
    reward: float | None


def train(variant: str, mode: str, steps: int, folder: Path) -> list[Row]:
    """Run the loop and return its steps."""
    overrides = [f"run.max_steps={steps}", "model.dtype=bfloat16", *VARIANTS[variant], *MODES[mode]]
    run_dir = train_calculator(f"{variant}-{mode}", folder, overrides)
    return [
        Row(
            variant=variant,
            old_log_probs=mode,
            step=record.step,
            ppo_kl=record.ppo_kl_bypass if mode == "rollout" else record.ppo_kl,
            mismatch=record.lag0_log_prob_abs_diff,
            interrupted=record.interrupted,
            reward=record.reward_mean,
        )
        for record in step_record_log(run_dir / "metrics.jsonl").read()
    ]


def values_of(rows: list[Row], variant: str, mode: str, field: str) -> dict[int, float]:
    """Return a field's absolute values by the steps that measured it: not every one has tokens of lag 0."""
    return {
        row.step: abs(value)
        for row in rows
        if (row.variant, row.old_log_probs) == (variant, mode)
        and (value := getattr(row, field)) is not None
        and math.isfinite(value)
    }


def mean_of(rows: list[Row], variant: str, mode: str, field: str) -> float:
    """Return the mean of a field's absolute values; NaN if no step measured it."""
    values = values_of(rows, variant, mode, field).values()
    return statistics.fmean(values) if values else math.nan


def violations(rows: list[Row]) -> list[str]:
    """Return what contradicts that the mismatch tells wrong rows from right ones."""
    found = []
    for mode in MODES:
        correct = mean_of(rows, "correct", mode, "mismatch")
        for variant in ("concatenated", "shifted"):
            wrong = mean_of(rows, variant, mode, "mismatch")
            if not wrong > correct:
                found.append(
                    f"{mode}: the mismatch of {variant} is {wrong:.2g}, of correct {correct:.2g} nats"
                )
    return found


def plot(rows: list[Row], path: Path) -> None:
    """Draws the three metrics over steps."""
    from matplotlib import pyplot

    panels = (
        ("|ppo_kl_bypass|, old_log_probs: rollout", "rollout", "ppo_kl"),
        ("mismatch at lag 0", "rollout", "mismatch"),
        ("|ppo_kl|, old_log_probs: recompute", "recompute", "ppo_kl"),
    )
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained", sharex=True)
    for axis, (title, mode, field) in zip(axes, panels, strict=True):
        for variant in VARIANTS:
            points = values_of(rows, variant, mode, field)
            axis.plot(points.keys(), points.values(), label=variant, marker="o", markersize=3, linewidth=1.2)
        axis.set(title=title, yscale="log", xlabel="step")
        axis.grid(alpha=0.25)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("nats")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(VARIANTS), frameon=False
    )
    figure.savefig(path)


def main() -> int:
    """Run the command. Returns 1 when the mismatch does not tell wrong rows from right ones."""
    parser = argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps of each of the eight runs")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="only draw the rows of --json, to here")
    options = parser.parse_args()
    if options.plot is not None:
        plot(msgspec.json.decode(Path(options.json).read_bytes(), type=list[Row]), options.plot)
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="async-rl-wrong-routing-") as folder:
        for mode in MODES:
            for variant in VARIANTS:
                print(f"training {options.steps} steps: {variant}, old_log_probs: {mode}", file=sys.stderr)
                rows += train(variant, mode, options.steps, Path(folder))
    if options.json is not None:
        Path(options.json).write_bytes(msgspec.json.encode(rows))
    fields = ("ppo_kl", "mismatch", "reward")
    means = [
        {"rows": variant, "old_log_probs": mode, **{f: mean_of(rows, variant, mode, f) for f in fields}}
        for mode in MODES
        for variant in VARIANTS
    ]
    return report(means, "means over the steps", None, violations(rows))


if __name__ == "__main__":
    sys.exit(main())
