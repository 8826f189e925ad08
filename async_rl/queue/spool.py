"""Finished work as frames in files of a folder, which are mapped instead of copied, and reused.

A frame is stored at the beginning of a *slab*: a file that is created once, kept mapped by its writer and
used for one frame after the other. Writing to pages that were never touched takes ten times as long as a
copy. Readers in this process use the writer's mapping, readers in others map the file.

**Contract.** The caller of `free_frame` promises that no reader uses the frame any more: its slab may hold
other data the next moment, and arrays that were read from it would show them. `TrajectoryQueue` frees a frame
after the step that consumed it was settled. Freeing wipes the head of the frame, so a late reader gets
`CorruptFrame`.
"""

from __future__ import annotations

import bisect
import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from async_rl import codec
from async_rl.codec import Bytes, Frame
from async_rl.errors import CorruptFrame, SpoolFull

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_SMALLEST_SLAB = 64 << 10
_WIPED = bytes(64)


class _DiskFull(SpoolFull):
    """The disk has no space, where `max_bytes` would allow the frame."""


class SpoolRef(msgspec.Struct, frozen=True, kw_only=True):
    """The location of a frame."""

    path: str
    nbytes: int
    """The size of the frame; its slab may be larger."""
    kind: str
    """The name of the type in the frame."""


class RecoveredFrames(msgspec.Struct, frozen=True, kw_only=True):
    """The frames that an earlier process left in the folder."""

    intact: tuple[SpoolRef, ...]
    corrupt: dict[str, str]
    """The reason by path. These slabs are free again."""


class Spool:
    """The frames of one folder, written by one process. All methods may be called from any thread.

    Example:
        >>> spool = Spool(Path("spool"), max_bytes=8 << 30)
        >>> ref = spool.put_frame(group)
        >>> spool.read_frame(ref, Group).trajectories[0].token_ids
        >>> spool.free_frame(ref)
    """

    def __init__(self, directory: Path, max_bytes: int | None, *, keep_free: bool = True) -> None:
        """Open a folder. Its frames stay until `recover_frames` and `free_frame`.

        Args:
            directory: The folder, created when it is missing.
            max_bytes: The limit for the bytes of slabs; None for no limit but the disk's.
            keep_free: Whether free slabs stay when none fits and another is created. Otherwise they are
                deleted then: the next frames will be about as large as this one, as batches are.
        """
        self.directory = directory
        self.max_bytes = max_bytes
        self._keep_free = keep_free
        self.make_space: Callable[[], int] = self.release_free_slabs
        """Called when the disk is full, before that is reported; returns the number of bytes released."""
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._slabs: dict[str, Bytes] = {}  # all of them, mapped
        self._used: set[str] = set()
        self._free: list[tuple[int, str]] = []  # (size, path), ascending
        self._retired: list[str] = []
        self._retiring = threading.Lock()
        self._next = 0
        self._used_bytes = self._total_bytes = 0
        for path in sorted(directory.glob("slab-*")):
            if path.stat().st_size == 0:
                path.unlink()  # its writer died before it had a size
                continue
            self._slabs[str(path)] = slab = _map(path)
            self._used.add(str(path))
            self._used_bytes += len(slab)
            self._total_bytes += len(slab)
            self._next = max(self._next, int(path.name.removeprefix("slab-")) + 1)

    @property
    def used_bytes(self) -> int:
        """The bytes of the slabs that hold a frame which is not retired."""
        return self._used_bytes

    @property
    def has_retired(self) -> bool:
        """Whether `free_retired` has slabs to free."""
        return bool(self._retired)

    def put_frame(self, obj: Any) -> SpoolRef:
        """Write an object as a frame, with one copy of its arrays.

        Raises:
            SpoolFull: When it does not fit, below `max_bytes` or on the disk, also without any free slabs.
        """
        frame = Frame(obj)
        return self._write(frame, frame.copy_into)

    def put_filled_frame(self, obj: S, fill: Callable[[S], None]) -> SpoolRef:
        """Write a frame whose arrays are created in place.

        Args:
            obj: Gives the shapes. Its arrays (all of them fields of itself) need no content.
            fill: Receives `obj` with arrays that are part of the frame, and fills every element.

        Raises:
            SpoolFull: As `put_frame`.
        """
        frame = Frame(obj)

        def write(target: Bytes) -> None:
            fill(frame.place(obj, target))
            frame.seal(target)

        return self._write(frame, write)

    def read_frame(self, ref: SpoolRef, expected: type[T], *, verify: bool = True) -> T:
        """Read a frame that this process wrote or recovered. The arrays are valid until it is freed.

        Raises:
            CorruptFrame: As `codec.decode`; the message names the file.
        """
        with self._lock:
            slab = self._slabs[ref.path]
        try:
            return codec.decode(slab, expected, verify=verify)
        except CorruptFrame as error:
            raise CorruptFrame(f"{ref.path}: {error}") from error

    def free_frame(self, ref: SpoolRef) -> None:
        """Release a slab for reuse; see the contract above.

        Raises:
            ValueError: When it was free already.
        """
        self._release(ref.path)

    def retire_frame(self, ref: SpoolRef) -> None:
        """Release a slab for reuse after the next `free_retired`; its bytes count as free from now on.

        Raises:
            ValueError: When it was free already.
        """
        with self._lock:
            self._remove_used(ref.path)
            self._retired.append(ref.path)

    def free_retired(self, before: Callable[[], None]) -> None:
        """Call `before`, then free the slabs that were retired when it began; none if it raises."""
        with self._retiring:
            retired = tuple(self._retired)
            before()
            with self._lock:
                for path in retired:
                    self._add_free(path)
                del self._retired[: len(retired)]

    def recover_frames(self) -> RecoveredFrames:
        """Verify all frames in the folder completely, and free those that are damaged."""
        intact, corrupt = [], {}
        for path in sorted(self._used):
            slab = self._slabs[path]
            try:
                head = codec.inspect(slab)
                intact.append(SpoolRef(path=path, nbytes=head.nbytes, kind=head.kind))
            except CorruptFrame as error:
                if slab[: len(_WIPED)].any():
                    corrupt[path] = str(error)
                self._release(path)
        return RecoveredFrames(intact=tuple(intact), corrupt=corrupt)

    def _write(self, frame: Frame, write: Callable[[Bytes], None]) -> SpoolRef:
        try:
            path, slab = self._acquire(frame.nbytes)
        except _DiskFull:
            if not self.make_space():
                raise
            path, slab = self._acquire(frame.nbytes)
        try:
            write(slab)
        except BaseException:
            self._release(path)
            raise
        return SpoolRef(path=path, nbytes=frame.nbytes, kind=frame.kind)

    def _acquire(self, nbytes: int) -> tuple[str, Bytes]:
        """Return the smallest free slab that is large enough and not twice too large, or a new one."""
        with self._lock:
            index = bisect.bisect_left(self._free, (nbytes, ""))
            if index < len(self._free) and self._free[index][0] <= max(2 * nbytes, _SMALLEST_SLAB):
                _, path = self._free.pop(index)
                slab = self._slabs[path]
            else:
                path, slab = self._create(slab_size(nbytes))
            self._used.add(path)
            self._used_bytes += len(slab)
            return path, slab

    def _create(self, size: int) -> tuple[str, Bytes]:
        if self.max_bytes is not None:
            if self._used_bytes + size > self.max_bytes:
                raise SpoolFull(
                    f"{self.directory} holds {self._used_bytes} bytes, another {size} exceed queue.max_bytes "
                    f"= {self.max_bytes}; raise it, or lower trainer.groups_per_batch or max_staleness"
                )
            while self._free and self._total_bytes + size > self.max_bytes:
                self._delete_smallest()
        while self._free and not self._keep_free:
            self._delete_smallest()
        path = self.directory / f"slab-{self._next:06d}"
        self._next += 1
        try:
            with path.open("xb") as file:
                # Allocate the blocks now: a mapping that finds the disk full later would kill the process.
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _DiskFull(
                    f"no space for {size} bytes in {self.directory}: the disk is full; free some, or lower "
                    "queue.max_bytes"
                ) from error
            raise
        self._slabs[str(path)] = slab = _map(path)
        self._total_bytes += size
        return str(path), slab

    def release_free_slabs(self) -> int:
        """Delete all free slabs; return how many bytes they had."""
        with self._lock:
            before = self._total_bytes
            while self._free:
                self._delete_smallest()
            return before - self._total_bytes

    def _delete_smallest(self) -> None:
        nbytes, path = self._free.pop(0)
        self._total_bytes -= nbytes
        del self._slabs[path]
        os.unlink(path)

    def _release(self, path: str) -> None:
        with self._lock:
            self._remove_used(path)
            self._add_free(path)

    def _remove_used(self, path: str) -> None:
        if path not in self._used:
            raise ValueError(f"{path} is free already")
        self._used.remove(path)
        self._used_bytes -= len(self._slabs[path])

    def _add_free(self, path: str) -> None:
        slab = self._slabs[path]
        slab[: len(_WIPED)] = np.frombuffer(_WIPED, np.uint8)
        bisect.insort(self._free, (len(slab), path))


def slab_size(nbytes: int) -> int:
    """Return the next of four sizes per octave: little is wasted, and frames of similar size share slabs."""
    if nbytes <= _SMALLEST_SLAB:
        return _SMALLEST_SLAB
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


def _map(path: Path) -> Bytes:
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
