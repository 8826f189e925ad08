"""The operating system's side of a run's folder: it refuses writes; driver and power can fail at any moment.

While it is mounted, calls that use disk space (of SQLite, the spool and the journal) go through here.

A power cut takes what was not synced: of each file any part of what was written since its last `fsync`, in
any order, or the whole file. SQLite keeps a promise of its own
(https://sqlite.org/pragma.html#pragma_synchronous): what a commit with `synchronous = FULL` has written stays
with all before it; what came after may be gone from some commit on.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Disk:
    """A disk that can refuse writes, and a count of operations.

    Example:
        >>> disk = Disk()
        >>> with disk.mounted():
        ...     disk.write_error = errno.ENOSPC
    """

    def __init__(self) -> None:
        self.write_error = 0
        """What writes answer, as `errno`: ENOSPC, EROFS or EIO; 0: they succeed."""
        self.no_files = False
        """Whether the driver has no descriptors for files and folders."""
        self.on_no_file: Callable[[], None] = lambda: None
        """Called once when that keeps it from opening one."""
        self.unreadable: dict[str, int] = {}
        """What opening a file answers, as `errno`, by the last two parts of its path."""
        self.operations = 0
        self.die_at: int | None = None
        """The operation in which the driver dies."""
        self.die: Callable[[], None] = lambda: None
        """Called then, with the operation half done."""
        self._durable: dict[str, bytes] = {}
        """The content of databases at their last durable commit, by name."""
        self._synced: dict[str, int] = {}
        """How much of other files was synced, bytes, by path."""

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Stand between the program and the disk. One at a time in a process."""
        fallocate, write, connect = os.posix_fallocate, os.write, sqlite3.connect
        open_descriptor, open_file, pwrite = os.open, io.open, os.pwrite
        listdir, scandir, fsync, replace = os.listdir, os.scandir, os.fsync, os.replace

        def faulty_fallocate(file: int, offset: int, length: int) -> None:
            self._use_space()
            fallocate(file, offset, length)

        def faulty_write(file: int, data: Any) -> int:
            if self._dies():
                half = write(file, memoryview(data)[: len(data) // 2])
                self.die()
                return half
            self._refuse_write()
            return write(file, data)

        def faulty_pwrite(file: int, data: Any, offset: int) -> int:
            self._refuse_write()
            return pwrite(file, data, offset)

        def faulty_open(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            self._refuse_file(path)
            if self.write_error == errno.EROFS and flags & (os.O_WRONLY | os.O_RDWR) and _is_of_driver(path):
                self._refuse_write()
            return open_descriptor(path, flags, *arguments, **options)

        def faulty_open_file(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            self._refuse_file(path)
            return open_file(path, mode, *arguments, **options)

        def faulty_listdir(path: Any = ".") -> list[Any]:
            self._refuse_file(path)
            return listdir(path)

        def faulty_scandir(path: Any = ".") -> Any:
            self._refuse_file(path)
            return scandir(path)

        def noted_fsync(file: int) -> None:
            fsync(file)
            self._synced[os.readlink(f"/proc/self/fd/{file}")] = os.fstat(file).st_size

        def noted_replace(source: Any, target: Any) -> None:
            replace(source, target)
            self._synced[str(target)] = self._synced.pop(str(source), 0)

        disk = self

        class Connection(sqlite3.Connection):
            """Says what SQLite says when a write finds no space."""

            def __init__(self, path: Any, *arguments: Any, **options: Any) -> None:
                super().__init__(path, *arguments, **options)
                self._name, self._is_durable = Path(str(path)).name, True

            def execute(self, statement: str, values: Any = (), /) -> sqlite3.Cursor:
                if statement.startswith(_WRITES):
                    if disk._dies():
                        disk.die()
                    if disk.write_error:
                        full = disk.write_error == errno.ENOSPC
                        raise sqlite3.OperationalError(
                            "database or disk is full" if full else "disk I/O error"
                        )
                done = super().execute(statement, values)
                if statement.startswith("PRAGMA synchronous"):
                    self._is_durable = statement.endswith("FULL")
                elif statement == "COMMIT" and self._is_durable:
                    disk._durable[self._name] = self.serialize()
                return done

        def faulty_connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = connect(*arguments, **{"factory": Connection, **options})
            return connection

        os.posix_fallocate, os.write = faulty_fallocate, faulty_write
        os.open, os.pwrite = faulty_open, faulty_pwrite
        os.listdir, os.scandir = faulty_listdir, faulty_scandir
        os.fsync, os.replace = noted_fsync, noted_replace  # type: ignore[assignment]
        io.open = builtins.open = faulty_open_file  # type: ignore[assignment]
        sqlite3.connect = faulty_connect  # type: ignore[assignment]
        try:
            yield
        finally:
            os.posix_fallocate, os.write, sqlite3.connect = fallocate, write, connect
            os.open, os.pwrite, os.listdir, os.scandir = open_descriptor, pwrite, listdir, scandir
            os.fsync, os.replace = fsync, replace
            io.open = builtins.open = open_file

    @contextmanager
    def open_to_checks(self) -> Iterator[None]:
        """Refuse nothing in the block: the simulation itself looks at the process and its files."""
        refused, self.no_files, self.unreadable = (self.no_files, self.unreadable), False, {}
        write_error, self.write_error, operations = self.write_error, 0, self.operations
        die_at, self.die_at = self.die_at, None
        try:
            yield
        finally:
            self.no_files, self.unreadable = refused
            self.write_error, self.operations, self.die_at = write_error, operations, die_at

    def keep_synced(self, folder: Path, copy: Path) -> None:
        """What was synced in a folder is synced in its copy, which takes its place."""
        for path in list(self._synced):
            if Path(path).is_relative_to(folder):
                self._synced[str(copy / Path(path).relative_to(folder))] = self._synced.pop(path)

    def cut_power(self, copy: Path, rng: random.Random) -> set[str]:
        """Lose some of what was not synced.

        Args:
            copy: The copy of the run's folder. Checkpoints are complete only once they are synced.
            rng: Decides what.

        Returns:
            The files that have lost something, as paths in the folder.
        """
        kept = rng.choice((0.0, 0.5, 0.9))
        lost = set[str]()
        for path in sorted(path for path in copy.rglob("*") if path.is_file()):
            name = str(path.relative_to(copy))
            if path.name.endswith((".sqlite-wal", ".sqlite-shm")) or name.startswith("checkpoints/"):
                continue
            if rng.random() < kept:
                continue
            if path.suffix == ".sqlite":
                for other in ("-wal", "-shm"):
                    path.with_name(path.name + other).unlink(missing_ok=True)
            if path.name == "ledger.sqlite":
                path.unlink()
                if (content := self._durable.get(path.name)) is not None:
                    path.write_bytes(content)
                continue
            lost.add(name)
            synced = min(self._synced.get(str(path), 0), path.stat().st_size)
            content = path.read_bytes()
            length = rng.randint(synced, len(content))
            match rng.choice(("short", "zeros", "none")):
                case "none" if not synced:
                    path.unlink()
                case "zeros":  # its length was written, its content was not
                    path.write_bytes(content[:length] + bytes(len(content) - length))
                case _:
                    path.write_bytes(content[:length])
        for path in copy.rglob("*"):  # what is left is on the disk
            self._synced[str(path)] = path.stat().st_size
        return lost

    def _use_space(self) -> None:
        if self._dies():
            self.die()
        self._refuse_write()

    def _refuse_write(self) -> None:
        if self.write_error:
            raise OSError(self.write_error, os.strerror(self.write_error))

    def _refuse_file(self, path: Any) -> None:
        if isinstance(path, int) or not (self.no_files or self.unreadable):
            return
        folders = os.fspath(path).split(os.sep)
        if (number := self.unreadable.get("/".join(folders[-2:]))) is not None:
            raise OSError(number, os.strerror(number), os.fspath(path))
        if self.no_files and _is_of_driver(path):
            note, self.on_no_file = self.on_no_file, lambda: None
            note()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), os.fspath(path))

    def _dies(self) -> bool:
        self.operations += 1
        return self.operations == self.die_at


_FILES_OF_DRIVER = frozenset({"proc", "sys", "spool", "journal", "metrics.jsonl"})
"""Parts of a path to what the driver opens. Trainer and engines are simulated in the same process."""


def _is_of_driver(path: Any) -> bool:
    return not isinstance(path, int) and not _FILES_OF_DRIVER.isdisjoint(os.fspath(path).split(os.sep))


_WRITES = ("BEGIN", "INSERT", "UPDATE", "DELETE", "COMMIT")
