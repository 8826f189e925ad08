"""Finished trajectories whose group is not: a frame file each, so that a restart makes none of them again.

They are not in the spool's slabs: most live for seconds, there may be as many as trajectories in flight, and
each mapped slab holds a file descriptor. The ledger says which files count; the others are nobody's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Collection
from pathlib import Path

from async_rl import codec
from async_rl.errors import CorruptFrame, SpoolFull
from async_rl.types import Trajectory


class KeptTrajectories:
    """The files of one folder. All methods may be called from any thread.

    Example:
        >>> name = kept.put(trajectory)
        >>> kept.read(name).outcome.reward
        >>> kept.free([name])
    """

    def __init__(self, directory: Path, max_bytes: int | None) -> None:
        """Open a folder; what lies in it stays until `recover`.

        Args:
            directory: Made when it is missing.
            max_bytes: Most bytes of all files, None for no limit but the disk's.
        """
        self._directory = directory
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._used = 0
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def put(self, trajectory: Trajectory) -> str:
        """Write a trajectory in the place of an earlier writing of it; returns the name of its file.

        Raises:
            SpoolFull: When there is no room. The trajectory can do without: its tokens are journalled.
        """
        name = trajectory.trajectory_id
        data = b"".join(codec.encode(trajectory))
        nbytes = len(data)
        with self._lock:
            self._forget(name)
            if self._max_bytes is not None and self._used + nbytes > self._max_bytes:
                raise SpoolFull(
                    f"{self._directory} holds {self._used} bytes, another {nbytes} exceed the quarter of "
                    f"queue.max_bytes that is meant for it, {self._max_bytes}"
                )
            self._note(name, nbytes)
        try:
            self._write(name, data)
        except OSError as error:
            self.free([name])
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise SpoolFull(f"no room for {nbytes} bytes in {self._directory}: the disk is full") from error
        return name

    def read(self, name: str) -> Trajectory:
        """The trajectory in a file; its arrays stay valid when the file is gone.

        Raises:
            CorruptFrame: When the file is damaged or missing.
        """
        try:
            return codec.read_frame(self._directory / name, Trajectory)
        except FileNotFoundError as error:
            raise CorruptFrame(f"{self._directory / name} is gone") from error

    def free(self, names: Collection[str]) -> None:
        """Remove files that no longer count."""
        for name in names:
            with self._lock:
                self._forget(name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._directory}/{name}")

    def recover(self, owned: Collection[str]) -> None:
        """Take up the files that an earlier process left, and remove those that nobody owns."""
        for path in self._directory.iterdir():
            if path.name in owned:
                with self._lock:
                    self._note(path.name, path.stat().st_size)
            else:
                path.unlink()

    def _write(self, name: str, data: bytes) -> None:
        """The file appears when it is whole. Path objects would take longer than the write."""
        part = f"{self._directory}/.{name}"
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(file, left) :]
        finally:
            os.close(file)
        os.rename(part, f"{self._directory}/{name}")

    def _note(self, name: str, nbytes: int) -> None:
        self._sizes[name] = nbytes
        self._used += nbytes

    def _forget(self, name: str) -> None:
        self._used -= self._sizes.pop(name, 0)
