"""Keeps the garbage collector and other threads from pausing the event loop of a process with many sessions.

A full collection looks at every object of the process: 0.2 s with thousands of trajectories. Nearly all
objects are freed by their reference count, so it finds nearly nothing. Young objects are collected seldom: a
process whose trajectories end as fast as others begin holds as many objects as before, and by CPython's
thresholds it would spend a twentieth of its time on collections that find nothing.

A thread that computes keeps the interpreter's lock until another asks for it and the switch interval is over.
The event loop gives up the lock several times in a turn, at each system call: with CPython's 5 ms, a thread
that writes a journal of 1 GB held up turns of 1 ms for 11 to 28 ms.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_COLLECTIONS_PER_CHECK: Final = 100
"""Collections of the middle generation between two looks at the memory, some seconds of a busy process."""

_THRESHOLDS: Final = (5000, 2)
"""How many more objects there must be for a collection of the young generation, and how many of these come
between two of the middle one: it looks at 15,000 objects, which takes about 2 ms."""

_SPARE_BLOCKS: Final = 2_000_000
"""Memory blocks, about 150 MB, that uncollected cycles may have beside as much as everything else."""

_SWITCH_INTERVAL_S: Final = 0.0005
"""How long the event loop waits for a thread that computes; a switch takes a few microseconds."""


class SurvivorFreezer:
    """Exempts objects from collections once they have survived two, until memory has doubled.

    Objects in reference cycles that become garbage after that wait for the next full collection, which takes
    place when the process has twice as many memory blocks as after the last one.
    """

    def __init__(self, spare_blocks: int = _SPARE_BLOCKS) -> None:
        """Take the memory in use as needed."""
        self._spare_blocks = spare_blocks
        self._limit = 2 * sys.getallocatedblocks() + spare_blocks
        self._num_collections = 0
        self._awaits_full = False

    def end_collection(self, phase: str, info: dict[str, Any]) -> None:
        """Exempt what survived; a callback of `gc.callbacks`."""
        generation = info["generation"]
        if phase != "stop" or generation < (2 if self._awaits_full else 1):
            return
        gc.freeze()
        if self._awaits_full:
            self._awaits_full = False
            self._limit = 2 * sys.getallocatedblocks() + self._spare_blocks
        self._num_collections += 1
        if self._num_collections % _COLLECTIONS_PER_CHECK == 0 and sys.getallocatedblocks() > self._limit:
            gc.unfreeze()
            self._awaits_full = True  # CPython makes one after ten of the middle generation


@contextmanager
def short_pauses() -> Iterator[None]:
    """Keep pauses of the event loop short while the block runs."""
    freezer, before, interval_s = SurvivorFreezer(), gc.get_threshold(), sys.getswitchinterval()
    gc.callbacks.append(freezer.end_collection)
    gc.set_threshold(*_THRESHOLDS)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.set_threshold(*before)
        gc.callbacks.remove(freezer.end_collection)
        gc.unfreeze()
