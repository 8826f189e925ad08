"""What a tracker is, and how steps reach trackers without waiting for them.

```
train loop ── log(record) ──► a bounded queue a tracker ──► its own thread ── Tracker.log(step, figures)
                  │ full: the step is lost to this tracker                  │ raises: likewise
                  └──► counted, said once in the log, and training goes on ◄┘
```

A tracker is made in its thread too: to log in to a service may take a minute, or for ever.
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
"""Steps that wait for a tracker: an hour of a service's absence, with steps of a quarter of a minute."""

CLOSE_S = 20.0
"""Longest wait at the end of a run for what trackers have not written yet, all of them together."""


class Tracker(Protocol):
    """Where figures of steps go. Called by one thread; may block and may raise."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the figures of a step.

        A step that is not above the last one is logged again, because the trainer went back to a checkpoint:
        what was logged from it on does not count any more.
        """
        ...

    def close(self) -> None:
        """Write out what is held back; nothing is logged afterwards."""
        ...


class Trackers:
    """All trackers of a run.

    Example:
        >>> trackers = Trackers({"jsonl": lambda: JsonlTracker(path)}, metrics, devices=3)
        >>> trackers.log(record)
        >>> trackers.close()
    """

    def __init__(self, makers: Mapping[str, Callable[[], Tracker]], metrics: Metrics, devices: int) -> None:
        """Start a thread for each tracker.

        Args:
            makers: By the tracker's name.
            metrics: Where lost steps are counted.
            devices: See `figures`.
        """
        self._devices = devices
        self._couriers = [_Courier(name, make, metrics) for name, make in makers.items()]
        self._evaluated: dict[str, float] = {}
        """Figures of evaluations that no step has taken along yet."""
        self._last_step = 0

    def log(self, record: StepRecord) -> None:
        """Hand a step to every tracker; returns at once."""
        if self._couriers:
            metrics = figures(record, self._devices) | self._evaluated
            self._evaluated, self._last_step = {}, record.step
            for courier in self._couriers:
                courier.take(record.step, metrics)

    def log_evaluation(self, record: EvaluationRecord) -> None:
        """Hand an evaluation in with the next step: trackers take no step twice, and this one is older."""
        self._evaluated |= evaluation_figures(record)

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Let every tracker write what it has, and close it; one that takes longer is left to itself."""
        for courier in self._couriers:
            if self._evaluated:  # of the last version: no step comes after it
                courier.take(self._last_step + 1, self._evaluated)
            courier.end()
        until = time.monotonic() + limit_s
        for courier in self._couriers:
            courier.join(max(0.0, until - time.monotonic()))


class _Courier:
    """Brings steps to one tracker, in a daemon thread: a tracker that hangs does not keep the program."""

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

    def take(self, step: int, metrics: Mapping[str, float]) -> None:
        if (
            self._waiting.qsize() >= MAX_WAITING
        ):  # one slot is reserved for the end marker; only this task puts
            self._lose("full", f"{MAX_WAITING} steps wait for it already")
        else:
            self._waiting.put_nowait((step, metrics))

    def end(self) -> None:
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
            except Exception as error:  # whatever a tracker raises: it is none of training's business
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
                "tracker %s lost a step (%s): %s. Training goes on, metrics.jsonl has every step; further "
                "ones are only counted, in async_rl_tracker_steps_lost_total",
                self._name,
                cause,
                why,
            )
