"""Counts the faults of a run: how often each was planned and took effect, and by what that is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tests.chaos.audit import Finding
from tests.chaos.plan import Kind


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

    def table(self) -> list[str]:
        """Return the table of all faults."""
        lines = [f"{'fault':<16}{'victim':<14}{'planned':>9}{'struck':>8}  evidence"]
        for (victim, how), planned in self._planned.items():
            known = self._evidence.get((victim, how), Counter())
            shown = ", ".join(f"{number} {what}" for what, number in known.items() if number)
            lines.append(f"{how:<16}{victim:<14}{planned:>9}{self._struck[victim, how]:>8}  {shown}".rstrip())
        return lines

    def finding(self, required: Iterable[Kind] = ()) -> Finding:
        """Return whether all faults took effect that were planned or are required."""
        missed = [
            f"{how} of {victim}"
            for victim, how in dict.fromkeys([*self._planned, *required])
            if not self._struck[victim, how]
        ]
        return Finding(
            "every fault took effect",
            not missed,
            f"{self._struck.total()} of {self._planned.total()}, never: {', '.join(missed) or 'none'}",
        )

    def continued(self) -> Finding:
        """Return whether tokens were continued that rollout workers had left in their journals."""
        known = sum(self._evidence.values(), Counter[str]())
        left, continued = known["tokens in journals"], known["tokens continued"]
        return Finding(
            "journals of lost rollout workers were continued",
            continued > 0 or not left,
            f"{continued} tokens continued, {left} were left by all their attempts",
        )
