"""The numbers that may be rewards."""

from __future__ import annotations

import math
import numbers
from decimal import Decimal
from typing import Any, Final

import numpy as np

MAX_REWARD: Final = 1e30
"""The largest magnitude of a reward. Batches hold rewards in float32, whose sums and differences must
be finite, too."""


def reward_value(number: Any) -> float | None:
    """Return a reward as a Python number, or None if it is no number or beyond `MAX_REWARD`.

    Scalars of NumPy and tensors without dimensions are numbers; text and complex numbers are not.
    """
    try:
        if getattr(number, "ndim", None) == 0 and callable(item := getattr(number, "item", None)):
            number = item()
        if not isinstance(number, numbers.Real | np.bool_ | Decimal):
            return None
        value = float(number)
    # An integer beyond all floats, a signalling NaN of Decimal, a tensor on the device `meta`.
    except (OverflowError, ValueError, RuntimeError):
        return None
    return value if math.isfinite(value) and abs(value) <= MAX_REWARD else None
