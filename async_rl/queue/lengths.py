"""Whether what is trained is as long as what was sampled: the Kolmogorov-Smirnov distance of the two.

Long answers take longer, so whatever drops or delays by age or time takes them first, and the policy learns
to be brief for no reason of its own. The distance between the lengths of trained trajectories and of all that
ended, dropped ones with the length they had reached, shows it: 0 when nothing is lost, 1 when nothing long
(or nothing short) is ever trained.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

MIN_SAMPLES: Final = 100
"""Fewer say nothing: the distance of two samples of 100 is above 0.1 by chance alone."""


class LengthDrift:
    """Lengths of the last trajectories that ended, and of the last that were trained.

    Example:
        >>> drift = LengthDrift(window=1000)
        >>> for length in range(1000):
        ...     drift.ended(length)
        ...     if length < 500:
        ...         drift.trained(length)
        >>> drift.distance
        0.5
    """

    def __init__(self, window: int = 4096) -> None:
        """Keep `window` lengths of each kind."""
        self._ended: deque[int] = deque(maxlen=window)
        self._trained: deque[int] = deque(maxlen=window)

    def ended(self, length: int) -> None:
        """A trajectory was finished or given up at so many tokens."""
        self._ended.append(length)

    def trained(self, length: int) -> None:
        """A trajectory of so many tokens was trained."""
        self._trained.append(length)

    @property
    def distance(self) -> float | None:
        """Largest difference of the two empirical distribution functions; None while there is too little.

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
