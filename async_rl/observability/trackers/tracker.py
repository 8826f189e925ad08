"""Defines the tracker protocol, and delivers steps to trackers without waiting for them.

```
train loop ── log(record) ──► a bounded queue a tracker ──► its own thread ── Tracker.log(step, figures)
                  │ full: this tracker loses the step                       │ raises: likewise
                  └──► counted, logged once, and training continues ◄──────┘
```

The thread also creates the tracker: logging in to a service may take a minute or never end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from async_rl.observability.evaluation_record import EvaluationRecord
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import StepRecord
from async_rl.observability.trackers.names import evaluation_figures, figures

log = logging.getLogger(__name__)

MAX_WAITING = 256
"""Steps that may wait for a tracker: with steps of 15 s, a service may be away for an hour."""

CLOSE_S = 20.0
"""The longest wait at the end of a run for all trackers together, in seconds."""


class Tracker(Protocol):
    """Receives the figures of steps, from one thread; it may block and may raise."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the figures of a step.

        A step that is not greater than the last one repeats a step, because the trainer went back to a
        checkpoint. It invalidates everything logged from that step on.
        """
        ...

    def close(self) -> None:
        """Write out what is buffered; no step follows."""
        ...


class Trackers:
    """The trackers of a run, each with its thread."""

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]], metrics: Metrics, devices: int) -> None:
        """Start a thread for each tracker.

        Args:
            makers: Functions that create the trackers, by name.
            metrics: Counts lost steps.
            devices: See `figures`.
        """
        self._devices = devices
        self._threads = [_TrackerThread(name, make, metrics) for name, make in makers.items()]
        self._evaluated: dict[str, float] = {}
        """Figures of evaluations that wait for the next step."""
        self._last_step = 0

    def log(self, record: StepRecord) -> None:
        """Queue a step for every tracker and return at once."""
        if self._threads:
            metrics = figures(record, self._devices) | self._evaluated
            self._evaluated, self._last_step = {}, record.step
            for thread in self._threads:
                thread.queue_step(record.step, metrics)

    def log_evaluation(self, record: EvaluationRecord) -> None:
        """Log an evaluation with the next step: trackers accept each step once, and this one has passed."""
        self._evaluated |= evaluation_figures(record)

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Let every tracker write its steps and close; give up on those that exceed the limit."""
        for thread in self._threads:
            if self._evaluated:  # the evaluation of the last version: no step follows it
                thread.queue_step(self._last_step + 1, self._evaluated)
            thread.end_steps()
        until = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


class _TrackerThread:
    """Delivers steps to one tracker in a daemon thread: a tracker that hangs does not delay the exit."""

    def __init__(self, name: str, make: Callable[[], Tracker], metrics: Metrics) -> None:
        self._name = name
        self._make = make
        self._lost = {
            cause: metrics.tracker_steps_lost_total.labels(name, cause) for cause in ("failed", "full")
        }
        self._warned: set[str] = set()
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(MAX_WAITING + 1)
        self._thread = threading.Thread(target=self._deliver, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def queue_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if (
            self._waiting.qsize() >= MAX_WAITING
        ):  # one slot is reserved for the end marker; this task is the only producer
            self._lose("full", f"{MAX_WAITING} steps wait for it already")
        else:
            self._waiting.put_nowait((step, metrics))

    def end_steps(self) -> None:
        self._waiting.put_nowait(None)

    def join(self, limit_s: float) -> None:
        self._thread.join(limit_s)
        if self._thread.is_alive():
            log.warning(
                "tracker %s has not ended in time and is left to itself; %d steps may not have reached it",
                self._name,
                max(0, self._waiting.qsize() - 1),
            )

    def _deliver(self) -> None:
        tracker: Tracker | None = None
        while (entry := self._waiting.get()) is not None:
            try:
                tracker = tracker or self._make()
                tracker.log(*entry)
            except Exception as error:  # training does not depend on trackers
                self._lose("failed", f"{type(error).__name__}: {' '.join(str(error).split())}")
        if tracker is not None:
            try:
                tracker.close()
            except Exception as error:
                log.warning("tracker %s did not close: %s: %s", self._name, type(error).__name__, error)

    def _lose(self, cause: str, why: str) -> None:
        self._lost[cause].inc()
        if cause not in self._warned:
            self._warned.add(cause)
            log.warning(
                "tracker %s lost a step (%s): %s. Training continues, metrics.jsonl has every step; further "
                "ones are only counted, in async_rl_tracker_steps_lost_total",
                self._name,
                cause,
                why,
            )
