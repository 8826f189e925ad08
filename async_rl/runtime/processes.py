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
"""Of prctl(2)."""


class Process(msgspec.Struct, frozen=True):
    """A process of some host, told from a later one with the same number."""

    host: str
    """Name of the host or node, in the words of whoever asks."""
    pid: int
    started: str
    """Clock ticks after boot, as /proc has them."""


def this_process(host: str) -> Process:
    """The process that calls."""
    return Process(host, os.getpid(), _started(os.getpid()))


def kill(process: Process, limit_s: float, grace_s: float = 0.0) -> bool:
    """Kill a process of this host and wait until it is gone; also one that is stopped, hung or gone already.

    Args:
        process: Which.
        limit_s: Longest wait after the kill.
        grace_s: How long it may take to go by itself, which it was asked to.

    Returns:
        False when it is still there after `limit_s`, as in a driver's uninterruptible wait.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        if _started(process.pid) != process.started:
            return True
        poller = select.poll()  # `select` takes no descriptor above 1023, and a driver has thousands
        poller.register(descriptor, select.POLLIN)
        if grace_s and poller.poll(1000 * grace_s):
            return True
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return bool(poller.poll(1000 * limit_s))
    except (ProcessLookupError, FileNotFoundError):
        return True  # it went by itself meanwhile
    finally:
        os.close(descriptor)


def die_with_parent() -> None:
    """Be killed when the process that started this one dies: who is stopped or hung would not notice.

    It is about the thread that started this process, so it is of use where that is a main thread.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _started(pid: int) -> str:
    # After the name in parentheses, which may hold anything, from the third field of proc(5) on.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


@contextmanager
def private_files() -> Iterator[None]:
    """What this process, and all that it starts meanwhile, writes is for its user alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
