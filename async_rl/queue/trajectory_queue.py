"""The staleness-bounded queue: groups in, batches out.

```
 admit ─► dispatched ─► (sampling) ─► put ────────► take ─► (a trainer step) ─► settle
   ▲                        │         │ frame,       │ frames of B groups          │ trained once,
   │                        │         │ ledger       │ packed into one             │ frames freed
   │                        ▼         ▼              ▼                             │
   │                 drop_group   ready groups   taken batch                       │
   └──────────── advance: engines serve the next version ◄─────────────────────────┘
```

| call | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| `admit` | a slot of the bound | slots, room in the spool | `advance`, `settle`, drops | leave to dispatch |
| `put` | a finished group | room in the spool, rarely | `settle` | a ready group |
| `take` | B ready groups | the groups that must go first | `put`, drops | a batch frame |

The queue holds references and headers, the payload lies in the spool. What may go when is decided by
`async_rl.staleness`, what of it is trained by `packing`; who owns what is written in the ledger. All methods
belong to the event loop's thread; copying and checking runs in two threads of the queue's own. A cancelled
`put` or `take` has happened or has not, never half of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from async_rl.engine_protocol import EngineFacts
from async_rl.errors import InvariantError, SpoolFull
from async_rl.observability.diagnosis import QueueView
from async_rl.observability.metrics import Metrics
from async_rl.queue.admission import Admission
from async_rl.queue.archive import Observer
from async_rl.queue.ended import EndedTrajectories, oldest_by_root
from async_rl.queue.holdings import InFlight, LeftGroup, QueueStatistics, ReadyGroup, TakenGroups
from async_rl.queue.journal_file import Journalled
from async_rl.queue.kept import KeptTrajectories
from async_rl.queue.ledger import DataPosition, GroupRecord, Ledger
from async_rl.queue.lengths import LengthDrift
from async_rl.queue.packing import Packer, StoredGroup, TakenBatch, age_counts_from
from async_rl.queue.spool import Spool, SpoolRef
from async_rl.runtime.threads import run_uncancellable
from async_rl.runtime.waits import waiting
from async_rl.staleness import Backlog, StalenessPolicy
from async_rl.types import Group, Trajectory, root_of

log = logging.getLogger(__name__)


class TrajectoryQueue:
    """See the module.

    Example:
        >>> if await queue.admit():
        ...     queue.dispatched(group_id, task_id, position, trajectory_ids, version)
        >>> await queue.put(group)
        >>> batch = await queue.take(version)
        >>> queue.settle(batch, step)
        >>> queue.advance(step)
    """

    def __init__(
        self,
        ledger: Ledger,
        spool: Spool,
        *,
        groups_per_batch: int,
        max_staleness: int,
        staleness_policy: StalenessPolicy = "wait",
        min_group_size: int = 1,
        facts: EngineFacts | None = None,
        version: int = 0,
        metrics: Metrics | None = None,
        observer: Observer | None = None,
        retry_task: Callable[[int, str], bool] = lambda position, reason: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over a ledger and a spool.

        Args:
            ledger: Rolled back to the step that the trainer continues from.
            spool: Of the groups; batches get a folder beside them, `batches`.
            groups_per_batch: B.
            max_staleness: η, the hard bound.
            staleness_policy: `wait`, `drop` or `mask_tokens`, see `async_rl.staleness`.
            min_group_size: Masking leaves at least so many trajectories of a group, or the group is dropped.
            facts: Of the model when routing is replayed, else None.
            version: What the trainer holds and the engines serve.
            metrics: Where trajectories and waits are counted.
            observer: Who is told what becomes of trajectories.
            retry_task: Called with the position of a task whose group was lost, and the reason; returns
            whether
                the task will be dispatched again.
            clock: Seconds, monotonic.
        """
        self._ledger = ledger
        self._retry_task = retry_task
        self._observer = observer or Observer()
        self._spool = spool
        self._batches = Spool(spool.directory / "batches", max_bytes=None)
        for left in self._batches.recover().intact:
            self._batches.free(left)  # its groups are still queued
        most = spool.max_bytes
        kept = KeptTrajectories(spool.directory / "ended", None if most is None else most // 4)
        self._ended_early = EndedTrajectories(ledger, kept)
        self._backlog = Backlog(groups_per_batch, max_staleness, staleness_policy)
        self._admission = Admission(self._backlog, spool, version)
        self._packer = Packer(
            spool,
            self._batches,
            max_staleness=max_staleness,
            staleness_policy=staleness_policy,
            min_group_size=min_group_size,
            facts=facts,
            metrics=metrics,
        )
        self.left: list[LeftGroup] = []
        """Groups that an earlier process left in flight, after `restore`; to be made with `resume`."""
        self._clock = clock
        self._in_flight: dict[str, InFlight] = {}
        self._putting: set[str] = set()
        self._ready: dict[str, ReadyGroup] = {}
        self._taken: dict[str, TakenGroups] = {}
        self._packing: frozenset[str] = frozenset()
        self._drift = LengthDrift()
        self._stopped = self._ended = False
        self._changed = asyncio.Event()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="trajectory-queue")
        self._metrics = metrics
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

    def restore(self, journalled: Mapping[str, Journalled] | None = None) -> DataPosition:
        """Take up the groups that an earlier process left; before anything else, blocking.

        A damaged frame settles its group as `corrupt` and makes its position pending; frames that nobody
        owns are freed. Groups in flight are in `left`, as old as what was sampled of them.

        Args:
            journalled: What the journal has of trajectories in flight.

        Returns:
            Where the sequence of tasks continues, with what was damaged.
        """
        found = {Path(ref.path).name: ref for ref in self._spool.recover().intact}
        outstanding = self._ledger.outstanding()
        sampled = oldest_by_root((journalled or {}).values())
        self._ended_early.recover(outstanding)
        for group in outstanding:
            ref = found.pop(group.frame or "", None)
            if not group.queued:
                left = self._ended_early.take_up(group, self._admission.next, sampled)
                self._backlog.dispatch(left.group_id, left.oldest)
                self.left.append(left)
                continue
            if ref is None or not self._holds(ref, group.group_id):
                self._drop(sorted(group.queued), "corrupt")
                if ref is not None:
                    self._spool.free(ref)
                continue
            # Versions above ours were published after the checkpoint and are no more: they count as ours, or
            # as those of an earlier restart's checkpoint.
            ceiling = self._admission.next if group.ceiling is None else group.ceiling
            oldest = min(group.weight_version, ceiling, self._admission.next)
            self._backlog.dispatch(group.group_id, oldest)
            self._make_ready(group.group_id, ref, oldest, counted=False)
        for orphan in found.values():
            self._spool.free(orphan)
        self._give_up_excess()
        self._ledger.flush()
        return self._ledger.data_position()

    def _give_up_excess(self) -> None:
        """Let go of the youngest groups in flight that the spool has no room for, by what is known now.

        The process before may have ended because it knew too late: it would happen again.
        """
        for left in sorted(self.left, key=lambda left: left.oldest, reverse=True):
            if self._admission.holds_all:
                return
            log.warning("group %s in flight is given up: the spool has no room for it", left.group_id)
            self.abandon(left)

    def abandon(self, left: LeftGroup) -> None:
        """A group of `left` cannot be made any more: its position is dispatched anew."""
        self.drop_group(left.group_id, "restart")

    def flush(self) -> None:
        """Write all changes that are not written yet. From any thread.

        Raises:
            AsyncRLError: When the ledger cannot be written.
        """
        self._ledger.flush()

    def resume(self, group_id: str, work: InFlight) -> None:
        """A group of `left` is being made again; see `dispatched`."""
        self._no_longer_left(group_id)
        self._in_flight[group_id] = work

    def _no_longer_left(self, group_id: str) -> None:
        self.left = [left for left in self.left if left.group_id != group_id]

    async def admit(self) -> bool:
        """Wait until one more group may be dispatched; then call `dispatched` before awaiting anything.

        Returns:
            False when nothing is admitted any more.
        """
        begin = self._clock()
        while not (self._stopped or self._ended):
            if self._admission.is_open:
                self._observe("admission", begin)
                return True
            await self._change("admission", self._admission.why)
        return False

    @property
    def admits(self) -> bool:
        """Whether one more group may be dispatched now."""
        return not (self._stopped or self._ended) and self._admission.is_open

    def dispatched(
        self,
        group_id: str,
        task_id: str,
        position: int,
        trajectory_ids: Sequence[str],
        version: int,
        work: InFlight | None = None,
    ) -> None:
        """Take note of an admitted group.

        Args:
            group_id: Unique for ever.
            task_id: Of its task.
            position: Of the task in the sequence of tasks.
            trajectory_ids: Of its siblings, unique for ever.
            version: Nothing in it will be sampled by older weights.
            work: Who makes it; asked for its age and told when it is given up. None is not asked.

        Raises:
            InvariantError: When an id is known already.
        """
        self._ledger.dispatch(group_id, task_id, position, trajectory_ids, version)
        self._backlog.dispatch(group_id, max(version, self._admission.served))
        if work is not None:
            self._in_flight[group_id] = work
        if self._metrics is not None:
            self._metrics.trajectories_dispatched_total.inc(len(trajectory_ids))

    def tried_again(self, trajectory_id: str, attempt: int) -> None:
        """A trajectory in flight failed and is made anew.

        Raises:
            InvariantError: When it is not in flight.
        """
        self._ledger.attempt(trajectory_id, attempt)

    def branched(self, root_id: str, branch_ids: Collection[str]) -> None:
        """A trajectory has ended, with these branches: they are of its group now.

        Others that the ledger knows, of a run that was killed since, have not come about again.

        Raises:
            InvariantError: When it is not in flight.
        """
        known = _with_branches(self._ledger.group_of(root_id), {root_id}) - {root_id}
        if gone := sorted(known - set(branch_ids)):
            self._drop(gone, "restart")
        if new := [branch_id for branch_id in branch_ids if branch_id not in known]:
            self._ledger.branch(root_id, new)
            if self._metrics is not None:
                self._metrics.trajectories_dispatched_total.inc(len(new))

    def ended(self, *tree: Trajectory) -> None:
        """A trajectory has ended, with its branches, its group has not: `keep_ended` stores them unless the
        group is faster.

        Raises:
            InvariantError: When one is not in flight.
        """
        self._ended_early.add(tree)

    async def keep_ended(self) -> list[str]:
        """Store trajectories that have ended before their groups: a restart will not make them again.

        The ledger knows of them with its next `flush`.

        Returns:
            Those that were stored now. Without room they are not: the journal has their tokens.
        """
        ended = self._ended_early.pending
        if not ended:
            return []
        stored, cancelled = await run_uncancellable(self._threads, lambda: self._ended_early.store(ended))
        kept = self._ended_early.note(stored)
        if cancelled is not None:
            raise cancelled
        return kept

    def keep_ended_now(self) -> list[str]:
        """The same in this thread, when nobody else is at work any more."""
        return self._ended_early.note(self._ended_early.store(self._ended_early.pending))

    async def put(self, group: Group) -> None:
        """Store a finished group. Trajectories that failed were dropped before.

        Cancelled, the group is in flight still or queued already.

        Raises:
            InvariantError: When the group is not in flight, or its trajectories are not those in flight.
            SpoolFull: When there is no room, and none will come of a step.
        """
        self._putting.add(group.group_id)
        try:
            await self._put(group)
        finally:
            self._putting.discard(group.group_id)

    async def _put(self, group: Group) -> None:
        record = self._ledger.group(group.group_id)
        trajectory_ids = [t.trajectory_id for t in group.trajectories]
        while True:
            if set(trajectory_ids) != record.in_flight:
                raise InvariantError(
                    f"group {group.group_id} is put with {sorted(trajectory_ids)}, in flight are "
                    f"{sorted(record.in_flight)}"
                )
            try:
                ref, cancelled = await run_uncancellable(self._threads, lambda: self._spool.put(group))
                break
            except SpoolFull:
                if not (self._packing or self._taken or self._backlog.select(self._admission.next)):
                    raise
                await self._change("capacity", self._why_put)
        known = record.weight_version
        oldest, counts_from = (
            group.oldest_weight_version,
            age_counts_from(group, self._backlog.staleness_policy),
        )
        kept = dict(record.kept)
        try:
            self._ended_early.finish(group.trajectories, kept)
            self._ledger.queue(
                group.group_id,
                trajectory_ids,
                version=known if oldest is None else oldest,
                frame=Path(ref.path).name,
                frame_bytes=ref.nbytes,
            )
            self._observer.queued(trajectory_ids)
        except InvariantError:  # dropped while it was written
            self._spool.free(ref)
            raise
        for trajectory in group.trajectories:
            self._drift.ended(trajectory.num_sampled_tokens)
        self._make_ready(group.group_id, ref, known if counts_from is None else counts_from, counted=True)
        self._wake()
        if cancelled is None:
            _, cancelled = await run_uncancellable(self._threads, self._ledger.flush)
        if cancelled is not None:
            raise cancelled  # what was kept is nobody's once the ledger is written: `restore` removes it
        self._ended_early.forget((), kept.values())

    def drop_trajectories(self, trajectory_ids: Sequence[str], reason: str) -> None:
        """Settle trajectories in flight that came to nothing, with their branches. Without any left, the
        group is gone.

        Raises:
            InvariantError: When one is not in flight.
        """
        groups = {group.group_id: group for group in map(self._ledger.group_of, trajectory_ids)}
        if any(group.queued for group in groups.values()):
            raise InvariantError(f"single trajectories of queued groups cannot be dropped: {sorted(groups)}")
        for group_id, group in groups.items():
            dropped = sorted(_with_branches(group, set(trajectory_ids)))
            self._count_ended(group_id, dropped)
            self._drop(dropped, reason)
            if not group.in_flight:
                self._backlog.remove(group_id)
                self._in_flight.pop(group_id, None)
        self._wake()

    def drop_group(
        self, group_id: str, reason: str, *, others: Mapping[str, str] | None = None, retry: bool = False
    ) -> None:
        """Settle what is outstanding of a group that is in flight or ready.

        Args:
            group_id: The group.
            reason: Why.
            others: Trajectories with a reason of their own, which is that of their branches too.
            retry: Its task's position becomes pending: it will be dispatched once more, by this process or
                the next.

        Raises:
            InvariantError: When it is settled, unknown or in a taken batch.
        """
        group = self._ledger.group(group_id)
        if group_id not in self._backlog or group_id in self._packing:
            raise InvariantError(f"group {group_id} is in a batch that the trainer has")
        outstanding = sorted(group.in_flight | group.queued)
        self._count_ended(group_id, group.in_flight)
        for trajectory_id in outstanding:
            own = (others or {}).get(root_of(trajectory_id), reason)
            self._drop([trajectory_id], own, retry=retry)
        self._backlog.remove(group_id)
        self._in_flight.pop(group_id, None)
        self._no_longer_left(group_id)
        ready = self._ready.pop(group_id, None)
        if ready is not None:
            self._ledger.flush()  # nobody may find the group queued in a slab that holds another
            self._spool.free(ready.ref)
        self._wake()

    def give_up(self, group_id: str, reason: str) -> None:
        """Drop a group from outside; whoever still makes it is cancelled.

        Raises:
            InvariantError: As `drop_group`.
        """
        if (work := self._in_flight.get(group_id)) is not None:
            work.cancel()
        self.drop_group(group_id, reason)

    async def take(self, version: int, *, wait: bool = True) -> TakenBatch | None:
        """Wait for the next batch, consumed at `version`, and pack it. One caller at a time.

        Args:
            version: The trainer's.
            wait: Whether to wait for one; else only one is taken that is ready, for which no group in flight
                is given up.

        Returns:
            None when the queue was stopped, when the data has ended and no batch can be filled any more, or
            when there is none and `wait` is off.

        Raises:
            InvariantError: When a trajectory in it would exceed the bound.
            SpoolFull: When the disk has no room for the batch.
        """
        self._admission.next = version
        self._renew_deadlines()
        while not self._stopped:
            if not wait and self._backlog.awaited(version):
                return None  # they would be given up, or waited for
            self._drop_overdue(version)
            chosen = self._backlog.select(version)
            if chosen is not None:
                batch = await self._pack_off_loop(version, chosen)
                if batch is not None:
                    return batch
            elif not wait or (self._ended and not self._backlog.num_in_flight):
                return None
            else:
                await self._change("batch", self._why_take)
        return None

    def settle(self, batch: TakenBatch, step: int) -> None:
        """The step that consumed a batch is done: its trajectories are trained, its frames are freed.

        Raises:
            InvariantError: When the batch was settled before.
        """
        taken = self._taken.pop(batch.batch_id, None)
        if taken is None:
            raise InvariantError(f"batch {batch.batch_id} is settled already, or was never taken")
        self._ledger.train(batch.group_ids, step, batch.batch_id)
        self._observer.trained(batch.trajectory_ids, step)
        self._ledger.flush()  # before a slab can be reused, and before a checkpoint claims the step
        for group in taken.groups:
            self._spool.free(group.ref)
        self._batches.free(taken.ref)
        for length in batch.sampled_lengths:
            self._drift.trained(length)
        if self._metrics is not None:
            self._metrics.trajectories_trained_total.inc(len(batch.trajectory_ids))
        self._wake()

    def published(self, version: int) -> None:
        """Engines are being given a new version."""
        self._ledger.publish(version)

    def committed(self, step: int, keep: int) -> None:
        """The checkpoint of a step is complete, and the `keep` newest ones are kept."""
        self._ledger.commit(step, keep)

    def advance(self, version: int) -> None:
        """All engines that take requests serve this version now; the trainer holds it."""
        self._admission.served = version
        self._admission.next = max(self._admission.next, version)
        self._wake()

    def stop(self) -> None:
        """Admit nothing more and hand out no further batch; what is in flight can still be put."""
        self._stopped = True
        self._wake()

    def end_of_data(self) -> None:
        """Nothing more will be dispatched: `take` returns None once no batch can be filled."""
        self._ended = True
        self._wake()

    @property
    def length_ks(self) -> float | None:
        """How far the lengths of what was trained lately are from those of all that ended: `LengthDrift`."""
        return self._drift.distance

    def statistics(self) -> QueueStatistics:
        """Where everything is, now.

        Raises:
            InvariantError: When the law of conservation does not hold.
        """
        counts = self._ledger.counts()
        return QueueStatistics(
            dispatched=counts.dispatched,
            in_flight=counts.in_flight,
            queued=counts.queued,
            trained=counts.trained,
            dropped=counts.dropped,
            groups_in_flight=self._backlog.num_in_flight,
            groups_ready=self._backlog.num_ready,
            bytes=self._spool.used_bytes,
        )

    def view(self) -> QueueView:
        """For a diagnosis: which groups the next batch waits for."""
        return QueueView(
            num_ready=self._backlog.num_ready,
            groups_per_batch=self._backlog.groups_per_batch,
            in_flight=tuple(self._backlog.in_flight()),
            due=tuple(self._backlog.in_flight(due=self._admission.next)),
            left=tuple(left.group_id for left in self.left),
            admits=self.admits,
        )

    def close(self) -> None:
        """Stop, write what is not written yet, and close the ledger."""
        self.stop()
        self._threads.shutdown()
        self._ledger.close()

    # -- what calls wait for ------------------------------------------------------------------------------

    def _why_put(self) -> str:
        return f"a step must free some of {self._spool.used_bytes} bytes in the spool"

    def _why_take(self) -> str:
        backlog = self._backlog
        if backlog.num_ready < backlog.groups_per_batch:
            return (
                f"{backlog.num_ready} of {backlog.groups_per_batch} groups are ready, "
                f"{backlog.num_in_flight} in flight"
            )
        due = backlog.awaited(self._admission.next)
        return (
            f"{due or 'some'} of {backlog.num_in_flight} groups in flight must go before the "
            f"{backlog.num_ready} ready ones, or they would grow older than {backlog.max_staleness}"
        )

    # -- work off the loop --------------------------------------------------------------------------------

    async def _pack_off_loop(self, version: int, chosen: Sequence[str]) -> TakenBatch | None:
        """Pack these groups, which stay ready until it is done; None when some cannot be trained on."""
        groups = tuple(self._ready[group_id] for group_id in chosen)
        stored = [
            StoredGroup(
                group_id=group.group_id,
                ref=group.ref,
                trajectory_ids=frozenset(self._ledger.group(group.group_id).queued),
                ceiling=self._ledger.group(group.group_id).ceiling,
            )
            for group in groups
        ]
        self._packing = frozenset(chosen)
        try:
            packed, cancelled = await run_uncancellable(
                self._threads, lambda: self._packer.pack(version, stored)
            )
        finally:
            self._packing = frozenset()
        for group_id, reason in packed.unusable.items():
            self._lose(group_id, reason)
        if cancelled is not None:
            if packed.ref is not None:
                self._batches.free(packed.ref)
            raise cancelled
        if packed.batch is None or packed.ref is None:
            return None
        self._hand_out(packed.batch, packed.ref, packed.over_age, groups)
        # Who is due at this version and is not in its batch cannot be in any.
        self._drop_overdue(version + 1)
        return packed.batch

    def _hand_out(
        self, batch: TakenBatch, ref: SpoolRef, over_age: Sequence[str], groups: tuple[ReadyGroup, ...]
    ) -> None:
        """The batch is the trainer's now."""
        if over_age:
            self._drop(over_age, "too_stale")
        if any(not group.counted for group in groups):
            fresh = {group.group_id for group in groups if group.counted}
            for trajectory_id, length in zip(batch.trajectory_ids, batch.sampled_lengths, strict=True):
                if self._ledger.group_of(trajectory_id).group_id not in fresh:
                    self._drift.ended(length)
        for group in groups:
            self._backlog.remove(group.group_id)
            del self._ready[group.group_id]
            self._observe("queue", group.since)
        self._admission.next = batch.trainer_version + 1
        self._taken[batch.batch_id] = TakenGroups(ref=ref, groups=groups)

    # -- deadlines ----------------------------------------------------------------------------------------

    def _renew_deadlines(self) -> None:
        """Look once a version at what groups in flight have really sampled: they may be younger than feared.

        One that has nothing yet to lose will sample by the weights that engines serve now.
        """
        served = self._admission.served
        for group_id in self._backlog.in_flight_until(served + self._backlog.max_staleness - 1):
            if group_id in self._in_flight and group_id not in self._putting:
                oldest = self._in_flight[group_id].oldest()
                self._backlog.renew(group_id, served if oldest is None else oldest)

    def _drop_overdue(self, version: int) -> None:
        """Drop the groups that can be in no batch from `version` on, under `drop` also those being made."""
        for group_id in self._backlog.overdue(version):
            self._lose(group_id, "too_stale")
        if self._backlog.staleness_policy != "drop":
            return
        for group_id in self._backlog.in_flight_until(version - 1):
            work = self._in_flight.get(group_id)
            # One without an age may sample its first token by the next version.
            if work is not None and group_id not in self._putting and work.oldest() is not None:
                work.cancel()
                self._lose(group_id, "too_stale")

    def _lose(self, group_id: str, reason: str) -> None:
        """Drop a group by no fault of its task."""
        position = self._ledger.group(group_id).position
        self.drop_group(group_id, reason, retry=self._retry_task(position, reason))

    # -- small things -------------------------------------------------------------------------------------

    def _make_ready(self, group_id: str, ref: SpoolRef, oldest: int, *, counted: bool) -> None:
        self._backlog.finish(group_id, oldest)
        self._in_flight.pop(group_id, None)
        self._ready[group_id] = ReadyGroup(
            group_id=group_id, ref=ref, oldest=oldest, since=self._clock(), counted=counted
        )
        self._admission.learn(ref.nbytes)

    def _holds(self, ref: SpoolRef, group_id: str) -> bool:
        return ref.kind == Group.__name__ and self._spool.read(ref, Group, verify=False).group_id == group_id

    def _count_ended(self, group_id: str, trajectory_ids: Iterable[str]) -> None:
        """Count trajectories in flight that come to nothing, with the length that they have reached."""
        work = self._in_flight.get(group_id)
        if work is not None:
            lengths = work.lengths()
            for trajectory_id in trajectory_ids:
                self._drift.ended(lengths.get(trajectory_id, 0))

    def _drop(self, trajectory_ids: Sequence[str], reason: str, *, retry: bool = False) -> None:
        groups = {group.group_id: group for group in map(self._ledger.group_of, trajectory_ids)}
        kept = {name: frame for group in groups.values() for name, frame in group.kept.items()}
        self._ledger.drop(trajectory_ids, reason, retry=retry)
        self._observer.dropped(trajectory_ids, reason)
        self._ended_early.forget(trajectory_ids, [kept[name] for name in trajectory_ids if name in kept])
        if self._metrics is not None:
            self._metrics.trajectories_dropped_total.labels(reason=reason).inc(len(trajectory_ids))

    def _observe(self, stage: str, begin: float) -> None:
        if self._metrics is not None:
            self._metrics.stage_wait_seconds.labels(stage=stage).observe(self._clock() - begin)

    def _wake(self) -> None:
        """Let all who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, on: str, why: Callable[[], str]) -> None:
        """Wait until something has changed."""
        with waiting(on, why=why):
            await self._changed.wait()


def _with_branches(group: GroupRecord, trajectory_ids: Collection[str]) -> set[str]:
    """These trajectories in flight and their branches."""
    return {name for name in group.in_flight if root_of(name) in trajectory_ids}
