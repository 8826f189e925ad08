"""What the journal of a lost rollout worker had, and what attempts used of it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from async_rl.store.journal_file import JournalledTrajectory, read_journal
from async_rl.types import root_of

Trajectories = dict[str, JournalledTrajectory]


class LostJournal(msgspec.Struct, frozen=True):
    """What is known of the journal of one lost rollout worker."""

    num_left: int
    """The sampled tokens in it of trajectories that were not dropped meanwhile."""
    num_used: int
    """The tokens that attempts continued, or discarded because their loops went another way."""


def journal_of(process: psutil.Process) -> Path | None:
    """Return the folder of the journal that a process writes; None before its first write."""
    with suppress(psutil.NoSuchProcess):
        for file in process.open_files():
            if (path := Path(file.path)).match("journal/*/journal-*"):
                return path.parent
    return None


def read_journals(folder: Path) -> dict[Path, Trajectories]:
    """Return what each journal of a run has, by its folder."""
    found: dict[Path, Trajectories] = {}
    for each in folder.glob("*/"):
        with suppress(FileNotFoundError):  # it was compacted or deleted meanwhile
            found[each] = read_journal(each)[0]
    return found


def left_in(folder: Path, journals: Mapping[Path, Trajectories]) -> Trajectories:
    """Return what a journal has of the trajectories which no later owner has written."""
    newest: dict[str, int] = {}
    for trajectories in journals.values():
        for name, state in trajectories.items():
            newest[name] = max(newest.get(name, -1), state.owner_epoch)
    return {
        name: state for name, state in journals.get(folder, {}).items() if state.owner_epoch == newest[name]
    }


def count_left(left: Trajectories, attempts: Mapping[str, int]) -> int:
    """Return how many sampled tokens are left of some attempts: the number of each, by trajectory."""
    return sum(
        state.num_sampled_tokens
        for name, state in left.items()
        if attempts.get(root_of(name)) == state.attempt
    )
