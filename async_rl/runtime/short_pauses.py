"""Keeps the garbage collector and other threads from pausing the event loop of a process with many sessions.

A full collection looks at every object of the process: 0.2 s with thousands of trajectories. Nearly all
objects are freed by their reference count, so it finds nearly nothing. An object is therefore looked at once,
while it is young, and is exempt if it survives.

CPython counts how many more objects are made than freed, not how many are young. Where trajectories end as
fast as others begin, that difference stays small: at a threshold of 5,000, collections looked at 20,000 to
90,000 objects for 15 to 100 ms. So a timer collects the young ones, as often as keeps each collection short.

A thread that computes keeps the interpreter's lock until another asks for it and the switch interval is over.
The event loop gives up the lock several times in a turn, at each system call: with CPython's 5 ms, a thread
that writes a journal of 1 GB held up turns of 1 ms for 11 to 28 ms.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_TARGET_S: Final = 0.002
"""How long a collection may take: a busy rollout worker then makes one every 50 ms."""

_SHORTEST_INTERVAL_S: Final = 0.005
_LONGEST_INTERVAL_S: Final = 0.25

_COLLECTIONS_PER_CHECK: Final = 100
"""Collections between two looks at the memory, some seconds of a busy process."""

_THRESHOLD: Final = 5000
"""How many more objects there must be for a collection by CPython, between two of the timer."""

_SPARE_BLOCKS: Final = 2_000_000
"""Memory blocks, about 150 MB, that uncollected cycles may have beside as much as everything else."""

_SWITCH_INTERVAL_S: Final = 0.0005
"""How long the event loop waits for a thread that computes; a switch takes a few microseconds."""


class YoungCollector:
    """Collects young objects, and exempts those that survive from collections until memory has doubled.

    Objects in reference cycles that become garbage after that wait for the next full collection, which takes
    place when the process has twice as many memory blocks as after the last one.
    """

    def __init__(self, spare_blocks: int = _SPARE_BLOCKS) -> None:
        """Take the memory in use as needed."""
        self._spare_blocks = spare_blocks
        self._limit = 2 * sys.getallocatedblocks() + spare_blocks
        self._num_collections = 0
        self._interval_s = _SHORTEST_INTERVAL_S
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Collect from time to time in the running event loop."""
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._collect_timed)

    def stop(self) -> None:
        """End that."""
        if self._timer is not None:
            self._timer.cancel()

    def collect(self) -> None:
        """Collect young objects, or all of them where memory has doubled."""
        self._num_collections += 1
        is_due = self._num_collections % _COLLECTIONS_PER_CHECK == 0
        if is_due and sys.getallocatedblocks() > self._limit:
            gc.unfreeze()
            gc.collect()
            self._limit = 2 * sys.getallocatedblocks() + self._spare_blocks
        else:
            gc.collect(0)
        gc.freeze()

    def _collect_timed(self) -> None:
        begin_s = time.perf_counter()
        self.collect()
        taken_s = time.perf_counter() - begin_s
        wanted_s = self._interval_s * min(2.0, max(0.5, _TARGET_S / taken_s))
        self._interval_s = min(max(wanted_s, _SHORTEST_INTERVAL_S), _LONGEST_INTERVAL_S)
        self.start()


@contextmanager
def short_pauses() -> Iterator[None]:
    """Keep pauses of the running event loop short while the block runs."""
    collector, before, interval_s = YoungCollector(), gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(_THRESHOLD)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    collector.start()
    try:
        yield
    finally:
        collector.stop()
        sys.setswitchinterval(interval_s)
        gc.set_threshold(*before)
        gc.unfreeze()
