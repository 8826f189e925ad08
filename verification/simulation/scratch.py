"""A temporary folder for simulated runs."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

_MEMORY: Final = Path("/dev/shm")


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a new folder, in memory where there is such a place."""
    memory = _MEMORY if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="async_rl_simulation_", dir=memory)
