"""The SQLite tables of the ledger: written later, in order; read at start and by audits.

Decisions are made on what the ledger holds in memory. A change is a list of statements that is committed in
one transaction or not at all; `flush` commits all pending changes. The database is in WAL mode and is not
synced on each commit: it survives the death of the process. After a power cut it may miss the last changes,
but it is never inconsistent.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_rl.errors import AsyncRLError, InvariantError

SCHEMA_VERSION = 4

Statement = tuple[str, Sequence[Any]]

_OF_STEPS = (("steps", "step"), ("publications", "weight_version"), ("checkpoints", "step"))
"""Tables, and the column that a rollback and folding use."""

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (                -- each uses up a position
    group_id TEXT PRIMARY KEY,
    task_id TEXT NOT NULL,
    position INTEGER NOT NULL,       -- place in the sequence of tasks
    weight_version INTEGER NOT NULL, -- nothing in the group was sampled by older weights
    ceiling INTEGER,                 -- labels above this are of undone versions
    straggled_s REAL NOT NULL DEFAULT 0  -- how long it has waited for its stragglers
) WITHOUT ROWID;
CREATE TABLE trajectories (
    trajectory_id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL REFERENCES groups,
    state TEXT NOT NULL CHECK (state IN ('in_flight', 'queued', 'trained', 'dropped')),
    attempt INTEGER NOT NULL DEFAULT 1,
    reward REAL,                     -- once it has ended
    stored BLOB,                     -- its `StoredTrajectory` as msgpack, while it is outstanding
    step INTEGER,                    -- that trained it
    reason TEXT,                     -- why it was dropped
    CHECK ((state = 'trained') = (step IS NOT NULL) AND (state = 'dropped') = (reason IS NOT NULL))
) WITHOUT ROWID;
CREATE INDEX members ON trajectories (group_id);
CREATE INDEX trained ON trajectories (step) WHERE state = 'trained';
CREATE INDEX dropped ON trajectories (state) WHERE state = 'dropped';
CREATE TABLE pending (position INTEGER PRIMARY KEY);
CREATE TABLE publications (weight_version INTEGER PRIMARY KEY);
CREATE TABLE steps (step INTEGER PRIMARY KEY, batch_id TEXT NOT NULL);
CREATE TABLE checkpoints (step INTEGER PRIMARY KEY);
CREATE TABLE folded (                -- trajectories that have no row any more
    state TEXT NOT NULL,
    reason TEXT NOT NULL,            -- '' where trained
    number INTEGER NOT NULL,
    PRIMARY KEY (state, reason)
) WITHOUT ROWID;
"""


class LedgerTables:
    """One database. All methods but `flush` are for one thread, that of the event loop.

    Example:
        >>> tables.add_statement("INSERT INTO publications VALUES (?)", (3,))
        >>> tables.end_change()
        >>> tables.flush()
    """

    def __init__(self, path: Path) -> None:
        """Open or create the database.

        Raises:
            AsyncRLError: When the file is of another version of this program.
        """
        self._change: list[Statement] = []  # the current one
        self._changes: deque[list[Statement]] = deque()  # completed, not committed yet
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        if not self.query_rows("SELECT 1 FROM sqlite_master WHERE name = 'meta'"):
            self._database.executescript(
                f"BEGIN; {_SCHEMA} INSERT INTO meta VALUES ('schema', {SCHEMA_VERSION}); COMMIT;"
            )
        ((found,),) = self.query_rows("SELECT value FROM meta WHERE key = 'schema'")
        if found != SCHEMA_VERSION:
            raise AsyncRLError(
                f"{path} has schema {found}, this program writes {SCHEMA_VERSION}: end the run with the "
                "version that began it, or begin another run (its checkpoints can be loaded)"
            )

    def add_statement(self, statement: str, values: Sequence[Any] = ()) -> None:
        """Add a statement to the current change."""
        self._change.append((statement, values))

    def end_change(self) -> None:
        """Complete the current change, so that `flush` commits it."""
        self._changes.append(self._change)
        self._change = []

    def query_rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Query what is committed."""
        with self._lock:
            return self._database.execute(statement, values).fetchall()

    def flush(self) -> None:
        """Commit all completed changes, in one transaction. From any thread.

        Raises:
            AsyncRLError: When the database cannot be written; the changes stay pending.
        """
        with self._lock:
            done: list[list[Statement]] = []
            try:
                while self._changes:
                    if not done:
                        self._database.execute("BEGIN IMMEDIATE")
                    done.append(self._changes.popleft())
                    for statement, values in done[-1]:
                        self._database.execute(statement, values)
                if done:
                    self._database.execute("COMMIT")
            except sqlite3.Error as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                self._changes.extendleft(reversed(done))
                if isinstance(error, sqlite3.IntegrityError):
                    raise InvariantError(f"an id was dispatched twice: {error}") from error
                raise AsyncRLError(f"the ledger cannot be written: {error}; is the disk full?") from error

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        with self._lock:
            self._database.close()

    def fold_settled(self, step: int, cursor: int) -> None:
        """Replace the rows of what is settled for good by counts.

        Args:
            step: The step of the oldest checkpoint that a restart may return to.
            cursor: The first position that was never dispatched; it is kept without the rows that show it.
        """
        self._fold_trajectories("state = 'dropped' OR state = 'trained' AND step <= ?", step)
        self.add_statement("INSERT OR REPLACE INTO meta VALUES ('cursor', ?)", (cursor,))
        self.add_statement("INSERT OR REPLACE INTO meta VALUES ('folded_step', ?)", (step,))
        self.add_statement(
            "DELETE FROM groups WHERE NOT EXISTS "
            "(SELECT 1 FROM trajectories WHERE trajectories.group_id = groups.group_id)"
        )
        for table, column in _OF_STEPS:
            self.add_statement(f"DELETE FROM {table} WHERE {column} < ?", (step,))

    def fold_dropped(self, trajectory_id: str) -> None:
        """Replace the row of a trajectory by a count if it was dropped: its id is used again."""
        self._fold_trajectories("state = 'dropped' AND trajectory_id = ?", trajectory_id)

    def _fold_trajectories(self, final: str, value: int | str) -> None:
        self.add_statement(
            "INSERT INTO folded SELECT state, coalesce(reason, ''), count(*) FROM trajectories "
            f"WHERE {final} GROUP BY state, reason "
            "ON CONFLICT DO UPDATE SET number = number + excluded.number",
            (value,),
        )
        self.add_statement(f"DELETE FROM trajectories WHERE {final}", (value,))

    def delete_after(self, step: int) -> None:
        """Delete steps, versions and checkpoints after this one, which a rollback undoes."""
        for table, column in _OF_STEPS:
            self.add_statement(f"DELETE FROM {table} WHERE {column} > ?", (step,))

    def count_by_state(self) -> tuple[Counter[str], Counter[str]]:
        """Count trajectories by state, and the dropped ones by reason, including folded ones."""
        states: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        for state, reason, number in self.query_rows(
            "SELECT state, reason, count(*) FROM trajectories GROUP BY state, reason "
            "UNION ALL SELECT state, nullif(reason, ''), number FROM folded"
        ):
            states[state] += number
            if reason is not None:
                dropped[reason] += number
        return states, dropped
