"""The trajectory queue: admits groups, takes finished ones, and gives batches within the staleness bound.

```
 wait_for_admission ─► (sampling) ─► put_group ─► next_batch ─► (a trainer step) ─► settle_batch
   ▲                                  │ frames,     │ references to                  │ trained once,
   │                                  ▼ ledger      ▼ B groups                       │ frames deleted
   │                               ready groups    taken batch                       │
   └──────── advance_version: engines serve the next version ◄───────────────────────┘
```

| call | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| `wait_for_admission` | a slot of the bound | slots, spool capacity | `advance_version`, drops | permission |
| `put_group` | a finished group | spool capacity, rarely | `settle_batch` | a ready group |
| `next_batch` | B ready groups | the groups that must go first | `put_group`, drops | references |

The queue decides by references with summaries; the data is in the spool. Its parts:

- `staleness.Backlog` has the deadlines of groups, and decides which may be dispatched and which make a batch;
- `outstanding` owns each group from its dispatch until it is trained or dropped; who samples groups calls it;
- `pack_groups` makes a batch of ready groups, and checks their ages.

All methods are for the event loop's thread; making batches and writing the ledger runs in two threads of
the queue. A cancelled `put_group` or `next_batch` has either happened completely or not at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import msgspec

from async_rl.engine_protocol import EngineFacts
from async_rl.errors import DataError, InvariantError, NodeUnreachable, SpoolFull
from async_rl.observability.diagnosis import QueueView
from async_rl.runtime.reward_values import MAX_REWARD, reward_value
from async_rl.runtime.threads import run_uncancellable
from async_rl.runtime.waits import waiting
from async_rl.staleness import Backlog
from async_rl.store.outstanding import OutstandingGroups
from async_rl.types import Group, StoredTrajectory, TakenBatch, root_of

log = logging.getLogger(__name__)

MAX_DAMAGED_GROUPS: Final = 64
"""The run ends after this many damaged groups without a batch in between."""

MAX_INCOMPLETE_BATCHES: Final = 64
"""The run ends after this many batches in a row whose frames nodes have lost."""


async def _read_nothing(batch: TakenBatch) -> Mapping[str, str]:
    """Find no flaws, where no trainer reads frames."""
    return {}


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of packing: a batch, or the groups that cannot be trained on, with the reason."""

    batch: TakenBatch | None = None
    unusable: Mapping[str, str] = {}
    flaw: str = ""
    """What is wrong with the last one that is damaged."""
    node: str = ""
    """The node that has it; empty: the run's folder has it."""
    missing: Mapping[str, Collection[str]] = {}
    """Trajectories whose nodes have no frames of them any more, by group."""
    too_stale: tuple[str, ...] = ()
    """Trajectories of groups in the batch that are left out: all of their tokens are too old."""


class TrajectoryQueue:
    """The queue of groups between the rollout manager and the train loop."""

    def __init__(
        self,
        groups: OutstandingGroups,
        *,
        min_group_size: int = 1,
        facts: EngineFacts | None = None,
        read_batch: Callable[[TakenBatch], Awaitable[Mapping[str, str]]] = _read_nothing,
    ) -> None:
        """Open the queue on the outstanding groups.

        Args:
            groups: The groups; `groups.backlog` has the bound.
            min_group_size: A group is dropped when masking leaves fewer of its trajectories.
            facts: The model's facts when routing is replayed, else None.
            read_batch: Lets the trainer read the frames of a batch before it has it, as `Trainer.read_batch`.
        """
        self.groups = groups
        self._backlog = groups.backlog
        self._stopped = self._data_ended = False
        self._tasks_left = True
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="trajectory-queue")
        self._pack_groups = partial(
            pack_groups, backlog=groups.backlog, min_group_size=min_group_size, facts=facts
        )
        self._read_batch = read_batch
        self._num_incomplete = 0
        """Batches in a row with frames that nodes have lost."""
        self._num_damaged = 0
        """Damaged groups since the last batch."""
        self._taken: set[str] = set()

    # -- groups -------------------------------------------------------------------------------------------

    async def wait_for_admission(self) -> bool:
        """Wait until one more group may be dispatched; then dispatch it before awaiting anything.

        It ends as well when there is a group to resume in `groups.restored`.

        Returns:
            False when nothing is admitted any more.
        """
        begin = self.groups.clock()
        while not (self._stopped or self._data_ended):
            if self.groups.restored:
                return True
            if self.admits:
                self.groups.observe_wait("admission", begin)
                return True
            await self.groups.changes.wait_for_change("admission", self._why_closed)
        return False

    @property
    def admits(self) -> bool:
        """Whether one more group may be dispatched now."""
        is_open = self._backlog.may_admit() and self.groups.has_space(more=1)
        return is_open and not (self._stopped or self._data_ended)

    async def put_group(self, group: Group) -> None:
        """Queue a finished group, whose frames are held. Trajectories that failed were dropped before.

        Cancelled, the group is in flight still or queued already.

        Raises:
            InvariantError: When the group is not in flight, or its trajectories are not those in flight.
            SpoolFull: When there is no space, and no step will free any: all groups in flight wait for it.
        """
        with self.groups.being_written(group.group_id):
            while True:
                try:
                    self.groups.queue_group(group)
                    return
                except SpoolFull as error:
                    # One that is sampled, or will be, may be stored on another node, and fill a batch. After
                    # `stop` the next process queues the group.
                    if self._stopped or self.groups.is_any_sampled or (self.admits and self._tasks_left):
                        await self._wait_for_step()
                    else:
                        await self.wait_for_space(error)

    async def wait_for_space(self, shortage: SpoolFull) -> None:
        """Wait until a step has freed space.

        Raises:
            SpoolFull: The shortage, when no step will free any.
        """
        if not (self._is_delivering or self._backlog.select_batch(self._backlog.next_version)):
            raise SpoolFull(str(shortage)) from None  # it has been waited out
        await self._wait_for_step()

    async def _wait_for_step(self) -> None:
        await self.groups.changes.wait_for_change("capacity", self._why_full)

    @property
    def _is_delivering(self) -> bool:
        """Whether a batch is being packed or has been taken: its groups will free their frames."""
        return bool(self.groups.claimed or self._taken)

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
        self._backlog.next_version = version
        self.groups.renew_deadlines()
        while not self._stopped:
            if not wait and self._backlog.awaited(version):
                return None  # they would be dropped, or waited for
            self.groups.drop_overdue(version)
            chosen = self._backlog.select_batch(version)
            absent = self.groups.absent_nodes(chosen or ())
            if chosen is not None and not absent:
                batch = await self._pack_batch(version, chosen)
                if batch is not None:
                    self._backlog.next_version = batch.trainer_version + 1
                    # A group that is due at this version and is not in its batch cannot be in any.
                    self.groups.drop_overdue(version + 1)
                    return batch
            elif not wait or (self._data_ended and not self._backlog.num_in_flight and not absent):
                return None
            elif absent:
                await self.groups.changes.wait_for_change("node", target=", ".join(absent))
            else:
                await self.groups.changes.wait_for_change("batch", self._why_no_batch)
        return None

    async def _pack_batch(self, version: int, group_ids: Sequence[str]) -> TakenBatch | None:
        """Pack ready groups and let the trainer read them, which has them afterwards.

        Cancelled, they stay ready.

        Args:
            version: The version that consumes the batch.
            group_ids: The groups, in the order of the batch.

        Returns:
            None when some groups cannot be trained on; these are dropped, or go back in flight when a node
            has lost frames of them. Also when a node that has some of the frames does not answer; the groups
            stay ready.

        Raises:
            DataError: Too many groups in a row are damaged.
            TrainerError: The trainer failed.
        """
        ledger = self.groups.ledger
        stored = {group_id: tuple(ledger.group(group_id).stored.values()) for group_id in group_ids}
        try:
            with self.groups.claim(group_ids):
                packed, cancelled = await run_uncancellable(
                    self._threads, partial(self._pack_groups, version, stored)
                )
                if packed.batch is not None and cancelled is None:
                    with waiting("frames", packed.batch.batch_id):
                        flaws = await self._read_batch(packed.batch)
                        packed = await self._without_damaged(packed, packed.batch, flaws)
        except NodeUnreachable as error:
            log.warning("the batch of version %d waits: %s", version, error)
            self.groups.spool.absent.add(error.node)
            return None
        for group_id, reason in packed.unusable.items():
            self.groups.drop_and_retry(group_id, reason)
        for group_id, root_ids in packed.missing.items():
            self.groups.reopen_group(group_id, root_ids)
        if cancelled is not None:
            raise cancelled
        if packed.batch is None:
            self._num_damaged += sum(reason == "corrupt" for reason in packed.unusable.values())
            if self._num_damaged >= MAX_DAMAGED_GROUPS:
                machine = f"node {packed.node}" if packed.node else "this machine"
                raise DataError(
                    f"{self._num_damaged} finished groups in a row cannot be read back from the spool; the "
                    f"last one: {packed.flaw}; check disk and memory of {machine}, and that only one job "
                    "writes into the run folder"
                )
            self._num_incomplete += bool(packed.missing)
            if self._num_incomplete >= MAX_INCOMPLETE_BATCHES:
                raise DataError(
                    f"in {self._num_incomplete} batches in a row frames were missing that node {packed.node} "
                    "had stored; check its disk, and that nothing else deletes files in queue.spool_dir"
                )
            return None
        self._num_damaged = self._num_incomplete = 0
        self.groups.take_groups(packed.batch, packed.too_stale)
        self._taken.add(packed.batch.batch_id)
        return packed.batch

    async def _without_damaged(self, packed: Packed, batch: TakenBatch, flaws: Mapping[str, str]) -> Packed:
        """Return a packed batch, or its groups with damaged or missing frames where there are some.

        Raises:
            NodeUnreachable: A node does not answer which of these frames it has.
        """
        if not flaws:
            return packed
        flawed = [each for each in batch.trajectories if each.trajectory_id in flaws]
        missing = await asyncio.to_thread(self.groups.spool.nodes.find_missing, flawed)
        groups = dict(zip(batch.trajectory_ids, (batch.group_ids[i] for i in batch.group_index), strict=True))
        unusable: dict[str, str] = {}
        lost: dict[str, set[str]] = {}
        flaw = node = ""
        for each in flawed:
            name, group_id = each.trajectory_id, groups[each.trajectory_id]
            if name in missing:
                lost.setdefault(group_id, set()).add(root_of(name))
                continue
            flaw, node = flaws[name], each.node
            log.warning("trajectory %s cannot be trained on: %s", name, flaw)
            unusable[group_id] = "corrupt"
        if missing:
            nodes = sorted({each.node for each in flawed if each.trajectory_id in missing})
            node = node or nodes[0]
            log.warning("%s no longer have the frames of %d trajectories", ", ".join(nodes), len(missing))
        lost = {group_id: names for group_id, names in lost.items() if group_id not in unusable}
        return Packed(unusable=unusable, flaw=flaw, node=node, missing=lost)

    async def settle_batch(self, batch: TakenBatch, step: int) -> asyncio.CancelledError | None:
        """Record that a step has trained a batch, and delete its frames.

        Returns:
            A cancellation that arrived meanwhile. The batch is settled: the caller raises it when its own
            state says so.

        Raises:
            InvariantError: When the batch was settled before.
            AsyncRLError: When the ledger cannot be written; the batch may or may not be settled.
        """
        if batch.batch_id not in self._taken:
            raise InvariantError(f"batch {batch.batch_id} is settled already, or was never taken")
        self.groups.record_trained(batch, step)
        # Before a checkpoint claims the step.
        flush = partial(self.groups.flush_ledger, durable=True)
        _, cancelled = await run_uncancellable(self._threads, flush)
        self._taken.remove(batch.batch_id)
        self.groups.changes.notify_all()
        return cancelled

    def advance_version(self, version: int) -> None:
        """Open the slots of a version that the trainer holds and all engines in service have reached."""
        self._backlog.served_version = version
        self._backlog.next_version = max(self._backlog.next_version, version)
        self.groups.changes.notify_all()

    # -- end and status -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Admit nothing more and give no further batch; groups in flight can still be put."""
        self._stopped = True
        self.groups.changes.notify_all()

    def end_data(self) -> None:
        """Note that nothing more will be dispatched: `next_batch` returns None once it can fill no batch."""
        self._data_ended = True
        self.groups.changes.notify_all()

    def set_tasks_left(self, are_left: bool) -> None:
        """Note whether the data has a task for another group now; a group that was dropped may be retried."""
        if are_left is not self._tasks_left:
            self._tasks_left = are_left
            self.groups.changes.notify_all()

    def close(self) -> None:
        """Stop, write what is not written yet, and close the ledger."""
        self.stop()
        self._threads.shutdown()
        self.groups.flush_ledger()
        self.groups.ledger.close()

    def view(self) -> QueueView:
        """Describe for the diagnosis which groups the next batch waits for."""
        backlog = self._backlog
        return QueueView(
            num_ready=backlog.num_ready,
            groups_per_batch=backlog.groups_per_batch,
            in_flight=tuple(backlog.in_flight()),
            due=tuple(backlog.in_flight(backlog.next_version)),
            restored=tuple(group.group_id for group in self.groups.restored),
            admits=self.admits,
        )

    def _why_closed(self) -> str:
        """Describe what prevents admission."""
        backlog = self._backlog
        if not backlog.may_admit():
            return (
                f"{backlog.outstanding} groups are outstanding, all that a batch of "
                f"{backlog.groups_per_batch} and a staleness of {backlog.max_staleness} allow while engines "
                f"serve version {backlog.served_version}"
            )
        return self.groups.spool.describe()

    def _why_full(self) -> str:
        """Describe what a finished group waits for that does not fit the spool."""
        return f"a step must free some of {self.groups.spool.used_bytes} bytes in the spool"

    def _why_no_batch(self) -> str:
        """Describe what the next batch waits for."""
        backlog = self._backlog
        if backlog.num_ready < backlog.groups_per_batch:
            return (
                f"{backlog.num_ready} of {backlog.groups_per_batch} groups are ready, "
                f"{backlog.num_in_flight} in flight"
            )
        due = backlog.awaited(backlog.next_version)
        return (
            f"{due or 'some'} of {backlog.num_in_flight} groups in flight must go before the "
            f"{backlog.num_ready} ready ones, or they would grow older than {backlog.max_staleness}"
        )


def pack_groups(
    version: int,
    stored: Mapping[str, Sequence[StoredTrajectory]],
    backlog: Backlog,
    min_group_size: int,
    facts: EngineFacts | None,
) -> Packed:
    """Make a batch of groups, to be consumed at `version`, and leave out what is too old. From any thread.

    It is the final check of the staleness bound: the trainer reads the batches that it makes. Everything is
    decided by the summaries of the trajectories. The ranks that read the frames verify them.

    Args:
        version: The trainer's version.
        stored: The trajectories of each group, in the order of the batch.
        backlog: Its bound and policy say whether older tokens are masked; otherwise there are none.
        min_group_size: A group with fewer trajectories left is not trained.
        facts: The model's facts when routing is replayed, else None.

    Raises:
        InvariantError: When a trained token would exceed the bound.
    """
    oldest = version - backlog.max_staleness if backlog.staleness_policy == "mask_tokens" else None
    unusable, flaw = {}, ""
    trajectories: list[StoredTrajectory] = []
    group_index: list[int] = []
    too_stale: list[str] = []
    for index, (group_id, group) in enumerate(stored.items()):
        try:
            for trajectory in group:
                _check_versions(trajectory, version)
                _check_values(trajectory)
        except DataError as error:
            log.warning("group %s cannot be trained on: %s", group_id, error)
            unusable[group_id], flaw = "corrupt", str(error)
            continue
        usable = tuple(group)
        if oldest is not None:
            usable = tuple(t for t in group if not _is_all_older(t, oldest))
        if len(usable) < len(group):
            if _num_attempts(usable) < min(min_group_size, _num_attempts(group)):
                unusable[group_id] = "too_stale"
            kept = {t.trajectory_id for t in usable}
            too_stale += [t.trajectory_id for t in group if t.trajectory_id not in kept]
        trajectories += usable
        group_index += [index] * len(usable)
    if unusable:
        return Packed(unusable=unusable, flaw=flaw)
    batch = TakenBatch(
        batch_id=f"batch-{version:08d}",
        trainer_version=version,
        group_ids=tuple(stored),
        group_index=tuple(group_index),
        trajectories=tuple(trajectories),
        masked_below=oldest,
        num_experts=0 if facts is None else facts.num_experts,
        moe_layers=() if facts is None else facts.moe_layers,
        top_k=0 if facts is None else facts.top_k,
    )
    _check_ages(batch, backlog.max_staleness)
    return Packed(batch=batch, too_stale=tuple(too_stale))


def _check_ages(batch: TakenBatch, max_staleness: int) -> None:
    for trajectory, age in zip(batch.trajectories, batch.staleness, strict=True):
        if age > max_staleness:
            raise InvariantError(
                f"trajectory {trajectory.trajectory_id}, sampled by version "
                f"{batch.trainer_version - age}, would be trained at {batch.trainer_version}: staleness "
                f"{age} exceeds rollout.max_staleness = {max_staleness}"
            )


def _check_values(trajectory: StoredTrajectory) -> None:
    """Refuse what a trainer could not compute with; a stored group would stop every start of the run.

    Raises:
        DataError: It has no tokens or no reward, or a reward that is not finite in float32.
    """
    name = f"trajectory {trajectory.trajectory_id}"
    if not trajectory.num_tokens:
        raise DataError(f"{name} has no tokens")
    for reward in (trajectory.reward, *(each.reward for each in trajectory.turn_rewards)):
        if reward_value(reward) is None:
            raise DataError(
                f"{name} has the reward {reward!r}, expected a finite number, at most {MAX_REWARD:g}"
            )


def _check_versions(trajectory: StoredTrajectory, trainer_version: int) -> None:
    """Refuse tokens of versions that the trainer has not reached: it would train on them as fresher than any.

    Sessions refuse them when an answer ends; these come from elsewhere, such as an edited run folder.
    """
    newest = trajectory.newest_weight_version
    if newest is not None and newest > trainer_version:
        raise DataError(
            f"trajectory {trajectory.trajectory_id} has tokens of weight version {newest}; the trainer is at "
            f"{trainer_version}"
        )


def _num_attempts(trajectories: Iterable[StoredTrajectory]) -> int:
    """Count a trajectory and its branches as one."""
    return len({root_of(trajectory.trajectory_id) for trajectory in trajectories})


def _is_all_older(trajectory: StoredTrajectory, oldest: int) -> bool:
    newest = trajectory.newest_weight_version
    return newest is not None and newest < oldest
