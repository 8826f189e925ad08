"""The record of an evaluation: one line of `evaluations.jsonl` in the run folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import msgspec

from async_rl.observability.record_log import RecordLog
from async_rl.observability.records import Figure, is_finite

FILE: Final = "evaluations.jsonl"
"""The file's name in the run folder."""

EVERYTHING: Final = "all"
"""The name of the set of all answers; the other sets are named by dataset."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over tasks with its 95 % confidence interval."""

    value: Figure
    low: Figure = None
    """The confidence interval; None with a single task."""
    high: Figure = None
    tasks: int = 0
    """The number of tasks."""


class EvaluationScore(msgspec.Struct, frozen=True, kw_only=True):
    """The scores of the answers of a set of tasks."""

    tasks: int
    """The number of tasks with at least one answer."""
    answers: int
    reward: Estimate
    """The mean over tasks of the mean reward of their answers."""
    pass_at: dict[str, Estimate] = {}
    """pass@k by k, over the tasks that have at least k answers."""
    parts: dict[str, float] = {}
    """The mean of each further part of the reward, over the answers that have it."""
    tokens_mean: Figure = None
    """The mean number of tokens that the policy sampled per answer."""
    truncated_share: Figure = None
    """The share of answers that reached their token limit."""


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation. One that is missing has a reason and no scores."""

    weight_version: int
    """The version that sampled every token of every scored answer."""
    status: Literal["done", "missing"]
    reason: str = ""
    """The reason why the evaluation is missing; empty otherwise."""
    time_s: float = 0.0
    """Its end, in seconds since the first trajectory of the run was dispatched."""
    duration_s: float = 0.0
    engines: tuple[str, ...] = ()
    scores: dict[str, EvaluationScore] = {}
    """Scores by set: `all`, each dataset, and `<dataset>/<data source>` where examples name a source."""
    asked: int = 0
    """The number of planned answers: scored and dropped ones."""
    dropped: dict[str, int] = {}
    """The number of dropped answers by reason: `mixed_version`, or the error of their last attempt."""
    sampled_tokens: int = 0

    @property
    def unaccounted(self) -> int:
        """The number of answers that were lost or counted twice; 0 for a complete evaluation."""
        scored = self.scores[EVERYTHING].answers if self.scores else 0
        return self.asked - scored - sum(self.dropped.values())


def find_estimate(record: EvaluationRecord, metric: str) -> Estimate | None:
    """Return an estimate of an evaluation by its name, `<set>/reward` or `<set>/pass@<k>`; None without it.

    Example:
        >>> score = EvaluationScore(tasks=2, answers=4, reward=Estimate(value=0.5))
        >>> record = EvaluationRecord(weight_version=20, status="done", scores={"all": score})
        >>> find_estimate(record, "all/reward").value
        0.5
    """
    name, _, figure = metric.rpartition("/")
    score = record.scores.get(name)
    if score is None:
        return None
    return score.reward if figure == "reward" else score.pass_at.get(figure.removeprefix("pass@"))


def best_evaluation(
    records: Iterable[EvaluationRecord], metric: str
) -> tuple[EvaluationRecord, float] | None:
    """Return the evaluation with the highest value of a metric, and that value; of equal ones the first."""
    best: tuple[EvaluationRecord, float] | None = None
    for record in records:
        found = find_estimate(record, metric)
        if found is not None and is_finite(found.value) and (best is None or found.value > best[1]):
            best = record, found.value
    return best


def evaluation_record_log(path: Path) -> RecordLog[EvaluationRecord]:
    """Open the `evaluations.jsonl` of a run."""
    return RecordLog(path, EvaluationRecord, lambda record: record.weight_version)
