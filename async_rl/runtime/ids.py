"""Ids of trajectories, groups and requests."""

from __future__ import annotations

import os
import time


def new_id() -> str:
    """Return an id of 32 hex digits: the time in nanoseconds, so that ids grow, then 64 random bits.

    The random bits tell processes apart. `uuid7` of the package `uuid6` takes five times as long.
    """
    return f"{time.time_ns():016x}{os.urandom(8).hex()}"
