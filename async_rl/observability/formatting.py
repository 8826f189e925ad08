"""Formats durations, shares, numbers and ids for the terminal, the live page and the report."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final

from async_rl.observability.records import Figure, is_finite

_SHORTEST_PREFIX: Final = 8
"""Characters of an abbreviated id, at least."""


_COMPACT: Final = ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e4, "k", 1e3))
"""The smallest value for each unit suffix."""


def abbreviate_ids(ids: Iterable[str], among: Iterable[str]) -> list[str]:
    """Return the shortest beginnings of one length that distinguish ids from all others.

    `async-rl inspect` finds a trajectory by its beginning, so every display shows that end of an id.

    Args:
        ids: The ids that are shown.
        among: All ids, these among them.
    """
    names, shown = sorted(set(among)), list(ids)
    length = _SHORTEST_PREFIX
    for name in shown:
        at = bisect_left(names, name)
        for other in (*names[max(0, at - 1) : at], *names[at + 1 : at + 2]):
            same = takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False))
            length = max(length, len(list(same)) + 1)
    return [name[:length] for name in shown]


def format_duration(seconds: float) -> str:
    """Return seconds in the two largest units that they need: `5 s`, `3 min 05 s`, `2 h 03 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def format_percent(share: Figure) -> str:
    """Return a share as whole percent, `n/a` where there is none."""
    return f"{share:.0%}" if is_finite(share) else "n/a"


def compact(value: Figure) -> str:
    """Return a figure in a few characters: `0.0123`, `1.2e-5`, `12.3k`, `n/a`."""
    if not is_finite(value):
        return "n/a"
    size = abs(value)
    for least, letter, unit in _COMPACT:
        if size >= least:
            return f"{value / unit:.3g}{letter}"
    if size and size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def number_ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as text: `3, 5-9`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
