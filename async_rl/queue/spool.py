"""Finished trajectories as frames in a folder of their node: one file each, written once.

```
 write_trajectory ─► early frame ──┐                    ┌─► (trained, dropped) discard ─► delete_discarded
                                   ├─► put_group ─► used
 trajectories without a frame ─────┘
```

A trajectory is encoded once. Readers map its file; a file that is deleted stays readable where it is mapped.
The ledger says which files count: a frame that it does not name is deleted by the next start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import msgspec

from async_rl.codec import Frame
from async_rl.errors import SpoolFull
from async_rl.queue.frames import encode_trajectory
from async_rl.runtime.shortages import is_shortage
from async_rl.types import StoredTrajectory, Trajectory

SMALLEST_GROUP = 64 << 10
"""The space for a group while nothing larger is known."""


class Spool:
    """The frames of one folder, written by one process. All methods may be called from any thread.

    Frames of groups that have not ended are *early*: together they have a quarter of `max_bytes` beside it,
    because groups that have ended must not wait for them.

    Example:
        >>> spool = Spool(Path("spool"), max_bytes=8 << 30)
        >>> early = spool.write_trajectory(first)
        >>> stored = spool.put_group([early, second])
        >>> read_columns(stored[1])["token_ids"]
        >>> spool.discard(stored)
    """

    def __init__(self, directory: Path, max_bytes: int | None) -> None:
        """Open a folder. Its files stay until `recover_frames`.

        Args:
            directory: The folder, created when it is missing.
            max_bytes: The limit for the frames of groups that have ended; None for no limit but the disk's.
        """
        self.directory = directory
        self.max_bytes = max_bytes
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = threading.Lock()
        self._early: dict[str, int] = {}  # bytes by path
        self._used: dict[str, int] = {}
        self._early_bytes = self._used_bytes = 0
        self._discarded: list[str] = []
        self._deleting = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """The bytes of the frames of groups that have ended."""
        return self._used_bytes

    @property
    def has_discarded(self) -> bool:
        """Whether `delete_discarded` has files to delete."""
        return bool(self._discarded)

    def write_trajectory(self, trajectory: Trajectory) -> StoredTrajectory:
        """Write the frame of a trajectory whose group has not ended.

        Raises:
            SpoolFull: When there is no space, or no descriptor for the file. The caller can go on: the
                journal has the tokens.
        """
        frame = encode_trajectory(trajectory)
        with self._lock:
            if self.max_bytes is not None and self._early_bytes + frame.nbytes > self.max_bytes // 4:
                raise SpoolFull(
                    f"{self.directory} holds {self._early_bytes} bytes of unfinished groups, another "
                    f"{frame.nbytes} exceed a quarter of queue.max_bytes = {self.max_bytes}"
                )
            path = self._add_early(trajectory.trajectory_id, frame.nbytes)
        return self._write(trajectory, frame, path)

    def put_group(self, members: Sequence[Trajectory | StoredTrajectory]) -> tuple[StoredTrajectory, ...]:
        """Keep the frames of a group that has ended, and write those that are missing.

        Raises:
            SpoolFull: When they do not fit, below `max_bytes` or on the disk; then none was written.
        """
        frames = {m.trajectory_id: encode_trajectory(m) for m in members if isinstance(m, Trajectory)}
        nbytes = sum(m.nbytes if isinstance(m, StoredTrajectory) else 0 for m in members)
        nbytes += sum(frame.nbytes for frame in frames.values())
        with self._lock:
            if self.max_bytes is not None and self._used_bytes + nbytes > self.max_bytes:
                raise SpoolFull(
                    f"{self.directory} holds {self._used_bytes} bytes, another {nbytes} exceed "
                    f"queue.max_bytes = {self.max_bytes}; raise it, or lower trainer.groups_per_batch or "
                    "max_staleness"
                )
            self._used_bytes += nbytes  # reserved until all are written
        stored: list[StoredTrajectory] = []
        written: list[StoredTrajectory] = []
        try:
            for member in members:
                if isinstance(member, Trajectory):
                    frame = frames[member.trajectory_id]
                    with self._lock:
                        path = self._add_early(member.trajectory_id, frame.nbytes)
                    member = self._write(member, frame, path)
                    written.append(member)
                stored.append(member)
        except BaseException:
            self._delete(entry.path for entry in written)
            with self._lock:
                self._used_bytes -= nbytes
            raise
        with self._lock:
            self._used_bytes -= nbytes
            for entry in stored:
                self._make_used(entry.path)
        return tuple(stored)

    def discard(self, stored: Iterable[StoredTrajectory]) -> None:
        """Let frames be deleted by the next `delete_discarded`; their bytes count as free from now on."""
        with self._lock:
            for entry in stored:
                if self._remove(entry.path):
                    self._discarded.append(entry.path)

    def delete_discarded(self, before: Callable[[], None] = lambda: None) -> None:
        """Call `before`, then delete what was discarded when it began; nothing if it raises."""
        with self._deleting:
            discarded = tuple(self._discarded)
            before()
            for path in discarded:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            with self._lock:
                del self._discarded[: len(discarded)]

    def relocated(self, stored: StoredTrajectory) -> StoredTrajectory:
        """Return the reference to the same file in this folder."""
        path = f"{self.directory}/{os.path.basename(stored.path)}"
        return msgspec.structs.replace(stored, path=path)

    def recover_frames(self, early: Collection[StoredTrajectory], used: Collection[StoredTrajectory]) -> None:
        """Keep the frames of an earlier process that its ledger names, and delete all other files."""
        with self._lock:
            for entry in early:
                self._early[entry.path] = entry.nbytes
                self._early_bytes += entry.nbytes
            for entry in used:
                self._used[entry.path] = entry.nbytes
                self._used_bytes += entry.nbytes
            for path in self.directory.iterdir():
                if str(path) not in self._early and str(path) not in self._used:
                    path.unlink()

    def _write(self, trajectory: Trajectory, frame: Frame, path: str) -> StoredTrajectory:
        """Write a file that appears when it is complete. Path objects would take longer than the write."""
        part = f"{path}.part"
        try:
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                for piece in frame.buffers():
                    rest = memoryview(piece)
                    while rest:
                        rest = rest[os.write(file, rest) :]
            finally:
                os.close(file)
            os.rename(part, path)
        except OSError as error:
            self._delete([path, part])
            if not is_shortage(error):
                raise
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            cause = "the disk is full; free some and start the run again" if full else error.strerror
            raise SpoolFull(f"{self.directory} cannot take {frame.nbytes} bytes: {cause}") from error
        return StoredTrajectory.of(trajectory, path=path, nbytes=frame.nbytes, checksum=frame.checksum)

    def _delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            with self._lock:
                self._remove(path)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _add_early(self, trajectory_id: str, nbytes: int) -> str:
        """Return a path that no other frame has, and count its bytes."""
        path, number = f"{self.directory}/{trajectory_id}", 0
        while path in self._early or path in self._used or path in self._discarded:
            number += 1
            path = f"{self.directory}/{trajectory_id}~{number}"
        self._early[path] = nbytes
        self._early_bytes += nbytes
        return path

    def _make_used(self, path: str) -> None:
        nbytes = self._early.pop(path, 0)
        self._early_bytes -= nbytes
        self._used[path] = nbytes
        self._used_bytes += nbytes

    def _remove(self, path: str) -> bool:
        """Stop counting a frame; return whether it was counted."""
        if path in self._early:
            self._early_bytes -= self._early.pop(path)
            return True
        if path in self._used:
            self._used_bytes -= self._used.pop(path)
            return True
        return False
