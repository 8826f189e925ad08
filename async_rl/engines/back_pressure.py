"""How many calls an engine takes that asks for fewer, and when it may be called again.

```
 refused (429) ──► pause: Retry-After, or 1 s, 2 s ... ──► called again, with at most the calls it accepted
                                                              └ each round of accepted calls: one more
```

The limit falls to what the engine has accepted and rises by one per round, as a TCP sender's window does
("additive increase"), so that it stays near what the engine takes; it is forgotten after ten minutes without
a refusal. An engine that refuses calls for long and completes none is not busy but broken. Pure: no I/O, no
clock.
"""

from __future__ import annotations

import math
from typing import Final

from async_rl.errors import EngineBusy

_PAUSE_S: Final = 1.0
"""First pause without Retry-After; SGLang refuses calls when its queue is full, which lasts some seconds."""

_PAUSE_MAX_S: Final = 30.0
"""Longest pause without Retry-After."""

_RETRY_AFTER_MAX_S: Final = 300.0
"""Longest pause with it: rate limits of minutes are honoured, an engine lost for hours is not waited for."""

_BROKEN_AFTER_S: Final = 60.0
"""An engine that refuses calls for longer without completing one is broken."""

_BROKEN_AFTER: Final = 3
"""The pauses after which it may be: a single Retry-After can be longer than `_BROKEN_AFTER_S`."""

_MEMORY_S: Final = 600.0
"""The limit is forgotten after so long without a refusal, as strikes are."""


class BackPressure:
    """The refusals of one engine.

    Example:
        >>> pressure = BackPressure()
        >>> pressure.record_refusal(0.0, EngineBusy("429", 7.0), accepted=12)
        7.0
        >>> pressure.max_calls
        12.0
    """

    def __init__(self) -> None:
        self.max_calls = math.inf
        """The most calls that the engine is given at once."""
        self._pauses = 0
        """Pauses since the engine last accepted a call."""
        self._first_refusal_s = 0.0
        """When the first of them began."""
        self._last_refusal_s = 0.0

    def record_refusal(self, now: float, error: EngineBusy, *, accepted: int) -> float:
        """Lower the limit, and return how long the engine must not be called.

        Args:
            now: Monotonic seconds.
            error: What it answered.
            accepted: Calls that it still has.
        """
        self.lower_limit(now, accepted)
        if not self._pauses:
            self._first_refusal_s = now
        self._pauses += 1
        if error.retry_after_s is not None:
            return min(error.retry_after_s, _RETRY_AFTER_MAX_S)
        return min(_PAUSE_S * 2.0 ** (self._pauses - 1), _PAUSE_MAX_S)

    def lower_limit(self, now: float, accepted: int) -> None:
        """Lower the limit to what the engine has accepted: another call of the same burst was refused."""
        self._last_refusal_s = now
        self.max_calls = float(max(1, min(self.max_calls, accepted)))

    def record_accepted_call(self, now: float) -> None:
        """Raise the limit a little: the engine has sent the first token of a call."""
        self._pauses = 0
        self.max_calls += 1.0 / self.max_calls
        if now - self._last_refusal_s > _MEMORY_S:
            self.max_calls = math.inf

    def is_broken(self, now: float, *, running: int) -> bool:
        """Whether the engine does nothing but refuse.

        Args:
            now: Monotonic seconds.
            running: Its calls that have received tokens.
        """
        if running or self._pauses < _BROKEN_AFTER:
            return False
        return now - self._first_refusal_s >= _BROKEN_AFTER_S
