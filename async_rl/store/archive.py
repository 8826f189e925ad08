"""An archive of the newest finished trajectories of a run, for people to inspect.

```
 who ran the attempt ─► trajectories/: its tokens, a file each
 manager  ended, failed ──┐                       ┌─► trajectories.sqlite: one row per trajectory, for tables
 queue    queued, trained,├─► notes in memory ────┤
          dropped        ─┘   (once a second, in  └─► one row per event: what became of it, and when
                               a thread)
```

The run never reads it and never waits for it: a note takes microseconds, and what cannot be written is left
out. It holds a fixed number of trajectories; the oldest are deleted first. Files contain no routing rows,
which would be most of their bytes (the numbers of rows are kept), so a trajectory takes about 8 bytes per
token. The process that ran the attempt writes them, so that the driver moves no tokens. A kill loses the last
second. Readers (`async-rl inspect`) may read at any time.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from async_rl import codec
from async_rl.errors import ConfigError, FailureKind
from async_rl.observability.failures import kind_of_answer, kind_of_error
from async_rl.types import StoredTrajectory, Trajectory, VersionSpan

log = logging.getLogger(__name__)

FILE: Final = "trajectories.sqlite"
"""The name in the run's folder."""

_SCHEMA_VERSION = 3

_MAX_LOG_BYTES: Final = 16 << 20
"""The limit of the write-ahead log, after a large write."""

Status = Literal["ended", "queued", "trained", "dropped", "failed"]
"""`ended`: its group has not ended; `failed`: it raised, and may be retried; `dropped` has a reason."""

_SCHEMA = """
CREATE TABLE trajectories (
    number INTEGER PRIMARY KEY,      -- ascending, the newest last
    trajectory_id TEXT NOT NULL UNIQUE,
    group_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    status TEXT NOT NULL,
    reason TEXT,                     -- why it was dropped, or the error
    failure TEXT,                    -- the kind of failure; NULL where it succeeded
    step INTEGER,                    -- that trained it
    reward REAL,
    reward_parts TEXT NOT NULL,      -- JSON
    stop_reason TEXT NOT NULL,
    turns INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    sampled INTEGER NOT NULL,
    interruptions INTEGER NOT NULL,
    oldest_version INTEGER,
    newest_version INTEGER,
    duration_s REAL NOT NULL
);
CREATE TABLE events (
    trajectory_id TEXT NOT NULL,
    unix_s REAL NOT NULL,
    what TEXT NOT NULL
);
CREATE INDEX events_of ON events (trajectory_id);
CREATE TRIGGER forget AFTER DELETE ON trajectories
    BEGIN DELETE FROM events WHERE trajectory_id = OLD.trajectory_id; END;
"""


class RoutingCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a routing trace that the archive keeps."""

    rows: int
    invalid: int
    spans: tuple[VersionSpan, ...]
    """Which weights computed which rows; `NEVER_COMPUTED` where no engine reported any."""


class ArchivedTrajectory(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A trajectory of the archive: the content of its file."""

    trajectory: Trajectory
    """The trajectory without its trace."""
    routing: RoutingCounts | None

    def with_reward(self, reward: float | None, parts: dict[str, float]) -> ArchivedTrajectory:
        """Return it with the reward, which groups that are scored by one call get after the file."""
        replace, trajectory = msgspec.structs.replace, self.trajectory
        outcome = replace(trajectory.outcome, reward=reward, reward_parts=parts)
        return replace(self, trajectory=replace(trajectory, outcome=outcome))


class ArchiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory in a table, without its tokens."""

    number: int
    trajectory_id: str
    group_id: str
    task_id: str
    attempt: int
    status: Status
    reason: str | None
    failure: FailureKind | None
    step: int | None
    reward: float | None
    stop_reason: str
    turns: int
    tokens: int
    sampled: int
    interruptions: int
    oldest_version: int | None
    newest_version: int | None
    duration_s: float


class ArchiveEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a trajectory's state."""

    unix_s: float
    what: str


class Observer:
    """Receives the changes of trajectories' states at once, on the event loop. This one ignores them."""

    def ended(self, trajectory: StoredTrajectory, attempt: int) -> None:
        """Called when a trajectory has its outcome and reward; its group may not have ended."""

    def failed(self, trajectory: StoredTrajectory, attempt: int, error: Exception) -> None:
        """Called when an attempt raised. The trajectory is as far as it came; it may be retried."""

    def queued(self, trajectory_ids: Iterable[str]) -> None:
        """Called when the group of the trajectories is ready for a batch."""

    def trained(self, trajectory_ids: Iterable[str], step: int) -> None:
        """Called when a step that consumed the trajectories is done."""

    def dropped(self, trajectory_ids: Iterable[str], reason: str) -> None:
        """Called when the trajectories will not be trained."""


def without_routing(trajectory: Trajectory) -> ArchivedTrajectory:
    """Return a trajectory without its routing rows, whose memory can then be freed."""
    trace = trajectory.trace
    counts = None
    if trace is not None:
        counts = RoutingCounts(rows=len(trace.rows), invalid=trajectory.num_missing_rows, spans=trace.spans)
    return ArchivedTrajectory(trajectory=msgspec.structs.replace(trajectory, trace=None), routing=counts)


class InspectedTrajectories:
    """The files of an archive: finished trajectories without routing rows. From any thread or process."""

    def __init__(self, folder: Path) -> None:
        """Keep files in a folder, which is created when it is missing."""
        self.folder = folder
        with contextlib.suppress(OSError):  # each write reports what is wrong
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @classmethod
    def of_archive(cls, path: Path) -> InspectedTrajectories:
        """Return the files that belong to an archive's database."""
        return cls(path.with_suffix(""))

    def keep(self, trajectory: Trajectory, attempt: int) -> None:
        """Write the file of an attempt; a failure is logged."""
        try:
            codec.write_frame(self._path(trajectory.trajectory_id, attempt), without_routing(trajectory))
        except (OSError, TypeError, ValueError, OverflowError) as error:
            log.warning("trajectory %s is not kept for inspection: %s", trajectory.trajectory_id, error)

    def read_file(self, trajectory_id: str, attempt: int) -> ArchivedTrajectory:
        """Return what was kept of an attempt.

        Raises:
            CorruptFrame: It is damaged.
            FileNotFoundError: There is no such file.
        """
        return codec.read_frame(self._path(trajectory_id, attempt), ArchivedTrajectory)

    def delete(self, trajectory_id: str, attempt: int) -> None:
        """Delete the file of an attempt."""
        with contextlib.suppress(OSError):
            self._path(trajectory_id, attempt).unlink()

    def delete_others(self, attempts: Iterable[tuple[str, int]]) -> None:
        """Delete all files but those of some attempts."""
        kept = {self._path(*each) for each in attempts}
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                if path not in kept:
                    path.unlink(missing_ok=True)

    def _path(self, trajectory_id: str, attempt: int) -> Path:
        return self.folder / f"{trajectory_id}-{attempt}"


class Archive(Observer):
    """Writes the archive of a run. All methods but `write_notes` are for the event loop's thread."""

    def __init__(
        self,
        path: Path,
        keep: int,
        clock: Callable[[], float] = time.time,
        *,
        pass_reward: float = 1.0,
    ) -> None:
        """Open or create the file.

        Args:
            path: The path of the file.
            keep: The number of newest trajectories to keep.
            clock: Returns seconds since 1970.
            pass_reward: The least reward of an attempt that succeeds.
        """
        self._pass_reward = pass_reward
        self._path = path
        self.inspected = InspectedTrajectories.of_archive(path)
        """The files of its trajectories."""
        self._keep = keep
        self._clock = clock
        # The next write would delete older notes anyway.
        self._notes: deque[tuple[str, tuple[Any, ...]]] = deque(maxlen=8 * keep)
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        try:
            self._database = self._open()
        except sqlite3.Error as error:
            log.warning("trajectories are not archived, %s cannot be opened: %s", path, error)

    def rollback(self, step: int) -> None:
        """Mark what was trained after a step as dropped: the run continues from its checkpoint."""
        self._note("rollback", step)

    def ended(self, trajectory: StoredTrajectory, attempt: int) -> None:
        """Implements `Observer.ended`."""
        self._note("put", trajectory, attempt, "ended", None, kind_of_answer(trajectory, self._pass_reward))

    def failed(self, trajectory: StoredTrajectory, attempt: int, error: Exception) -> None:
        """Implements `Observer.failed`."""
        why = f"{type(error).__name__}: {error}"
        self._note("put", trajectory, attempt, "failed", why, kind_of_error(error))

    def queued(self, trajectory_ids: Iterable[str]) -> None:
        """Implements `Observer.queued`."""
        self._note("settle", tuple(trajectory_ids), "queued", None, None, "its group is queued")

    def trained(self, trajectory_ids: Iterable[str], step: int) -> None:
        """Implements `Observer.trained`."""
        self._note("settle", tuple(trajectory_ids), "trained", None, step, f"trained in step {step}")

    def dropped(self, trajectory_ids: Iterable[str], reason: str) -> None:
        """Implements `Observer.dropped`."""
        self._note("settle", tuple(trajectory_ids), "dropped", reason, None, f"dropped: {reason}")

    def write_notes(self) -> None:
        """Write the notes and delete the oldest trajectories."""
        with self._lock:
            if self._database is None or not self._notes:
                return
            try:
                self._database.execute("BEGIN IMMEDIATE")
                while self._notes:
                    kind, (unix_s, *values) = self._notes.popleft()
                    getattr(self, f"_write_{kind}")(self._database, unix_s, *values)
                deleted = self._database.execute(
                    "DELETE FROM trajectories WHERE number <= (SELECT max(number) FROM trajectories) - ? "
                    "RETURNING trajectory_id, attempt",
                    (self._keep,),
                ).fetchall()
                self._database.execute("COMMIT")
                for name, attempt in deleted:
                    self.inspected.delete(name, attempt)
            except sqlite3.Error as error:
                log.warning("some trajectories are not archived: %s: %s", self._path, error)
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")

    def close(self) -> None:
        """Write the remaining notes and close the file."""
        self.write_notes()
        with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA journal_size_limit = {_MAX_LOG_BYTES}")
        database.execute(
            "PRAGMA synchronous = OFF"
        )  # a power cut may destroy the file; the run does not depend on it
        ((version,),) = database.execute("PRAGMA user_version").fetchall()
        if version != _SCHEMA_VERSION:
            # The file is of another version. It serves inspection only, so it can be replaced.
            database.executescript(
                "DROP TABLE IF EXISTS trajectories; DROP TABLE IF EXISTS events;"
                f"BEGIN; {_SCHEMA} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;"
            )
        kept = database.execute("SELECT trajectory_id, attempt FROM trajectories")
        self.inspected.delete_others(kept.fetchall())
        return database

    def _note(self, kind: str, *values: Any) -> None:
        if self._database is not None:
            self._notes.append((kind, (self._clock(), *values)))

    def _write_put(
        self,
        database: sqlite3.Connection,
        unix_s: float,
        trajectory: StoredTrajectory,
        attempt: int,
        status: str,
        why: str | None,
        failure: FailureKind | None,
    ) -> None:
        name = trajectory.trajectory_id
        ((number,),) = database.execute("SELECT coalesce(max(number), 0) + 1 FROM trajectories")
        # Not REPLACE: an earlier attempt's events stay.
        database.execute("UPDATE trajectories SET trajectory_id = '' WHERE trajectory_id = ?", (name,))
        replaced = database.execute("DELETE FROM trajectories WHERE trajectory_id = '' RETURNING attempt")
        for (earlier,) in replaced.fetchall():
            if earlier != attempt:
                self.inspected.delete(name, earlier)
        database.execute(
            f"INSERT INTO trajectories VALUES ({', '.join('?' * 19)})",
            (
                number,
                name,
                trajectory.group_id,
                trajectory.task_id,
                attempt,
                status,
                why,
                failure,
                None,
                trajectory.reward,
                msgspec.json.encode(trajectory.reward_parts).decode(),
                trajectory.stop_reason,
                trajectory.num_turns,
                trajectory.num_tokens,
                trajectory.num_sampled_tokens,
                trajectory.num_interruptions,
                trajectory.oldest_weight_version,
                trajectory.newest_weight_version,
                trajectory.duration_s,
            ),
        )
        _write_event(database, name, unix_s - trajectory.duration_s, f"attempt {attempt} begins")
        _write_event(database, name, unix_s, f"attempt {attempt} failed: {why}" if why else "ended")

    def _write_settle(
        self,
        database: sqlite3.Connection,
        unix_s: float,
        trajectory_ids: tuple[str, ...],
        status: str,
        reason: str | None,
        step: int | None,
        what: str,
    ) -> None:
        for name in trajectory_ids:
            # A trajectory that failed before it was dropped keeps its error, which says more.
            done = database.execute(
                "UPDATE trajectories SET status = ?, step = ?, "
                "reason = CASE WHEN status = 'failed' THEN reason ELSE ? END WHERE trajectory_id = ?",
                (status, step, reason, name),
            )
            if done.rowcount:
                _write_event(database, name, unix_s, what)

    def _write_rollback(self, database: sqlite3.Connection, unix_s: float, step: int) -> None:
        undone = database.execute(
            "SELECT trajectory_id FROM trajectories WHERE status = 'trained' AND step > ?", (step,)
        ).fetchall()
        what = f"dropped: restart at the checkpoint of step {step}"
        self._write_settle(
            database, unix_s, tuple(name for (name,) in undone), "dropped", "restart", None, what
        )


def _write_event(database: sqlite3.Connection, name: str, unix_s: float, what: str) -> None:
    database.execute("INSERT INTO events VALUES (?, ?, ?)", (name, unix_s, what))


class ArchiveReader:
    """Reads the archive of a run, which may be running."""

    def __init__(self, path: Path) -> None:
        """Open the file, read-only.

        Raises:
            ConfigError: When it does not exist, or is of another version of this program.
        """
        if not path.is_file():
            raise ConfigError(
                f"{path} does not exist: the run kept no trajectories (run.keep_trajectories), or has not "
                "begun"
            )
        try:
            self._inspected = InspectedTrajectories.of_archive(path)
            self._database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
            ((version,),) = self._database.execute("PRAGMA user_version").fetchall()
        except sqlite3.Error as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if version != _SCHEMA_VERSION:
            raise ConfigError(f"{path} is of version {version}, this program reads {_SCHEMA_VERSION}")

    def find_rows(
        self, where: str = "1", values: Sequence[Any] = (), *, order: str = "number DESC", limit: int = -1
    ) -> list[ArchiveRow]:
        """Return rows of the table of trajectories.

        Args:
            where: An SQL condition on the fields of `ArchiveRow`; never text of a user.
            values: The values of its question marks.
            order: The order, in SQL.
            limit: The number of rows at most; -1 for all.
        """
        columns = ", ".join(ArchiveRow.__struct_fields__)
        found = self._database.execute(
            f"SELECT {columns} FROM trajectories WHERE {where} ORDER BY {order} LIMIT ?", (*values, limit)
        )
        return [
            msgspec.convert(dict(zip(ArchiveRow.__struct_fields__, row, strict=True)), ArchiveRow)
            for row in found
        ]

    def count_trajectories(self) -> int:
        """Return the number of trajectories."""
        ((number,),) = self._database.execute("SELECT count(*) FROM trajectories")
        return int(number)

    def read_trajectory(self, trajectory_id: str) -> tuple[ArchivedTrajectory, list[ArchiveEvent]]:
        """Return one trajectory that `find_rows` has listed, and its events.

        Raises:
            ConfigError: When newer ones have replaced it meanwhile.
            CorruptFrame: When it is damaged.
        """
        found = self._database.execute(
            "SELECT attempt, reward, reward_parts FROM trajectories WHERE trajectory_id = ?", (trajectory_id,)
        ).fetchone()
        if found is None:
            raise ConfigError(
                f"trajectory {trajectory_id} is no longer in the archive: newer ones have replaced it"
            )
        attempt, reward, parts = found
        try:
            item = self._inspected.read_file(trajectory_id, attempt)
        except FileNotFoundError as error:
            raise ConfigError(
                f"trajectory {trajectory_id} has no tokens in the archive: the process that ran it could not "
                "write them, or newer ones have replaced it"
            ) from error
        events = self._database.execute(
            "SELECT unix_s, what FROM events WHERE trajectory_id = ? ORDER BY rowid", (trajectory_id,)
        )
        item = item.with_reward(reward, msgspec.json.decode(parts))
        return item, [ArchiveEvent(unix_s=unix_s, what=what) for unix_s, what in events]

    def find_settled_steps(self) -> list[tuple[int, float]]:
        """Return the steps that trained listed trajectories, and when each was done, seconds since 1970."""
        found = self._database.execute(
            "SELECT step, max(unix_s) FROM trajectories JOIN events USING (trajectory_id) "
            "WHERE status = 'trained' AND what = 'trained in step ' || step GROUP BY step"
        )
        return found.fetchall()

    def close(self) -> None:
        """Close the file."""
        self._database.close()
