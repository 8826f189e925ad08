"""The operating system's side of a run's folder: it fills up, and the driver can die in any operation on it.

While it is mounted, calls that use disk space (of SQLite, the spool and the journal) go through here.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Disk:
    """Disk space that can run out, and a count of operations.

    Example:
        >>> disk = Disk()
        >>> with disk.mounted():
        ...     disk.full = True
    """

    def __init__(self) -> None:
        self.full = False
        self.no_files = False
        """Whether the driver has no descriptors for files and folders."""
        self.on_no_file: Callable[[], None] = lambda: None
        """Called once when that keeps it from opening one."""
        self.operations = 0
        self.die_at: int | None = None
        """The operation in which the driver dies."""
        self.die: Callable[[], None] = lambda: None
        """Called then, with the operation half done."""

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Stand between the program and the disk. One at a time in a process."""
        fallocate, write, connect = os.posix_fallocate, os.write, sqlite3.connect
        open_descriptor, open_file, pwrite = os.open, io.open, os.pwrite
        listdir, scandir = os.listdir, os.scandir

        def faulty_fallocate(file: int, offset: int, length: int) -> None:
            self._use_space()
            fallocate(file, offset, length)

        def faulty_write(file: int, data: Any) -> int:
            if self._dies():
                half = write(file, memoryview(data)[: len(data) // 2])
                self.die()
                return half
            self._refuse_if_full()
            return write(file, data)

        def faulty_pwrite(file: int, data: Any, offset: int) -> int:
            self._refuse_if_full()
            return pwrite(file, data, offset)

        def faulty_open(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
            self._refuse_file(path)
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

        disk = self

        class Connection(sqlite3.Connection):
            """Says what SQLite says when a write finds no space."""

            def execute(self, statement: str, values: Any = (), /) -> sqlite3.Cursor:
                if statement.startswith(_WRITES):
                    if disk._dies():
                        disk.die()
                    if disk.full:
                        raise sqlite3.OperationalError("database or disk is full")
                return super().execute(statement, values)

        def faulty_connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = connect(*arguments, **{"factory": Connection, **options})
            return connection

        os.posix_fallocate, os.write = faulty_fallocate, faulty_write
        os.open, os.pwrite = faulty_open, faulty_pwrite
        os.listdir, os.scandir = faulty_listdir, faulty_scandir
        io.open = builtins.open = faulty_open_file  # type: ignore[assignment]
        sqlite3.connect = faulty_connect  # type: ignore[assignment]
        try:
            yield
        finally:
            os.posix_fallocate, os.write, sqlite3.connect = fallocate, write, connect
            os.open, os.pwrite, os.listdir, os.scandir = open_descriptor, pwrite, listdir, scandir
            io.open = builtins.open = open_file

    @contextmanager
    def open_to_checks(self) -> Iterator[None]:
        """Refuse no file in the block: the simulation itself looks at the process and its files."""
        no_files, self.no_files = self.no_files, False
        try:
            yield
        finally:
            self.no_files = no_files

    def _use_space(self) -> None:
        if self._dies():
            self.die()
        self._refuse_if_full()

    def _refuse_if_full(self) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _refuse_file(self, path: Any) -> None:
        if not self.no_files or isinstance(path, int):
            return
        folders = os.fspath(path).split(os.sep)
        if not _FILES_OF_DRIVER.isdisjoint(folders):
            note, self.on_no_file = self.on_no_file, lambda: None
            note()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), os.fspath(path))

    def _dies(self) -> bool:
        self.operations += 1
        return self.operations == self.die_at


_FILES_OF_DRIVER = frozenset({"proc", "sys", "spool", "journal", "metrics.jsonl"})
"""Parts of a path to what the driver opens. Trainer and engines are simulated in the same process."""

_WRITES = ("BEGIN", "INSERT", "UPDATE", "DELETE", "COMMIT")
