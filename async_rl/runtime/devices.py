"""Whether this process may use a GPU and TransformerEngine, and the cores beside a GPU."""

from __future__ import annotations

import functools
import glob
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from async_rl.errors import EnvironmentNotReady

_IMPORT_LIMIT_S: Final = 300


def detect_device() -> str:
    """Return `cuda` if this process may use a GPU and its torch supports CUDA, else `cpu`.

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
    """Return the number of this machine's GPUs; 0 if this process may not use them."""
    return len(glob.glob("/dev/nvidia[0-9]*")) if detect_device() == "cuda" else 0


@functools.cache
def finds_transformer_engine() -> bool:
    """Whether TransformerEngine is installed; it is imported, once, in a process of its own.

    A build for another torch fails only when it is imported, and importing it loads torch.

    Raises:
        EnvironmentNotReady: It is installed and cannot be imported.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    command = [sys.executable, "-P", "-c", "import transformer_engine.pytorch"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        problem = f"its import took more than {_IMPORT_LIMIT_S} s"
    else:
        if done.returncode == 0:
            return True
        problem = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    raise EnvironmentNotReady(
        f"TransformerEngine is installed, but cannot be imported ({problem}), as when it was built for "
        "another torch: run `make setup-gpu`, or uninstall it"
    )


def bind_to_numa_node(uuid: str, root: Path = Path("/")) -> frozenset[int]:
    """Restrict all threads of this process to the cores of the NUMA node that a GPU is connected to.

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
