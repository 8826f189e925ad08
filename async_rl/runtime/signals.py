"""Keeps the handlers of signals installed while a library replaces them."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from async_rl.runtime.supervision import Nursery

_INTERVAL_S: Final = 0.02
"""How long a replaced handler may stay: no event tells when a library replaces it."""


@asynccontextmanager
async def signal_handlers_kept() -> AsyncIterator[None]:
    """Install this process's handler of SIGTERM again and again during the block, and once after it.

    Ray's native library installs a crash handler for SIGTERM while it connects (it aborts the process) and
    the default action while it disconnects. Both happen below Python, which still knows its own handler.
    """

    async def keep() -> None:
        while True:
            _install_again()
            await asyncio.sleep(_INTERVAL_S)

    try:
        async with Nursery() as nursery:
            keeping = nursery.start_task("signal handlers", keep())
            try:
                yield
            finally:
                keeping.cancel()
    finally:
        _install_again()


def _install_again() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    if handler is None or threading.current_thread() is not threading.main_thread():
        return  # not installed by Python, or not this thread's to install
    signal.signal(signal.SIGTERM, handler)
    signal.siginterrupt(signal.SIGTERM, False)  # as asyncio has it
