"""Stores trajectories that have ended before their group, so that a restart does not repeat them.

```
 add_tree ─► pending ─ store_pending (in a thread) ─► frames ─► ledger, with its next flush
               │                                        │
               └── discard: settled ────────────────────┴─► deleted (by the next flush of the ledger)
```
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from itertools import groupby

from async_rl.errors import CorruptFrame, SpoolFull
from async_rl.queue.frames import verify_frame
from async_rl.queue.ledger import GroupRecord, Ledger
from async_rl.queue.spool import Spool
from async_rl.runtime.threads import run_uncancellable
from async_rl.types import Group, StoredTrajectory, Trajectory, root_of

log = logging.getLogger(__name__)


class FinishedTrajectories:
    """Stores the finished trajectories of groups in flight and records them in the ledger.

    All methods are for the event loop's thread.
    """

    def __init__(self, ledger: Ledger, spool: Spool, executor: Executor) -> None:
        """Start with nothing pending.

        Args:
            ledger: Records which trajectories have ended, and their frames.
            spool: Holds the frames.
            executor: Runs the writes of `store_pending`.
        """
        self._ledger = ledger
        self._spool = spool
        self._executor = executor
        self._pending: dict[str, Trajectory] = {}  # branches right after their trunk

    def add_tree(self, *tree: Trajectory) -> None:
        """Add a trajectory that has ended before its group, with its branches.

        Raises:
            InvariantError: When one is not in flight.
        """
        for trajectory in tree:
            self._ledger.group_of(trajectory.trajectory_id)
        self._pending |= {trajectory.trajectory_id: trajectory for trajectory in tree}

    async def store_pending(self) -> list[str]:
        """Store the trajectories added since the last call whose groups have not ended, in a thread.

        The ledger has them after its next flush.

        Returns:
            Those that were stored now. Without space they are not: the journal has their tokens.
        """
        pending = list(self._pending.values())
        if not pending:
            return []
        stored, cancelled = await run_uncancellable(self._executor, lambda: self._store(pending))
        recorded = self._record_stored(stored)
        if cancelled is not None:
            raise cancelled
        return recorded

    def store_pending_now(self) -> list[str]:
        """Do the same in the calling thread, when no other thread works any more."""
        return self._record_stored(self._store(list(self._pending.values())))

    def members_of(self, group: Group) -> list[Trajectory | StoredTrajectory]:
        """Return a group that has ended with references in place of the trajectories that have a frame.

        None of them is pending any more. A frame that a thread is writing at this moment is discarded.
        """
        stored = self._ledger.group(group.group_id).stored
        for trajectory in group.trajectories:
            self._pending.pop(trajectory.trajectory_id, None)
        return [stored.get(member.trajectory_id, member) for member in group.trajectories]

    def discard(self, trajectory_ids: Iterable[str], stored: Iterable[StoredTrajectory]) -> None:
        """Forget settled trajectories; the next flush of the ledger deletes their frames."""
        for name in trajectory_ids:
            self._pending.pop(name, None)
        self._spool.discard(stored)

    def recover_trajectories(self, group: GroupRecord, version: int) -> dict[str, StoredTrajectory]:
        """Return the finished trajectories of a group that an earlier process left in flight.

        A trajectory and its branches are made by one agent loop: if any of them is missing or damaged, all of
        them are sampled again.

        Args:
            group: The group, from the ledger.
            version: The version that engines serve. Versions above it were undone by the restart: tokens that
                they sampled count as sampled by this one.
        """
        intact: set[str] = set()
        for trajectory_id, stored in group.stored.items():
            try:
                verify_frame(stored)
                intact.add(trajectory_id)
            except CorruptFrame as error:
                log.warning("trajectory %s is sampled again: %s", trajectory_id, error)
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

    def _store(self, trajectories: Sequence[Trajectory]) -> list[StoredTrajectory]:
        """Write trajectories until there is no space, each together with its branches."""
        stored: list[StoredTrajectory] = []
        for _, tree in groupby(trajectories, key=lambda trajectory: root_of(trajectory.trajectory_id)):
            complete = len(stored)
            try:
                for trajectory in tree:
                    stored.append(self._spool.write_trajectory(trajectory))
            except SpoolFull as error:
                log.info("trajectory %s stays in the journal only: %s", trajectory.trajectory_id, error)
                self._spool.discard(stored[complete:])
                del stored[complete:]
                break
        return stored

    def _record_stored(self, stored: Sequence[StoredTrajectory]) -> list[str]:
        """Record stored trajectories in the ledger, except those that were settled meanwhile."""
        current = [entry for entry in stored if entry.trajectory_id in self._pending]
        self._spool.discard([entry for entry in stored if entry.trajectory_id not in self._pending])
        for entry in current:
            del self._pending[entry.trajectory_id]
            self._ledger.finish_trajectory(entry)
        return [entry.trajectory_id for entry in current]
