"""`make gpu-proof`: runs the suite on this machine's GPU and prints what each case measured.

Installs nothing. Exit code 0: every case ran and passed; 1: a case did not; 3: the machine has no GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from async_rl.errors import EnvironmentNotReady
from tests.gpu.proof import Recorder, absent, exit_code, show, write

_PACKAGES = (
    *("torch", "sglang", "ray", "megatron-core", "transformer-engine", "torch-memory-saver", "mbridge"),
    "async-rl",
)
_WIDTH = 160
"""Columns of the table where the output is not a terminal of its own width."""


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("-k", default="", help="only the cases whose names match, as in pytest")
    options = parser.parse_args()
    try:
        machine, num_gpus = describe()
    except EnvironmentNotReady as error:
        print(f"gpu-proof: {error}", file=sys.stderr)
        return error.exit_code
    if missing := absent(_PACKAGES):
        print(
            f"gpu-proof: not installed: {', '.join(missing)}. Cases that need them will fail: install "
            "requirements/gpu.txt and this project (docs/guide/scaling-up.md)",
            file=sys.stderr,
        )
    recorder = Recorder(num_gpus)
    run(recorder, options.k)
    cases = list(recorder.cases.values())
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    show(cases, ", ".join(f"{name} {value}" for name, value in machine.items()), console)
    if options.json is not None:
        write(cases, machine, options.json)
    return exit_code(cases)


def run(recorder: Recorder, only: str = "") -> None:
    """Run the suite, one case after the other."""
    here = str(Path(__file__).parent)
    pytest.main(["-q", "--no-header", "--timeout=900", "-k", only, here], [recorder])


def describe() -> tuple[dict[str, str], int]:
    """Return a description of this machine, and its number of GPUs.

    Raises:
        EnvironmentNotReady: When torch sees no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise EnvironmentNotReady(
            f"torch {torch.__version__} sees no GPU, so nothing can be proven: run it on a machine with "
            "one, in an environment made from requirements/gpu.txt (docs/guide/scaling-up.md)"
        )
    _, total = torch.cuda.mem_get_info()
    machine = {"GPU": torch.cuda.get_device_name(), "memory": f"{total / 2**30:.0f} GiB"}
    machine |= {"CUDA": str(torch.version.cuda)}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            machine[name] = importlib.metadata.version(name)
    return machine, torch.cuda.device_count()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not `sys.exit`: torch-memory-saver exits with code 1 when the interpreter frees its regions at shutdown.
    os._exit(code)
