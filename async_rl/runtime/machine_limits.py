"""How much memory of the machine or container, and how many descriptors of this process are in use."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import psutil

_CGROUPS: Final = Path("/sys/fs/cgroup")


class LimitUsage(NamedTuple):
    """What is used of something limited."""

    used: int
    limit: int


def descriptor_usage() -> LimitUsage:
    """Return the open file descriptors of this process and its soft limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # One of the entries is the descriptor with which the folder is read.
    return LimitUsage(len(os.listdir("/proc/self/fd")) - 1, soft)


def memory_usage(cgroups: Path = _CGROUPS, cgroup_of_process: Path = Path("/proc/self/cgroup")) -> LimitUsage:
    """Return the memory in use and its limit, of the container or of the machine, whichever is closer to it.

    Caches of files that the kernel can drop are not in use. All processes count, also engines and ranks on
    the driver's machine.

    Args:
        cgroups: Where control groups are mounted.
        cgroup_of_process: The file with the control group of this process.
    """
    machine = psutil.virtual_memory()
    usages = [LimitUsage(machine.total - machine.available, machine.total)]
    with suppress(OSError, ValueError):
        for line in cgroup_of_process.read_text().splitlines():
            hierarchy, controllers, path = line.split(":", 2)
            if hierarchy == "0":
                names = ("memory.max", "memory.current", "inactive_file")
                usages += _of_cgroup(cgroups, path, *names)
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                usages += _of_cgroup(cgroups / "memory", path, *names)
    return max(usages, key=lambda usage: usage.used / usage.limit)


def _of_cgroup(root: Path, path: str, limit_file: str, used_file: str, cached: str) -> list[LimitUsage]:
    """Return the usage of a control group; of the mounted root if the container does not see its own path."""
    folder = root / path.lstrip("/")
    folder = folder if (folder / limit_file).exists() else root
    with suppress(OSError, ValueError):  # no such controller, or "max": no limit
        limit = int((folder / limit_file).read_text())
        used = int((folder / used_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return [LimitUsage(max(0, used - int(stat.get(cached, 0))), limit)]
    return []
