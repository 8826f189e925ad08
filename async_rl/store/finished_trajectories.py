"""Records trajectories that have ended before their group, so that a restart does not repeat them.

```
 add_tree ─► held ─► ledger, with its next flush
              │        │
              └────────┴── discard: settled ─► deleted (by the next flush of the ledger)
```

Their files were written where their attempts ran: frames, and completions while a group has no rewards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from async_rl.store.ledger import GroupRecord, Ledger
from async_rl.store.spool import Spool
from async_rl.types import StoredCompletion, StoredTrajectory, root_of

log = logging.getLogger(__name__)


class FinishedTrajectories:
    """Holds the finished trajectories of groups in flight and records them in the ledger.

    All methods are for the event loop's thread.
    """

    def __init__(self, ledger: Ledger, spool: Spool) -> None:
        """Start with nothing held.

        Args:
            ledger: Records which trajectories have ended, and their frames.
            spool: Holds the frames.
        """
        self._ledger = ledger
        self._spool = spool
        self._unscored: dict[str, tuple[StoredTrajectory, StoredCompletion]] = {}

    def add_tree(
        self, *tree: StoredTrajectory, completions: Mapping[str, StoredCompletion] = MappingProxyType({})
    ) -> None:
        """Add a trajectory that has ended before its group, with its branches; the next flush records them.

        Args:
            tree: The trajectory and its branches.
            completions: What those without a reward will be scored for, by trajectory. They are not recorded:
                after a restart their attempt runs again from the journal, because the whole group is scored
                by one call.

        Raises:
            InvariantError: When one is not in flight.
        """
        for trajectory in tree:
            name = trajectory.trajectory_id
            if (completion := completions.get(name)) is None:
                self._ledger.finish_trajectory(trajectory)
            else:
                self._ledger.group_of(name)
                self._unscored[name] = trajectory, completion

    def forget_unscored(self, trajectory_ids: Iterable[str]) -> None:
        """Keep only the frames of trajectories whose group is queued."""
        for name in trajectory_ids:
            if (unscored := self._unscored.pop(name, None)) is not None:
                self._spool.discard(unscored[1:])

    def discard_unscored(self) -> None:
        """Discard all trajectories that are not recorded, when nothing will score them any more."""
        for files in self._unscored.values():
            self._spool.discard(files)
        self._unscored.clear()

    def discard(self, trajectory_ids: Iterable[str], stored: Iterable[StoredTrajectory]) -> None:
        """Forget settled trajectories; the next flush of the ledger deletes their frames."""
        for name in trajectory_ids:
            self._spool.discard(self._unscored.pop(name, ()))
        self._spool.discard(stored)

    def recover_trajectories(
        self, group: GroupRecord, version: int, flaws: Mapping[str, str]
    ) -> dict[str, StoredTrajectory]:
        """Return the finished trajectories of a group that an earlier process left in flight.

        A trajectory and its branches are made by one agent loop: if any of them is missing or damaged, all of
        them are sampled again.

        Args:
            group: The group, from the ledger.
            version: The version that engines serve. Versions above it were undone by the restart: tokens that
                they sampled count as sampled by this one.
            flaws: What is wrong with frames, by trajectory.
        """
        for trajectory_id in group.stored.keys() & flaws.keys():
            log.warning("trajectory %s is sampled again: %s", trajectory_id, flaws[trajectory_id])
        intact = group.stored.keys() - flaws.keys()
        unfinished = {root_of(name) for name in group.in_flight - intact}
        finished: dict[str, StoredTrajectory] = {}
        for trajectory_id, stored in sorted(group.stored.items()):
            if root_of(trajectory_id) in unfinished:
                self._ledger.unfinish_trajectory(trajectory_id)
                self._spool.discard([stored])
                continue
            finished[trajectory_id] = capped = stored.capped(version)
            if capped is not stored:
                self._ledger.finish_trajectory(capped)
        return finished
