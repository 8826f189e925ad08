"""What is written down of an evaluation: one line of `evaluations.jsonl` in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from async_rl.observability.record_log import RecordLog
from async_rl.observability.records import Figure

FILE: Final = "evaluations.jsonl"
"""In the run's folder."""

EVERYTHING: Final = "all"
"""The set of all answers, among those that are named by dataset."""


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over tasks with its 95 % confidence interval."""

    value: Figure
    low: Figure = None
    """None where one task says nothing of the others."""
    high: Figure = None
    tasks: int = 0
    """That it is a mean over."""


class EvaluationScore(msgspec.Struct, frozen=True, kw_only=True):
    """What the answers of a set of tasks are worth."""

    tasks: int
    """With at least one answer."""
    answers: int
    reward: Estimate
    """Mean over tasks of the mean reward of their answers."""
    pass_at: dict[str, Estimate] = {}
    """pass@k by k, over the tasks that have k answers."""
    parts: dict[str, float] = {}
    """Means over answers of the other parts of the reward, of those that have them."""
    tokens_mean: Figure = None
    """Tokens that the policy wrote, by answer."""
    truncated_share: Figure = None
    """Share of the answers that ran out of tokens."""


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation. `missing` ones say why, and have no scores."""

    weight_version: int
    """Of every sampled token of every answer that was scored."""
    status: Literal["done", "missing"]
    reason: str = ""
    """Why it is missing."""
    time_s: float = 0.0
    """When it ended, since the first trajectory of the run was dispatched."""
    duration_s: float = 0.0
    engines: tuple[str, ...] = ()
    scores: dict[str, EvaluationScore] = {}
    """By set: `all`, each dataset, and `<dataset>/<data source>` where rows name theirs."""
    asked: int = 0
    """Answers that were to be made: those scored, and those dropped."""
    dropped: dict[str, int] = {}
    """Answers that were left out, by reason: `mixed_version`, or what their last attempt failed with."""
    sampled_tokens: int = 0

    @property
    def unaccounted(self) -> int:
        """Zero for one that is done, or an answer was lost or counted twice."""
        scored = self.scores[EVERYTHING].answers if self.scores else 0
        return self.asked - scored - sum(self.dropped.values())


def evaluation_record_log(path: Path) -> RecordLog[EvaluationRecord]:
    """Open the `evaluations.jsonl` of a run."""
    return RecordLog(path, EvaluationRecord, lambda record: record.weight_version)
