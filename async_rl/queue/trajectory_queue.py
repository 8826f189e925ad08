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
`async_rl.staleness`; who owns what is written in the ledger. All methods belong to the event loop's thread;
copying and checking runs in two threads of the queue's own. A cancelled `put` or `take` has happened or has
not, never half of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from async_rl.engines.protocol import EngineFacts
from async_rl.errors import AlignmentError, CorruptFrame, InvariantError, SpoolFull
from async_rl.metrics import Metrics
from async_rl.queue import batching
from async_rl.queue.ledger import DataPosition, Ledger
from async_rl.queue.spool import Spool, SpoolRef
from async_rl.routing import invalid_rows
from async_rl.staleness import Backlog, Overage, staleness
from async_rl.types import Group, Trajectory

log = logging.getLogger(__name__)

R = TypeVar("R")


class TakenBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that the trainer may consume, and what is worth knowing of it without reading it.

    Lists are per trajectory, in the order of the batch.
    """

    batch_id: str
    path: str
    """Of the `TrainBatch` frame; valid until the batch is settled."""
    nbytes: int
    trainer_version: int
    group_ids: tuple[str, ...]
    trajectory_ids: tuple[str, ...]
    staleness: tuple[int, ...]
    lengths: tuple[int, ...]
    """Tokens."""
    rewards: tuple[float, ...]
    interruptions: tuple[int, ...]
    resumes: tuple[int, ...]
    num_sampled_tokens: int
    routing_rows: int
    routing_rows_invalid: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all trajectories."""
        return sum(self.lengths)


class QueueStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything is. The first five are trajectories and obey the law of conservation."""

    dispatched: int
    in_flight: int
    queued: int
    trained: int
    dropped: dict[str, int]
    groups_in_flight: int
    groups_ready: int
    bytes: int
    """Of finished groups in the spool."""


class _Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A finished group that waits for its batch."""

    group_id: str
    ref: SpoolRef
    oldest: int
    since: float


class _Packed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of packing: a batch, or the groups whose frames are damaged."""

    batch: TakenBatch | None = None
    ref: SpoolRef | None = None
    corrupt: tuple[str, ...] = ()


class _Taken(msgspec.Struct, frozen=True, kw_only=True):
    ref: SpoolRef
    groups: tuple[_Ready, ...]


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
        overage: Overage = "wait",
        facts: EngineFacts | None = None,
        version: int = 0,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take over a ledger and a spool.

        Args:
            ledger: Rolled back to the step that the trainer continues from.
            spool: Of the groups; batches get a folder beside them, `batches`.
            groups_per_batch: B.
            max_staleness: η, the hard bound.
            overage: `wait` or `drop`, see the config.
            facts: Of the model when routing is replayed, else None.
            version: What the trainer holds and the engines serve.
            metrics: Where trajectories and waits are counted.
            clock: Seconds, monotonic.
        """
        self._ledger = ledger
        self._spool = spool
        self._batches = Spool(spool.directory / "batches", max_bytes=None)
        for left in self._batches.recover().intact:
            self._batches.free(left)  # its groups are still queued
        self._backlog = Backlog(groups_per_batch, max_staleness, overage)
        self._facts = facts
        self._served = version
        self._next = version
        self._clock = clock
        self._ready: dict[str, _Ready] = {}
        self._taken: dict[str, _Taken] = {}
        self._packing: frozenset[str] = frozenset()
        self._largest = 0
        self._stopped = self._ended = False
        self._waits: list[str] = []
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

    def restore(self) -> DataPosition:
        """Take up the groups that an earlier process left queued; before anything else, blocking.

        A damaged frame settles its group as `corrupt` and makes its position pending; frames that nobody
        owns are freed.

        Returns:
            Where the sequence of tasks continues, with what was damaged.
        """
        found = {Path(ref.path).name: ref for ref in self._spool.recover().intact}
        for group in self._ledger.outstanding():
            ref = found.pop(group.frame or "", None)
            if not group.queued:
                raise InvariantError(f"group {group.group_id} is in flight: roll the ledger back first")
            if ref is None or not self._holds(ref, group.group_id):
                self._drop(sorted(group.queued), "corrupt")
                if ref is not None:
                    self._spool.free(ref)
                continue
            # Versions above ours were published after the checkpoint and are no more: they count as new.
            oldest = min(group.weight_version, self._next)
            self._backlog.dispatch(group.group_id, oldest)
            self._make_ready(group.group_id, ref, oldest)
        for orphan in found.values():
            self._spool.free(orphan)
        self._ledger.flush()
        return self._ledger.data_position()

    async def admit(self) -> bool:
        """Wait until one more group may be dispatched; then call `dispatched` before awaiting anything.

        Returns:
            False when nothing is admitted any more.
        """
        begin = self._clock()
        while not (self._stopped or self._ended):
            if self._may_admit():
                self._observe("admission", begin)
                return True
            await self._change("admit")
        return False

    @property
    def admits(self) -> bool:
        """Whether one more group may be dispatched now."""
        return not (self._stopped or self._ended) and self._may_admit()

    def dispatched(
        self, group_id: str, task_id: str, position: int, trajectory_ids: Sequence[str], version: int
    ) -> None:
        """Take note of an admitted group.

        Args:
            group_id: Unique for ever.
            task_id: Of its task.
            position: Of the task in the sequence of tasks.
            trajectory_ids: Of its siblings, unique for ever.
            version: Nothing in it will be sampled by older weights.

        Raises:
            InvariantError: When an id is known already.
        """
        self._ledger.dispatch(group_id, task_id, position, trajectory_ids, version)
        self._backlog.dispatch(group_id, max(version, self._served))
        if self._metrics is not None:
            self._metrics.trajectories_dispatched_total.inc(len(trajectory_ids))

    async def put(self, group: Group) -> None:
        """Store a finished group. Trajectories that failed were dropped before.

        Cancelled, the group is in flight still or queued already.

        Raises:
            InvariantError: When the group is not in flight, or its trajectories are not those in flight.
            SpoolFull: When there is no room, and none will come of a step.
        """
        record = self._ledger.group(group.group_id)
        trajectory_ids = [t.trajectory_id for t in group.trajectories]
        while True:
            if set(trajectory_ids) != record.in_flight:
                raise InvariantError(
                    f"group {group.group_id} is put with {sorted(trajectory_ids)}, in flight are "
                    f"{sorted(record.in_flight)}"
                )
            try:
                ref, cancelled = await self._off_loop(lambda: self._spool.put(group))
                break
            except SpoolFull:
                if not (self._packing or self._taken or self._backlog.select(self._next)):
                    raise
                await self._change("put")
        oldest = group.oldest_weight_version
        if oldest is None:
            oldest = record.weight_version
        try:
            self._ledger.queue(
                group.group_id,
                trajectory_ids,
                version=oldest,
                frame=Path(ref.path).name,
                frame_bytes=ref.nbytes,
            )
        except InvariantError:  # dropped while it was written
            self._spool.free(ref)
            raise
        self._make_ready(group.group_id, ref, oldest)
        self._wake()
        if cancelled is None:
            _, cancelled = await self._off_loop(self._ledger.flush)
        if cancelled is not None:
            raise cancelled

    def drop_trajectories(self, trajectory_ids: Sequence[str], reason: str) -> None:
        """Settle trajectories in flight that came to nothing. Without any left, the group is gone.

        Raises:
            InvariantError: When one is not in flight.
        """
        groups = {group.group_id: group for group in map(self._ledger.group_of, trajectory_ids)}
        if any(group.queued for group in groups.values()):
            raise InvariantError(f"single trajectories of queued groups cannot be dropped: {sorted(groups)}")
        self._drop(trajectory_ids, reason)
        for group_id, group in groups.items():
            if not group.in_flight:
                self._backlog.remove(group_id)
        self._wake()

    def drop_group(self, group_id: str, reason: str) -> None:
        """Settle what is outstanding of a group that is in flight or ready.

        Raises:
            InvariantError: When it is settled, unknown or in a taken batch.
        """
        group = self._ledger.group(group_id)
        if group_id not in self._backlog or group_id in self._packing:
            raise InvariantError(f"group {group_id} is in a batch that the trainer has")
        self._drop(sorted(group.in_flight | group.queued), reason)
        self._backlog.remove(group_id)
        ready = self._ready.pop(group_id, None)
        if ready is not None:
            self._ledger.flush()  # nobody may find the group queued in a slab that holds another
            self._spool.free(ready.ref)
        self._wake()

    async def take(self, version: int) -> TakenBatch | None:
        """Wait for the next batch, consumed at `version`, and pack it. One caller at a time.

        Returns:
            None when the queue was stopped, or when the data has ended and no batch can be filled any more.

        Raises:
            InvariantError: When a trajectory in it would exceed the bound.
            SpoolFull: When the disk has no room for the batch.
        """
        self._next = version
        while not self._stopped:
            for group_id in self._backlog.overdue(version):
                self.drop_group(group_id, "overage")
            chosen = self._backlog.select(version)
            if chosen is not None:
                batch = await self._pack_off_loop(version, chosen)
                if batch is not None:
                    return batch
            elif self._ended and not self._backlog.num_in_flight:
                return None
            else:
                await self._change("take")
        return None

    def settle(self, batch: TakenBatch, step: int) -> None:
        """The step that consumed a batch is done: its trajectories are trained, its frames are freed.

        Raises:
            InvariantError: When the batch was settled before.
        """
        taken = self._taken.pop(batch.batch_id, None)
        if taken is None:
            raise InvariantError(f"batch {batch.batch_id} is settled already, or was never taken")
        self._ledger.train(batch.group_ids, step)
        self._ledger.flush()  # before a slab can be reused, and before a checkpoint claims the step
        for group in taken.groups:
            self._spool.free(group.ref)
        self._batches.free(taken.ref)
        if self._metrics is not None:
            self._metrics.trajectories_trained_total.inc(len(batch.trajectory_ids))
        self._wake()

    def advance(self, version: int) -> None:
        """All engines that take requests serve this version now; the trainer holds it."""
        self._served = version
        self._next = max(self._next, version)
        self._wake()

    def stop(self) -> None:
        """Admit nothing more and hand out no further batch; what is in flight can still be put."""
        self._stopped = True
        self._wake()

    def end_of_data(self) -> None:
        """Nothing more will be dispatched: `take` returns None once no batch can be filled."""
        self._ended = True
        self._wake()

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

    def waiting_for(self) -> str | None:
        """What those who wait in the queue wait for, in words; None when nobody does."""
        sentences = {"admit": self._why_admit, "put": self._why_put, "take": self._why_take}
        return "; ".join(sentences[call]() for call in dict.fromkeys(self._waits)) or None

    def close(self) -> None:
        """Stop, write what is not written yet, and close the ledger."""
        self.stop()
        self._threads.shutdown()
        self._ledger.close()

    # -- decisions ----------------------------------------------------------------------------------------

    def _may_admit(self) -> bool:
        return self._backlog.may_admit(lag=self._next - self._served) and self._has_room()

    def _has_room(self) -> bool:
        """Whether the spool can take what is in flight and one group more, each as large as any so far.

        Groups that the next batch needs are let in whatever they need: without them no room would ever come.
        """
        if self._spool.max_bytes is None or self._backlog.outstanding < self._backlog.groups_per_batch:
            return True
        expected = (self._backlog.num_in_flight + 1) * self._largest
        return self._spool.used_bytes + expected <= self._spool.max_bytes

    def _why_admit(self) -> str:
        backlog = self._backlog
        if not backlog.may_admit(lag=self._next - self._served):
            return (
                f"admit: {backlog.outstanding} groups are outstanding, all that a batch of "
                f"{backlog.groups_per_batch} and a staleness of {backlog.max_staleness} allow while engines "
                f"serve version {self._served}"
            )
        return f"admit: the spool holds {self._spool.used_bytes} of {self._spool.max_bytes} bytes"

    def _why_put(self) -> str:
        return f"put: a step that frees some of {self._spool.used_bytes} bytes in the spool"

    def _why_take(self) -> str:
        backlog = self._backlog
        if backlog.num_ready < backlog.groups_per_batch:
            return (
                f"take: {backlog.num_ready} of {backlog.groups_per_batch} groups are ready, "
                f"{backlog.num_in_flight} in flight"
            )
        due = backlog.awaited(self._next)
        return (
            f"take: {due or 'some'} of {backlog.num_in_flight} groups in flight must go before the "
            f"{backlog.num_ready} ready ones, or they would grow older than {backlog.max_staleness}"
        )

    # -- work off the loop --------------------------------------------------------------------------------

    async def _pack_off_loop(self, version: int, chosen: Sequence[str]) -> TakenBatch | None:
        """Pack these groups, which stay ready until it is done; None when some of them were damaged."""
        groups = tuple(self._ready[group_id] for group_id in chosen)
        self._packing = frozenset(chosen)
        try:
            packed, cancelled = await self._off_loop(lambda: self._pack(version, groups))
        finally:
            self._packing = frozenset()
        for group_id in packed.corrupt:
            self.drop_group(group_id, "corrupt")
        if cancelled is not None:
            if packed.ref is not None:
                self._batches.free(packed.ref)
            raise cancelled
        if packed.batch is None or packed.ref is None:
            return None
        for group in groups:
            self._backlog.remove(group.group_id)
            del self._ready[group.group_id]
            self._observe("queue", group.since)
        self._next = version + 1
        self._taken[packed.batch.batch_id] = _Taken(ref=packed.ref, groups=groups)
        return packed.batch

    def _pack(self, version: int, ready: Sequence[_Ready]) -> _Packed:
        """Read, verify and pack; runs in a thread."""
        groups, corrupt = [], []
        for entry in ready:
            try:
                groups.append(self._spool.read(entry.ref, Group))
                self._check_routing(groups[-1])
            except (CorruptFrame, AlignmentError) as error:
                log.warning("group %s cannot be trained on: %s", entry.group_id, error)
                corrupt.append(entry.group_id)
        if corrupt:
            return _Packed(corrupt=tuple(corrupt))
        trajectories = [t for group in groups for t in group.trajectories]
        ages = tuple(self._age(version, t) for t in trajectories)
        batch_id = f"batch-{version:08d}"
        plan = batching.plan(groups, version, batch_id, self._facts)
        ref = self._batches.put_filled(plan, lambda batch: batching.fill(batch, groups))
        traces = [t.trace for t in trajectories if t.trace is not None]
        batch = TakenBatch(
            batch_id=batch_id,
            path=ref.path,
            nbytes=ref.nbytes,
            trainer_version=version,
            group_ids=tuple(entry.group_id for entry in ready),
            trajectory_ids=plan.trajectory_ids,
            staleness=ages,
            lengths=tuple(t.num_tokens for t in trajectories),
            rewards=tuple(t.outcome.reward or 0.0 for t in trajectories),
            interruptions=tuple(t.outcome.num_interruptions for t in trajectories),
            resumes=tuple(t.outcome.num_resumes for t in trajectories),
            num_sampled_tokens=sum(t.num_sampled_tokens for t in trajectories),
            routing_rows=sum(len(trace.rows) for trace in traces),
            routing_rows_invalid=sum(map(invalid_rows, traces)),
        )
        return _Packed(batch=batch, ref=ref)

    def _check_routing(self, group: Group) -> None:
        """Routing that is not of the model trained here, after a change of it, is as good as damaged."""
        if self._facts is None:
            return
        for trajectory in group.trajectories:
            try:
                batching.check_routing(
                    trajectory, self._facts.moe_layers, self._facts.top_k, self._facts.num_experts
                )
            except AlignmentError as error:
                if self._metrics is not None:
                    self._metrics.replay_rejected_total.labels(error.reason).inc()
                raise

    def _age(self, version: int, trajectory: Trajectory) -> int:
        oldest = trajectory.oldest_weight_version
        age = 0 if oldest is None else staleness(version, oldest)
        if age > self._backlog.max_staleness:
            raise InvariantError(
                f"trajectory {trajectory.trajectory_id}, sampled by version {oldest}, would be trained at "
                f"{version}: staleness {age} exceeds rollout.max_staleness = {self._backlog.max_staleness}"
            )
        return age

    async def _off_loop(self, work: Callable[[], R]) -> tuple[R, asyncio.CancelledError | None]:
        """Run work in a thread to its end, whatever happens; a cancellation meanwhile is returned."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        cancelled = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
        try:
            return future.result(), cancelled
        except Exception as error:
            if cancelled is None:
                raise
            raise cancelled from error

    # -- small things -------------------------------------------------------------------------------------

    def _make_ready(self, group_id: str, ref: SpoolRef, oldest: int) -> None:
        self._backlog.finish(group_id, oldest)
        self._ready[group_id] = _Ready(group_id=group_id, ref=ref, oldest=oldest, since=self._clock())
        self._largest = max(self._largest, ref.nbytes)

    def _holds(self, ref: SpoolRef, group_id: str) -> bool:
        return ref.kind == Group.__name__ and self._spool.read(ref, Group, verify=False).group_id == group_id

    def _drop(self, trajectory_ids: Sequence[str], reason: str) -> None:
        self._ledger.drop(trajectory_ids, reason)
        if self._metrics is not None:
            self._metrics.trajectories_dropped_total.labels(reason=reason).inc(len(trajectory_ids))

    def _observe(self, stage: str, begin: float) -> None:
        if self._metrics is not None:
            self._metrics.stage_wait_seconds.labels(stage=stage).observe(self._clock() - begin)

    def _wake(self) -> None:
        """Let all who wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, call: str) -> None:
        """Wait until something has changed."""
        self._waits.append(call)
        try:
            await self._changed.wait()
        finally:
            self._waits.remove(call)
