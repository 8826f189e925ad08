"""An archive of the newest finished trajectories of a run, in SQLite, for people to inspect.

```
 manager  ended, failed ──┐                        ┌─► one row per trajectory: columns for tables, and a frame
 queue    queued, trained,├─► notes in memory ─────┤
          dropped        ─┘   (once a second, in   └─► one row per event: what became of it, and when
                               a thread)
```

The run never reads it and never waits for it: a note takes microseconds, and where the file cannot be
written, the notes are discarded and the run continues. It holds a fixed number of trajectories; the oldest
are deleted first. Frames contain no routing rows, which would be most of their bytes (the numbers of rows are
kept), so a trajectory takes about 8 bytes per token. A kill loses the last second. Readers (`async-rl
inspect`) may read at any time.
"""

from __future__ import annotations

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
from async_rl.errors import ConfigError, CorruptFrame
from async_rl.types import NEVER_COMPUTED, Trajectory, VersionSpan

log = logging.getLogger(__name__)

FILE: Final = "trajectories.sqlite"
"""The name in the run's folder."""

_SCHEMA_VERSION = 1

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
    step INTEGER,                    -- that trained it
    reward REAL,
    stop_reason TEXT NOT NULL,
    turns INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    sampled INTEGER NOT NULL,
    interruptions INTEGER NOT NULL,
    oldest_version INTEGER,
    newest_version INTEGER,
    duration_s REAL NOT NULL,
    frame BLOB NOT NULL
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
    """A trajectory of the archive: the frame of a row."""

    trajectory: Trajectory
    """The trajectory without its trace."""
    routing: RoutingCounts | None


class ArchiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """A trajectory in a table, without its tokens."""

    number: int
    trajectory_id: str
    group_id: str
    task_id: str
    attempt: int
    status: Status
    reason: str | None
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

    def ended(self, trajectory: Trajectory, attempt: int) -> None:
        """Called when a trajectory has its outcome and reward; its group may not have ended."""

    def failed(self, trajectory: Trajectory, attempt: int, error: Exception) -> None:
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
        invalid = sum(s.end - s.start for s in trace.spans if s.weight_version == NEVER_COMPUTED)
        counts = RoutingCounts(rows=len(trace.rows), invalid=invalid, spans=trace.spans)
    return ArchivedTrajectory(trajectory=msgspec.structs.replace(trajectory, trace=None), routing=counts)


class Archive(Observer):
    """Writes the archive of a run. All methods but `write_notes` are for the event loop's thread.

    Example:
        >>> archive = Archive(run_dir / archive.FILE, keep=1000)
        >>> archive.ended(trajectory, attempt=1)
        >>> archive.write_notes()
    """

    def __init__(self, path: Path, keep: int, clock: Callable[[], float] = time.time) -> None:
        """Open or create the file.

        Args:
            path: The path of the file.
            keep: The number of newest trajectories to keep.
            clock: Returns seconds since 1970.
        """
        self._path = path
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

    def ended(self, trajectory: Trajectory, attempt: int) -> None:
        """Implements `Observer.ended`."""
        self._note("put", without_routing(trajectory), attempt, "ended", None)

    def failed(self, trajectory: Trajectory, attempt: int, error: Exception) -> None:
        """Implements `Observer.failed`."""
        self._note("put", without_routing(trajectory), attempt, "failed", f"{type(error).__name__}: {error}")

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
                self._database.execute(
                    "DELETE FROM trajectories WHERE number <= (SELECT max(number) FROM trajectories) - ?",
                    (self._keep,),
                )
                self._database.execute("COMMIT")
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
        return database

    def _note(self, kind: str, *values: Any) -> None:
        if self._database is not None:
            self._notes.append((kind, (self._clock(), *values)))

    def _write_put(
        self,
        database: sqlite3.Connection,
        unix_s: float,
        item: ArchivedTrajectory,
        attempt: int,
        status: str,
        why: Any,
    ) -> None:
        trajectory, outcome = item.trajectory, item.trajectory.outcome
        name = trajectory.trajectory_id
        ((number,),) = database.execute("SELECT coalesce(max(number), 0) + 1 FROM trajectories")
        # Not REPLACE: an earlier attempt's events stay.
        database.execute("UPDATE trajectories SET trajectory_id = '' WHERE trajectory_id = ?", (name,))
        database.execute("DELETE FROM trajectories WHERE trajectory_id = ''")
        database.execute(
            f"INSERT INTO trajectories VALUES ({', '.join('?' * 18)})",
            (
                number,
                name,
                trajectory.group_id,
                trajectory.task_id,
                attempt,
                status,
                why,
                None,
                outcome.reward,
                outcome.stop_reason,
                outcome.num_turns,
                trajectory.num_tokens,
                trajectory.num_sampled_tokens,
                outcome.num_interruptions,
                trajectory.oldest_weight_version,
                trajectory.newest_weight_version,
                outcome.finished_s - outcome.started_s,
                b"".join(codec.encode(item)),
            ),
        )
        begun_s = unix_s - (outcome.finished_s - outcome.started_s)
        _write_event(database, name, begun_s, f"attempt {attempt} begins")
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
    """Reads the archive of a run, which may be running.

    Example:
        >>> reader = ArchiveReader(run_dir / FILE)
        >>> rows = reader.find_rows("reward < 0.5", order="tokens DESC", limit=20)
        >>> archived, events = reader.read_trajectory(rows[0].trajectory_id)
    """

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
            "SELECT frame FROM trajectories WHERE trajectory_id = ?", (trajectory_id,)
        ).fetchone()
        if found is None:
            raise ConfigError(
                f"trajectory {trajectory_id} is no longer in the archive: newer ones have replaced it"
            )
        try:
            item = codec.decode(found[0], ArchivedTrajectory)
        except CorruptFrame as error:
            raise CorruptFrame(f"trajectory {trajectory_id}: {error}") from error
        events = self._database.execute(
            "SELECT unix_s, what FROM events WHERE trajectory_id = ? ORDER BY rowid", (trajectory_id,)
        )
        return item, [ArchiveEvent(unix_s=unix_s, what=what) for unix_s, what in events]

    def close(self) -> None:
        """Close the file."""
        self._database.close()
