"""Trajectories that have ended while their group has not: kept on disk, so that a restart makes none again.

```
 add ─► pending ─ store (in a thread) ─► files ─ note ─► ledger, with its next flush
            │                              │
            └── forget: settled, or its group was faster ──► files freed
```
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby

from async_rl.errors import CorruptFrame, SpoolFull
from async_rl.queue.holdings import LeftGroup
from async_rl.queue.journal_file import Journalled
from async_rl.queue.kept import KeptTrajectories
from async_rl.queue.ledger import GroupRecord, Ledger
from async_rl.types import Trajectory, root_of

log = logging.getLogger(__name__)


class EndedTrajectories:
    """What is kept of groups in flight. All methods belong to the event loop's thread, but for `store`."""

    def __init__(self, ledger: Ledger, kept: KeptTrajectories) -> None:
        """Nothing is pending; files that an earlier process left wait for `recover`."""
        self._ledger = ledger
        self._kept = kept
        self._pending: dict[str, Trajectory] = {}

    @property
    def pending(self) -> list[Trajectory]:
        """Those that are not stored yet, branches right after their trunk."""
        return list(self._pending.values())

    def add(self, tree: Sequence[Trajectory]) -> None:
        """A trajectory has ended, with its branches.

        Raises:
            InvariantError: When one is not in flight.
        """
        for trajectory in tree:
            self._ledger.group_of(trajectory.trajectory_id)
        self._pending |= {trajectory.trajectory_id: trajectory for trajectory in tree}

    def store(self, trajectories: Sequence[Trajectory]) -> list[str]:
        """Write trajectories, each with its branches or neither, until there is no room. From any thread."""
        stored: list[str] = []
        for _, tree in groupby(trajectories, key=lambda trajectory: root_of(trajectory.trajectory_id)):
            whole = len(stored)
            try:
                for trajectory in tree:
                    stored.append(self._kept.put(trajectory))
            except SpoolFull as error:
                log.info("trajectory %s is not kept beside the journal: %s", trajectory.trajectory_id, error)
                self._kept.free(stored[whole:])
                del stored[whole:]
                break
        return stored

    def note(self, stored: Sequence[str]) -> list[str]:
        """Let the ledger know of those that are stored and still count; returns them."""
        kept = [name for name in stored if name in self._pending]
        self._kept.free([name for name in stored if name not in self._pending])  # settled meanwhile
        for name in kept:
            self._finish(self._pending.pop(name), name)
        return kept

    def finish(self, trajectories: Iterable[Trajectory], kept: Collection[str]) -> None:
        """Their group has ended too: none is pending any more, and the ledger knows of all.

        Args:
            trajectories: Of the group.
            kept: Those that the ledger knows of already.
        """
        for trajectory in trajectories:
            self._pending.pop(trajectory.trajectory_id, None)
            if trajectory.trajectory_id not in kept:
                self._finish(trajectory, None)

    def forget(self, trajectory_ids: Iterable[str], files: Collection[str] = ()) -> None:
        """They are settled: nothing of them is kept."""
        for name in trajectory_ids:
            self._pending.pop(name, None)
        self._kept.free(files)

    def recover(self, groups: Iterable[GroupRecord]) -> None:
        """Take up the files that an earlier process left for these groups, and remove all others."""
        self._kept.recover({name for group in groups for name in group.kept.values()})

    def take_up(self, group: GroupRecord, version: int, sampled: Mapping[str, int]) -> LeftGroup:
        """A group in flight as an earlier process left it, with what need not be made again of it.

        A trajectory and its branches are made by one loop: all of them are there, or all are made again.

        Args:
            group: Of the ledger.
            version: What engines serve. Later ones are no more; what is not sampled yet will be by this one.
            sampled: By trajectory, the oldest version that sampled what the journal has of it.
        """
        kept: dict[str, Trajectory] = {}
        for trajectory_id, name in sorted(group.kept.items()):
            try:
                kept[trajectory_id] = self._kept.read(name)
            except CorruptFrame as error:
                log.warning("trajectory %s is made again: %s", trajectory_id, error)
        unfinished = {root_of(name) for name in group.in_flight - kept.keys()}
        ended: dict[str, Trajectory] = {}
        for trajectory_id, name in sorted(group.kept.items()):
            if root_of(trajectory_id) in unfinished:
                self._ledger.lose(trajectory_id)
                self._kept.free([name])
                continue
            trajectory = kept[trajectory_id]
            ended[trajectory_id] = capped = trajectory.capped(version)
            if capped is not trajectory:
                with contextlib.suppress(SpoolFull):  # then the next restart lowers it again
                    self._kept.put(capped)
        versions = [t.oldest_weight_version for t in ended.values()]
        versions += [sampled[name] for name in group.in_flight if name in sampled]
        return LeftGroup(
            group_id=group.group_id,
            task_id=group.task_id,
            position=group.position,
            trajectory_ids=tuple(sorted({root_of(name) for name in group.in_flight})),
            ended=ended,
            attempts=dict(group.attempts),
            oldest=min([version, *(v for v in versions if v is not None)]),
        )

    def _finish(self, trajectory: Trajectory, file: str | None) -> None:
        self._ledger.finish(
            trajectory.trajectory_id,
            segments=len(trajectory.segments),
            tokens=trajectory.num_sampled_tokens,
            reward=trajectory.outcome.reward,
            frame=file,
        )


def oldest_by_root(journalled: Iterable[Journalled]) -> dict[str, int]:
    """The oldest version that sampled a trajectory or one of its branches."""
    oldest: dict[str, int] = {}
    for state in journalled:
        if (version := state.oldest_weight_version) is not None:
            root = root_of(state.trajectory_id)
            oldest[root] = min(version, oldest.get(root, version))
    return oldest
