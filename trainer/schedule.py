"""Learning rates as functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations


def linear_warmup(step: int, peak: float, warmup_steps: int) -> float:
    """Rate of step `step` (from 0): rises linearly to `peak` over the warm-up, then stays."""
    return peak * min(1.0, (step + 1) / warmup_steps) if warmup_steps else peak
