"""Counts the faults of a run: how often each was planned and took effect, and by what that is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from verification.audit_run import Result
from verification.chaos.lost_journals import LostJournal
from verification.chaos.plan import Kind

USED_SHARE: Final = 0.8
"""Attempts use at least this share of what a lost worker's journal has of trajectories that go on. The rest
is of attempts that had just failed and begun again, which the journal did not know yet."""


class Strikes:
    """The faults of one run.

    Example:
        >>> strikes = Strikes()
        >>> strikes.plan(("engine", "too_busy"))
        >>> strikes.strike(("engine", "too_busy"), {"requests refused": 7})
        >>> print("\\n".join(strikes.table()))
        fault           victim          planned  struck  evidence
        too_busy        engine                1       1  7 requests refused
    """

    def __init__(self) -> None:
        """Count nothing yet."""
        self._planned: Counter[Kind] = Counter()
        self._struck: Counter[Kind] = Counter()
        self._evidence: dict[Kind, Counter[str]] = {}
        self._journals: list[LostJournal] = []

    def plan(self, kind: Kind) -> None:
        """Count a fault that is about to be injected."""
        self._planned[kind] += 1

    def strike(self, kind: Kind, evidence: dict[str, int] | None = None) -> None:
        """Count a fault that took effect."""
        self._struck[kind] += 1
        self.add_evidence(kind, evidence or {})

    def add_evidence(self, kind: Kind, evidence: dict[str, int]) -> None:
        """Add to what is known of a fault."""
        self._evidence.setdefault(kind, Counter()).update(evidence)

    def lose_journal(self, kind: Kind, lost: LostJournal) -> None:
        """Add what is known of the journal of a rollout worker that a fault has ended."""
        self._journals.append(lost)
        evidence = {"tokens in journals": lost.num_left, "of them used": min(lost.num_left, lost.num_used)}
        self.add_evidence(kind, evidence)

    def table(self) -> list[str]:
        """Return the table of all faults."""
        lines = [f"{'fault':<16}{'victim':<14}{'planned':>9}{'struck':>8}  evidence"]
        for (victim, how), planned in self._planned.items():
            known = self._evidence.get((victim, how), Counter())
            shown = ", ".join(f"{number} {what}" for what, number in known.items() if number)
            lines.append(f"{how:<16}{victim:<14}{planned:>9}{self._struck[victim, how]:>8}  {shown}".rstrip())
        return lines

    def finding(self, required: Iterable[Kind] = ()) -> Result:
        """Return whether all faults took effect that were planned or are required."""
        missed = [
            f"{how} of {victim}"
            for victim, how in dict.fromkeys([*self._planned, *required])
            if not self._struck[victim, how]
        ]
        return Result(
            "every fault took effect",
            not missed,
            f"{self._struck.total()} of {self._planned.total()}, never: {', '.join(missed) or 'none'}",
        )

    def journals(self) -> Result:
        """Return whether attempts used the journals of lost rollout workers."""
        used = [(min(each.num_used, each.num_left), each.num_left) for each in self._journals]
        return Result(
            "journals of lost rollout workers were used",
            all(num_used >= USED_SHARE * num_left for num_used, num_left in used),
            f"tokens: {', '.join(f'{num_used} of {num_left}' for num_used, num_left in used) or 'none'}",
        )
