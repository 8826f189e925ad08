"""Whether this process may use a GPU."""

from __future__ import annotations

import glob
import importlib.metadata
import os


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
