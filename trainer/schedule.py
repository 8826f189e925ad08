"""Learning rates as functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math


def linear_warmup(step: int, peak: float, warmup_steps: int) -> float:
    """Rate of step `step` (from 0): rises linearly to `peak` over the warm-up, then stays."""
    return peak * min(1.0, (step + 1) / warmup_steps) if warmup_steps else peak


def warmup_then_cosine(step: int, peak: float, warmup_steps: int, total_steps: int, floor: float) -> float:
    """Rate of step `step` (from 0): linear warm-up, then half a cosine down to `floor * peak`.

    Source: arXiv 1608.03983 (SGDR), equation 5, without restarts.
    """
    if step < warmup_steps:
        return linear_warmup(step, peak, warmup_steps)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
