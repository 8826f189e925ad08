"""A stopwatch: adds up the time between its starts and stops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds during which it ran.

    Example:
        >>> times = iter([1.0, 3.0])
        >>> stopwatch = Stopwatch(lambda: next(times), seconds=10.0)
        >>> with stopwatch.running():
        ...     pass
        >>> stopwatch.seconds
        12.0
    """

    def __init__(self, clock: Callable[[], float], seconds: float = 0.0) -> None:
        """Stand at a time; `clock` returns monotonic seconds."""
        self._clock = clock
        self._seconds = seconds
        self._since_s: float | None = None

    @property
    def seconds(self) -> float:
        """The time so far, also while it runs."""
        return self._seconds + (0.0 if self._since_s is None else self._clock() - self._since_s)

    def set_running(self, runs: bool) -> None:
        """Start or stop; nothing happens if it is in that state."""
        if runs is (self._since_s is None):
            self._seconds, self._since_s = self.seconds, self._clock() if runs else None

    def restart(self) -> None:
        """Begin at zero, in the same state."""
        self._seconds, self._since_s = 0.0, None if self._since_s is None else self._clock()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run while the block does."""
        self.set_running(True)
        try:
            yield
        finally:
            self.set_running(False)
