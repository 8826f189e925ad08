"""Stores trajectories that have ended before their group, so that a restart does not repeat them.

```
 add_tree ─► pending ─ store_pending (in a thread) ─► files ─► ledger, with its next flush
               │                                       │
               └── discard: settled, or its group is queued ─► files deleted (by the next store)
```
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor
from itertools import groupby
from pathlib import Path

from async_rl import codec
from async_rl.errors import CorruptFrame, SpoolFull
from async_rl.queue.ledger import GroupRecord, Ledger
from async_rl.runtime.shortages import is_shortage
from async_rl.runtime.threads import run_uncancellable
from async_rl.types import Trajectory, root_of

log = logging.getLogger(__name__)


class TrajectoryFiles:
    """A folder with one frame file per trajectory. All methods may be called from any thread.

    The files are not slabs of the spool: most exist for seconds, there may be as many as trajectories in
    flight, and each mapped slab holds a file descriptor. The ledger says which files count.

    Example:
        >>> name = files.write_trajectory(trajectory)
        >>> files.read_trajectory(name).outcome.reward
        >>> files.delete([name])
    """

    def __init__(self, directory: Path, max_bytes: int | None) -> None:
        """Open a folder. Its files stay until `recover_files`.

        Args:
            directory: The folder, created when it is missing.
            max_bytes: The limit for all files together; None for no limit but the disk's.
        """
        self._directory = directory
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._used = 0
        self.make_space: Callable[[], int] = lambda: 0
        """Called when the disk is full, before that is reported; returns the number of bytes released."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def write_trajectory(self, trajectory: Trajectory) -> str:
        """Write a trajectory, replacing an earlier file of it, and return the name of the file.

        Raises:
            SpoolFull: When there is no space, or no descriptor for the file. The caller can go on: the
                journal has the tokens.
        """
        name = trajectory.trajectory_id
        data = b"".join(codec.encode(trajectory))
        nbytes = len(data)
        with self._lock:
            self._remove_size(name)
            if self._max_bytes is not None and self._used + nbytes > self._max_bytes:
                raise SpoolFull(
                    f"{self._directory} holds {self._used} bytes, another {nbytes} exceed the quarter of "
                    f"queue.max_bytes that is meant for it, {self._max_bytes}"
                )
            self._add_size(name, nbytes)
        try:
            self._write_or_make_space(name, data)
        except OSError as error:
            self.delete([name])
            if not is_shortage(error):
                raise
            raise SpoolFull(
                f"{nbytes} bytes cannot be written to {self._directory}: {error.strerror}"
            ) from error
        return name

    def read_trajectory(self, name: str) -> Trajectory:
        """Read the trajectory in a file. Its arrays stay valid after the file is deleted.

        Raises:
            CorruptFrame: When the file is damaged or missing.
        """
        try:
            return codec.read_frame(self._directory / name, Trajectory)
        except FileNotFoundError as error:
            raise CorruptFrame(f"{self._directory / name} does not exist") from error

    def delete(self, names: Collection[str]) -> None:
        """Delete files that no longer count."""
        for name in names:
            with self._lock:
                self._remove_size(name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._directory}/{name}")

    def recover_files(self, owned: Collection[str]) -> None:
        """Keep the named files of an earlier process and delete all others."""
        for path in self._directory.iterdir():
            if path.name in owned:
                with self._lock:
                    self._add_size(path.name, path.stat().st_size)
            else:
                path.unlink()

    def _write_or_make_space(self, name: str, data: bytes) -> None:
        """Write a file, on a full disk once more if `make_space` releases any."""
        try:
            self._write_file(name, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.make_space():
                raise
            self._write_file(name, data)

    def _write_file(self, name: str, data: bytes) -> None:
        """Write a file that appears when it is complete. Path objects would take longer than the write."""
        part = f"{self._directory}/.{name}"
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
        finally:
            os.close(file)
        os.rename(part, f"{self._directory}/{name}")

    def _add_size(self, name: str, nbytes: int) -> None:
        self._sizes[name] = nbytes
        self._used += nbytes

    def _remove_size(self, name: str) -> None:
        self._used -= self._sizes.pop(name, 0)


class FinishedTrajectories:
    """Stores the finished trajectories of groups in flight and records them in the ledger.

    All methods are for the event loop's thread.
    """

    def __init__(self, ledger: Ledger, files: TrajectoryFiles, executor: Executor) -> None:
        """Start with nothing pending. Files of an earlier process stay until `recover_files`.

        Args:
            ledger: Records which trajectories have ended, and their files.
            files: Holds the files.
            executor: Runs the writes of `store_pending`.
        """
        self._ledger = ledger
        self._files = files
        self._executor = executor
        self._pending: dict[str, Trajectory] = {}  # branches right after their trunk
        self._discarded: deque[str] = deque()  # files to be deleted

    def add_tree(self, *tree: Trajectory) -> None:
        """Add a trajectory that has ended before its group, with its branches.

        Raises:
            InvariantError: When one is not in flight.
        """
        for trajectory in tree:
            self._ledger.group_of(trajectory.trajectory_id)
        self._pending |= {trajectory.trajectory_id: trajectory for trajectory in tree}

    async def store_pending(self) -> list[str]:
        """Store the trajectories added since the last call whose groups have not ended, in a thread.

        Discarded files are deleted there before. The ledger has them after its next flush.

        Returns:
            Those that were stored now. Without space they are not: the journal has their tokens.
        """
        pending = list(self._pending.values())
        if not pending and not self._discarded:
            return []
        stored, cancelled = await run_uncancellable(self._executor, lambda: self._store(pending))
        self._discarded.extend(name for name in stored if name not in self._pending)  # settled meanwhile
        recorded = self._record_stored(stored)
        if cancelled is not None:
            raise cancelled
        return recorded

    def store_pending_now(self) -> list[str]:
        """Do the same in the calling thread, when no other thread works any more."""
        return self._record_stored(self._store(list(self._pending.values())))  # none is settled meanwhile

    def record_group(self, trajectories: Iterable[Trajectory], stored: Collection[str]) -> None:
        """Record the trajectories of a group that has ended; none of them is pending any more.

        Args:
            trajectories: The trajectories of the group.
            stored: Those that the ledger has recorded already.
        """
        for trajectory in trajectories:
            self._pending.pop(trajectory.trajectory_id, None)
            if trajectory.trajectory_id not in stored:
                self._record(trajectory, None)

    def discard(self, trajectory_ids: Iterable[str], files: Collection[str] = ()) -> None:
        """Forget settled trajectories; the next store or `delete_discarded` deletes their files."""
        for name in trajectory_ids:
            self._pending.pop(name, None)
        self._discarded.extend(files)

    def delete_discarded(self) -> None:
        """Delete the discarded files. From any thread."""
        while self._discarded:
            self._files.delete([self._discarded.popleft()])

    def recover_files(self, groups: Iterable[GroupRecord]) -> None:
        """Keep the files that an earlier process wrote for these groups, and delete all others."""
        self._files.recover_files({name for group in groups for name in group.stored.values()})

    def recover_trajectories(self, group: GroupRecord, version: int) -> dict[str, Trajectory]:
        """Read the finished trajectories of a group that an earlier process left in flight.

        A trajectory and its branches are made by one agent loop: if any of them is missing or damaged, all of
        them are sampled again.

        Args:
            group: The group, from the ledger.
            version: The version that engines serve. Versions above it were undone by the restart: tokens that
                they sampled count as sampled by this one.
        """
        found: dict[str, Trajectory] = {}
        for trajectory_id, name in sorted(group.stored.items()):
            try:
                found[trajectory_id] = self._files.read_trajectory(name)
            except CorruptFrame as error:
                log.warning("trajectory %s is sampled again: %s", trajectory_id, error)
        unfinished = {root_of(name) for name in group.in_flight - found.keys()}
        finished: dict[str, Trajectory] = {}
        for trajectory_id, name in sorted(group.stored.items()):
            if root_of(trajectory_id) in unfinished:
                self._ledger.unfinish_trajectory(trajectory_id)
                self._files.delete([name])
                continue
            trajectory = found[trajectory_id]
            finished[trajectory_id] = capped = trajectory.capped(version)
            if capped is not trajectory:
                with contextlib.suppress(SpoolFull):  # then the next restart lowers it again
                    self._files.write_trajectory(capped)
        return finished

    def _store(self, trajectories: Sequence[Trajectory]) -> list[str]:
        """Write trajectories until there is no space, each together with its branches; return their files."""
        self.delete_discarded()
        stored: list[str] = []
        for _, tree in groupby(trajectories, key=lambda trajectory: root_of(trajectory.trajectory_id)):
            complete = len(stored)
            try:
                for trajectory in tree:
                    stored.append(self._files.write_trajectory(trajectory))
            except SpoolFull as error:
                log.info("trajectory %s stays in the journal only: %s", trajectory.trajectory_id, error)
                self._files.delete(stored[complete:])
                del stored[complete:]
                break
        return stored

    def _record_stored(self, stored: Sequence[str]) -> list[str]:
        """Record stored trajectories in the ledger, except those that were settled meanwhile."""
        current = [name for name in stored if name in self._pending]
        for name in current:
            self._record(self._pending.pop(name), name)
        return current

    def _record(self, trajectory: Trajectory, file: str | None) -> None:
        self._ledger.finish_trajectory(
            trajectory.trajectory_id,
            segments=len(trajectory.segments),
            tokens=trajectory.num_sampled_tokens,
            reward=trajectory.outcome.reward,
            frame=file,
        )
