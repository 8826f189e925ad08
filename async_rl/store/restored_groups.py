"""Restores the groups of an earlier process: what has ended from the spool, the rest from the journal."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from async_rl.store.admission import Admission
from async_rl.store.finished_trajectories import FinishedTrajectories
from async_rl.store.ledger import GroupRecord, Ledger
from async_rl.store.outstanding import OutstandingGroups, RestoredGroup
from async_rl.store.progress import ProgressReport
from async_rl.store.spool import Spool, relocated
from async_rl.types import StoredTrajectory, root_of

log = logging.getLogger(__name__)


def frames_in_flight(ledger: Ledger, directory: Path, node: str = "") -> list[StoredTrajectory]:
    """Return the finished trajectories of groups in flight whose frames a process on this node can read.

    Args:
        ledger: Knows them.
        directory: The spool in the run's folder.
        node: The address of this node.
    """
    return [
        relocated(entry, directory)
        for group in ledger.outstanding()
        if not group.queued
        for entry in group.stored.values()
        if entry.node in ("", node)
    ]


class GroupRestorer:
    """Adds the outstanding groups of the ledger to a queue that has none yet.

    Frames of ready groups are verified with their batch, those of groups in flight before: a damaged one is
    sampled again beside its siblings. Frames that belong to no group are deleted.
    """

    def __init__(
        self,
        ledger: Ledger,
        spool: Spool,
        groups: OutstandingGroups,
        admission: Admission,
        finished: FinishedTrajectories,
    ) -> None:
        """Read from the ledger and the spool, and add to `groups`."""
        self._ledger = ledger
        self._spool = spool
        self._groups = groups
        self._admission = admission
        self._finished = finished

    def restore_groups(self, journalled: Mapping[str, ProgressReport], flaws: Mapping[str, str]) -> None:
        """Restore all groups; blocking.

        Args:
            journalled: How far trajectories in flight and their branches are in the journals, by id.
            flaws: What is wrong with frames of groups in flight, by trajectory.
        """
        outstanding = self._ledger.outstanding()
        for group in outstanding:  # the run's folder may have been moved
            group.stored = {
                name: relocated(entry, self._spool.directory) for name, entry in group.stored.items()
            }
        sampled = oldest_by_root(journalled)
        self._spool.recover_frames(
            early=[entry for group in outstanding if not group.queued for entry in group.stored.values()],
            used=[entry for group in outstanding if group.queued for entry in group.stored.values()],
        )
        for group in outstanding:
            if group.queued:
                self._restore_queued(group)
            else:
                self._groups.restore_in_flight(self._in_flight(group, sampled, flaws))
        self._drop_excess()
        self._ledger.flush()
        self._spool.delete_discarded()

    def _restore_queued(self, group: GroupRecord) -> None:
        # Versions above ours were published after the checkpoint and are undone: they count as ours, or as
        # those of an earlier restart's checkpoint.
        ceiling = self._admission.next if group.ceiling is None else group.ceiling
        oldest = min(group.weight_version, ceiling, self._admission.next)
        self._groups.restore_ready(group.group_id, oldest)

    def _in_flight(
        self, group: GroupRecord, sampled: Mapping[str, int], flaws: Mapping[str, str]
    ) -> RestoredGroup:
        """Return a group in flight with its finished trajectories.

        Args:
            group: The group, from the ledger.
            sampled: By trajectory, the oldest version that sampled what the journal has of it.
            flaws: As that of `restore_groups`.
        """
        version = self._admission.next
        ended = self._finished.recover_trajectories(group, version, flaws)
        versions = [trajectory.oldest_weight_version for trajectory in ended.values()]
        versions += [sampled[name] for name in group.in_flight if name in sampled]
        return RestoredGroup(
            group_id=group.group_id,
            task_id=group.task_id,
            position=group.position,
            trajectory_ids=tuple(sorted({root_of(name) for name in group.in_flight})),
            finished=ended,
            attempts=dict(group.attempts),
            oldest_version=min([version, *(v for v in versions if v is not None)]),
            straggled_s=group.straggled_s,
        )

    def _drop_excess(self) -> None:
        """Drop the youngest groups in flight that the spool has no space for.

        The earlier process may have ended for lack of space because it learned the size of its groups too
        late; restoring all of them would repeat this.
        """
        for group in sorted(self._groups.restored, key=lambda group: group.oldest_version, reverse=True):
            if self._admission.holds_in_flight:
                return
            log.warning("group %s in flight is dropped: the spool has no space for it", group.group_id)
            self._groups.drop_group(group.group_id, "restart")


def oldest_by_root(journalled: Mapping[str, ProgressReport]) -> dict[str, int]:
    """Return the oldest version that sampled a trajectory or one of its branches, by trajectory."""
    oldest: dict[str, int] = {}
    for name, progress in journalled.items():
        if (version := progress.oldest_version) is not None:
            root = root_of(name)
            oldest[root] = min(version, oldest.get(root, version))
    return oldest
