"""Waits while this process has no descriptor for a file, or its disk has no space."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from async_rl.runtime.waits import waiting

R = TypeVar("R")

MAX_SHORTAGE_S: Final = 60.0
"""A shortage that lasts longer is no peak: it needs the user."""

_SHORTAGE_DELAY_S: Final = 0.2
"""How long an attempt waits before it is made again."""

_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT})


def is_shortage(error: Exception) -> bool:
    """Whether the cause of an error is that there was no descriptor for a file or no space on the disk."""
    cause = error.__cause__ or error
    if isinstance(cause, sqlite3.OperationalError):
        return "disk is full" in str(cause)
    return isinstance(cause, OSError) and cause.errno in _SHORTAGES


async def wait_out_shortage(attempt: Callable[[], Awaitable[R]]) -> R:
    """Make an attempt again while there is no descriptor or no space for it, for up to `MAX_SHORTAGE_S`.

    Descriptors become free all the time, because connections and files are closed; other programs delete
    their files. A failed attempt must have had no effect.

    Raises:
        Exception: The shortage lasts, or the attempt fails for another reason.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + MAX_SHORTAGE_S
    while True:
        try:
            return await attempt()
        except Exception as error:
            if not is_shortage(error) or loop.time() >= deadline:
                raise
        with waiting("disk"):
            await asyncio.sleep(_SHORTAGE_DELAY_S)
