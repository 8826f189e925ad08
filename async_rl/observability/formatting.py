"""Formats durations and shares for the terminal, the live page and the report."""

from __future__ import annotations

from async_rl.observability.records import Figure, is_finite


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
