"""Whether this process may use a GPU, and the cores beside it."""

from __future__ import annotations

import glob
import importlib.metadata
import os
from contextlib import suppress
from pathlib import Path


def detect_device() -> str:
    """Returns `cuda` if this process may use a GPU and its torch supports CUDA, else `cpu`.

    It reads files and metadata, because importing torch would take seconds.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and visible.strip() in ("", "-1")
    try:
        cpu_only = importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        cpu_only = True
    return "cuda" if glob.glob("/dev/nvidia[0-9]*") and not hidden and not cpu_only else "cpu"


def count_gpus() -> int:
    """Returns the number of this machine's GPUs; 0 if this process may not use them."""
    return len(glob.glob("/dev/nvidia[0-9]*")) if detect_device() == "cuda" else 0


def bind_to_numa_node(uuid: str, root: Path = Path("/")) -> frozenset[int]:
    """Restricts all threads of this process to the cores of the NUMA node that a GPU is connected to.

    Memory that they allocate afterwards is of that node, too. Cores that this process may not use stay out;
    if none remain, or the machine has a single node, nothing changes.

    Args:
        uuid: The GPU's UUID, as the driver lists it under /proc/driver/nvidia/gpus.
        root: Where /proc and /sys are.

    Returns:
        The cores; empty if nothing changed.
    """
    listed = (root / "proc/driver/nvidia/gpus").glob("*/information")
    address = next((path.parent.name for path in listed if uuid in path.read_text()), "unlisted")
    try:
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
        ranges = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip().split(",")
    except FileNotFoundError:  # the machine has a single node (-1), or hides its devices
        return frozenset()
    limits = [part.partition("-")[::2] for part in ranges if part]
    beside = {core for low, high in limits for core in range(int(low), int(high or low) + 1)}
    cores = beside & os.sched_getaffinity(0)
    for thread in os.listdir("/proc/self/task") if cores else ():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread), cores)
    return frozenset(cores)
