"""What a process holds, and by how much it grows with the work it has done."""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

_HISTORY: Final = frozenset({"metrics.jsonl"})
"""Files that grow by design: one line per step."""

_NORMAL_95: Final = 1.96


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """A slope with its 95% confidence interval."""

    slope: float
    half_width: float
    samples: int

    @property
    def upper(self) -> float:
        """The upper end of the interval."""
        return self.slope + self.half_width


def regress(
    x: Sequence[float], y: Sequence[float], segments: Sequence[int], *levels: Sequence[float]
) -> Growth:
    """Fit y = slope · x + a constant for each segment + a multiple of each level.

    The interval allows for samples that resemble their predecessors: it is widened by the correlation of the
    residuals with the ones before them.

    Args:
        x: Work done, for example trajectories.
        y: What was held then.
        segments: Which samples share a constant, for example the incarnation of each.
        levels: What rises and falls and takes its share of `y`, for example trajectories in flight.
    """
    ids = np.array(segments)
    kinds = np.unique(ids)
    columns = [np.array(column, np.float64) for column in (x, *levels)]
    held = np.array(y, np.float64)
    for column in (*columns, held):
        for segment in kinds:
            column[ids == segment] -= column[ids == segment].mean()
    varying = [column for column in columns[1:] if column.any()]
    degrees = len(ids) - len(kinds) - 1 - len(varying)
    if degrees < 1 or not columns[0].any():
        return Growth(slope=math.nan, half_width=math.inf, samples=len(ids))
    if varying:  # what the levels explain of both is taken out (Frisch-Waugh-Lovell)
        known = np.stack(varying, axis=1)
        columns[0] -= known @ np.linalg.lstsq(known, columns[0], rcond=None)[0]
        held -= known @ np.linalg.lstsq(known, held, rcond=None)[0]
    work = columns[0]
    spread = float(work @ work)
    slope = float(work @ held) / spread
    residuals = held - slope * work
    follows = ids[1:] == ids[:-1]
    power = float(residuals @ residuals)
    alike = float(residuals[1:][follows] @ residuals[:-1][follows]) / power if power else 0.0
    alike = min(max(alike, 0.0), 0.95)
    error = math.sqrt(power / degrees / spread * (1 + alike) / (1 - alike))
    return Growth(slope=slope, half_width=_NORMAL_95 * error, samples=len(ids))


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`, see mallinfo(3)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_SIZE_CLASS: Final = re.compile(rb"^ *\d+ +(\d+) +\d+ +(\d+) +\d+$", re.MULTILINE)
"""A line of CPython's report: size class, bytes of a block, pools, blocks in use, free blocks."""


def allocated_bytes() -> int:
    """Bytes that this process has allocated and not freed.

    CPython's allocator reports its blocks of up to 512 bytes, glibc all others.
    """
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _MallInfo
    info, report = mallinfo(), _printed(sys._debugmallocstats)
    small = sum(int(size) * int(used) for size, used in _SIZE_CLASS.findall(report))
    return int(info.uordblks + info.hblkhd) + small


def _printed(report: Callable[[], None]) -> bytes:
    """Return what a C function prints to the process's standard error."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            try:
                report()
            finally:
                os.dup2(kept, 2)
            file.seek(0)
            return file.read()
    finally:
        os.close(kept)


def resident_bytes() -> int:
    """Resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_descriptors() -> int:
    """Open file descriptors, without the one that lists them."""
    return len(os.listdir("/proc/self/fd")) - 1


def num_threads() -> int:
    """Threads of this process, those of libraries included."""
    return len(os.listdir("/proc/self/task"))


def disk_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, without those that keep a line per step."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if name not in _HISTORY:
                try:
                    total += os.stat(os.path.join(parent, name)).st_size
                except FileNotFoundError:  # removed meanwhile
                    continue
    return total
