"""Memory for big arrays that come and go, kept warm.

A page costs several times as much to touch first as to write again (on a virtual machine up to thirty times),
and routing rows are megabytes that live for seconds. So memory that an array no longer needs is handed to the
next one. It comes back by itself, when the last view of the array is gone: nobody has to remember to.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_GRAIN: Final = 1 << 18
"""Slabs are whole multiples of this, so that sequences of similar length share them."""


class Slabs:
    """Hands out uninitialised arrays on memory that was used before, where it has some. For all threads.

    Invariant: at most `max_idle_bytes` lie idle; what comes back beyond that goes to the system.

    Example:
        >>> slabs = Slabs(max_idle_bytes=1 << 28)
        >>> rows = slabs.empty((32768, 48, 8), np.uint8)
        >>> del rows  # and all views of it: its memory is the next array's
    """

    def __init__(self, max_idle_bytes: int) -> None:
        """Start without memory."""
        self._max_idle_bytes = max_idle_bytes
        self._lock = threading.Lock()
        self._idle: list[np.ndarray] = []  # the one used last is at the end
        # An array may die anywhere, also below a method of ours that holds the lock: it only appends.
        self._returned: deque[np.ndarray] = deque()
        self._num_lent = 0

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray[Any, Any]:
        """An array of this shape; its numbers are whatever was there before."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        with self._lock:
            self._gather()
            self._num_lent += 1
            slab = self._pop(size)
        if slab is None:
            slab = np.empty(max(1, -(-size // _GRAIN)) * _GRAIN, np.uint8)
        # All views of this one have it as their base, and not the slab, which must outlive them.
        lent = np.frombuffer(slab.data, np.uint8)
        weakref.finalize(lent, self._returned.append, slab).atexit = False
        return lent[:size].view(dtype).reshape(shape)

    def usage(self) -> tuple[int, int]:
        """How many arrays are alive, and how many bytes lie idle."""
        with self._lock:
            self._gather()
            return self._num_lent, sum(slab.nbytes for slab in self._idle)

    def _pop(self, size: int) -> np.ndarray[Any, Any] | None:
        """The smallest idle slab that is large enough and not wastefully larger, the warmest of those."""
        fitting = [i for i, slab in enumerate(self._idle) if size <= slab.nbytes <= 2 * size + _GRAIN]
        if not fitting:
            return None
        return self._idle.pop(min(fitting, key=lambda i: (self._idle[i].nbytes, -i)))

    def _gather(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
            self._num_lent -= 1
        excess = sum(slab.nbytes for slab in self._idle) - self._max_idle_bytes
        while excess > 0:
            excess -= self._idle.pop(0).nbytes
