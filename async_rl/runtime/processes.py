"""Operating-system processes on Linux: end one whatever its state, and make new files private to the user."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

_PR_SET_PDEATHSIG: Final = 1
"""Option of prctl(2)."""


class Process(msgspec.Struct, frozen=True):
    """A process on a host, distinguishable from a later process with the same pid."""

    host: str
    """Name of the host or node; the caller chooses the kind of name."""
    pid: int
    started: str
    """Start time in clock ticks after boot, from /proc."""


def this_process(host: str) -> Process:
    """Return the calling process."""
    return Process(host, os.getpid(), start_time(os.getpid()))


def kill(process: Process, limit_s: float, grace_s: float = 0.0) -> bool:
    """Kill a process of this host and wait until it has ended, even if it is stopped, hung or already gone.

    Args:
        process: The process to kill.
        limit_s: Longest wait after the kill.
        grace_s: How long the process, which was asked to end, may take to end by itself.

    Returns:
        False if it still exists after `limit_s`, for example in a device driver's uninterruptible wait.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if start_time(process.pid) != process.started:
            return True
        poller = select.poll()  # `select` takes no descriptor above 1023, and a driver has thousands
        poller.register(descriptor, select.POLLIN)
        if grace_s and poller.poll(1000 * grace_s):
            return True
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return bool(poller.poll(1000 * limit_s))
    except (ProcessLookupError, FileNotFoundError):
        return True  # it ended by itself meanwhile
    finally:
        os.close(descriptor)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even if this process is stopped or hung.

    The kernel watches the thread that started this process, so that thread should be a main thread.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def start_time(pid: int) -> str:
    """Return when a process started, in clock ticks after boot.

    Raises:
        FileNotFoundError: It has ended.
    """
    # After the name in parentheses, which may hold anything, from the third field of proc(5) on.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


@contextmanager
def private_files() -> Iterator[None]:
    """Make new files of this process and its children readable by the user only, while the block runs."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
