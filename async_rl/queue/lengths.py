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

_EXACT_BITS: Final = 9
"""Lengths below 512 are distinguished exactly, longer ones to one part in 256: a distance is off by at most
0.002 where lengths are log-normal with a sigma of 0.8."""
_OCTAVE: Final = 1 << (_EXACT_BITS - 1)
_BUCKETS: Final = 2 * _OCTAVE + _OCTAVE * 15
"""Enough for 16 million tokens."""

MIN_SAMPLES: Final = 100
"""Fewer samples mean nothing: the distance of two samples of 100 is above 0.1 by chance alone."""


class LengthDrift:
    """Compares the lengths of the last trajectories that ended with those of the last that were trained.

    Adding a length takes O(1), the distance O(buckets), about ten microseconds.

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
        self._ended = _Window(window)
        self._trained = _Window(window)

    def add_ended(self, length: int) -> None:
        """Add the length of a trajectory that was finished or dropped."""
        self._ended.add(length)

    def add_trained(self, length: int) -> None:
        """Add the length of a trained trajectory."""
        self._trained.add(length)

    @property
    def distance(self) -> float | None:
        """The largest difference of the distribution functions; None with fewer than `MIN_SAMPLES`.

        Source: the two-sample Kolmogorov-Smirnov statistic, N. Smirnov, Ann. Math. Statist. 19 (1948) 279.
        """
        if min(len(self._ended.recent), len(self._trained.recent)) < MIN_SAMPLES:
            return None
        return float(np.abs(self._ended.distribution() - self._trained.distribution()).max())


class _Window:
    """The last lengths, counted in buckets."""

    def __init__(self, size: int) -> None:
        self.recent: deque[int] = deque(maxlen=size)
        self._counts = np.zeros(_BUCKETS, np.int64)

    def add(self, length: int) -> None:
        if len(self.recent) == self.recent.maxlen:
            self._counts[self.recent[0]] -= 1
        bucket = _bucket(length)
        self.recent.append(bucket)
        self._counts[bucket] += 1

    def distribution(self) -> np.ndarray:
        """`[buckets] float64`, the share of the window up to each bucket."""
        shares: np.ndarray = np.cumsum(self._counts) / len(self.recent)
        return shares


def _bucket(length: int) -> int:
    shift = max(0, length.bit_length() - _EXACT_BITS)
    return min(shift * _OCTAVE + (length >> shift), _BUCKETS - 1)
