"""What a run has and leaves, seen from outside: processes, shared memory, the tables of its ledger."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import psutil

from tests.chaos.diary import DIARY

Key = tuple[int, float]
"""A process for ever: its number and when it was started."""


class Processes:
    """All processes of a run, found by the environment they inherit, and the shared memory they map."""

    def __init__(self, diary: Path) -> None:
        self._tag = str(diary)
        self.seen: dict[Key, str] = {}
        """Their names."""
        self.shared: set[str] = set()

    def look(self) -> dict[str, list[psutil.Process]]:
        """The living ones by role: driver, trainer rank, engine actor, engine; the rest is `other`."""
        roles: dict[str, list[psutil.Process]] = {}
        for process in self._alive():
            with suppress(psutil.NoSuchProcess):
                name = process.name()
                self.seen.setdefault((process.pid, process.create_time()), name)
                maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                self.shared.update(line.split(maxsplit=5)[5] for line in maps if " /dev/shm/" in line)
                roles.setdefault(_role(process, name), []).append(process)
        return roles

    def left(self) -> list[str]:
        """Those that live although the driver is gone."""
        return [f"{process.pid} {process.name()}" for process in self._alive()]

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
        ("sglang::", "engine"),
    ):
        if name.startswith(prefix):
            return role
    return "driver" if "async_rl.cli" in process.cmdline() else "other"


class Row(msgspec.Struct, frozen=True):
    """A trajectory in the ledger's tables."""

    group_id: str
    position: int
    state: str
    step: int | None
    reason: str | None


class LedgerWatch:
    """Reads the ledger's tables now and then, because rows of what is settled for good are folded away."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[str, Row] = {}
        """By trajectory, as last seen."""
        self.current: set[str] = set()
        """Trajectories that had a row at the last look."""
        self.pending: set[int] = set()

    def look(self) -> None:
        """Read all rows, without a lock that the run would feel."""
        if not self._path.exists():
            return
        with closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=10)) as database:
            try:
                found = database.execute(
                    "SELECT trajectory_id, group_id, position, state, step, reason "
                    "FROM trajectories JOIN groups USING (group_id)"
                ).fetchall()
                pending = database.execute("SELECT position FROM pending").fetchall()
            except sqlite3.OperationalError:
                return  # its tables are not made yet
        self.rows |= {trajectory_id: Row(*columns) for trajectory_id, *columns in found}
        self.current = {trajectory_id for trajectory_id, *_ in found}
        self.pending = {position for (position,) in pending}
