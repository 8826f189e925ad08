"""What is done with frames and journals on the node that has them: they are deleted and read there.

```
 driver: Spool ─┬─ LocalFrameReader                                its own node
                └─ `placement.frame_readers` ─► LocalFrameReader   in an actor on each other node with frames
```
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from async_rl.store.journal_folders import JournalSummary, NodeJournals, read_journals

log = logging.getLogger(__name__)


class FrameReader(NodeJournals, Protocol):
    """The frames and journals on one node. All methods may be called from any thread.

    Each begins something, and returns a function that waits until it is done.

    Raises:
        NodeUnreachable: By that function, when there is no answer.
    """

    def begin_ping(self, limit_s: float) -> Callable[[], None]:
        """Ask for an answer, within a time."""
        ...

    def begin_find_missing(self, paths: Sequence[str]) -> Callable[[], list[str]]:
        """Return which frames have no file."""
        ...

    def begin_delete(self, paths: Sequence[str]) -> Callable[[], None]:
        """Delete frames."""
        ...

    def begin_end_folder(self, folder: str, known: Collection[str]) -> Callable[[], None]:
        """Delete the files in the folder of a process that has ended, except known frames."""
        ...

    def begin_keep_only(
        self, known: Collection[str], in_use: Collection[str], newest: int
    ) -> Callable[[], None]:
        """Delete the files of all processes that have ended, except known frames.

        It may be done much later, when other processes have started.

        Args:
            known: The paths of frames that may still be needed.
            in_use: The names of folders of processes that may still write.
            newest: The highest number of a folder that is known; folders made since have higher ones.
        """
        ...

    def end(self) -> None:
        """End it, whatever it does: another reader takes its place."""
        ...


class LocalFrameReader(FrameReader):
    """The frames on the node of this process."""

    def __init__(self, directory: Path | None) -> None:
        """Read frames anywhere on this node.

        Args:
            directory: The folder with those of all processes that write on it; None: there are none.
        """
        self._directory = directory
        self._ended_folders: set[str] = set()
        self._unread: dict[str, Collection[str]] = {}
        """Folders of ended processes that could not be read for want of descriptors; their known frames."""

    def begin_ping(self, limit_s: float) -> Callable[[], None]:
        """Implements `FrameReader.begin_ping`: this process runs."""
        return _nothing_left

    def begin_find_missing(self, paths: Sequence[str]) -> Callable[[], list[str]]:
        """Implements `FrameReader.begin_find_missing`."""
        missing = [path for path in paths if _is_missing(path)]
        return lambda: missing

    def begin_delete(self, paths: Sequence[str]) -> Callable[[], None]:
        """Implements `FrameReader.begin_delete`."""
        self._end_unread_folders()
        by_folder: defaultdict[str, list[str]] = defaultdict(list)
        for path in paths:
            by_folder[os.path.dirname(path)].append(path)
        for folder, in_folder in by_folder.items():
            delete_files(in_folder)
            if folder in self._ended_folders:
                self._remove_folder(folder)
        return _nothing_left

    def begin_end_folder(self, folder: str, known: Collection[str]) -> Callable[[], None]:
        """Implements `FrameReader.begin_end_folder`."""
        self._end_unread_folders()
        self._end_folder(folder, known)
        return _nothing_left

    def _end_unread_folders(self) -> None:
        unread, self._unread = self._unread, {}
        for folder, known in unread.items():
            self._end_folder(folder, known)

    def _end_folder(self, folder: str, known: Collection[str]) -> None:
        try:
            found = files_in(folder)
        except OSError as error:
            log.warning("%s is deleted later: %s", folder, error)
            self._unread[folder] = known
            return
        self._ended_folders.add(folder)
        delete_files(file.path for file in found if file.path not in known)
        self._remove_folder(folder)

    def begin_keep_only(
        self, known: Collection[str], in_use: Collection[str], newest: int
    ) -> Callable[[], None]:
        """Implements `FrameReader.begin_keep_only`."""
        if self._directory is None or not self._directory.is_dir():
            return _nothing_left
        for path in self._directory.iterdir():
            if folder_number(path.name) > newest:
                continue
            if not path.is_dir():
                path.unlink(missing_ok=True)
            elif path.name not in in_use:
                self.begin_end_folder(str(path), known)
        return _nothing_left

    def begin_read_journals(
        self, base: str, alive: Collection[str], restarts: Mapping[int, int]
    ) -> Callable[[], dict[str, JournalSummary]]:
        """Implements `NodeJournals.begin_read_journals`."""
        return lambda: read_journals(Path(base), alive, restarts)

    def begin_delete_journals(self, folders: Sequence[str]) -> Callable[[], None]:
        """Implements `NodeJournals.begin_delete_journals`."""
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        return _nothing_left

    def end(self) -> None:
        """Implements `FrameReader.end`: this process continues."""

    def _remove_folder(self, folder: str) -> None:
        with contextlib.suppress(OSError):  # it has frames still
            os.rmdir(folder)
            self._ended_folders.discard(folder)


def _nothing_left() -> None:
    """Wait for nothing."""


def folder_number(name: str) -> int:
    """Return the number in the name of a process's folder; 0 if it has none."""
    number = name.partition("-")[0]
    return int(number) if number.isdecimal() else 0


def files_in(folder: str) -> list[os.DirEntry[str]]:
    """Return the files in a folder; none if it does not exist."""
    try:
        return [entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def delete_files(paths: Iterable[str]) -> None:
    """Delete files that may be gone already."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _is_missing(path: str) -> bool:
    """Whether there is no such file; one that a broken disk does not show is there."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
