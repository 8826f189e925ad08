"""Detect a blocked event loop from a thread, because tasks on that loop are blocked with it.

```
 event loop   tick ─ a second ─► tick ─ a second ─►  (blocked)           tick: measures its own lateness
 thread           check    check    check    check  check: logs the loop's stack when ticks stop
```

Code without an `await` blocks the loop: an async tool or reward that computes or calls `time.sleep` or
`requests`. Everything then waits, engine calls included, and no timeout fires.
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

BLOCKED_S: Final = 10.0
"""A loop that is blocked for this time is reported: shorter blocks show in `event_loop_lag_seconds`."""

_LONGEST_TICK_S: Final = 1.0

_NUM_CHECKS: Final = 4
"""Checks within `blocked_s`: a block is reported at most a quarter of `blocked_s` late."""

_STOPPED_SHARE: Final = 0.1
"""A late check says that the process was stopped if the process has worked for less than this share of the
time; otherwise code has kept all threads from running."""


class LoopWatchdog:
    """Watches the running event loop from its own thread while the block runs."""

    def __init__(self, metrics: Metrics, blocked_s: float = BLOCKED_S) -> None:
        """Prepare the thread; `__enter__` starts it.

        Args:
            metrics: Counts blocks and observes the lateness of ticks.
            blocked_s: A loop whose tick is this late counts as blocked.
        """
        self._metrics = metrics
        self._blocked_s = blocked_s
        self._tick_s = min(_LONGEST_TICK_S, blocked_s / _NUM_CHECKS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._check_ticks, name="loop-watch", daemon=True)
        self._ticked_s = time.monotonic()

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
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

    def _check_ticks(self) -> None:
        """Report each block once; runs in the thread."""
        reported_s: float | None = None
        resumed_s = checked_s = time.monotonic()
        worked_s = time.process_time()
        while not self._ended.wait(self._blocked_s / _NUM_CHECKS):
            now = time.monotonic()
            if now - checked_s > 2 * self._blocked_s / _NUM_CHECKS and (
                time.process_time() - worked_s < _STOPPED_SHARE * (now - checked_s)
            ):
                resumed_s = now  # the whole process was stopped, or its machine: no code is to blame
            checked_s, worked_s = now, time.process_time()
            ticked_s = self._ticked_s
            late_s = now - max(ticked_s, resumed_s) - self._tick_s
            if reported_s is not None and ticked_s != reported_s:
                log.warning("the event loop runs again")
                reported_s = None
            if late_s >= self._blocked_s and reported_s is None:
                reported_s = ticked_s
                self._metrics.event_loop_blocked_total.inc()
                log.error("%s", self._report(late_s))

    def _report(self, late_s: float) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "  (its thread has ended)\n"
        return (
            f"the event loop has been blocked for {late_s:.1f} s: nothing else can run until the code below "
            f"returns. Make blocking code a plain function, which runs in a thread, or let it await:\n{stack}"
        )
