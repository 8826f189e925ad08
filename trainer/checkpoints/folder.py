"""A folder of checkpoints: names, the one rename by which a checkpoint appears, and which ones stay.

```
step_00000040/         whole, for it was renamed when it was
step_00000060/
.step_00000080.tmp/    being written, or left by a process that was killed
```
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

_NAME = re.compile(r"^step_(\d{8,})$")
_LEFT = re.compile(r"^\.step_\d{8,}\.(tmp|old)$")


def step_of(path: Path) -> int | None:
    """The step of a checkpoint by its name; None for any other name."""
    match = _NAME.match(path.name)
    return int(match.group(1)) if match else None


def checkpoints_newest_first(directory: Path) -> list[Path]:
    """What has the name of a checkpoint."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def final_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step appears."""
    return directory / f"step_{step:08d}"


def scratch_path(directory: Path, step: int) -> Path:
    """Where it is being written."""
    return directory / f".step_{step:08d}.tmp"


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove what killed processes have left, while nothing is being written.

    Returns:
        What was removed.
    """
    left = [path for path in directory.iterdir() if _LEFT.match(path.name)] if directory.is_dir() else []
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return left


def publish_checkpoint(directory: Path, step: int) -> Path:
    """Let the checkpoint of a step appear, whole and on the disk.

    One of the same step, of a run that came this far before it was set back, is replaced; in between there is
    neither, and the older ones that the run was set back to are still there.
    """
    final, scratch = final_path(directory, step), scratch_path(directory, step)
    old = directory / f".{final.name}.old"
    _sync(scratch)
    if final.exists():
        final.rename(old)
    scratch.rename(final)
    _sync(directory)
    shutil.rmtree(old, ignore_errors=True)
    return final


def remove_old_checkpoints(directory: Path, step: int, keep: int, every: int | None) -> list[Path]:
    """Remove checkpoints that are no longer kept, once that of a step stands.

    Args:
        directory: The folder.
        step: The newest whole one. Those of later steps were passed over when the run was set back.
        keep: So many newest ones stay.
        every: Those of steps that are multiples of this stay too.

    Returns:
        What was removed.
    """
    paths = {step_of(path) or 0: path for path in checkpoints_newest_first(directory)}
    kept = steps_kept(paths, step, keep, every)
    removed = [path for number, path in paths.items() if number not in kept]
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return removed


def steps_kept(steps: Iterable[int], newest: int, keep: int, every: int | None) -> set[int]:
    """Which steps' checkpoints stay when `newest` is the newest; see `retain`."""
    there = sorted(step for step in steps if step <= newest)
    return set(there[-keep:]) | {step for step in there if every and step % every == 0}


def _sync(folder: Path) -> None:
    """Write the names in a folder down to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
