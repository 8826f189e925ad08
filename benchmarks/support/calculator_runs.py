"""Runs the quickstart's job, SGLang and Megatron-Core in a real loop, with changes to its config."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent.parent
CONFIG: Final = ROOT / "examples" / "calculator" / "config.yaml"
MODEL: Final = ROOT / "models" / "calculator-warm"

_LOG_END: Final = 3000
"""Characters of the log that a failed run shows."""


def train_calculator(
    name: str, folder: Path, overrides: Sequence[str], cores: Sequence[int] | None = None
) -> Path:
    """Train as `make quickstart` does, and return the run's folder, which is in `folder`.

    Args:
        name: Of the run.
        folder: `run.dir`; the log is there, too.
        overrides: `dotted.key=value` changes to the config.
        cores: Cores that all processes of the run start on; None leaves them all.

    Raises:
        SystemExit: The run failed; the message has the end of its log.
    """
    command = [sys.executable, "-m", "async_rl.cli.main", "train", str(CONFIG)]
    placed = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores is not None else []
    log_file = folder / f"{name}.log"
    with log_file.open("w") as log:
        done = subprocess.run(
            [*placed, *command, f"run.name={name}", f"run.dir={folder}", *overrides],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{name} failed with {done.returncode}:\n{log_file.read_text()[-_LOG_END:]}")
    return folder / name


def untrained_model(folder: Path) -> list[str]:
    """Make the quickstart's model and data without the warm start, and return the overrides that use them."""
    model, data = folder / "calculator-base", folder / "data"
    here = CONFIG.parent
    for program, target in (("make_model.py", model), ("make_data.py", data)):
        subprocess.run(
            [sys.executable, str(here / program), str(target)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
    return [f"model.path={model}", f"data.path={data / 'tasks.jsonl'}"]
