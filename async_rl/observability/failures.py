"""Tells apart why attempts did not succeed, and counts them, with examples for a table.

```
 attempt ends ─► kind_of_error or kind_of_answer ─► the ledger: a number per kind, the newest examples
                                                        └─► rows(): page, report, summary, `async-rl inspect`
```

An attempt that failed has no reward. It is made again or dropped, so what breaks around an agent is never
scored 0. An attempt that was scored succeeds when its reward is at least `evaluation.pass_reward`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from async_rl.errors import AsyncRLError, FailureKind
from async_rl.runtime.printable import first_line
from async_rl.types import StoredTrajectory

SUCCESS: Final = "success"
"""Counts as the attempts that did not fail."""

NUM_EXAMPLES: Final = 3
"""The examples of a kind: enough to see whether they have one cause."""

LABELS: Final[Mapping[FailureKind, str]] = {
    "agent_wrong": "agent wrong",
    "tool_broken": "tool broken",
    "sandbox_lost": "sandbox lost",
    "time_over": "time over",
    "context_full": "context full",
    "other": "engine, reward or worker failed",
}


class FailureExample(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that did not succeed."""

    trajectory_id: str
    attempt: int
    """The number of the attempt, from 1."""
    error: str
    """The first line of its error, or how its answer was scored."""


class FailureRow(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts that did not succeed for one reason."""

    kind: FailureKind
    label: str
    number: int
    share: str
    """The share of all attempts that have ended, `3%`."""
    examples: Sequence[FailureExample]
    """The newest ones, the newest first."""


class AttemptCounts:
    """The attempts of a run that have ended, by kind. Its size does not depend on their number."""

    def __init__(self) -> None:
        """Start without attempts."""
        self.numbers: Counter[str] = Counter()
        """The number of each kind, and of `SUCCESS`."""
        self._examples: dict[str, deque[FailureExample]] = {}

    def add_example(self, kind: FailureKind, example: FailureExample) -> None:
        """Keep an example, in place of the oldest one of its kind."""
        self._examples.setdefault(kind, deque(maxlen=NUM_EXAMPLES)).append(example)

    def rows(self) -> list[FailureRow]:
        """Return the kinds that occurred, the most frequent first."""
        total = self.numbers.total()
        found = [
            FailureRow(
                kind=kind,
                label=label,
                number=number,
                share=f"{number / total:.1%}" if number / total < 0.1 else f"{number / total:.0%}",
                examples=tuple(reversed(self._examples.get(kind, ()))),
            )
            for kind, label in LABELS.items()
            if (number := self.numbers[kind])
        ]
        return sorted(found, key=lambda row: -row.number)


def kind_of_error(error: BaseException) -> FailureKind:
    """Return why an attempt failed that ended with an error; its class says it, or an instance does."""
    return error.failure_kind if isinstance(error, AsyncRLError) else "other"


def kind_of_answer(trajectory: StoredTrajectory, pass_reward: float) -> FailureKind | None:
    """Return why a scored attempt did not succeed; None if it did, or has no reward.

    Args:
        trajectory: The trajectory that its agent loop received.
        pass_reward: The least reward of an answer that passes.
    """
    if trajectory.reward is None or trajectory.reward >= pass_reward:
        return None
    if trajectory.tool_fault:
        return "tool_broken"
    return "context_full" if trajectory.stop_reason in ("length", "max_turns") else "agent_wrong"


def describe_answer(trajectory: StoredTrajectory) -> str:
    """Return why a scored attempt did not succeed, in a line."""
    scored = f"reward {trajectory.reward:g}, {trajectory.stop_reason.replace('_', ' ')}"
    return f"{trajectory.tool_fault} ({scored})" if trajectory.tool_fault else scored


def describe_error(error: BaseException) -> str:
    """Return the first line of an error."""
    return first_line(str(error)) or type(error).__name__
