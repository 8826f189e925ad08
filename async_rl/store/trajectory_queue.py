"""The trajectory queue: takes finished groups from rollouts and gives batches within the staleness bound.

```
 dispatch_group ─► (sampling) ─► put_group ─► next_batch ─► (a trainer step) ─► settle_batch
   ▲                   │          │ frames,     │ references to                  │ trained once,
   │                   ▼          ▼ ledger      ▼ B groups                       │ frames deleted
   │              drop_group   ready groups   taken batch                        │
   └── wait_for_admission ◄── advance_version: engines serve the next version ◄──┘
```

| call | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| `wait_for_admission` | a slot of the bound | slots, spool capacity | `advance_version`, drops | permission |
| `put_group` | a finished group | spool capacity, rarely | `settle_batch` | a ready group |
| `next_batch` | B ready groups | the groups that must go first | `put_group`, drops | references |

The queue holds references with summaries; the data is in the spool. Its parts:

- `admission` applies the bound and the capacity of the spool, by the arithmetic of `async_rl.staleness`;
- `outstanding` follows each group from its dispatch until it is trained or dropped;
- `delivery` makes batches with `packing` and settles them;
- `restored_groups` adds the groups of an earlier process.

All methods are for the event loop's thread; making batches and writing the ledger runs in two threads of
the queue. A cancelled `put_group` or `next_batch` has either happened completely or not at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import msgspec

from async_rl.engine_protocol import EngineFacts
from async_rl.errors import InvariantError, SpoolFull
from async_rl.observability.diagnosis import QueueView
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import TrajectoryCounts
from async_rl.staleness import Backlog, StalenessPolicy
from async_rl.store.admission import Admission, GroupWork
from async_rl.store.archive import Observer
from async_rl.store.delivery import BatchDelivery
from async_rl.store.finished_trajectories import FinishedTrajectories
from async_rl.store.ledger import DataPosition, Ledger
from async_rl.store.lengths import LengthDrift
from async_rl.store.outstanding import ChangeSignal, OutstandingGroups, RestoredGroup
from async_rl.store.packing import Packer
from async_rl.store.progress import ProgressReport
from async_rl.store.restored_groups import GroupRestorer
from async_rl.store.spool import Spool
from async_rl.types import Group, TakenBatch


class QueueStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of trajectories by state, which obey the law of conservation, and numbers of groups."""

    dispatched: int
    in_flight: int
    queued: int
    trained: int
    dropped: dict[str, int]
    groups_in_flight: int
    groups_ready: int
    bytes: int
    """The size of finished groups in the spool, on the node that has the most."""

    @property
    def counts(self) -> TrajectoryCounts:
        """The numbers of trajectories."""
        return TrajectoryCounts(
            dispatched=self.dispatched,
            trained=self.trained,
            in_flight=self.in_flight,
            queued=self.queued,
            dropped=dict(self.dropped),
        )


async def _read_nothing(batch: TakenBatch) -> Mapping[str, str]:
    """Find no flaws, where no trainer reads frames."""
    return {}


class TrajectoryQueue:
    """The queue of groups between the rollout manager and the train loop."""

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
        read_batch: Callable[[TakenBatch], Awaitable[Mapping[str, str]]] = _read_nothing,
        lengths: LengthDrift | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the queue on a ledger and a spool. Call `restore_groups` before anything else.

        Args:
            ledger: The ledger, rolled back to the step that the trainer continues from.
            spool: The spool for finished trajectories.
            groups_per_batch: B.
            max_staleness: η, the hard bound.
            staleness_policy: `wait`, `drop` or `mask_tokens`; `async_rl.staleness` describes them.
            min_group_size: A group is dropped when masking leaves fewer of its trajectories.
            facts: The model's facts when routing is replayed, else None.
            version: The version that the trainer holds and the engines serve.
            metrics: Counts trajectories and waits.
            observer: Receives what becomes of trajectories.
            retry_task: Called with the position of a task whose group was dropped by no fault of its own, and
                the reason; returns whether the task will be dispatched again.
            read_batch: Lets the trainer read the frames of a batch before it has it, as `Trainer.read_batch`.
            lengths: Compares the lengths of trained and of all ended trajectories; None makes one.
            clock: Returns monotonic seconds.
        """
        self._ledger = ledger
        self._spool = spool
        self._clock = clock
        self._stopped = self._data_ended = False
        self._tasks_left = True
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="trajectory-queue")
        self._changes = ChangeSignal()
        self._backlog = Backlog(groups_per_batch, max_staleness, staleness_policy)
        self._admission = Admission(self._backlog, spool, version)
        self.finished = FinishedTrajectories(ledger, spool)
        """Records trajectories that have ended before their groups."""
        self._groups = OutstandingGroups(
            ledger,
            spool,
            self._backlog,
            self._admission,
            self.finished,
            self._changes,
            lengths or LengthDrift(),
            retry_task=retry_task,
            observer=observer or Observer(),
            metrics=metrics,
            clock=clock,
        )
        packer = Packer(
            max_staleness=max_staleness,
            staleness_policy=staleness_policy,
            min_group_size=min_group_size,
            facts=facts,
        )
        self._delivery = BatchDelivery(self._groups, packer, self._threads, read_batch)

    # -- restart ------------------------------------------------------------------------------------------

    def restore_groups(
        self,
        journalled: Mapping[str, ProgressReport] = MappingProxyType({}),
        flaws: Mapping[str, str] = MappingProxyType({}),
    ) -> DataPosition:
        """Restore the groups that an earlier process left; before anything else, blocking.

        A damaged frame settles its group as `corrupt` and makes its position pending; frames that belong to
        no group are freed. Groups in flight are in `restored_groups`, as old as what was sampled of them.

        Args:
            journalled: How far trajectories in flight and their branches are in the journals, by id.
            flaws: What is wrong with frames of groups in flight, by trajectory.

        Returns:
            Where the sequence of tasks continues, including the positions of damaged groups.
        """
        restorer = GroupRestorer(self._ledger, self._spool, self._groups, self._admission, self.finished)
        restorer.restore_groups(journalled, flaws)
        return self._ledger.data_position()

    @property
    def restored_groups(self) -> Sequence[RestoredGroup]:
        """Groups in flight that `resume_group` must continue: of an earlier process, or with lost frames."""
        return self._groups.restored

    def follow_nodes(self) -> None:
        """Let batches go on whose nodes are back, and sample again what was stored on lost nodes.

        Ready groups with lost frames are in `restored_groups` then. Those in flight go on: a later call
        returns them when they are ready.
        """
        self._groups.reopen_lost()
        self._changes.notify_all()

    def resume_group(self, group_id: str, work: GroupWork) -> None:
        """Continue a restored group with the work that samples it."""
        self._groups.resume_group(group_id, work)

    # -- dispatch -----------------------------------------------------------------------------------------

    async def wait_for_admission(self) -> bool:
        """Wait until one more group may be dispatched; then call `dispatch_group` before awaiting anything.

        It ends as well when there is one of `restored_groups`.

        Returns:
            False when nothing is admitted any more.
        """
        begin = self._clock()
        while not (self._stopped or self._data_ended):
            if self._groups.restored:
                return True
            if self._admission.is_open:
                self._groups.observe_wait("admission", begin)
                return True
            await self._changes.wait_for_change("admission", self._admission.why_closed)
        return False

    @property
    def admits(self) -> bool:
        """Whether one more group may be dispatched now."""
        return not (self._stopped or self._data_ended) and self._admission.is_open

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
        self._groups.dispatch_group(group_id, task_id, position, trajectory_ids, version, work)

    def start_attempt(self, trajectory_id: str, attempt: int) -> None:
        """Record that another attempt begins at a trajectory in flight.

        Raises:
            InvariantError: When it is not in flight.
        """
        self._ledger.start_attempt(trajectory_id, attempt)

    def add_branches(self, root_id: str, branch_ids: Collection[str]) -> None:
        """Make the branches of a trajectory that has ended members of its group.

        Branches that the ledger has from an earlier process and that did not occur again are dropped.

        Raises:
            InvariantError: When the trajectory is not in flight.
        """
        self._groups.add_branches(root_id, branch_ids)

    async def put_group(self, group: Group) -> None:
        """Queue a finished group, whose frames are held. Trajectories that failed were dropped before.

        Cancelled, the group is in flight still or queued already.

        Raises:
            InvariantError: When the group is not in flight, or its trajectories are not those in flight.
            SpoolFull: When there is no space, and no step will free any: all groups in flight wait for it.
        """
        with self._groups.being_written(group.group_id):
            trajectory_ids = {trajectory.trajectory_id for trajectory in group.trajectories}
            while True:
                in_flight = self._ledger.group(group.group_id).in_flight
                if trajectory_ids != in_flight:
                    raise InvariantError(
                        f"group {group.group_id} is put with {sorted(trajectory_ids)}, in flight are "
                        f"{sorted(in_flight)}"
                    )
                try:
                    self._spool.put_group(group.trajectories)
                    break
                except SpoolFull as error:
                    # One that is sampled, or will be, may be stored on another node, and fill a batch. After
                    # `stop` the next process queues the group.
                    if self._stopped or self._groups.is_any_sampled or (self.admits and self._tasks_left):
                        await self._wait_for_step()
                    else:
                        await self.wait_for_space(error)
            self.finished.forget_unscored(trajectory_ids)
            # The ledger is written with other changes: a crash before that leaves the group in flight, ended.
            self._groups.queue_group(group.group_id, group.trajectories)

    async def wait_for_space(self, shortage: SpoolFull) -> None:
        """Wait until a step has freed space.

        Raises:
            SpoolFull: The shortage, when no step will free any.
        """
        if not (self._delivery.in_progress or self._backlog.select_batch(self._admission.next)):
            raise SpoolFull(str(shortage)) from None  # it has been waited out
        await self._wait_for_step()

    async def _wait_for_step(self) -> None:
        await self._changes.wait_for_change("capacity", self._admission.why_full)

    # -- drops --------------------------------------------------------------------------------------------

    def drop_trajectories(self, trajectory_ids: Sequence[str], reason: str) -> None:
        """Drop failed trajectories in flight with their branches, and their group if none is left.

        Raises:
            InvariantError: When one is not in flight.
        """
        self._groups.drop_trajectories(trajectory_ids, reason)

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
        self._groups.drop_group(group_id, reason, others=others, retry=retry)

    def cancel_group(self, group_id: str, reason: str) -> None:
        """Drop a group and cancel its work.

        Raises:
            InvariantError: As `drop_group`.
        """
        self._groups.cancel_group(group_id, reason)

    # -- batches ------------------------------------------------------------------------------------------

    async def next_batch(self, version: int, *, wait: bool = True) -> TakenBatch | None:
        """Wait for the next batch, consumed at `version`, and pack it. One caller at a time.

        Args:
            version: The trainer's version.
            wait: Whether to wait for a batch. Otherwise only a batch that is ready is taken, for which no
                group in flight is dropped.

        Returns:
            None when the queue was stopped, when the data has ended and no batch can be filled any more, or
            when there is none and `wait` is off.

        Raises:
            InvariantError: When a trajectory in it would exceed the bound.
            SpoolFull: When the disk has no space for the batch.
        """
        self._admission.next = version
        self._admission.renew_deadlines(self._groups.work)
        while not self._stopped:
            if not wait and self._backlog.awaited(version):
                return None  # they would be dropped, or waited for
            self._groups.drop_overdue(version)
            chosen = self._backlog.select_batch(version)
            absent = self._groups.absent_nodes(chosen or ())
            if chosen is not None and not absent:
                batch = await self._delivery.pack_batch(version, chosen)
                if batch is not None:
                    self._admission.next = batch.trainer_version + 1
                    # A group that is due at this version and is not in its batch cannot be in any.
                    self._groups.drop_overdue(version + 1)
                    return batch
            elif not wait or (self._data_ended and not self._backlog.num_in_flight and not absent):
                return None
            elif absent:
                await self._changes.wait_for_change("node", target=", ".join(absent))
            else:
                await self._changes.wait_for_change("batch", self._admission.why_no_batch)
        return None

    async def settle_batch(self, batch: TakenBatch, step: int) -> asyncio.CancelledError | None:
        """Record that a step has trained a batch: its trajectories are trained, its frames are freed.

        Returns:
            A cancellation that arrived meanwhile. The batch is settled: the caller raises it when its own
            state says so.

        Raises:
            InvariantError: When the batch was settled before.
        """
        cancelled = await self._delivery.settle_batch(batch, step)
        self._changes.notify_all()
        return cancelled

    def record_publication(self, version: int) -> None:
        """Record that engines receive a new version."""
        self._ledger.record_publication(version)

    def record_checkpoint(self, step: int, keep: int) -> None:
        """Record that the checkpoint of a step is complete and that the `keep` newest ones are kept."""
        self._ledger.record_checkpoint(step, keep)

    def advance_version(self, version: int) -> None:
        """Open the slots of a version that the trainer holds and all engines in service have reached."""
        self._admission.served = version
        self._admission.next = max(self._admission.next, version)
        self._changes.notify_all()

    # -- end and status -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Admit nothing more and give no further batch; groups in flight can still be put."""
        self._stopped = True
        self._changes.notify_all()

    def end_data(self) -> None:
        """Note that nothing more will be dispatched: `next_batch` returns None once it can fill no batch."""
        self._data_ended = True
        self._changes.notify_all()

    def set_tasks_left(self, are_left: bool) -> None:
        """Note whether the data has a task for another group now; a group that was dropped may be retried."""
        if are_left is not self._tasks_left:
            self._tasks_left = are_left
            self._changes.notify_all()

    def record_straggling(self) -> None:
        """Record how long groups have waited for their stragglers; the next flush writes it."""
        self._groups.record_straggling()

    def flush_ledger(self, *, durable: bool = False) -> None:
        """Write all changes of the ledger that are not written yet, and free dropped groups. From any thread.

        Args:
            durable: Whether the changes shall survive a power cut; then the ledger is written in any case.

        Raises:
            AsyncRLError: When the ledger cannot be written, or another driver has written it.
        """
        self._groups.flush_ledger(durable=durable)

    def close(self) -> None:
        """Stop, write what is not written yet, and close the ledger."""
        self.stop()
        self._threads.shutdown()
        self.flush_ledger()
        self._ledger.close()

    @property
    def length_ks(self) -> float | None:
        """The distance between the lengths of trained and of all ended trajectories; see `LengthDrift`."""
        return self._groups.lengths.distance

    def statistics(self) -> QueueStatistics:
        """Count trajectories and groups by state.

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
        """Describe for the diagnosis which groups the next batch waits for."""
        return QueueView(
            num_ready=self._backlog.num_ready,
            groups_per_batch=self._backlog.groups_per_batch,
            in_flight=tuple(self._backlog.in_flight()),
            due=tuple(self._backlog.in_flight(self._admission.next)),
            restored=tuple(group.group_id for group in self._groups.restored),
            admits=self.admits,
        )
