"""A folder of checkpoints: names, atomic publication by one rename, and removal of old checkpoints.

```
step_00000040/         complete: a checkpoint gets this name when all its files are written
step_00000060/
.step_00000080.tmp/    being written, or left over from a process that was killed
step_00000060.skipped/ was damaged, or could not be read, when an older one was loaded
```
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Set
from pathlib import Path

from async_rl.runtime.files import sync

_NAME = re.compile(r"^step_(\d{8,})$")
_LEFT = re.compile(r"^\.step_\d{8,}\.(tmp|old)$")


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name; None for any other name."""
    match = _NAME.match(path.name)
    return int(match.group(1)) if match else None


def checkpoints_newest_first(directory: Path) -> list[Path]:
    """Return the folders that are named like a checkpoint, newest step first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path) or 0, reverse=True)


def final_path(directory: Path, step: int) -> Path:
    """Return the path at which the complete checkpoint of a step appears."""
    return directory / f"step_{step:08d}"


def scratch_path(directory: Path, step: int) -> Path:
    """Return the path at which the checkpoint of a step is written."""
    return directory / f".step_{step:08d}.tmp"


def remove_leftovers(directory: Path) -> list[Path]:
    """Remove folders left over from killed processes; must not run while a checkpoint is being written.

    Returns:
        The removed folders.
    """
    left = [path for path in directory.iterdir() if _LEFT.match(path.name)] if directory.is_dir() else []
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return left


def set_aside_newer(directory: Path, loaded: Path) -> list[Path]:
    """Rename the checkpoints that are newer than the loaded one, so that no later start loads them.

    They belong to steps that the run undoes, and may only have been unreadable for a while.

    Returns:
        Their new paths, `<name>.skipped`.
    """
    moved = []
    for path in checkpoints_newest_first(directory):
        if path.name == loaded.name:
            break
        aside = path.with_name(f"{path.name}.skipped")
        shutil.rmtree(aside, ignore_errors=True)
        moved.append(path.rename(aside))
    return moved


def publish_checkpoint(directory: Path, step: int) -> Path:
    """Publish the checkpoint of a step by a rename, once its files are on disk.

    It replaces a checkpoint of the same step, written before the run was reset to an earlier step. Between
    the two renames neither exists; the older checkpoint that the run was reset to still does.
    """
    final, scratch = final_path(directory, step), scratch_path(directory, step)
    old = directory / f".{final.name}.old"
    sync(scratch)
    if final.exists():
        final.rename(old)
    scratch.rename(final)
    sync(directory)
    shutil.rmtree(old, ignore_errors=True)
    return final


def remove_old_checkpoints(
    directory: Path, step: int, keep: int, every: int | None, others: Set[int] = frozenset()
) -> list[Path]:
    """Remove checkpoints that are no longer needed, once the checkpoint of a step is complete.

    Args:
        directory: The folder of checkpoints.
        step: The step of the newest complete checkpoint. Checkpoints of later steps predate a reset of the
        run.
        keep: The number of newest checkpoints to keep.
        every: Checkpoints whose step is a multiple of this are kept as well.
        others: Further steps whose checkpoints are kept.

    Returns:
        The removed folders.
    """
    paths = {step_of(path) or 0: path for path in checkpoints_newest_first(directory)}
    kept = steps_kept(paths, step, keep, every, others)
    removed = [path for number, path in paths.items() if number not in kept]
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return removed


def steps_kept(
    steps: Iterable[int], newest: int, keep: int, every: int | None, others: Set[int] = frozenset()
) -> set[int]:
    """Return the steps whose checkpoints `remove_old_checkpoints` keeps when `newest` is the newest step."""
    there = sorted(step for step in steps if step <= newest)
    return set(there[-keep:]) | {step for step in there if (every and step % every == 0) or step in others}
