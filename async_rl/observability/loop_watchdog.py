"""Notices an event loop that stands still: what runs on it cannot, because it stands still with it.

```
 event loop   tick ─ a second ─► tick ─ a second ─►  (blocked)           tick: how late it was
 thread           look     look     look     look   look: where it stands, into the log
```

What blocks a loop is code without an `await`: an async tool or reward that calls `time.sleep`, `requests`, or
computes. Everything waits then, engines included, and no timeout comes due.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Final, Self

from async_rl.observability.metrics import Metrics

log = logging.getLogger(__name__)

_LONGEST_TICK_S: Final = 1.0

_LOOKS: Final = 4
"""In the time after which a loop counts as blocked: so late at most is it said."""


class LoopWatch:
    """Watches the running loop while the block runs, from a thread of its own.

    Example:
        >>> with LoopWatch(metrics, blocked_s=10): ...
    """

    def __init__(self, metrics: Metrics, blocked_s: float) -> None:
        """Start nothing yet.

        Args:
            metrics: How late ticks are, and how often the loop was blocked.
            blocked_s: Without a tick for so long beyond its time the loop is blocked.
        """
        self._metrics = metrics
        self._blocked_s = blocked_s
        self._tick_s = min(_LONGEST_TICK_S, blocked_s / _LOOKS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="loop-watch", daemon=True)
        self._ticked_s = time.monotonic()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._of = threading.get_ident()
        self._await_tick()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._ended.set()
        self._thread.join()

    def _await_tick(self) -> None:
        self._ticked_s = time.monotonic()
        self._timer = self._loop.call_later(self._tick_s, self._tick, self._loop.time() + self._tick_s)

    def _tick(self, expected_s: float) -> None:
        self._metrics.event_loop_lag_seconds.observe(max(0.0, self._loop.time() - expected_s))
        self._await_tick()

    def _look(self) -> None:
        """The thread."""
        said_s: float | None = None
        while not self._ended.wait(self._blocked_s / _LOOKS):
            ticked_s = self._ticked_s
            late_s = time.monotonic() - ticked_s - self._tick_s
            if said_s is not None and ticked_s != said_s:
                log.warning("the event loop goes on")
                said_s = None
            if late_s >= self._blocked_s and said_s is None:
                said_s = ticked_s
                self._metrics.event_loop_blocked_total.inc()
                log.error("%s", self._report(late_s))

    def _report(self, late_s: float) -> str:
        frame = sys._current_frames().get(self._of)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (its thread has ended)\n"
        return (
            f"the event loop has stood still for {late_s:.1f} s: nothing else can run until the code below "
            f"returns. Code that blocks must be a plain function, which gets a thread, or await:\n{stack}"
        )
