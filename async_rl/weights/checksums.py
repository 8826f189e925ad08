"""Whether engines have the weights they should: sums over their parameters, held against each other.

An engine sums what it computes with, after it has fused and sharded it. What its sums must be is known from

1. the trainer, for parameters over which it can make the same sum (`trainer.weights.checksums` says which);
2. an engine that has loaded the version from files, with the same ranks and parameters;
3. failing that, the first engine that has taken the version: whoever differs from it is taken out of service,
   loads from files, and becomes the one that the others are held against.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)

Sums = tuple[dict[str, str], ...]
"""Of each tensor-parallel rank: the sum over every parameter, by name."""


class Comparison:
    """The sums of one weight version at a time.

    Example:
        >>> comparison = Comparison()
        >>> comparison.report("engine-0", 3, ({"w": "aa"},), from_files=False)
        {}
        >>> comparison.report("engine-1", 3, ({"w": "bb"},), from_files=False)
        {'engine-1': 'w of rank 0 sums to bb, and to aa on engine-0'}
    """

    def __init__(self) -> None:
        self._version = -1
        self._expected: Mapping[str, str] = {}
        self._expected_version = -1
        self._comparable: frozenset[str] | None = None
        self._reports: dict[str, Sums] = {}
        self._standard: tuple[str, Sums] | None = None
        self._from_files = False

    def expect(self, version: int, sums: Mapping[str, str]) -> None:
        """What the trainer's sums over a version are, by the engines' names."""
        self._expected_version, self._expected = version, sums

    def report(self, engine_id: str, version: int, sums: Sums, *, from_files: bool) -> dict[str, str]:
        """What an engine says after it has taken a version.

        Args:
            engine_id: Which engine.
            version: What it serves.
            sums: Over its parameters.
            from_files: Whether it has loaded files, rather than what was sent.

        Returns:
            Engines with wrong weights, this one or others, and what is wrong with them.
        """
        if version < self._version:
            return {}  # overtaken: it will load again
        if version != self._version:
            self._version, self._reports, self._standard, self._from_files = version, {}, None, False
        if from_files and self._comparable is None and self._expected_version == version:
            self._comparable = self._calibrate(sums)
        if difference := self._unlike_trainer(version, sums):
            return {engine_id: difference}
        self._reports[engine_id] = sums
        if self._standard is None or (from_files and not self._from_files):
            self._standard, self._from_files = (engine_id, sums), from_files
        compared = list(self._reports) if self._standard[0] == engine_id else [engine_id]
        wrong = {
            other: words for other in compared if (words := _difference(self._reports[other], self._standard))
        }
        for other in wrong:
            del self._reports[other]
        return wrong

    def _calibrate(self, sums: Sums) -> frozenset[str]:
        """Parameters of which trainer and engine make one sum: those that agree now, when both have files."""
        names = [name for name in self._expected if len(sums) == 1 and name in sums[0]]
        equal = frozenset(name for name in names if sums[0][name] == self._expected[name])
        log.info(
            "checksums: %d of an engine's %d parameters can be held against the trainer's, the rest only "
            "against other engines'",
            len(equal),
            len(sums[0]),
        )
        return equal

    def _unlike_trainer(self, version: int, sums: Sums) -> str:
        if version != self._expected_version or len(sums) != 1:
            return ""
        for name in sorted(self._comparable or ()):
            if sums[0].get(name) != self._expected.get(name):
                return f"{name} sums to {sums[0].get(name)}, and to {self._expected.get(name)} in the trainer"
        return ""


def _difference(sums: Sums, standard: tuple[str, Sums]) -> str:
    """The first one, or nothing. Engines that are laid out otherwise have other sums."""
    other, expected = standard
    if [set(rank) for rank in sums] != [set(rank) for rank in expected]:
        return ""
    for number, (rank, wanted) in enumerate(zip(sums, expected, strict=True)):
        for name, found in rank.items():
            if found != wanted[name]:
                return f"{name} of rank {number} sums to {found}, and to {wanted[name]} on {other}"
    return ""
