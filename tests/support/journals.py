"""Journals as processes leave them, one folder each, and a process that continues with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

import numpy as np

from async_rl.store.journal import Journal, JournalEntry
from async_rl.store.journal_file import JournalledTrajectory, read_journal
from async_rl.store.journal_folders import newest_tree
from async_rl.types import Sampled, root_of


def sampled(count: int, version: int = 0) -> Sampled:
    """Return a segment of this many tokens."""
    return Sampled(
        token_ids=np.arange(count, dtype=np.int32),
        rollout_log_probs=np.zeros(count, np.float32),
        weight_version=version,
        engine_id="engine-0",
        finish_reason="abort",
    )


def read_journals(base: Path) -> dict[str, JournalledTrajectory]:
    """Return what the newest owners of trajectories have of them and their branches, by id."""
    trees: defaultdict[str, defaultdict[Path, dict[str, JournalledTrajectory]]]
    trees = defaultdict(lambda: defaultdict(dict))
    for folder in sorted(base.iterdir()) if base.exists() else ():
        for name, state in read_journal(folder)[0].items():
            trees[root_of(name)][folder][name] = state
    newest: dict[str, JournalledTrajectory] = {}
    for root_id, of_root in trees.items():
        newest |= newest_tree(root_id, of_root.values())
    return newest


def continue_journals(
    base: Path, alive: Collection[str], newest_version: int | None = None
) -> tuple[Journal, dict[str, JournalledTrajectory]]:
    """Return the journal of a process that takes over what those before left of trajectories."""
    number = len(list(base.glob("*"))) + 1
    left = {
        name: state.capped(newest_version)
        for name, state in read_journals(base).items()
        if root_of(name) in alive
    }
    journal = Journal(base / f"{number:06d}")
    journal.claim_trajectories(left, owner_epoch=number)
    journal.write_entries()
    return journal, left


def reopen_entry(journal: Journal, left: JournalledTrajectory) -> JournalEntry:
    """Return the entry of a trajectory that `continue_journals` has taken over."""
    number = int(journal.directory.name)
    return journal.open_entry(left.trajectory_id, left.attempt, left, owner_epoch=number)
