"""The state of every trajectory, in SQLite, so that a crash at any point neither drops nor repeats a task.

```
dispatch ──► in_flight ──queue──► queued ──train──► trained (step) ──commit──► folded into a count
              │  ▲ finish            │                  │ rollback: the step is not in the checkpoint
              │  └ it has ended,     │                  ▼
              │    its group has not │            dropped (restart), its position is pending
              └─────────drop─────────┴──► dropped (reason) ──commit──► folded into a count
```

At every moment `dispatched = in_flight + queued + trained + sum of dropped`, counted per trajectory (the law
of conservation). The last two states are final: a second settlement is an error, not a no-op.

Each task has a *position*, its place in the endless sequence of tasks. The settlement of its group uses up a
position, except after a restart, a damaged frame or a drop with `retry`: then the position is *pending* and
is dispatched anew.

The ledger also records what a restart must agree with: attempts, references to trajectories that ended,
the batch of each step that the trainer acknowledged, and committed checkpoints. It counts how attempts ended,
with the newest examples of each kind of failure; a restart does not undo that.

**Draws by difficulty** (`data.curriculum`) count the result of the first group at each position, at a later
position that is fixed when the result is recorded. A restart undoes neither results nor draws: what was drawn
is dispatched again, and a second result of its position is ignored.

**A restart at the checkpoint of step N** leaves in flight what was in flight (the journal has its tokens) and
queued what was queued. What was trained after N is dropped as `restart` and its positions are pending. Its
frames could have been kept until a checkpoint has their step; but groups that were in flight or queued behind
them fill the bound already, B (η + 1) of them, and for each one put back another would grow too old. The
restart undoes weight versions above N: labels above it are lowered to N, the oldest that they can be, so that
the bound holds.

**Size.** Rows of settled trajectories are folded into counts once no kept checkpoint can undo them: a run of
a year has as many rows as one of a few checkpoints. Ids are compared with those that have rows; older ones
are unique because they contain a time.

Decisions are made on the outstanding groups in memory; their changes are written later, in order, by `flush`:
with the journal (each second without one), before frames are deleted, and when a step is settled. A crash
before that undoes the newest changes, together: a dispatch that was not written is a task that was not
dispatched.

**Power cuts.** A flush survives the death of the process; that of the machine only if it is durable. The
flush that settles a step is, so that the ledger knows every step that a checkpoint may contain. A start from
a checkpoint that is newer than the ledger is refused.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from async_rl.codec import UNREADABLE
from async_rl.errors import AsyncRLError, FailureKind, InvariantError
from async_rl.observability.failures import SUCCESS, FailureExample
from async_rl.observability.records import TrajectoryCounts
from async_rl.store.ledger_tables import LedgerTables
from async_rl.types import StoredTrajectory, root_of

log = logging.getLogger(__name__)

_stored = msgspec.msgpack.Decoder(StoredTrajectory)

_MOST_BYTES = 1 << 40
"""Larger than any frame."""

REDISPATCHED = frozenset({"restart", "corrupt"})
"""Reasons of drops that are no fault of the task: its position becomes pending."""


class DataPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where the sequence of tasks continues: first with the pending positions, then from `cursor` on."""

    cursor: int = 0
    pending: tuple[int, ...] = ()


class PendingTask(msgspec.Struct, frozen=True):
    """The task of a position that is dispatched again."""

    task_id: str
    has_result: bool


class GroupResult(msgspec.Struct, frozen=True, order=True):
    """The result of the first group at a position, which the draw at `due` counts."""

    due: int
    position: int
    task_id: str
    scored: int
    """Its trajectories that were scored."""
    passed: int
    """Those of them that passed."""


class DrawnTask(msgspec.Struct, frozen=True):
    """What draws have counted of one task."""

    task_id: str
    scored: float
    passed: float
    drawn: int
    """The last position with it; -1 for none."""


class GroupRecord(msgspec.Struct, kw_only=True, eq=False):
    """An outstanding group."""

    group_id: str
    task_id: str
    position: int
    weight_version: int
    in_flight: set[str] = msgspec.field(default_factory=set)
    queued: set[str] = msgspec.field(default_factory=set)
    stored: dict[str, StoredTrajectory] = msgspec.field(default_factory=dict)
    """Trajectories that have ended: of a queued group all, in the order of the group; of one in flight those
    whose frame was written early."""
    attempts: dict[str, int] = msgspec.field(default_factory=dict)
    """The current attempt of trajectories in flight that are not in their first."""
    straggled_s: float = 0.0
    """How long it has waited for its stragglers."""
    has_branches: bool = False
    """Whether one of its trajectories has had branches."""
    has_result: bool = False
    """Whether this group, or an earlier one at its position, has a result for draws."""

    @property
    def root_ids(self) -> tuple[str, ...]:
        """Its trajectories in flight, without branches."""
        return tuple(sorted({root_of(name) for name in self.in_flight}))


class Ledger:
    """The states of all trajectories. All methods but `flush` are for one thread, that of the event loop."""

    def __init__(self, path: Path) -> None:
        """Open or create the database. After a crash call `rollback` before anything else.

        Raises:
            AsyncRLError: When the file is of another version of this program.
        """
        self._groups: dict[str, GroupRecord] = {}
        self._owner: dict[str, str] = {}  # group of each outstanding trajectory
        self._pending: dict[int, PendingTask] = {}
        self._task_at: dict[int, str] = {}  # of outstanding groups and of the newest draw
        self._newest_draw = -1
        self._results: list[GroupResult] = []  # a heap
        self._cursor = 0
        self._folded_step = 0
        self._path = path
        self._step = 0  # the newest one that is recorded
        self.incarnation = 0
        """The number of rollbacks, and so of the processes and trainers that this run has had."""
        self.restarts: dict[int, int] = {}
        """The steps from which incarnations continued, by number. One that went back at least as far as an
        earlier one stands for both."""
        self._checkpoints: list[int] = []  # those that a rollback may return to
        self._counts = dict.fromkeys(("dispatched", "in_flight", "queued", "trained"), 0)
        self._dropped: Counter[str] = Counter()
        self._tables = LedgerTables(path)
        self.attempts = self._tables.count_attempts()
        """The attempts that have ended, of all incarnations."""
        self._load()

    def record_dispatch(
        self, group_id: str, task_id: str, position: int, trajectory_ids: Sequence[str], version: int
    ) -> None:
        """Add a new group, before its first token is sampled.

        Raises:
            InvariantError: When the group or one of the trajectories is outstanding already. The next `flush`
                finds one that was settled before.
        """
        known = [t for t in trajectory_ids if t in self._owner]
        if group_id in self._groups or known or not trajectory_ids:
            raise InvariantError(
                f"group {group_id} is dispatched twice or has no trajectories (known: {known})"
            )
        self._groups[group_id] = GroupRecord(
            group_id=group_id,
            task_id=task_id,
            position=position,
            weight_version=version,
            in_flight=set(trajectory_ids),
            has_result=position in self._pending and self._pending[position].has_result,
        )
        self._task_at[position] = task_id
        self._owner.update(dict.fromkeys(trajectory_ids, group_id))
        self._cursor = max(self._cursor, position + 1)
        self._counts["dispatched"] += len(trajectory_ids)
        self._counts["in_flight"] += len(trajectory_ids)
        self._tables.add_statement(
            "INSERT INTO groups (group_id, task_id, position, weight_version, has_result) "
            "VALUES (?, ?, ?, ?, ?)",
            (group_id, task_id, position, version, self._groups[group_id].has_result),
        )
        for trajectory_id in trajectory_ids:
            self._tables.add_statement(
                "INSERT INTO trajectories (trajectory_id, group_id, state) VALUES (?, ?, 'in_flight')",
                (trajectory_id, group_id),
            )
        if position in self._pending:
            del self._pending[position]
            self._tables.add_statement("DELETE FROM pending WHERE position = ?", (position,))
        self._tables.end_change()

    def record_branches(self, root_id: str, branch_ids: Sequence[str]) -> None:
        """Add the branches of a trajectory in flight that has ended, as members of its group.

        Raises:
            InvariantError: When it is not in flight, or one of them is known.
        """
        group = self._in_flight(root_id)
        if known := [branch_id for branch_id in branch_ids if branch_id in self._owner]:
            raise InvariantError(f"trajectory {root_id} branches twice into {known}")
        group.in_flight.update(branch_ids)
        group.has_branches = True
        self._owner.update(dict.fromkeys(branch_ids, group.group_id))
        self._counts["dispatched"] += len(branch_ids)
        self._counts["in_flight"] += len(branch_ids)
        for branch_id in branch_ids:
            # An earlier run of the trajectory may have made it too, and a later one not: then it was dropped.
            self._tables.fold_dropped(branch_id)
            self._tables.add_statement(
                "INSERT INTO trajectories (trajectory_id, group_id, state) VALUES (?, ?, 'in_flight')",
                (branch_id, group.group_id),
            )
        self._tables.end_change()

    def record_attempt(self, trajectory_id: str, attempt: int) -> None:
        """Record that another attempt at a trajectory in flight begins.

        Raises:
            InvariantError: When it is not in flight.
        """
        self._in_flight(trajectory_id).attempts[trajectory_id] = attempt
        self._tables.add_statement(
            "UPDATE trajectories SET attempt = ? WHERE trajectory_id = ?", (attempt, trajectory_id)
        )
        self._tables.end_change()

    def record_attempt_end(
        self, failure_kind: FailureKind | None, trajectory_id: str, attempt: int, error: str = ""
    ) -> None:
        """Count an attempt that has ended, whatever becomes of its trajectory.

        Args:
            failure_kind: Why it did not succeed; None if it did.
            trajectory_id: Its trajectory.
            attempt: Its number, from 1.
            error: The first line of its error, or how its answer was scored.
        """
        kind, example = failure_kind or SUCCESS, None
        self.attempts.numbers[kind] += 1
        if failure_kind is not None:
            example = FailureExample(trajectory_id=trajectory_id, attempt=attempt, error=error)
            self.attempts.add_example(failure_kind, example)
        self._tables.add_attempt(kind, self.attempts.numbers[kind], example)
        self._tables.end_change()

    def record_straggling(self, group_id: str, straggled_s: float) -> None:
        """Record how long a group in flight has waited for its stragglers, over all processes.

        Raises:
            InvariantError: When it is settled or unknown.
        """
        group = self._outstanding(group_id)
        if straggled_s == group.straggled_s:
            return
        group.straggled_s = straggled_s
        self._tables.add_statement(
            "UPDATE groups SET straggled_s = ? WHERE group_id = ?", (straggled_s, group_id)
        )
        self._tables.end_change()

    def record_finished(self, stored: StoredTrajectory) -> None:
        """Record that a trajectory has ended and where it is; it stays in flight until its group is queued.

        Raises:
            InvariantError: When it is not in flight.
        """
        group = self._in_flight(stored.trajectory_id)
        group.stored[stored.trajectory_id] = stored
        self._store(stored)
        self._tables.end_change()

    def record_unfinished(self, trajectory_id: str) -> None:
        """Undo `record_finished`: the frame of the trajectory is damaged or missing.

        Raises:
            InvariantError: When it is not in flight.
        """
        self._in_flight(trajectory_id).stored.pop(trajectory_id, None)
        self._tables.add_statement(
            "UPDATE trajectories SET reward = NULL, stored = NULL WHERE trajectory_id = ?", (trajectory_id,)
        )
        self._tables.end_change()

    def record_queued(self, group_id: str, stored: Sequence[StoredTrajectory], *, version: int) -> None:
        """Record that a group is finished and its trajectories are stored.

        Args:
            group_id: A group in flight.
            stored: All its trajectories that were not dropped, in the order of the group.
            version: The oldest weight version that sampled any of it.

        Raises:
            InvariantError: When the group is not in flight, or trajectories are missing or too many.
        """
        group = self._outstanding(group_id)
        members = {entry.trajectory_id: entry for entry in stored}
        if group.queued or members.keys() != group.in_flight:
            raise InvariantError(
                f"group {group_id} is queued with {sorted(members)}, in flight are "
                f"{sorted(group.in_flight)}, queued already {sorted(group.queued)}"
            )
        for trajectory_id, entry in members.items():
            if group.stored.get(trajectory_id) != entry:
                self._store(entry)
        group.queued, group.in_flight = group.in_flight, set()
        group.weight_version, group.stored = version, members
        group.attempts = {}
        self._counts["in_flight"] -= len(stored)
        self._counts["queued"] += len(stored)
        self._tables.add_statement(
            "UPDATE groups SET weight_version = ? WHERE group_id = ?", (version, group_id)
        )
        self._tables.add_statement(
            "UPDATE trajectories SET state = 'queued' WHERE group_id = ? AND state = 'in_flight'",
            (group_id,),
        )
        self._tables.end_change()

    def record_reopened(self, group_id: str, lost: Collection[str]) -> None:
        """Undo `record_queued` for a group that has lost frames; its other trajectories have ended still.

        Args:
            group_id: A queued group.
            lost: Its trajectories that are sampled again.

        Raises:
            InvariantError: When the group is not queued.
        """
        group = self._outstanding(group_id)
        if not group.queued or not group.queued.issuperset(lost):
            raise InvariantError(
                f"group {group_id} is to sample {sorted(lost)} again; queued are {sorted(group.queued)}"
            )
        self._counts["queued"] -= len(group.queued)
        self._counts["in_flight"] += len(group.queued)
        group.in_flight, group.queued = group.queued, set()
        self._tables.add_statement(
            "UPDATE trajectories SET state = 'in_flight' WHERE group_id = ? AND state = 'queued'", (group_id,)
        )
        for trajectory_id in lost:
            self.record_unfinished(trajectory_id)
        self._tables.end_change()

    def record_trained(self, group_ids: Iterable[str], step: int, batch_id: str) -> None:
        """Record that the trainer has acknowledged a step, whose batch consumed these groups completely.

        Raises:
            InvariantError: When one of them is not queued; then none is settled.
        """
        groups = [self._outstanding(group_id) for group_id in group_ids]
        unready = [g.group_id for g in groups if g.in_flight or not g.queued]
        if unready or len({g.group_id for g in groups}) != len(groups):
            raise InvariantError(f"step {step} settles groups that are not queued, or one twice: {unready}")
        for group in groups:
            self._tables.add_statement(
                "UPDATE trajectories SET state = 'trained', step = ?, stored = NULL "
                "WHERE group_id = ? AND state = 'queued'",
                (step, group.group_id),
            )
            for trajectory_id in group.queued:
                del self._owner[trajectory_id]
            self._counts["queued"] -= len(group.queued)
            self._counts["trained"] += len(group.queued)
            self._forget_group(group)
        self._step = step
        self._tables.add_statement("INSERT OR REPLACE INTO steps VALUES (?, ?)", (step, batch_id))
        self._tables.end_change()

    def record_checkpoint(self, step: int, keep: int) -> None:
        """Record that the checkpoint of a step is complete, and fold what the `keep` newest ones cover."""
        self._checkpoints = sorted({*self._checkpoints, step})[-keep:]
        self._tables.add_statement("INSERT OR IGNORE INTO checkpoints VALUES (?)", (step,))
        if len(self._checkpoints) == keep:
            self._folded_step = self._checkpoints[0]
            self._tables.fold_settled(self._folded_step, self._cursor)
        self._tables.end_change()

    def record_dropped(self, trajectory_ids: Iterable[str], reason: str, *, retry: bool = False) -> None:
        """Settle outstanding trajectories that will not be trained.

        Args:
            trajectory_ids: Trajectories of any groups.
            reason: Why.
            retry: Make the positions of groups without any other trajectories pending, whatever the reason.

        Raises:
            InvariantError: When one of them is not outstanding; then none is settled.
        """
        chosen = list(trajectory_ids)
        strange = [t for t in chosen if t not in self._owner]
        if strange or len(set(chosen)) != len(chosen):
            raise InvariantError(f"drop ({reason}) of trajectories that are settled or unknown: {strange}")
        for trajectory_id in chosen:
            group = self._groups[self._owner.pop(trajectory_id)]
            state = "in_flight" if trajectory_id in group.in_flight else "queued"
            (group.in_flight if state == "in_flight" else group.queued).remove(trajectory_id)
            group.stored.pop(trajectory_id, None)
            group.attempts.pop(trajectory_id, None)
            self._counts[state] -= 1
            self._drop(trajectory_id, reason)
            if not group.in_flight and not group.queued:
                self._forget_group(group)
                if retry or reason in REDISPATCHED:
                    self._make_pending(group.position, PendingTask(group.task_id, group.has_result))
        self._tables.end_change()

    def rollback(self, step: int) -> DataPosition:
        """Restore the state at the checkpoint of a step, as the module describes.

        A new database has nothing to roll back.

        Raises:
            AsyncRLError: When what was trained after the step has been folded, or the step is not recorded:
                what its checkpoint has trained would be trained again.
        """
        if step > self._step:
            known = f"knows no step after {self._step}" if self._step else "is new"
            raise AsyncRLError(
                f"the checkpoint is of step {step}, but {self._path} {known}: it was deleted, or is an older "
                "copy; restore the ledger that belongs to the checkpoint, or remove the checkpoints after "
                f"step {self._step}, or begin another run with the model that `async-rl export` makes of this"
            )
        if step < self._folded_step:
            raise AsyncRLError(
                f"the ledger has folded what was trained up to step {self._folded_step} and cannot go back "
                f"to step {step}: restore the checkpoint of step {self._folded_step} or a later one, or "
                "begin another run"
            )
        self.flush()
        undone = self._tables.query_rows(
            "SELECT trajectory_id, position, task_id, has_result FROM trajectories JOIN groups "
            "USING (group_id) WHERE state = 'trained' AND step > ?",
            (step,),
        )
        for trajectory_id, position, task_id, has_result in undone:
            self._drop(trajectory_id, "restart")
            self._make_pending(position, PendingTask(task_id, bool(has_result)))
        self._counts["trained"] -= len(undone)
        for group in self._groups.values():
            self._cap_versions(group, step)
        self._checkpoints = [kept for kept in self._checkpoints if kept <= step]
        self._tables.delete_after(step)
        self._step = step
        self._record_restart(step)
        self._tables.end_change()
        self.flush()
        return self.data_position()

    def _cap_versions(self, group: GroupRecord, step: int) -> None:
        """Let labels of undone versions count as this step, the oldest that they can be."""
        for name, stored in group.stored.items():
            if (capped := stored.capped(step)) is not stored:
                group.stored[name] = capped
                self._store(capped)

    def _record_restart(self, step: int) -> None:
        self.incarnation += 1
        self._tables.add_statement(
            "INSERT OR REPLACE INTO meta VALUES ('incarnation', ?)", (self.incarnation,)
        )
        for number in [number for number, before in self.restarts.items() if before >= step]:
            del self.restarts[number]
            self._tables.add_statement("DELETE FROM meta WHERE key = ?", (f"restart {number}",))
        self.restarts[self.incarnation] = step
        self._tables.add_statement("INSERT INTO meta VALUES (?, ?)", (f"restart {self.incarnation}", step))

    # -- draws by difficulty -------------------------------------------------------------------------------

    def record_result(self, group_id: str, scored: int, passed: int, lag: int) -> None:
        """Record the result of a group for later draws, unless its position has one.

        The draw `lag` positions after it counts it or, if that was made, the next one: so draws do not depend
        on when groups end, as long as none ends later.

        Args:
            group_id: An outstanding group.
            scored: Its trajectories that were scored.
            passed: Those of them that passed.
            lag: The number of positions.

        Raises:
            InvariantError: When the group is settled or unknown.
        """
        group = self._outstanding(group_id)
        if group.has_result or not scored:
            return
        group.has_result = True
        result = GroupResult(
            max(group.position + lag, self._cursor, self._newest_draw + 1),
            group.position,
            group.task_id,
            scored,
            passed,
        )
        heapq.heappush(self._results, result)
        self._tables.add_statement("UPDATE groups SET has_result = 1 WHERE group_id = ?", (group_id,))
        self._tables.add_statement(
            "INSERT INTO results (due, position, task_id, scored, passed) VALUES (?, ?, ?, ?, ?)",
            msgspec.structs.astuple(result),
        )
        self._tables.end_change()

    def due_results(self, position: int) -> list[GroupResult]:
        """Remove and return the results that the draw of a position counts; `record_draw` must follow."""
        due = []
        while self._results and self._results[0].due <= position:
            due.append(heapq.heappop(self._results))
        return due

    def record_draw(self, position: int, task_id: str, changed: Iterable[DrawnTask]) -> None:
        """Record the task of a new position, and what its draw has counted."""
        self._newest_draw = position
        self._task_at[position] = task_id
        self._tables.add_statement("DELETE FROM drawn")
        self._tables.add_statement("INSERT INTO drawn VALUES (?, ?)", (position, task_id))
        self._tables.add_statement("DELETE FROM results WHERE due <= ?", (position,))
        for each in changed:
            self._tables.add_statement(
                "INSERT OR REPLACE INTO tasks VALUES (?, ?, ?, ?)", msgspec.structs.astuple(each)
            )
        self._tables.end_change()

    def task_at(self, position: int) -> str | None:
        """Return the task of a position that is outstanding, pending or drawn last; None for another one."""
        if (pending := self._pending.get(position)) is not None:
            return pending.task_id
        return self._task_at.get(position)

    def drawn_tasks(self) -> list[DrawnTask]:
        """Return what draws have counted of each task, as far as it is written."""
        return [DrawnTask(*row) for row in self._tables.query_rows("SELECT * FROM tasks")]

    # -- the state ------------------------------------------------------------------------------------------

    def counts(self) -> TrajectoryCounts:
        """Count all trajectories by state.

        Raises:
            InvariantError: When the law of conservation does not hold.
        """
        counts = TrajectoryCounts(dropped={k: v for k, v in self._dropped.items() if v}, **self._counts)
        if counts.unaccounted:
            raise InvariantError(f"trajectories were lost or made up: {counts}")
        return counts

    def outstanding(self) -> list[GroupRecord]:
        """Return the groups in flight or queued, by position."""
        return sorted(self._groups.values(), key=lambda group: group.position)

    def group_of(self, trajectory_id: str) -> GroupRecord:
        """Return the group of an outstanding trajectory.

        Raises:
            InvariantError: When it is settled or unknown.
        """
        if trajectory_id not in self._owner:
            raise InvariantError(f"trajectory {trajectory_id} is settled already, or was never dispatched")
        return self._groups[self._owner[trajectory_id]]

    @property
    def in_flight(self) -> frozenset[str]:
        """Trajectories that have not ended, or whose group has not."""
        return frozenset(t for group in self._groups.values() for t in group.in_flight)

    def group(self, group_id: str) -> GroupRecord:
        """Return one outstanding group.

        Raises:
            InvariantError: When it is settled or unknown.
        """
        return self._outstanding(group_id)

    def data_position(self) -> DataPosition:
        """Return where the sequence of tasks continues; checkpoints contain it."""
        return DataPosition(cursor=self._cursor, pending=tuple(sorted(self._pending)))

    def flush(self, *, durable: bool = False) -> None:
        """Commit all changes made so far, in one transaction. From any thread.

        Args:
            durable: Whether they, and all before them, shall survive a power cut.

        Raises:
            AsyncRLError: When the database cannot be written; the changes stay pending.
        """
        self._tables.flush(durable=durable)

    def close(self) -> None:
        """Flush and close."""
        self._tables.close()

    def _load(self) -> None:
        """Load the state from the tables."""
        for position, task_id, has_result in self._tables.query_rows("SELECT * FROM pending"):
            self._pending[position] = PendingTask(task_id, bool(has_result))
        for position, task_id in self._tables.query_rows("SELECT * FROM drawn"):
            self._newest_draw = position
            self._task_at[position] = task_id
        self._results = [
            GroupResult(*row)
            for row in self._tables.query_rows(
                "SELECT due, position, task_id, scored, passed FROM results ORDER BY due, position"
            )
        ]
        meta: dict[str, int] = dict(self._tables.query_rows("SELECT key, value FROM meta"))
        ((last,),) = self._tables.query_rows("SELECT max(position) FROM groups")
        self._cursor = max(meta.get("cursor", 0), 0 if last is None else last + 1)
        self._folded_step = meta.get("folded_step", 0)
        ((newest,),) = self._tables.query_rows("SELECT max(step) FROM steps")
        self._step = newest or self._folded_step
        self.incarnation = meta.get("incarnation", 0)
        self.restarts = {
            int(key.removeprefix("restart ")): step
            for key, step in meta.items()
            if key.startswith("restart ")
        }
        self._checkpoints = [
            step for (step,) in self._tables.query_rows("SELECT step FROM checkpoints ORDER BY step")
        ]
        stored = self._stored_counts()
        self._dropped.update(stored.dropped)
        for state in self._counts:
            self._counts[state] = getattr(stored, state)
        for trajectory_id, state, attempt, stored_entry, *columns in self._tables.query_rows(
            "SELECT trajectory_id, state, attempt, stored, group_id, task_id, position, weight_version, "
            "straggled_s, has_result FROM trajectories JOIN groups USING (group_id) "
            "WHERE state IN ('in_flight', 'queued') ORDER BY trajectory_id"
        ):
            group_id, task_id, position, version, straggled_s, has_result = columns
            self._task_at[position] = task_id
            group = self._groups.setdefault(
                group_id,
                GroupRecord(
                    group_id=group_id,
                    task_id=task_id,
                    position=position,
                    weight_version=version,
                    straggled_s=straggled_s,
                    has_result=bool(has_result),
                ),
            )
            if stored_entry is not None:
                group.stored[trajectory_id] = _read_stored(stored_entry, trajectory_id, group)
            if attempt > 1:
                group.attempts[trajectory_id] = attempt
            (group.in_flight if state == "in_flight" else group.queued).add(trajectory_id)
            self._owner[trajectory_id] = group_id
            group.has_branches |= root_of(trajectory_id) != trajectory_id

    def _outstanding(self, group_id: str) -> GroupRecord:
        group = self._groups.get(group_id)
        if group is None:
            raise InvariantError(f"group {group_id} is not outstanding: settled already, or never dispatched")
        return group

    def _in_flight(self, trajectory_id: str) -> GroupRecord:
        group = self.group_of(trajectory_id)
        if trajectory_id not in group.in_flight:
            raise InvariantError(f"trajectory {trajectory_id} is not in flight: its group is queued")
        return group

    def _drop(self, trajectory_id: str, reason: str) -> None:
        self._dropped[reason] += 1
        self._tables.add_statement(
            "UPDATE trajectories SET state = 'dropped', step = NULL, stored = NULL, reason = ? "
            "WHERE trajectory_id = ?",
            (reason, trajectory_id),
        )

    def _store(self, stored: StoredTrajectory) -> None:
        self._tables.add_statement(
            "UPDATE trajectories SET reward = ?, stored = ? WHERE trajectory_id = ?",
            (stored.reward, msgspec.msgpack.encode(stored), stored.trajectory_id),
        )

    def _forget_group(self, group: GroupRecord) -> None:
        del self._groups[group.group_id]
        self._task_at.pop(group.position, None)

    def _make_pending(self, position: int, task: PendingTask) -> None:
        self._pending[position] = task
        self._tables.add_statement(
            "INSERT OR IGNORE INTO pending VALUES (?, ?, ?)", (position, task.task_id, task.has_result)
        )

    def _stored_counts(self) -> TrajectoryCounts:
        states, dropped = self._tables.count_by_state()
        return TrajectoryCounts(
            dispatched=sum(states.values()),
            in_flight=states["in_flight"],
            queued=states["queued"],
            trained=states["trained"],
            dropped=dict(dropped),
        )


def _read_stored(entry: bytes, trajectory_id: str, group: GroupRecord) -> StoredTrajectory:
    """Read the reference to a stored trajectory; in place of a damaged one, return one to a lost frame."""
    problem = "it is of another trajectory, or has impossible sizes"
    try:
        stored = _stored.decode(entry)
        sizes = [stored.nbytes, stored.offset, *(span.length for span in stored.spans)]
        if stored.trajectory_id == trajectory_id and all(0 <= size < _MOST_BYTES for size in sizes):
            return stored
    except (*UNREADABLE, TypeError) as error:
        problem = str(error)
    log.error("the ledger's reference to trajectory %s is damaged, so it is lost: %s", trajectory_id, problem)
    return StoredTrajectory(
        trajectory_id=trajectory_id,
        group_id=group.group_id,
        task_id=group.task_id,
        path=f"damaged/{trajectory_id}",
        nbytes=0,
        checksum=0,
        spans=(),
        reward=None,
        stop_reason="completed",
    )
