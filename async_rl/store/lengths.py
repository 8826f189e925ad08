"""The Kolmogorov-Smirnov distance between the lengths of trained and of sampled trajectories.

Long answers take longer, so everything that drops or delays by age or time affects them first, and the policy
learns to be brief for no reason of its own. The distance between the lengths of trained trajectories and of
all that ended, dropped ones with the length they had reached, shows it: 0 when nothing is dropped, 1 when
nothing long (or nothing short) is ever trained.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

MIN_SAMPLES: Final = 100
"""Fewer samples mean nothing: the distance of two samples of 100 is above 0.1 by chance alone."""


class LengthDrift:
    """Compares the lengths of the last trajectories that ended with those of the last that were trained.

    Example:
        >>> drift = LengthDrift(window=1000)
        >>> for length in range(1000):
        ...     drift.add_ended(length)
        ...     if length < 500:
        ...         drift.add_trained(length)
        >>> drift.distance
        0.5
    """

    def __init__(self, window: int = 4096) -> None:
        """Compare windows of this many lengths each."""
        self._ended: deque[int] = deque(maxlen=window)
        self._trained: deque[int] = deque(maxlen=window)

    def add_ended(self, length: int) -> None:
        """Add the length of a trajectory that was finished or dropped."""
        self._ended.append(length)

    def add_trained(self, length: int) -> None:
        """Add the length of a trained trajectory."""
        self._trained.append(length)

    @property
    def distance(self) -> float | None:
        """The largest difference of the distribution functions; None with fewer than `MIN_SAMPLES`.

        It takes about a millisecond for two full windows, once per trainer step.

        Source: the two-sample Kolmogorov-Smirnov statistic, N. Smirnov, Ann. Math. Statist. 19 (1948) 279.
        """
        if min(len(self._ended), len(self._trained)) < MIN_SAMPLES:
            return None
        ended, trained = np.sort(self._ended), np.sort(self._trained)
        lengths = np.concatenate((ended, trained))
        ended_share = np.searchsorted(ended, lengths, side="right") / len(ended)
        trained_share = np.searchsorted(trained, lengths, side="right") / len(trained)
        return float(np.abs(ended_share - trained_share).max())
