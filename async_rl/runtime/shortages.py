"""Waits while this process has no descriptor for a file, or its disk has no space."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from async_rl.errors import AsyncRLError
from async_rl.runtime.waits import waiting

log = logging.getLogger(__name__)

R = TypeVar("R")

_PROBE_BYTES: Final = 1 << 16
"""Size of a file that shows whether there is space."""

MAX_SHORTAGE_S: Final = 60.0
"""A shortage that lasts longer is no peak: it needs the user."""

_SHORTAGE_DELAY_S: Final = 0.2
"""How long file work waits before it is repeated for the first time."""

_MAX_SHORTAGE_DELAY_S: Final = 1.0
"""The wait doubles up to this: thousands of trajectories may wait to be stored on one full disk."""

DISK_ERRORS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.ESTALE}
)
"""What a disk answers that does not take what is written."""

_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT})


def describe_disk_error(error: OSError) -> str:
    """Return why something could not be written, and the remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "the disk is full; free some and start the run again"
    remedy = "; make the disk writable and start the run again" if error.errno in DISK_ERRORS else ""
    return f"{error.strerror}{remedy}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name a file in the error of a block that cannot write it.

    Raises:
        AsyncRLError: The operating system refused that; the cause is a shortage if that was one.
    """
    try:
        yield
    except OSError as error:
        raise AsyncRLError(f"{path} cannot be written: {describe_disk_error(error)}") from error


def is_shortage(error: BaseException) -> bool:
    """Whether an error, or a cause of it, is that there was no descriptor, or no space on the disk."""
    return shortage_number(error) is not None


def shortage_number(error: BaseException) -> int | None:
    """Return the `errno` of the shortage that an error, or a cause of it, is; None if none is."""
    causes: dict[int, BaseException] = {}  # an error raised from its own group is a cause of itself
    left: list[BaseException | None] = [error]
    while left:
        cause = left.pop()
        if cause is None or id(cause) in causes:
            continue
        causes[id(cause)] = cause
        left += [cause.__cause__, *(cause.exceptions if isinstance(cause, BaseExceptionGroup) else ())]
    return next((number for number in map(_own_number, causes.values()) if number is not None), None)


def _own_number(error: BaseException) -> int | None:
    if isinstance(error, sqlite3.OperationalError):
        return errno.ENOSPC if "disk is full" in str(error) else None
    return error.errno if isinstance(error, OSError) and error.errno in _SHORTAGES else None


async def wait_out_shortage(attempt: Callable[[], Awaitable[R]], *, delay_s: float = _SHORTAGE_DELAY_S) -> R:
    """Make an attempt again while there is no descriptor or no space for it, for up to `MAX_SHORTAGE_S`.

    Descriptors become free all the time, because connections and files are closed; other programs delete
    their files. A failed attempt must have had no effect.

    Args:
        attempt: Makes the attempt.
        delay_s: How long to wait before it is made again for the first time. The wait then doubles up to
            a second.

    Raises:
        Exception: The shortage lasts, or the attempt fails for another reason.
    """
    waited_s = 0.0  # counted, and not read from the clock, which jumps when the machine was suspended
    while True:
        try:
            return await attempt()
        except Exception as error:
            if not is_shortage(error) or waited_s >= MAX_SHORTAGE_S:
                raise
        with waiting("disk"):
            await asyncio.sleep(delay_s)
        waited_s += delay_s
        delay_s = max(delay_s, min(2 * delay_s, _MAX_SHORTAGE_DELAY_S))


async def wait_for_files(folder: Path) -> None:
    """Make a folder, and wait until a file can be written in it, for up to `MAX_SHORTAGE_S`.

    What needs the file then says why there is none.

    Raises:
        AsyncRLError: The disk takes no file.
    """

    async def write_file() -> None:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        path = folder / ".shortage"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, bytes(_PROBE_BYTES))
        finally:
            os.close(file)
            os.unlink(path)

    try:
        await write_file()
    except OSError as error:
        if is_shortage(error):
            log.warning("waiting for up to %.0f s until a file can be written: %s", MAX_SHORTAGE_S, error)
    try:
        await wait_out_shortage(write_file)
    except OSError as error:
        if not is_shortage(error):
            raise AsyncRLError(f"{folder} cannot be written: {describe_disk_error(error)}") from error
