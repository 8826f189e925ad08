"""Finished trajectories as frames of their node, one file each, written once by the process that made them.

```
 spool/                                            the driver's Spool counts and deletes
   000001-driver/             SpoolFolder          ┌─► (trained, dropped) discard ─► delete_discarded
   000002-rollout-worker-0/   SpoolFolder ─ hold ──┤
   000003-rollout-worker-1/   SpoolFolder          └─► put_group ─► used
     reusable/                files of settled trajectories, which the next frames overwrite
```

Each process writes into a folder of its own, which no later process gets. Readers map a frame until its batch
is settled: all ranks have answered then, and its file may be overwritten. The ledger says which frames count:
one that it does not name is deleted by the next start, or when the process that wrote it has ended.

A new file costs two to three times as much as one that is overwritten, because the kernel clears its pages.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Final, Protocol

import msgspec

from async_rl.codec import Frame
from async_rl.errors import SpoolFull
from async_rl.queue.frames import encode_trajectory
from async_rl.runtime.shortages import is_shortage
from async_rl.types import StoredTrajectory, Trajectory

log = logging.getLogger(__name__)

SMALLEST_GROUP = 64 << 10
"""The space for a group while nothing larger is known."""

FOLDER: Final = "spool"
"""The name in the run's folder."""

SMALLEST_REUSED: Final = 256 << 10
"""Files of fewer bytes are deleted: finding one again would take as long as making one."""

MAX_REUSABLE_BYTES: Final = 256 << 20
"""The limit for files that can be overwritten, per folder."""

_REUSABLE: Final = "reusable"


class FrameStore(Protocol):
    """Where an attempt that has ended leaves its trajectories. All methods may be called from any thread."""

    def store_tree(self, tree: Sequence[Trajectory]) -> tuple[StoredTrajectory, ...]:
        """Write the frames of a trajectory and its branches, or none of them.

        Raises:
            SpoolFull: When there is no space, or no descriptor for a file. The caller can go on: the journal
                has the tokens.
        """
        ...

    def discard(self, stored: Iterable[StoredTrajectory]) -> None:
        """Let frames be deleted that are not needed any more."""
        ...


class SpoolFolder(FrameStore):
    """The folder into which one process writes frames.

    Example:
        >>> folder = SpoolFolder(Path("spool/000001-driver"))
        >>> stored = folder.store_tree([trajectory, branch])
        >>> read_columns(stored[1])["token_ids"]
    """

    def __init__(self, directory: Path) -> None:
        """Open a folder that exists, and that no other process writes into."""
        self.directory = directory
        self._reusable = f"{directory}/{_REUSABLE}"
        self._numbers = count()
        self._lock = threading.Lock()
        self._found: list[tuple[int, str]] = []  # reusable files, with their sizes

    def store_tree(self, tree: Sequence[Trajectory]) -> tuple[StoredTrajectory, ...]:
        """Implements `FrameStore.store_tree`."""
        stored: list[StoredTrajectory] = []
        try:
            for trajectory in tree:
                stored.append(self._write(trajectory))  # noqa: PERF401  # those before a failure are deleted
        except BaseException:
            self.discard(stored)
            raise
        return tuple(stored)

    def discard(self, stored: Iterable[StoredTrajectory]) -> None:
        """Delete frames."""
        _delete(entry.path for entry in stored)

    def _write(self, trajectory: Trajectory) -> StoredTrajectory:
        """Write a file that appears when it is complete. Path objects would take longer than the write."""
        frame = encode_trajectory(trajectory)
        path = f"{self.directory}/{trajectory.trajectory_id}-{next(self._numbers)}"
        part = f"{path}.part"
        try:
            self._take_reusable(part, frame.nbytes)
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _write_all(file, frame)
                os.ftruncate(file, frame.nbytes)
            finally:
                os.close(file)
            os.rename(part, path)
        except OSError as error:
            _delete([path, part])
            if not is_shortage(error):
                raise
            with self._lock:
                self._found.clear()
                _delete(file.path for file in _files(self._reusable))
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            cause = "the disk is full; free some and start the run again" if full else error.strerror
            raise SpoolFull(f"{self.directory} cannot take {frame.nbytes} bytes: {cause}") from error
        return StoredTrajectory.of(trajectory, path=path, nbytes=frame.nbytes, checksum=frame.checksum)

    def _take_reusable(self, path: str, nbytes: int) -> None:
        """Move the file of a settled trajectory of about this size to a path, if there is one."""
        if nbytes < SMALLEST_REUSED:
            return
        with self._lock:
            if not self._found:
                self._found = [(file.stat().st_size, file.path) for file in _files(self._reusable)]
            if self._found:
                nearest = min(self._found, key=lambda file: abs(file[0] - nbytes))
                self._found.remove(nearest)
                os.rename(nearest[1], path)


class Spool(FrameStore):
    """All frames of a run on the driver's node: what they take, and when they are deleted.

    It is used by one process, whose own frames are in a folder of it as those of others are. Frames are held
    from the end of their attempt on; those of groups that have ended are *used*, and limited by `max_bytes`.

    Example:
        >>> spool = Spool(Path("spool"), max_bytes=8 << 30)
        >>> stored = spool.store_tree([trajectory])
        >>> spool.put_group(stored)
        >>> spool.discard(stored)
    """

    def __init__(self, directory: Path, max_bytes: int | None) -> None:
        """Open the spool of a run. Its frames stay until `recover_frames`.

        Args:
            directory: The folder, created when it is missing.
            max_bytes: The limit for the frames of groups that have ended; None for no limit but the disk's.
        """
        self.directory = directory = directory.absolute()  # references are read by other processes
        self.max_bytes = max_bytes
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = threading.Lock()
        self._early: dict[str, int] = {}  # bytes by path
        self._used: dict[str, int] = {}
        self._used_bytes = 0
        self._discarded: list[str] = []
        self._deleting = threading.Lock()
        self._ended_folders: set[str] = set()
        numbers = (path.name.partition("-")[0] for path in directory.iterdir())
        self._numbers = count(max((int(number) for number in numbers if number.isdecimal()), default=0) + 1)
        # Made before others are removed: no number occurs twice, even if an earlier process still runs.
        self._own = SpoolFolder(self.new_folder("driver"))

    @property
    def used_bytes(self) -> int:
        """The bytes of the frames of groups that have ended."""
        return self._used_bytes

    def new_folder(self, name: str) -> Path:
        """Make the folder of a process, which no other process has had.

        Raises:
            SpoolFull: When there is no space, or no descriptor for it.
        """
        while True:
            with self._lock:
                path = self.directory / f"{next(self._numbers):06d}-{name}"
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            except OSError as error:
                if not is_shortage(error):
                    raise
                raise SpoolFull(f"{path} cannot be made: {error.strerror}") from error
            return path

    def store_tree(self, tree: Sequence[Trajectory]) -> tuple[StoredTrajectory, ...]:
        """Implements `FrameStore.store_tree`: this process writes and holds the frames."""
        stored = self._own.store_tree(tree)
        self.hold(stored)
        return stored

    def hold(self, stored: Iterable[StoredTrajectory]) -> None:
        """Keep frames that another process has written."""
        with self._lock:
            for entry in stored:
                self._early[entry.path] = entry.nbytes

    def put_group(self, stored: Sequence[StoredTrajectory]) -> None:
        """Count the frames of a group that has ended as used.

        Raises:
            SpoolFull: When they exceed `max_bytes`; then nothing has changed.
        """
        nbytes = sum(entry.nbytes for entry in stored)
        with self._lock:
            if self.max_bytes is not None and self._used_bytes + nbytes > self.max_bytes:
                raise SpoolFull(
                    f"{self.directory} holds {self._used_bytes} bytes, another {nbytes} exceed "
                    f"queue.max_bytes = {self.max_bytes}; raise it, or lower trainer.groups_per_batch or "
                    "max_staleness"
                )
            for entry in stored:
                self._early.pop(entry.path, None)
                self._used[entry.path] = entry.nbytes
            self._used_bytes += nbytes

    def discard(self, stored: Iterable[StoredTrajectory]) -> None:
        """Let frames be deleted by the next `delete_discarded`; their bytes count as free from now on."""
        with self._lock:
            for entry in stored:
                if self._remove(entry.path):
                    self._discarded.append(entry.path)

    def refuse(self, stored: Iterable[StoredTrajectory]) -> None:
        """Let frames that another process has written be deleted, unless they are held."""
        with self._lock:
            self._discarded += [
                e.path for e in stored if e.path not in self._early and e.path not in self._used
            ]

    def delete_discarded(self, before: Callable[[], None] = lambda: None) -> None:
        """Call `before`, then delete what was discarded when it began; nothing if it raises."""
        with self._deleting:
            discarded = tuple(self._discarded)
            before()
            by_folder: defaultdict[str, list[str]] = defaultdict(list)
            for path in discarded:
                by_folder[os.path.dirname(path)].append(path)
            for folder, paths in by_folder.items():
                if folder in self._ended_folders:
                    _delete(paths)
                    self._remove_folder(folder)
                else:
                    _recycle(folder, paths)
            with self._lock:
                del self._discarded[: len(discarded)]

    def end_folder(self, folder: Path) -> None:
        """Delete the frames in the folder of a process that has ended, except those that are held."""
        with self._deleting:
            try:
                files = [*_files(str(folder)), *_files(f"{folder}/{_REUSABLE}")]
            except OSError as error:
                log.warning("%s is left to the next start: %s", folder, error)
                return
            with self._lock:
                known = {*self._early, *self._used, *self._discarded}
                self._ended_folders.add(str(folder))
            _delete(file.path for file in files if file.path not in known)
            with contextlib.suppress(OSError):
                os.rmdir(f"{folder}/{_REUSABLE}")
            self._remove_folder(str(folder))

    def relocated(self, stored: StoredTrajectory) -> StoredTrajectory:
        """Return the reference to the same file in this folder: the run's folder may have been moved."""
        folder, name = os.path.split(stored.path)
        path = f"{self.directory}/{os.path.basename(folder)}/{name}"
        return msgspec.structs.replace(stored, path=path)

    def recover_frames(self, early: Collection[StoredTrajectory], used: Collection[StoredTrajectory]) -> None:
        """Keep the frames of earlier processes that the ledger names, and delete all other files."""
        self.hold(early)
        with self._lock:
            for entry in used:
                self._used[entry.path] = entry.nbytes
                self._used_bytes += entry.nbytes
        for folder in self.directory.iterdir():
            if not folder.is_dir():
                folder.unlink()
            elif folder != self._own.directory:
                self.end_folder(folder)

    def _remove(self, path: str) -> bool:
        """Stop counting a frame; return whether it was counted."""
        if path in self._used:
            self._used_bytes -= self._used.pop(path)
            return True
        return self._early.pop(path, None) is not None

    def _remove_folder(self, folder: str) -> None:
        with contextlib.suppress(OSError):  # it has frames still
            os.rmdir(folder)
            self._ended_folders.discard(folder)


class NoSpool(FrameStore):
    """Stores no frames, in the place of a `Spool`: answers of evaluations, which are never trained on."""

    def new_folder(self, name: str) -> None:
        """Return no folder."""

    def store_tree(self, tree: Sequence[Trajectory]) -> tuple[StoredTrajectory, ...]:
        """Return summaries."""
        return tuple(StoredTrajectory.of(trajectory) for trajectory in tree)

    def hold(self, stored: Iterable[StoredTrajectory]) -> None:
        """Do nothing, as there are no frames."""

    refuse = discard = hold

    def end_folder(self, folder: Path) -> None:
        """Do nothing, as there are no folders."""


def _write_all(file: int, frame: Frame) -> None:
    for piece in frame.buffers():
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(file, rest) :]


def _files(folder: str) -> list[os.DirEntry[str]]:
    """Return the files in a folder; none if it does not exist."""
    try:
        return [entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return []


def _recycle(folder: str, paths: Iterable[str]) -> None:
    """Let the process of a folder overwrite files that are not needed any more; delete what is too much."""
    reusable = f"{folder}/{_REUSABLE}"
    left: list[str] = []
    nbytes: int | None = None
    for path in paths:
        try:
            size = os.stat(path).st_size
            if size >= SMALLEST_REUSED:
                if nbytes is None:
                    os.makedirs(reusable, mode=0o700, exist_ok=True)
                    nbytes = sum(file.stat().st_size for file in _files(reusable))
                if nbytes + size <= MAX_REUSABLE_BYTES:
                    os.rename(path, f"{reusable}/{os.path.basename(path)}")
                    nbytes += size
                    continue
        except OSError as error:  # a file was taken meanwhile, or there is no space for the folder
            log.info("%s is deleted, not used again: %s", path, error)
        left.append(path)
    _delete(left)


def _delete(paths: Iterable[str]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
