"""Waits for processes that others have started."""

from __future__ import annotations

import os
import select


def wait_gone(pid: int) -> None:
    """Return when a process has ended, within 60 s, without reaping it."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ended = select.poll()  # `select` takes no descriptor above 1023
        ended.register(descriptor, select.POLLIN)
        assert ended.poll(60_000), f"process {pid} is still there"
    finally:
        os.close(descriptor)
