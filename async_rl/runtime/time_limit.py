"""Bounds the time of pure Python code that a user supplies, such as a chat template, in any thread."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_CHECK_S: Final = 0.5


class TimeLimitExceeded(Exception):
    """The code ran for longer than its limit."""


class _TimeLimits:
    """The limits of all threads, and the thread that raises the error in those that exceed theirs."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ends_s: dict[int, float] = {}
        self._checker: threading.Thread | None = None

    def begin(self, thread: int, limit_s: float) -> None:
        with self.lock:
            self.ends_s[thread] = time.monotonic() + limit_s
            if self._checker is None or not self._checker.is_alive():  # also after a fork
                self._checker = threading.Thread(target=self._check, name="time-limits", daemon=True)
                self._checker.start()

    def _check(self) -> None:
        while True:
            time.sleep(_CHECK_S)
            with self.lock:
                now = time.monotonic()
                for thread in [thread for thread, end_s in self.ends_s.items() if now > end_s]:
                    del self.ends_s[thread]
                    error = ctypes.py_object(TimeLimitExceeded)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


_time_limits = _TimeLimits()


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raise `TimeLimitExceeded` in the block once it has run for `limit_s`. Blocks of a thread do not nest.

    It is raised between two instructions of Python: a single call into C is not interrupted.
    """
    thread = threading.get_ident()
    _time_limits.begin(thread, limit_s)
    try:
        yield
    finally:
        with _time_limits.lock:  # after it the checker does not raise here any more
            _time_limits.ends_s.pop(thread, None)
