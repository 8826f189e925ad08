"""The outstanding groups of the queue: dispatched, and neither trained nor dropped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from async_rl.errors import InvariantError
from async_rl.observability.metrics import Metrics
from async_rl.runtime.waits import waiting
from async_rl.staleness import Backlog
from async_rl.store.admission import Admission, GroupWork
from async_rl.store.archive import Observer
from async_rl.store.finished_trajectories import FinishedTrajectories
from async_rl.store.ledger import GroupRecord, Ledger
from async_rl.store.lengths import LengthDrift
from async_rl.store.packing import StoredGroup, age_counts_from
from async_rl.store.spool import Spool
from async_rl.types import StoredTrajectory, TakenBatch, root_of

log = logging.getLogger(__name__)


class RestoredGroup(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A group in flight that nothing samples: an earlier process left it, or a node with frames was lost."""

    group_id: str
    task_id: str
    position: int
    trajectory_ids: tuple[str, ...]
    """All trajectories in flight, including the finished ones."""
    finished: Mapping[str, StoredTrajectory]
    """The finished trajectories, which are not sampled again."""
    attempts: Mapping[str, int]
    """The number of the current attempt, for trajectories that are not in their first."""
    oldest_version: int
    """The version that the group's age counts from."""
    straggled_s: float = 0.0
    """How long it had waited for its stragglers."""


class ReadyGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A finished group that waits for its batch."""

    group_id: str
    oldest_version: int
    since: float
    counted: bool
    """Whether `LengthDrift` has counted its trajectories; an earlier process counted in its own memory."""


class ChangeSignal:
    """Wakes every call that waits for a change of the queue, so that it checks its condition again."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify_all(self) -> None:
        """Wake all waiting calls."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(
        self, on: str, why: Callable[[], str] | None = None, *, target: str = ""
    ) -> None:
        """Wait for the next `notify_all`; the arguments describe the wait to the diagnosis."""
        with waiting(on, target, why=why):
            await self._changed.wait()


class OutstandingGroups:
    """Follows each group from its dispatch until it is trained or dropped, in memory and in the ledger.

    Invariant: a group is in the backlog as in flight or ready, or belongs to a taken batch. Each change of a
    trajectory's state is counted once, in the ledger, the metrics and the length statistics.
    """

    def __init__(
        self,
        ledger: Ledger,
        spool: Spool,
        backlog: Backlog,
        admission: Admission,
        finished: FinishedTrajectories,
        changes: ChangeSignal,
        lengths: LengthDrift,
        *,
        retry_task: Callable[[int, str], bool],
        observer: Observer,
        metrics: Metrics | None,
        clock: Callable[[], float],
    ) -> None:
        """Start without groups; `restore_in_flight` and `restore_ready` add those of an earlier process.

        Args:
            ledger: Records all states.
            spool: Holds the finished groups.
            backlog: Holds the deadlines.
            admission: Learns the sizes of groups.
            finished: Stores finished trajectories of groups in flight.
            changes: Notified when groups are dropped.
            lengths: Compares the lengths of trained and of all ended trajectories.
            retry_task: Called with the position of a task whose group was dropped by no fault of its own, and
                the reason; returns whether the task will be dispatched again.
            observer: Receives what becomes of trajectories.
            metrics: Counts trajectories and waits.
            clock: Returns monotonic seconds.
        """
        self._ledger = ledger
        self._spool = spool
        self._backlog = backlog
        self._admission = admission
        self._finished = finished
        self._changes = changes
        self._retry_task = retry_task
        self._observer = observer
        self._metrics = metrics
        self._clock = clock
        self.restored: list[RestoredGroup] = []
        """Groups in flight that no work has resumed yet."""
        self._work: dict[str, GroupWork] = {}
        self._writing: set[str] = set()
        self._ready: dict[str, ReadyGroup] = {}
        self._claimed: frozenset[str] = frozenset()
        self.lengths = lengths
        if metrics is not None:
            counts = ledger.counts()
            # After a restart of the trainer they hold what an earlier queue of this process counted.
            metrics.trajectories_dispatched_total.reset()
            metrics.trajectories_trained_total.reset()
            metrics.trajectories_dropped_total.clear()
            metrics.trajectories_dispatched_total.inc(counts.dispatched)
            metrics.trajectories_trained_total.inc(counts.trained)
            for reason, number in counts.dropped.items():
                metrics.trajectories_dropped_total.labels(reason=reason).inc(number)
            # Evaluated at the scrape, and from now on: they add up with the counters at every moment.
            metrics.trajectories_in_flight.set_function(lambda: ledger.counts().in_flight)
            metrics.trajectories_queued.set_function(lambda: ledger.counts().queued)

    # -- groups in flight ---------------------------------------------------------------------------------

    @property
    def work(self) -> Mapping[str, GroupWork]:
        """The groups that are being sampled; those that `put` writes to the spool are not."""
        if not self._writing:
            return self._work
        return {group_id: work for group_id, work in self._work.items() if group_id not in self._writing}

    @property
    def is_any_sampled(self) -> bool:
        """Whether a group in flight is not being written."""
        return not self._writing.issuperset(self._backlog.in_flight())

    def dispatch_group(
        self,
        group_id: str,
        task_id: str,
        position: int,
        trajectory_ids: Sequence[str],
        version: int,
        work: GroupWork | None,
    ) -> None:
        """Add an admitted group.

        Raises:
            InvariantError: When an id is known already.
        """
        self._ledger.dispatch_group(group_id, task_id, position, trajectory_ids, version)
        self._backlog.add_group(group_id, max(version, self._admission.served))
        if work is not None:
            self._work[group_id] = work
        self._count_dispatched(len(trajectory_ids))

    def add_branches(self, root_id: str, branch_ids: Collection[str]) -> None:
        """Make the branches of a trajectory that has ended members of its group.

        Branches that the ledger has from an earlier process and that did not occur again are dropped.

        Raises:
            InvariantError: When the trajectory is not in flight.
        """
        group = self._ledger.group_of(root_id)
        if not branch_ids and not group.has_branches:
            return
        known = _with_branches(group, {root_id}) - {root_id}
        if gone := sorted(known - set(branch_ids)):
            self._settle_dropped(gone, "restart")
        if new := [branch_id for branch_id in branch_ids if branch_id not in known]:
            self._ledger.add_branches(root_id, new)
            self._count_dispatched(len(new))

    def restore_in_flight(self, group: RestoredGroup) -> None:
        """Add a group that an earlier process left in flight."""
        self._backlog.add_group(group.group_id, group.oldest_version)
        self.restored.append(group)

    def resume_group(self, group_id: str, work: GroupWork) -> None:
        """Continue a restored group with the work that samples it."""
        self._remove_restored(group_id)
        self._work[group_id] = work

    def record_straggling(self) -> None:
        """Record in the ledger how long groups have waited for their stragglers."""
        for group_id, work in self.work.items():
            self._ledger.record_straggling(group_id, work.straggled_s())

    @contextmanager
    def being_written(self, group_id: str) -> Iterator[None]:
        """Mark a group as being written while the block runs: it keeps its deadline and is not cancelled."""
        self._writing.add(group_id)
        try:
            yield
        finally:
            self._writing.discard(group_id)

    # -- ready groups -------------------------------------------------------------------------------------

    def queue_group(self, group_id: str, stored: Sequence[StoredTrajectory]) -> None:
        """Make a group ready whose trajectories are stored.

        Raises:
            InvariantError: When the group was dropped while it was written; its frames are discarded.
        """
        versions = [v for entry in stored if (v := entry.oldest_weight_version) is not None]
        counts_from = age_counts_from(stored, self._backlog.staleness_policy)
        try:
            known = self._ledger.group(group_id).weight_version
            self._ledger.queue_group(group_id, stored, version=min(versions, default=known))
        except InvariantError:
            self._spool.discard(stored)
            raise
        self._observer.queued([entry.trajectory_id for entry in stored])
        for entry in stored:
            self.lengths.add_ended(entry.num_sampled_tokens)
        self._make_ready(group_id, known if counts_from is None else counts_from, counted=True)
        self._changes.notify_all()

    def restore_ready(self, group_id: str, oldest: int) -> None:
        """Add a finished group that an earlier process left in the spool."""
        self._backlog.add_group(group_id, oldest)
        self._make_ready(group_id, oldest, counted=False)

    def absent_nodes(self, group_ids: Iterable[str]) -> list[str]:
        """Return the nodes that have frames of ready groups and do not answer."""
        if not (absent := self._spool.absent):
            return []
        stored = (entry for group_id in group_ids for entry in self._ledger.group(group_id).stored.values())
        return sorted({entry.node for entry in stored} & absent)

    def wait_for_node(self, node: str) -> None:
        """Let batches with frames of a node wait until it answers, or is given up."""
        self._spool.absent.add(node)

    def reopen_lost(self) -> None:
        """Return ready groups with frames on lost nodes to `restored`: these trajectories are sampled again.

        The group is as old as before, so it meets its deadline as any group in flight.
        """
        if not (lost := self._spool.lost):
            return
        for group_id in [name for name in self._ready if name not in self._claimed | self._writing]:
            record = self._ledger.group(group_id)
            gone = {root_of(name) for name, entry in record.stored.items() if entry.node in lost}
            if gone:
                self.reopen_group(group_id, gone)

    def find_missing(self, stored: Iterable[StoredTrajectory]) -> set[str]:
        """Return the trajectories whose frames nodes have lost; see `Spool.find_missing`."""
        return self._spool.find_missing(stored)

    def reopen_group(self, group_id: str, root_ids: Collection[str]) -> None:
        """Return a ready group to `restored`: trajectories of it are sampled again, with their branches."""
        group = self._ledger.group(group_id)
        log.warning("group %s lost %d trajectories with their node", group.group_id, len(root_ids))
        if self._metrics is not None:
            self._metrics.attempts_restarted_total.inc(len(root_ids))
        gone = {name for name in group.stored if root_of(name) in root_ids}
        discarded = [group.stored[name] for name in gone]
        self._spool.reopen_group(group.stored.values())
        self._ledger.reopen_group(group.group_id, gone)
        self._spool.discard(discarded)
        oldest = self._ready.pop(group.group_id).oldest_version
        self._backlog.remove_group(group.group_id)
        self.restore_in_flight(
            RestoredGroup(
                group_id=group.group_id,
                task_id=group.task_id,
                position=group.position,
                trajectory_ids=tuple(sorted({root_of(name) for name in group.in_flight})),
                finished=dict(group.stored),
                attempts={},
                oldest_version=oldest,
                straggled_s=group.straggled_s,
            )
        )
        self._changes.notify_all()

    def stored_group(self, group_id: str) -> StoredGroup:
        """Return a ready group as the packer reads it."""
        record = self._ledger.group(group_id)
        ceiling = record.ceiling
        return StoredGroup(
            group_id=group_id,
            trajectories=tuple(
                entry if ceiling is None else entry.capped(ceiling) for entry in record.stored.values()
            ),
        )

    @contextmanager
    def claim(self, group_ids: Sequence[str]) -> Iterator[None]:
        """Prevent that ready groups are dropped while they are packed in the block."""
        self._claimed = frozenset(group_ids)
        try:
            yield
        finally:
            self._claimed = frozenset()

    def take_groups(self, batch: TakenBatch, too_stale: Sequence[str]) -> None:
        """Remove the groups of a packed batch from the ready ones: the trainer has them.

        Args:
            batch: The batch.
            too_stale: Trajectories of its groups that are not in it.
        """
        if too_stale:
            self._settle_dropped(too_stale, "too_stale")
        groups = tuple(self._ready[group_id] for group_id in batch.group_ids)
        if any(not group.counted for group in groups):
            counted = {group.group_id for group in groups if group.counted}
            for trajectory_id, length in zip(batch.trajectory_ids, batch.sampled_lengths, strict=True):
                if self._ledger.group_of(trajectory_id).group_id not in counted:
                    self.lengths.add_ended(length)
        for group in groups:
            self._backlog.remove_group(group.group_id)
            del self._ready[group.group_id]
            self.observe_wait("queue", group.since)

    def record_trained(self, batch: TakenBatch, step: int) -> None:
        """Record that a step has trained a batch; the next flush writes it."""
        self._ledger.train_groups(batch.group_ids, step, batch.batch_id)
        self._observer.trained(batch.trajectory_ids, step)
        if self._metrics is not None:  # at once: a scrape sees the ledger's other counts meanwhile
            self._metrics.trajectories_trained_total.inc(len(batch.trajectory_ids))

    def flush_ledger(self, *, durable: bool = False) -> None:
        """Write all changes of the ledger, then delete the frames of settled trajectories. From any thread.

        In this order, because no restart may find a trajectory outstanding whose frame is gone.

        Args:
            durable: Whether the changes shall survive a power cut.
        """
        self._spool.delete_discarded(before=partial(self._ledger.flush, durable=durable))

    def discard_trained(self, batch: TakenBatch) -> None:
        """Let the frames of a trained batch be deleted by the next flush."""
        self._spool.discard(batch.trajectories)
        for length in batch.sampled_lengths:
            self.lengths.add_trained(length)

    # -- drops --------------------------------------------------------------------------------------------

    def drop_trajectories(self, trajectory_ids: Sequence[str], reason: str) -> None:
        """Drop trajectories in flight with their branches, and their group if none is left.

        Raises:
            InvariantError: When one is not in flight.
        """
        groups = {group.group_id: group for group in map(self._ledger.group_of, trajectory_ids)}
        if any(group.queued for group in groups.values()):
            raise InvariantError(f"single trajectories of queued groups cannot be dropped: {sorted(groups)}")
        for group_id, group in groups.items():
            dropped = sorted(_with_branches(group, set(trajectory_ids)))
            self._count_unfinished(group_id, dropped)
            self._settle_dropped(dropped, reason)
            if not group.in_flight:
                self._backlog.remove_group(group_id)
                self._work.pop(group_id, None)
        self._changes.notify_all()

    def drop_group(
        self, group_id: str, reason: str, *, others: Mapping[str, str] | None = None, retry: bool = False
    ) -> None:
        """Drop a group in flight or ready; see `TrajectoryQueue.drop_group`."""
        group = self._ledger.group(group_id)
        if group_id not in self._backlog or group_id in self._claimed:
            raise InvariantError(f"group {group_id} is in a batch that the trainer has")
        outstanding = sorted(group.in_flight | group.queued)
        self._count_unfinished(group_id, group.in_flight)
        for trajectory_id in outstanding:
            own = (others or {}).get(root_of(trajectory_id), reason)
            self._settle_dropped([trajectory_id], own, retry=retry)
        self._backlog.remove_group(group_id)
        self._work.pop(group_id, None)
        self._remove_restored(group_id)
        self._ready.pop(group_id, None)
        self._changes.notify_all()

    def drop_and_retry(self, group_id: str, reason: str) -> None:
        """Drop a group by no fault of its task, which is dispatched again if it may be."""
        position = self._ledger.group(group_id).position
        self.drop_group(group_id, reason, retry=self._retry_task(position, reason))

    def drop_overdue(self, version: int) -> None:
        """Drop the groups that can be in no batch from `version` on.

        With the policy `drop` these include groups in flight.
        """
        for group_id in self._backlog.overdue(version):
            self.drop_and_retry(group_id, "too_stale")
        for group_id in self._admission.overdue_in_flight(version, self.work):
            self._work[group_id].cancel()
            self.drop_and_retry(group_id, "too_stale")

    def cancel_group(self, group_id: str, reason: str) -> None:
        """Drop a group and stop its work."""
        if (work := self._work.get(group_id)) is not None:
            work.cancel()
        self.drop_group(group_id, reason)

    # -- statistics ---------------------------------------------------------------------------------------

    def observe_wait(self, stage: str, begin: float) -> None:
        """Observe the time since `begin` as spent waiting in a stage."""
        if self._metrics is not None:
            self._metrics.stage_wait_seconds.labels(stage=stage).observe(self._clock() - begin)

    def _count_dispatched(self, number: int) -> None:
        if self._metrics is not None:
            self._metrics.trajectories_dispatched_total.inc(number)

    def _count_unfinished(self, group_id: str, trajectory_ids: Iterable[str]) -> None:
        """Count the lengths that dropped trajectories in flight have reached."""
        work = self._work.get(group_id)
        if work is not None:
            lengths = work.sampled_lengths()
            for trajectory_id in trajectory_ids:
                self.lengths.add_ended(lengths.get(trajectory_id, 0))

    def _make_ready(self, group_id: str, oldest: int, *, counted: bool) -> None:
        self._backlog.finish_group(group_id, oldest)
        self._work.pop(group_id, None)
        self._ready[group_id] = ReadyGroup(
            group_id=group_id, oldest_version=oldest, since=self._clock(), counted=counted
        )
        stored = self._ledger.group(group_id).stored.values()
        self._admission.record_size(sum(entry.nbytes for entry in stored))

    def _settle_dropped(self, trajectory_ids: Sequence[str], reason: str, *, retry: bool = False) -> None:
        groups = {group.group_id: group for group in map(self._ledger.group_of, trajectory_ids)}
        stored = {name: entry for group in groups.values() for name, entry in group.stored.items()}
        self._ledger.drop_trajectories(trajectory_ids, reason, retry=retry)
        self._observer.dropped(trajectory_ids, reason)
        self._finished.discard(trajectory_ids, [stored[name] for name in trajectory_ids if name in stored])
        if self._metrics is not None:
            self._metrics.trajectories_dropped_total.labels(reason=reason).inc(len(trajectory_ids))

    def _remove_restored(self, group_id: str) -> None:
        self.restored = [group for group in self.restored if group.group_id != group_id]


def _with_branches(group: GroupRecord, trajectory_ids: Collection[str]) -> set[str]:
    """Return these trajectories in flight and their branches."""
    return {name for name in group.in_flight if root_of(name) in trajectory_ids}
