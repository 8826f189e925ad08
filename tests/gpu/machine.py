"""What figures are of: this machine, and the code that runs on it. Imports torch only to look at a GPU."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
from contextlib import suppress
from pathlib import Path

from async_rl.errors import EnvironmentNotReady

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("torch", "sglang", "ray", "megatron-core", "transformer-engine", "torch-memory-saver", "mbridge"),
    "async-rl",
)
_CODE = ("async_rl", "agent_loops", "trainer", "benchmarks", "examples", "tests/gpu", "tests/support")


def describe(*, rehearsal: bool) -> dict[str, str]:
    """Return a description of this machine. Run it in a process of its own: torch keeps memory of a GPU that
    it has looked at.

    Raises:
        EnvironmentNotReady: When torch sees no GPU, and it is no rehearsal.
    """
    import torch

    machine = {"GPU": "none: a rehearsal on the CPU"}
    if not rehearsal:
        if not torch.cuda.is_available():
            raise EnvironmentNotReady(
                f"torch {torch.__version__} sees no GPU, so nothing can be proven: run it on a machine with "
                "one, in an environment made from requirements/gpu.txt (docs/guide/scaling-up.md); "
                "REHEARSE=1 runs the code of all cases on a CPU"
            )
        _, total = torch.cuda.mem_get_info()
        machine = {"GPU": f"{torch.cuda.device_count()} {torch.cuda.get_device_name()}"}
        machine |= {"memory": f"{total / 2**30:.0f} GiB", "CUDA": str(torch.version.cuda)}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            machine[name] = importlib.metadata.version(name)
    return machine


def describe_code() -> dict[str, str]:
    """Return the commit, and a digest of all files that a case can run: a copy may have no commit, or changes
    to one.
    """
    digest = hashlib.sha256()
    for folder in _CODE:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".yaml", ".json"):
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    git = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
        commit = done.stdout.strip()
    except OSError:
        commit = ""
    return {"commit": commit or "unknown", "digest": digest.hexdigest()[:16]}
