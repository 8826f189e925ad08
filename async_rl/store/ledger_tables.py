"""The SQLite tables of the ledger: written later, in order; read at start.

Decisions are made on what the ledger holds in memory. A change is a list of statements that is committed in
one transaction or not at all; `flush` commits all pending changes. The database is in WAL mode. A commit
survives the death of the process; after a power cut it may be missing with all later ones, unless it or a
later one was durable (https://sqlite.org/pragma.html#pragma_synchronous).

Only one driver may write. Each commit is numbered, so that a second one, on a file system whose locks do not
reach other nodes, is noticed by whichever of the two commits after the other.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from async_rl.errors import AsyncRLError, InvariantError
from async_rl.observability.failures import NUM_EXAMPLES, AttemptCounts, FailureExample

SCHEMA_VERSION = 7

Statement = tuple[str, Sequence[Any]]

_OF_STEPS = ("steps", "checkpoints")
"""Tables with a row per step."""

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (                -- each uses up a position
    group_id TEXT PRIMARY KEY,
    task_id TEXT NOT NULL,
    position INTEGER NOT NULL,       -- place in the sequence of tasks
    weight_version INTEGER NOT NULL, -- nothing in the group was sampled by older weights
    straggled_s REAL NOT NULL DEFAULT 0, -- how long it has waited for its stragglers
    has_result INTEGER NOT NULL DEFAULT 0  -- whether its position has a row in results, or had one
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
CREATE TABLE pending (
    position INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL,
    has_result INTEGER NOT NULL      -- as that of its group
);
CREATE TABLE results (               -- of groups, until a draw counts them
    position INTEGER PRIMARY KEY,
    due INTEGER NOT NULL,            -- the first position whose draw counts it
    task_id TEXT NOT NULL,
    scored INTEGER NOT NULL,         -- trajectories
    passed INTEGER NOT NULL
);
CREATE TABLE tasks (                 -- what draws have counted
    task_id TEXT PRIMARY KEY,
    scored REAL NOT NULL,
    passed REAL NOT NULL,
    drawn INTEGER NOT NULL           -- the last position with it
) WITHOUT ROWID;
CREATE TABLE drawn (                 -- the newest draw, which may not be dispatched yet
    position INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL
);
CREATE TABLE steps (step INTEGER PRIMARY KEY, batch_id TEXT NOT NULL);
CREATE TABLE checkpoints (step INTEGER PRIMARY KEY);
CREATE TABLE folded (                -- trajectories that have no row any more
    state TEXT NOT NULL,
    reason TEXT NOT NULL,            -- '' where trained
    number INTEGER NOT NULL,
    PRIMARY KEY (state, reason)
) WITHOUT ROWID;
CREATE TABLE attempts (              -- those that have ended; a restart undoes none
    kind TEXT PRIMARY KEY,           -- of failure, or 'success'
    number INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE examples (              -- the newest failed attempts of each kind
    kind TEXT NOT NULL,
    number INTEGER NOT NULL,         -- how many of the kind there were with it
    trajectory_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    error TEXT NOT NULL,             -- one line
    PRIMARY KEY (kind, number)
) WITHOUT ROWID;
"""


_ATTEMPTS = "SELECT kind, number FROM attempts"
_EXAMPLES = "SELECT kind, trajectory_id, attempt, error FROM examples ORDER BY kind, number"


class LedgerTables:
    """One database. All methods but `flush` are for one thread, that of the event loop."""

    def __init__(self, path: Path) -> None:
        """Open or create the database.

        Raises:
            AsyncRLError: When the file cannot be opened, is damaged or is of another version.
        """
        self._change: list[Statement] = []  # the current one
        self._changes: deque[list[Statement]] = deque()  # completed, not committed yet
        self._lock = threading.Lock()
        self._path = path
        try:
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._database.execute("PRAGMA journal_mode = WAL")
            if not self.query_rows("SELECT 1 FROM sqlite_master WHERE name = 'meta'"):
                self._database.executescript(
                    f"BEGIN; {_SCHEMA} INSERT INTO meta VALUES ('schema', {SCHEMA_VERSION}); COMMIT;"
                )
        except sqlite3.Error as error:
            raise _cannot("opened", path, error) from error
        ((found,),) = self.query_rows("SELECT value FROM meta WHERE key = 'schema'")
        if found != SCHEMA_VERSION:
            raise AsyncRLError(
                f"{path} has schema {found}, this program writes {SCHEMA_VERSION}: end the run with the "
                "version that began it, or begin another run (its checkpoints can be loaded)"
            )
        self._num_commits = self._read_commits()

    def add_statement(self, statement: str, values: Sequence[Any] = ()) -> None:
        """Add a statement to the current change."""
        self._change.append((statement, values))

    def end_change(self) -> None:
        """Complete the current change, so that `flush` commits it."""
        self._changes.append(self._change)
        self._change = []

    def query_rows(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Query what is committed.

        Raises:
            AsyncRLError: When the database cannot be read.
        """
        with self._lock:
            try:
                return self._database.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                raise _cannot("read", self._path, error) from error

    def flush(self, *, durable: bool = False) -> None:
        """Commit all completed changes, in one transaction. From any thread.

        Args:
            durable: Whether to sync the disk.

        Raises:
            AsyncRLError: When the database cannot be written, or another driver has written it; the changes
                stay pending.
        """
        with self._lock:
            done: list[list[Statement]] = []
            if not self._changes and not durable:
                return
            try:
                self._database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._database.execute("BEGIN IMMEDIATE")
                self._check_alone()
                while self._changes:
                    done.append(self._changes.popleft())
                    for statement, values in done[-1]:
                        self._database.execute(statement, values)
                # Not nothing: SQLite syncs what it writes.
                self._database.execute(
                    "INSERT OR REPLACE INTO meta VALUES ('commits', ?)", (self._num_commits + 1,)
                )
                self._database.execute("COMMIT")
                self._num_commits += 1
            except sqlite3.Error as error:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                self._changes.extendleft(reversed(done))
                if isinstance(error, sqlite3.IntegrityError):
                    raise InvariantError(f"an id was dispatched twice: {error}") from error
                raise _cannot("written", self._path, error) from error

    def _check_alone(self) -> None:
        """Check in a transaction that nobody else has committed since this database was opened.

        Raises:
            AsyncRLError: Somebody has.
        """
        if self._read_commits() == self._num_commits:
            return
        self._database.execute("ROLLBACK")
        raise AsyncRLError(
            f"another driver has written {self._path}, so this one ends: two of them run in this folder, "
            "because its file system does not lock files for other nodes or .lock was deleted; end one of "
            "them, then start the run again if none is left"
        )

    def _read_commits(self) -> int:
        found = self._database.execute("SELECT value FROM meta WHERE key = 'commits'").fetchone()
        return 0 if found is None else int(found[0])

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
        for table in _OF_STEPS:
            self.add_statement(f"DELETE FROM {table} WHERE step < ?", (step,))

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
        """Delete steps and checkpoints after this one, which a rollback undoes."""
        for table in _OF_STEPS:
            self.add_statement(f"DELETE FROM {table} WHERE step > ?", (step,))

    def add_attempt(self, kind: str, number: int, example: FailureExample | None) -> None:
        """Count an attempt that has ended.

        Args:
            kind: Why it failed, or `SUCCESS`.
            number: The number of attempts of this kind, with this one.
            example: What to keep of it, in place of the oldest example of its kind.
        """
        self.add_statement("INSERT OR REPLACE INTO attempts VALUES (?, ?)", (kind, number))
        if example is not None:
            self.add_statement(
                "DELETE FROM examples WHERE kind = ? AND number <= ?", (kind, number - NUM_EXAMPLES)
            )
            self.add_statement(
                "INSERT INTO examples VALUES (?, ?, ?, ?, ?)",
                (kind, number, example.trajectory_id, example.attempt, example.error),
            )

    def count_attempts(self) -> AttemptCounts:
        """Return the attempts that have ended."""
        return _counts_of(self.query_rows(_ATTEMPTS), self.query_rows(_EXAMPLES))

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


def _counts_of(numbers: Iterable[tuple[Any, ...]], examples: Iterable[tuple[Any, ...]]) -> AttemptCounts:
    counts = AttemptCounts()
    counts.numbers.update(dict(numbers))
    for kind, trajectory_id, attempt, error in examples:
        example = FailureExample(trajectory_id=trajectory_id, attempt=attempt, error=error)
        counts.add_example(kind, example)
    return counts


def read_attempts(path: Path) -> AttemptCounts:
    """Return the attempts of a run that have ended, from its ledger; none if that cannot be read.

    The run may be running: what it has not flushed is missing.
    """
    try:
        database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    except sqlite3.Error:
        return AttemptCounts()
    try:
        with database:
            return _counts_of(database.execute(_ATTEMPTS), database.execute(_EXAMPLES))
    except sqlite3.Error:
        return AttemptCounts()
    finally:
        database.close()


def _cannot(what: str, path: Path, error: sqlite3.Error) -> AsyncRLError:
    """Return the error of a ledger that cannot be opened, read or written."""
    if isinstance(error, sqlite3.OperationalError):  # of the file system; others are of the content
        return AsyncRLError(
            f"the ledger {path} cannot be {what}: {error}; is the disk full, or not writable?"
        )
    return AsyncRLError(
        f"the ledger {path} cannot be {what}: {error}; restore a copy that is no older than the newest "
        "checkpoint, or begin another run with the model that `async-rl export` makes of that"
    )
