"""The outstanding groups: dispatched, and neither trained nor dropped.

```
 dispatch_group ─► finish_tree (each trajectory) ─► queue_group ─► take_groups ─► record_trained
       │                                                │              (a batch)      frames deleted
       └───────────── drop_trajectories, drop_group ────┘
```

Each change goes to the ledger, whose next flush writes it, and to the spool, whose files are deleted after
that. Files were written where their attempts ran: frames, and completions while a group has no rewards.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from async_rl.errors import InvariantError
from async_rl.observability.failures import (
    LABELS,
    SUCCESS,
    describe_answer,
    describe_error,
    kind_of_answer,
    kind_of_error,
)
from async_rl.observability.metrics import Metrics
from async_rl.runtime.waits import waiting
from async_rl.staleness import Backlog, StalenessPolicy
from async_rl.store.archive import Observer
from async_rl.store.ledger import GroupRecord, Ledger
from async_rl.store.lengths import LengthDrift
from async_rl.store.progress import ProgressReport
from async_rl.store.spool import Spool, relocated
from async_rl.types import Group, StoredCompletion, StoredTrajectory, TakenBatch, root_of

log = logging.getLogger(__name__)


class GroupWork(Protocol):
    """A group that is being sampled, as the queue sees it."""

    def oldest_version(self) -> int | None:
        """The version that the group's age counts from so far; None while nothing fixes it.

        `rollout.staleness_policy` defines it: the version of the oldest token or, with `mask_tokens`, the
        smallest of the newest versions of the trajectories that have ended.
        """
        ...

    def sampled_lengths(self) -> Mapping[str, int]:
        """Tokens sampled so far, by trajectory."""
        ...

    def straggled_s(self) -> float:
        """How long the group has waited for its stragglers, in this process and earlier ones."""
        ...

    def cancel(self) -> None:
        """Stop sampling. The queue has dropped the group and expects no more calls for it."""
        ...


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
    """Owns each group from its dispatch until it is trained or dropped; writes the ledger and the spool.

    Invariant: a group is in the backlog as in flight or ready, or belongs to a taken batch. Each change of a
    trajectory's state is counted once, in the ledger, the metrics and the length statistics.

    All methods are for the event loop's thread, except `flush_ledger`.
    """

    def __init__(
        self,
        ledger: Ledger,
        spool: Spool,
        backlog: Backlog,
        metrics: Metrics,
        *,
        retry_task: Callable[[int, str], bool] = lambda position, reason: False,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        pass_reward: float = 1.0,
        result_lag: int | None = None,
    ) -> None:
        """Start without groups. Call `restore_groups` before anything else.

        Args:
            ledger: Records all states; rolled back to the step that the trainer continues from.
            spool: Holds the frames of trajectories that have ended.
            backlog: Holds the deadlines and the versions that they depend on.
            metrics: Counts trajectories and waits.
            retry_task: Called with the position of a task whose group was dropped by no fault of its own, and
                the reason; returns whether the task will be dispatched again.
            observer: Receives what becomes of trajectories.
            clock: Returns monotonic seconds.
            pass_reward: The least reward of an attempt that succeeds.
            result_lag: The number of positions after which draws count the result of a group; None records no
                results.
        """
        self._result_lag = result_lag
        self.ledger = ledger
        self.spool = spool
        self.backlog = backlog
        self.lengths = LengthDrift()
        """Compares the lengths of trained and of all ended trajectories."""
        self.metrics = metrics
        self.changes = ChangeSignal()
        """Notified when a group is queued, dropped or restored."""
        self.restored: list[GroupRecord] = []
        """Groups in flight that `resume_group` must continue: of an earlier process, or with lost frames."""
        self.claimed: frozenset[str] = frozenset()
        """Ready groups that are being packed: they are not dropped."""
        self._retry_task = retry_task
        self._observer = observer or Observer()
        self._pass_reward = pass_reward
        self.clock = clock
        self._work: dict[str, GroupWork] = {}
        self._writing: set[str] = set()
        self._ready: dict[str, float] = {}  # when they became ready
        self._unscored: dict[str, tuple[StoredTrajectory, StoredCompletion]] = {}
        _count_from_ledger(metrics, ledger)

    # -- restart ------------------------------------------------------------------------------------------

    def restore_groups(
        self,
        journalled: Mapping[str, ProgressReport] = MappingProxyType({}),
        flaws: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Restore the groups that an earlier process left; before anything else, blocking.

        Frames of ready groups are verified with their batch, those of groups in flight before: a damaged one
        is sampled again beside its siblings. Frames that belong to no group are deleted. Groups in flight are
        in `restored`, as old as what was sampled of them.

        Args:
            journalled: How far trajectories in flight and their branches are in the journals, by id.
            flaws: What is wrong with frames of groups in flight, by trajectory.
        """
        outstanding = self.ledger.outstanding()
        for group in outstanding:  # the run's folder may have been moved
            group.stored = {
                name: relocated(entry, self.spool.directory) for name, entry in group.stored.items()
            }
        self.spool.recover_frames(
            early=[entry for group in outstanding if not group.queued for entry in group.stored.values()],
            used=[tuple(group.stored.values()) for group in outstanding if group.queued],
        )
        sampled = oldest_by_root(journalled)
        version = self.backlog.next_version
        for group in outstanding:
            if not group.queued:
                self._recover_trajectories(group, flaws)
            known = [trajectory.oldest_weight_version for trajectory in group.stored.values()]
            known += [sampled[name] for name in group.in_flight if name in sampled]
            oldest = min([version, *(each for each in known if each is not None)])
            self.backlog.add_group(group.group_id, oldest)
            if group.queued:
                self._make_ready(group, min(oldest, group.weight_version))
            else:
                self.restored.append(group)
        self._drop_excess()
        self.flush_ledger()

    def _recover_trajectories(self, group: GroupRecord, flaws: Mapping[str, str]) -> None:
        """Keep the finished trajectories of a group in flight whose frames are intact.

        A trajectory and its branches are made by one agent loop: if any of them is missing or damaged, all of
        them are sampled again.
        """
        for trajectory_id in group.stored.keys() & flaws.keys():
            log.warning("trajectory %s is sampled again: %s", trajectory_id, flaws[trajectory_id])
        unfinished = {root_of(name) for name in group.in_flight - (group.stored.keys() - flaws.keys())}
        for trajectory_id, stored in sorted(group.stored.items()):
            if root_of(trajectory_id) in unfinished:
                self.ledger.record_unfinished(trajectory_id)
                self.spool.discard([stored])

    def _drop_excess(self) -> None:
        """Drop the youngest groups in flight that the spool has no space for.

        The earlier process may have ended for lack of space because it learned the size of its groups too
        late; restoring all of them would repeat this.
        """
        oldest = self.backlog.oldest_version
        for group in sorted(self.restored, key=lambda group: oldest(group.group_id), reverse=True):
            if self.has_space():
                return
            log.warning("group %s in flight is dropped: the spool has no space for it", group.group_id)
            self.drop_group(group.group_id, "restart")

    # -- groups in flight ---------------------------------------------------------------------------------

    def has_space(self, more: int = 0) -> bool:
        """Whether the spool can hold the groups in flight and `more` of them.

        Groups that the next batch needs have space whatever they need: no space would come free otherwise.
        """
        backlog = self.backlog
        is_needed = backlog.outstanding + more <= backlog.groups_per_batch
        return is_needed or self.spool.fits_groups(backlog.num_in_flight + more)

    @property
    def is_any_sampled(self) -> bool:
        """Whether a group in flight is not being written."""
        return not self._writing.issuperset(self.backlog.in_flight())

    def dispatch_group(
        self,
        group_id: str,
        task_id: str,
        position: int,
        trajectory_ids: Sequence[str],
        version: int,
        work: GroupWork | None = None,
    ) -> None:
        """Add an admitted group.

        Args:
            group_id: The id of the group, unique for ever.
            task_id: The id of its task.
            position: The position of the task in the sequence of tasks.
            trajectory_ids: The ids of its trajectories, unique for ever.
            version: No token of the group will be sampled by older weights.
            work: Reports the age of the group and is cancelled when the group is dropped. None has no age.

        Raises:
            InvariantError: When an id is known already.
        """
        self.ledger.record_dispatch(group_id, task_id, position, trajectory_ids, version)
        self.backlog.add_group(group_id, max(version, self.backlog.served_version))
        if work is not None:
            self._work[group_id] = work
        self.metrics.trajectories_dispatched_total.inc(len(trajectory_ids))

    def resume_group(self, group_id: str, work: GroupWork) -> None:
        """Continue a restored group with the work that samples it."""
        self._remove_restored(group_id)
        self._work[group_id] = work

    def finish_tree(
        self, *tree: StoredTrajectory, completions: Mapping[str, StoredCompletion] = MappingProxyType({})
    ) -> None:
        """Add a trajectory that has ended before its group, with its branches; the next flush records them.

        Branches that the ledger has from an earlier process and that did not occur again are dropped.

        Args:
            tree: The trajectory and its branches.
            completions: What those without a reward will be scored for, by trajectory. They are not recorded:
                after a restart their attempt runs again from the journal, because the whole group is scored
                by one call.

        Raises:
            InvariantError: When one is not in flight.
        """
        root_id = root_of(tree[0].trajectory_id)
        self._add_branches(root_id, [each.trajectory_id for each in tree if each.trajectory_id != root_id])
        for trajectory in tree:
            name = trajectory.trajectory_id
            if (completion := completions.get(name)) is None:
                self.ledger.record_finished(trajectory)
            else:
                self.ledger.group_of(name)
                self._unscored[name] = trajectory, completion

    def _add_branches(self, root_id: str, branch_ids: Collection[str]) -> None:
        group = self.ledger.group_of(root_id)
        if not branch_ids and not group.has_branches:
            return
        known = _with_branches(group, {root_id}) - {root_id}
        if gone := sorted(known - set(branch_ids)):
            self._settle_dropped(gone, "restart")
        if new := [branch_id for branch_id in branch_ids if branch_id not in known]:
            self.ledger.record_branches(root_id, new)
            self.metrics.trajectories_dispatched_total.inc(len(new))

    def discard_unscored(self) -> None:
        """Discard all trajectories that are not recorded, when nothing will score them any more."""
        for files in self._unscored.values():
            self.spool.discard(files)
        self._unscored.clear()

    def record_straggling(self) -> None:
        """Record in the ledger how long groups have waited for their stragglers."""
        for group_id, work in self._sampled().items():
            self.ledger.record_straggling(group_id, work.straggled_s())

    def renew_deadlines(self) -> None:
        """Postpone the deadlines of groups that have sampled nothing as old as was assumed at their dispatch.

        A group whose age is not fixed yet will sample by the weights that engines serve now.
        """
        backlog, work = self.backlog, self._sampled()
        for group_id in backlog.in_flight(backlog.served_version + backlog.max_staleness - 1):
            if group_id in work:
                oldest = work[group_id].oldest_version()
                backlog.renew_deadline(group_id, backlog.served_version if oldest is None else oldest)

    @contextmanager
    def being_written(self, group_id: str) -> Iterator[None]:
        """Mark a group as being written while the block runs: it keeps its deadline and is not cancelled."""
        self._writing.add(group_id)
        try:
            yield
        finally:
            self._writing.discard(group_id)

    def _sampled(self) -> Mapping[str, GroupWork]:
        """Return the groups that are being sampled; those that are being written are not."""
        if not self._writing:
            return self._work
        return {group_id: work for group_id, work in self._work.items() if group_id not in self._writing}

    # -- ready groups -------------------------------------------------------------------------------------

    def queue_group(self, group: Group) -> None:
        """Make a group ready whose trajectories have all ended, and keep only their frames.

        Raises:
            InvariantError: When the group is not in flight, or its trajectories are not those in flight.
            SpoolFull: When there is no space; then nothing has changed.
        """
        record, stored = self.ledger.group(group.group_id), group.trajectories
        trajectory_ids = [entry.trajectory_id for entry in stored]
        if record.in_flight != set(trajectory_ids):
            raise InvariantError(
                f"group {group.group_id} is queued with {sorted(trajectory_ids)}, in flight are "
                f"{sorted(record.in_flight)}"
            )
        self.spool.use_group(stored)
        for name in trajectory_ids:
            self.spool.discard(self._unscored.pop(name, ())[1:])
        known = record.weight_version
        versions = [v for entry in stored if (v := entry.oldest_weight_version) is not None]
        counts_from = age_counts_from(stored, self.backlog.staleness_policy)
        # The ledger is written with other changes: a crash before that leaves the group in flight, ended.
        self.ledger.record_queued(group.group_id, stored, version=min(versions, default=known))
        self._observer.queued(trajectory_ids)
        self._make_ready(record, known if counts_from is None else counts_from)
        self.changes.notify_all()

    def absent_nodes(self, group_ids: Iterable[str]) -> list[str]:
        """Return the nodes that have frames of ready groups and do not answer."""
        if not (absent := self.spool.absent):
            return []
        stored = (entry for group_id in group_ids for entry in self.ledger.group(group_id).stored.values())
        return sorted({entry.node for entry in stored} & absent)

    def follow_nodes(self) -> None:
        """Let batches go on whose nodes are back, and sample again what was stored on lost nodes.

        Ready groups with lost frames are in `restored` then. Those in flight go on: a later call returns them
        when they are ready.
        """
        if lost := self.spool.nodes.lost:
            for group_id in [name for name in self._ready if name not in self.claimed]:
                stored = self.ledger.group(group_id).stored
                if gone := {root_of(name) for name, entry in stored.items() if entry.node in lost}:
                    self.reopen_group(group_id, gone)
        self.changes.notify_all()

    def reopen_group(self, group_id: str, root_ids: Collection[str]) -> None:
        """Return a ready group to `restored`: trajectories of it are sampled again, with their branches.

        The group is as old as before, so it meets its deadline as any group in flight.
        """
        group = self.ledger.group(group_id)
        log.warning("group %s lost %d trajectories with their node", group_id, len(root_ids))
        self.metrics.attempts_restarted_total.inc(len(root_ids))
        gone = {name for name in group.stored if root_of(name) in root_ids}
        discarded = [group.stored[name] for name in gone]
        self.spool.reopen_group(group.stored.values())
        self.ledger.record_reopened(group_id, gone)
        self.spool.discard(discarded)
        del self._ready[group_id]
        oldest = self.backlog.oldest_version(group_id)
        self.backlog.remove_group(group_id)
        self.backlog.add_group(group_id, oldest)
        self.restored.append(group)
        self.changes.notify_all()

    @contextmanager
    def claim(self, group_ids: Sequence[str]) -> Iterator[None]:
        """Prevent that ready groups are dropped while they are packed in the block."""
        self.claimed = frozenset(group_ids)
        try:
            yield
        finally:
            self.claimed = frozenset()

    def take_groups(self, batch: TakenBatch, too_stale: Sequence[str]) -> None:
        """Remove the groups of a packed batch from the ready ones: the trainer has them.

        Args:
            batch: The batch.
            too_stale: Trajectories of its groups that are not in it.
        """
        if too_stale:
            self._settle_dropped(too_stale, "too_stale")
        for group_id in batch.group_ids:
            self.backlog.remove_group(group_id)
            self.observe_wait("queue", self._ready.pop(group_id))

    def record_attempt_end(self, attempt: int, end: StoredTrajectory | Exception, trajectory_id: str) -> None:
        """Count an attempt by how it ended.

        Args:
            attempt: Its number, from 1.
            end: The scored trajectory, or the error that ended the attempt.
            trajectory_id: The id of the trajectory.
        """
        if isinstance(end, StoredTrajectory):
            kind, error = kind_of_answer(end, self._pass_reward), describe_answer(end)
        else:
            kind, error = kind_of_error(end), describe_error(end)
        self.ledger.record_attempt_end(kind, trajectory_id, attempt, error)
        self.metrics.attempts_total.labels(kind or SUCCESS).inc()

    def record_result(self, group_id: str, trajectories: Iterable[StoredTrajectory]) -> None:
        """Record for later draws how many attempts of a group were scored and passed, if the run draws so."""
        if self._result_lag is None:
            return
        rewards = [
            each.reward
            for each in trajectories
            if each.reward is not None and root_of(each.trajectory_id) == each.trajectory_id
        ]
        passed = sum(reward >= self._pass_reward for reward in rewards)
        self.ledger.record_result(group_id, len(rewards), passed, self._result_lag)

    def record_trained(self, batch: TakenBatch, step: int) -> None:
        """Record that a step has trained a batch; the next flush writes it, then deletes its frames."""
        self.ledger.record_trained(batch.group_ids, step, batch.batch_id)
        self._observer.trained(batch.trajectory_ids, step)
        # At once: a scrape sees the ledger's other counts meanwhile.
        self.metrics.trajectories_trained_total.inc(len(batch.trajectory_ids))
        self.spool.discard(batch.trajectories)
        for length in batch.sampled_lengths:
            self.lengths.add_trained(length)

    def flush_ledger(self, *, durable: bool = False) -> None:
        """Write all changes of the ledger, then delete the frames of settled trajectories. From any thread.

        In this order, because no restart may find a trajectory outstanding whose frame is gone.

        Args:
            durable: Whether the changes shall survive a power cut; then the ledger is written in any case.

        Raises:
            AsyncRLError: When the ledger cannot be written, or another driver has written it.
        """
        self.spool.delete_discarded(before=partial(self.ledger.flush, durable=durable))

    # -- drops --------------------------------------------------------------------------------------------

    def drop_trajectories(self, trajectory_ids: Sequence[str], reason: str) -> None:
        """Drop failed trajectories in flight with their branches, and their group if none is left.

        Raises:
            InvariantError: When one is not in flight.
        """
        groups = {group.group_id: group for group in map(self.ledger.group_of, trajectory_ids)}
        if any(group.queued for group in groups.values()):
            raise InvariantError(f"single trajectories of queued groups cannot be dropped: {sorted(groups)}")
        for group_id, group in groups.items():
            dropped = sorted(_with_branches(group, set(trajectory_ids)))
            self._count_unfinished(group_id, dropped)
            self._settle_dropped(dropped, reason)
            if not group.in_flight:
                self.backlog.remove_group(group_id)
                self._work.pop(group_id, None)
        self.changes.notify_all()

    def drop_group(
        self, group_id: str, reason: str, *, others: Mapping[str, str] | None = None, retry: bool = False
    ) -> None:
        """Drop the outstanding trajectories of a group that is in flight or ready.

        Args:
            group_id: The group.
            reason: Why.
            others: Trajectories with another reason, which is also that of their branches.
            retry: Whether the position of the task becomes pending: it will be dispatched once more, by this
                process or the next.

        Raises:
            InvariantError: When the group is settled, unknown or in a taken batch.
        """
        group = self.ledger.group(group_id)
        if group_id not in self.backlog or group_id in self.claimed:
            raise InvariantError(f"group {group_id} is in a batch that the trainer has")
        outstanding = sorted(group.in_flight | group.queued)
        self._count_unfinished(group_id, group.in_flight)
        for trajectory_id in outstanding:
            own = (others or {}).get(root_of(trajectory_id), reason)
            self._settle_dropped([trajectory_id], own, retry=retry)
        self.backlog.remove_group(group_id)
        self._work.pop(group_id, None)
        self._remove_restored(group_id)
        self._ready.pop(group_id, None)
        self.changes.notify_all()

    def drop_and_retry(self, group_id: str, reason: str) -> None:
        """Drop a group by no fault of its task, which is dispatched again if it may be."""
        position = self.ledger.group(group_id).position
        self.drop_group(group_id, reason, retry=self._retry_task(position, reason))

    def drop_overdue(self, version: int) -> None:
        """Drop the groups that can be in no batch from `version` on.

        With the policy `drop` these include groups in flight.
        """
        for group_id in self.backlog.overdue(version):
            self.drop_and_retry(group_id, "too_stale")
        if self.backlog.staleness_policy != "drop":
            return
        sampled = self._sampled()
        for group_id in self.backlog.in_flight(version - 1):
            # A group without an age may sample its first token by the next version.
            if group_id in sampled and sampled[group_id].oldest_version() is not None:
                self._work[group_id].cancel()
                self.drop_and_retry(group_id, "too_stale")

    def cancel_group(self, group_id: str, reason: str) -> None:
        """Drop a group and stop its work.

        Raises:
            InvariantError: As `drop_group`.
        """
        if (work := self._work.get(group_id)) is not None:
            work.cancel()
        self.drop_group(group_id, reason)

    # -- statistics ---------------------------------------------------------------------------------------

    def observe_wait(self, stage: str, begin: float) -> None:
        """Observe the time since `begin` as spent waiting in a stage."""
        self.metrics.stage_wait_seconds.labels(stage=stage).observe(self.clock() - begin)

    def _count_unfinished(self, group_id: str, trajectory_ids: Iterable[str]) -> None:
        """Count the lengths that dropped trajectories in flight have reached."""
        work = self._work.get(group_id)
        if work is not None:
            lengths = work.sampled_lengths()
            for trajectory_id in trajectory_ids:
                self.lengths.add_ended(lengths.get(trajectory_id, 0))

    def _make_ready(self, group: GroupRecord, oldest: int) -> None:
        self.backlog.finish_group(group.group_id, oldest)
        self._work.pop(group.group_id, None)
        self._ready[group.group_id] = self.clock()
        for entry in group.stored.values():
            self.lengths.add_ended(entry.num_sampled_tokens)

    def _settle_dropped(self, trajectory_ids: Sequence[str], reason: str, *, retry: bool = False) -> None:
        groups = {group.group_id: group for group in map(self.ledger.group_of, trajectory_ids)}
        stored = {name: entry for group in groups.values() for name, entry in group.stored.items()}
        self.ledger.record_dropped(trajectory_ids, reason, retry=retry)
        self._observer.dropped(trajectory_ids, reason)
        for name in trajectory_ids:
            self.spool.discard(self._unscored.pop(name, ()))
        self.spool.discard(stored[name] for name in trajectory_ids if name in stored)
        self.metrics.trajectories_dropped_total.labels(reason=reason).inc(len(trajectory_ids))

    def _remove_restored(self, group_id: str) -> None:
        self.restored = [group for group in self.restored if group.group_id != group_id]


def _with_branches(group: GroupRecord, trajectory_ids: Collection[str]) -> set[str]:
    """Return these trajectories in flight and their branches."""
    return {name for name in group.in_flight if root_of(name) in trajectory_ids}


def _count_from_ledger(metrics: Metrics, ledger: Ledger) -> None:
    """Set the counters to what the ledger has: an earlier process, or an earlier trainer, has counted too."""
    counts = ledger.counts()
    metrics.trajectories_dispatched_total.reset()
    metrics.trajectories_trained_total.reset()
    metrics.trajectories_dropped_total.clear()
    metrics.attempts_total.clear()
    metrics.trajectories_dispatched_total.inc(counts.dispatched)
    metrics.trajectories_trained_total.inc(counts.trained)
    for reason, number in counts.dropped.items():
        metrics.trajectories_dropped_total.labels(reason=reason).inc(number)
    for kind in (SUCCESS, *LABELS):
        metrics.attempts_total.labels(kind).inc(ledger.attempts.numbers[kind])
    # Evaluated at the scrape, and from now on: they add up with the counters at every moment.
    metrics.trajectories_in_flight.set_function(lambda: ledger.counts().in_flight)
    metrics.trajectories_queued.set_function(lambda: ledger.counts().queued)


def age_counts_from(
    trajectories: Iterable[StoredTrajectory], staleness_policy: StalenessPolicy
) -> int | None:
    """Return the version that the age of a finished group counts from; None when nothing was sampled.

    It is the version of the oldest token or, where old tokens are masked, that of the token with which the
    first of its trajectories would lose its last trained one.
    """
    mask = staleness_policy == "mask_tokens"
    versions = (t.newest_weight_version if mask else t.oldest_weight_version for t in trajectories)
    return min((version for version in versions if version is not None), default=None)


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


def oldest_by_root(journalled: Mapping[str, ProgressReport]) -> dict[str, int]:
    """Return the oldest version that sampled a trajectory or one of its branches, by trajectory."""
    oldest: dict[str, int] = {}
    for name, progress in journalled.items():
        if (version := progress.oldest_version) is not None:
            root = root_of(name)
            oldest[root] = min(version, oldest.get(root, version))
    return oldest
