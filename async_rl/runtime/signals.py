"""Keeps the handlers of signals installed while a library replaces them."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_INTERVAL_S: Final = 0.02
"""How long a replaced handler may stay: no event tells when a library replaces it."""


@contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Install this process's handler of SIGTERM again and again during the block, and once after it.

    Ray's native library installs a crash handler for SIGTERM while it connects (it aborts the process) and
    the default action while it disconnects. Both happen below Python, which still knows its own handler.
    """
    loop = asyncio.get_running_loop()
    timer = loop.call_later(_INTERVAL_S, lambda: keep())

    def keep() -> None:
        nonlocal timer
        _install_again()
        timer = loop.call_later(_INTERVAL_S, keep)

    try:
        yield
    finally:
        timer.cancel()
        _install_again()


def _install_again() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    if handler is None or threading.current_thread() is not threading.main_thread():
        return  # not installed by Python, or not this thread's to install
    signal.signal(signal.SIGTERM, handler)
    signal.siginterrupt(signal.SIGTERM, False)  # as asyncio has it
