"""Observes a run from outside: its processes, shared memory and the tables of its ledger."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import psutil

from verification.diary import DIARY

Key = tuple[int, float]
"""Identifies a process by its pid and start time."""


class Processes:
    """Finds all processes of a run by the environment they inherit, and the shared memory they map."""

    def __init__(self, diary: Path) -> None:
        self._tag = str(diary)
        self.seen: dict[Key, str] = {}
        """Names of the shared memory segments that were seen."""
        self.shared: set[str] = set()

    def look(self) -> dict[str, list[psutil.Process]]:
        """Return live processes by role, as `plan.Victim` names them; others are `other`."""
        roles: dict[str, list[psutil.Process]] = {}
        for process in self._alive():
            # Any process may end meanwhile: psutil and /proc say so in their own ways.
            with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, PermissionError):
                name = process.name()
                self.seen.setdefault((process.pid, process.create_time()), name)
                maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                self.shared.update(line.split(maxsplit=5)[5] for line in maps if " /dev/shm/" in line)
                roles.setdefault(_role(process, name), []).append(process)
        return roles

    def left(self) -> list[str]:
        """Return the processes that outlive the driver."""
        found = []
        for process in self._alive():
            with suppress(psutil.NoSuchProcess):
                found.append(f"{process.pid} {process.name()}")
        return found

    def _alive(self) -> Iterator[psutil.Process]:
        known = dict(self.seen)
        for process in psutil.process_iter(["pid", "create_time", "status"]):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
                if process.info["status"] == psutil.STATUS_ZOMBIE:
                    continue
                ours = known.get(process.pid) == process.info["create_time"]
                if ours or process.environ().get(DIARY) == self._tag:
                    yield process


def _role(process: psutil.Process, name: str) -> str:
    for prefix, role in (
        ("ray::RankActor", "trainer rank"),
        ("ray::EngineActo", "engine actor"),
        ("ray::RolloutWorkerActor.run_worker", "rollout worker"),  # not one that starts
        ("sglang::", "engine"),
    ):
        if name.startswith(prefix):
            return role
    return "driver" if "async_rl.cli" in process.cmdline() else "other"


class Row(msgspec.Struct, frozen=True):
    """The row of a trajectory in the ledger's tables."""

    group_id: str
    position: int
    state: str
    step: int | None
    reason: str | None


class LedgerWatch:
    """Reads the ledger's tables repeatedly, because rows of settled trajectories are compacted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[str, Row] = {}
        """Last row seen of each trajectory."""
        self.current: set[str] = set()
        """Trajectories that had a row in the last read."""
        self.dropped: set[str] = set()
        """Trajectories that were dropped, and those whose row is gone and was last seen without an end."""
        self.pending: set[int] = set()
        self.unfinished: dict[str, int] = {}
        """The attempts of trajectories in flight that had not ended in the last read, by trajectory."""

    def look(self) -> None:
        """Read all rows without a lock that could block the run."""
        if not self._path.exists():
            return
        with closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=10)) as database:
            try:
                found = database.execute(
                    "SELECT trajectory_id, group_id, position, state, step, reason "
                    "FROM trajectories JOIN groups USING (group_id)"
                ).fetchall()
                pending = database.execute("SELECT position FROM pending").fetchall()
                unfinished = database.execute(
                    "SELECT trajectory_id, attempt FROM trajectories "
                    "WHERE state = 'in_flight' AND stored IS NULL"
                ).fetchall()
            except sqlite3.OperationalError:
                return  # its tables do not exist yet
        self.rows |= {trajectory_id: Row(*columns) for trajectory_id, *columns in found}
        self.current = {trajectory_id for trajectory_id, *_ in found}
        self.dropped = {
            name
            for name, row in self.rows.items()
            if row.state == "dropped" or (row.state == "in_flight" and name not in self.current)
        }
        self.pending = {position for (position,) in pending}
        self.unfinished = dict(unfinished)
