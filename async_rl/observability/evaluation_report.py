"""Shows evaluations on the terminal: a table of one, or lines beside those of a run's steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from async_rl.observability.evaluation_record import (
    EVERYTHING,
    Estimate,
    EvaluationRecord,
    EvaluationScore,
    best_evaluation,
    find_estimate,
)
from async_rl.observability.formatting import format_duration
from async_rl.observability.text_console import TextConsole


def show_scores(console: TextConsole, model: str, record: EvaluationRecord) -> None:
    """Print a record as a table with one line per set."""
    ks = sorted({k for score in record.scores.values() for k in score.pass_at}, key=int)
    title = f"{model}, {record.asked} answers in {record.duration_s:.0f} s"
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("set")
    for name in ("tasks", "reward", *(f"pass@{k}" for k in ks), "tokens", "truncated"):
        table.add_column(name, justify="right")
    for name, score in record.scores.items():
        table.add_row(
            name,
            str(score.tasks),
            with_margin(score.reward),
            *(with_margin(score.pass_at[k]) for k in ks),
            _number(score.tokens_mean, ".0f"),
            _number(score.truncated_share, ".0%"),
        )
    console.print(table)
    for name, score in record.scores.items():
        if score.parts:
            console.print(f"parts of the reward, {name}: {_parts(score)}", soft_wrap=True)
    if record.reason:
        console.print(record.reason, style="yellow")
    elif record.dropped:
        console.print(f"answers that were dropped: {_dropped(record)}", style="yellow")


def evaluation_lines(record: EvaluationRecord, earlier: Sequence[EvaluationRecord]) -> list[str]:
    """Return an evaluation of a run as lines of text, one per set.

    Args:
        record: The evaluation.
        earlier: Those before it: the last one is compared with, and the best one is named.
    """
    what = f"evaluation of version {record.weight_version}"
    if record.status == "missing":
        return [f"{what} is missing: {record.reason}"]
    dropped = f"; dropped: {_dropped(record)}" if record.dropped else ""
    lines = [f"{what}: {record.asked} answers in {format_duration(record.duration_s)}{dropped}"]
    before = next((each for each in reversed(earlier) if each.scores), None)
    datasets = [name for name in record.scores if name != EVERYTHING and "/" not in name]
    for name, score in record.scores.items():
        if name == EVERYTHING and len(datasets) == 1:
            continue  # which is the only dataset
        passes = "".join(f" | pass@{k} {with_margin(each)}" for k, each in score.pass_at.items())
        parts = f" | {_parts(score)}" if score.parts else ""
        tokens, truncated = _number(score.tokens_mean, ".0f"), _number(score.truncated_share, ".0%")
        lines.append(
            f"  {name}: reward {with_margin(score.reward)}{_compared(name, before)}{passes}{parts}"
            f" | {tokens} tokens | truncated {truncated}"
        )
    return lines


def describe_best(records: Sequence[EvaluationRecord], metric: str) -> str:
    """Return which evaluation is the best by a metric, as text; empty if none has it."""
    best = best_evaluation(records, metric)
    if best is None:
        return ""
    estimate = find_estimate(best[0], metric)
    assert estimate is not None, "the best one has the metric"
    return f"version {best[0].weight_version}, {metric} {with_margin(estimate)}"


def with_margin(estimate: Estimate) -> str:
    """Return an estimate with half the width of its interval."""
    value, low, high = estimate.value, estimate.low, estimate.high
    if value is None or low is None or high is None:
        return _number(value, ".3f")
    return f"{value:.3f} ± {max(value - low, high - value):.3f}"


def _compared(name: str, before: EvaluationRecord | None) -> str:
    score = None if before is None else before.scores.get(name)
    if before is None or score is None:
        return ""
    return f" ({_number(score.reward.value, '.3f')} at version {before.weight_version})"


def _parts(score: EvaluationScore) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in score.parts.items())


def _dropped(record: EvaluationRecord) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(record.dropped.items()))


def _number(value: Any, form: str) -> str:
    return "n/a" if value is None else format(value, form)
