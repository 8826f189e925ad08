"""Finished trajectories as frames of their node, one file each, written once by the process that made them.

```
 spool/                                            the driver's Spool counts and deletes
   000001-driver/             SpoolFolder          ┌─► (trained, dropped) discard ─► delete_discarded
   000002-rollout-worker-0/   SpoolFolder ─ hold ──┤
   000003-rollout-worker-1/   SpoolFolder          └─► use_group ─► used
```

Each process writes into a folder of its own, which no later process gets. The ledger says which frames count:
one that it does not name is deleted by the next start, or when the process that wrote it has ended.

With `queue.spool_dir` the folders with these names are on the nodes of their processes, and what is done with
their files is done there (`FrameReader`). The folders in the run's spool keep the numbers then.

Where one call rewards a group, the completions of its members are in the folders of the run's spool, wherever
frames are, until a process has scored them. They have text and token ids, a hundredth of a frame with routing
rows, and the process that scores a group needs all of them.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from async_rl.codec import Frame
from async_rl.errors import SpoolFull
from async_rl.runtime.shortages import DISK_ERRORS, describe_disk_error, is_shortage
from async_rl.store.frame_reader import FrameReader, LocalFrameReader, delete_files, folder_number
from async_rl.store.frames import encode_completion, encode_trajectory
from async_rl.store.spool_nodes import SpoolNodes, no_other_nodes
from async_rl.types import Completion, StoredCompletion, StoredTrajectory, Trajectory

SMALLEST_GROUP = 64 << 10
"""The space for a group while nothing larger is known."""

FOLDER: Final = "spool"
"""The name in the run's folder."""


StoredFile = StoredTrajectory | StoredCompletion
"""A file of a spool: the frame of a trajectory, or a completion."""


class FrameStore(Protocol):
    """Where an attempt that has ended leaves its trajectories. All methods may be called from any thread."""

    def store_tree(self, tree: Sequence[Trajectory]) -> tuple[StoredTrajectory, ...]:
        """Write the frames of a trajectory and its branches, or none of them.

        Raises:
            SpoolFull: When there is no space, or no descriptor for a file. The caller can go on: the journal
                has the tokens.
        """
        ...

    def store_completion(self, trajectory_id: str, completion: Completion) -> StoredCompletion:
        """Write a completion into the run's folder, for the process that scores its group.

        Raises:
            SpoolFull: As `store_tree`.
            AgentLoopError: When its messages cannot be written.
        """
        ...

    def discard(self, stored: Iterable[StoredFile]) -> None:
        """Let files be deleted that are not needed any more."""
        ...


class _WrittenFiles:
    """The files that one process writes into a folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._numbers = count()
        self._is_made = False

    def make_folder(self) -> None:
        """Create the folder when it is missing; the first file does it otherwise."""
        if not self._is_made:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._is_made = True

    def write_frame(self, name: str, frame: Frame) -> str:
        """Write a file that appears when it is complete, and return its path.

        Path objects would take longer than the write.

        Raises:
            SpoolFull: When there is no space, or no descriptor for it.
        """
        path = f"{self.directory}/{name}-{next(self._numbers)}"
        part = f"{path}.part"
        try:
            self.make_folder()
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                _write_all(file, frame)
            finally:
                os.close(file)
            os.rename(part, path)
        except OSError as error:
            delete_files([path, part])
            if not is_shortage(error) and error.errno not in DISK_ERRORS:
                raise
            cause = describe_disk_error(error)
            raise SpoolFull(f"{self.directory} cannot take {frame.nbytes} bytes: {cause}") from error
        return path


class AnswerFolder(FrameStore):
    """The folder of a process that writes completions and no frames: evaluations are never trained on."""

    def __init__(self, directory: Path) -> None:
        """Write into a folder that no other process writes into; the first completion creates it."""
        self.directory = directory
        """The folder of the frames, if there are any."""
        self._completions = _WrittenFiles(directory)

    def store_tree(self, tree: Sequence[Trajectory]) -> tuple[StoredTrajectory, ...]:
        """Return summaries."""
        return tuple(StoredTrajectory.of(trajectory) for trajectory in tree)

    def store_completion(self, trajectory_id: str, completion: Completion) -> StoredCompletion:
        """Implements `FrameStore.store_completion`."""
        frame = encode_completion(completion, trajectory_id)
        path = self._completions.write_frame(f"{trajectory_id}-completion", frame)
        return StoredCompletion(path=path, nbytes=frame.nbytes, checksum=frame.checksum)

    def discard(self, stored: Iterable[StoredFile]) -> None:
        """Delete files."""
        delete_files(entry.path for entry in stored if entry.path)


class SpoolFolder(AnswerFolder):
    """The folder into which one process writes frames and completions."""

    def __init__(self, directory: Path, node: str = "", *, frames: Path | None = None) -> None:
        """Open a folder that no other process writes into; create it when it is missing.

        Args:
            directory: The folder.
            node: The address of this node if its frames are seen on it only.
            frames: Another folder for the frames, so that `directory` has the completions only.
        """
        super().__init__(directory)
        self._frames = self._completions if frames is None else _WrittenFiles(frames)
        self._frames.make_folder()
        self._node = node
        self.directory = self._frames.directory

    def store_tree(self, tree: Sequence[Trajectory]) -> tuple[StoredTrajectory, ...]:
        """Implements `FrameStore.store_tree`."""
        stored: list[StoredTrajectory] = []
        try:
            for trajectory in tree:
                stored.append(self._store(trajectory))  # noqa: PERF401  # those before a failure are deleted
        except BaseException:
            self.discard(stored)
            raise
        return tuple(stored)

    def _store(self, trajectory: Trajectory) -> StoredTrajectory:
        frame = encode_trajectory(trajectory)
        path = self._frames.write_frame(trajectory.trajectory_id, frame)
        return StoredTrajectory.of(
            trajectory, path=path, nbytes=frame.nbytes, checksum=frame.checksum, node=self._node
        )


def folder_on_node(folder: Path, node: str) -> Path:
    """Return the folder of a process on its node: nodes may see each other's disks."""
    return folder.parent / node / folder.name if node else folder


def _of_node(node: str) -> str:
    return f" of node {node}" if node else ""


class _HeldFrame(NamedTuple):
    node: str
    nbytes: int
    is_used: bool = False
    """Whether its group has ended."""


def relocated(stored: StoredTrajectory, directory: Path) -> StoredTrajectory:
    """Return the reference to the same file in a run's spool: the run's folder may have been moved."""
    if stored.node:
        return stored
    folder, name = os.path.split(stored.path)
    return msgspec.structs.replace(stored, path=f"{directory}/{os.path.basename(folder)}/{name}")


class Spool(FrameStore):
    """All frames of a run, on all nodes: what they take, and when they are deleted.

    It is used by the driver, whose own frames are in a folder of it as those of others are. Frames are held
    from the end of their attempt on; those of groups that have ended are *used*, and limited by `max_bytes`.
    """

    def __init__(
        self,
        directory: Path,
        max_bytes: int | None,
        *,
        node: str = "",
        node_directory: Path | None = None,
        open_reader: Callable[[str], FrameReader] = no_other_nodes,
    ) -> None:
        """Open the spool of a run. Its frames stay until `recover_frames`.

        Args:
            directory: The folder, created when it is missing.
            max_bytes: The limit on each node for the frames of groups that have ended; None for no limit but
                the disk's.
            node: The address of this node.
            node_directory: The folder of each node in which its processes keep their frames; None keeps them
                in `directory`.
            open_reader: Returns what reads the frames on another node.
        """
        self.directory = directory = directory.absolute()  # references are read by other processes
        self.max_bytes = max_bytes
        self.largest_group = SMALLEST_GROUP
        """The bytes of the largest group so far, which others may need as well."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._node_directory = node_directory
        local: dict[str, FrameReader] = {"": LocalFrameReader(directory)}
        if node:
            here = None if node_directory is None else folder_on_node(node_directory / "any", node).parent
            local[node] = LocalFrameReader(here)
        self.nodes = SpoolNodes(local, open_reader, held=self._nodes_with_frames, keep_known=self._keep_known)
        self._lock = threading.Lock()
        self._frames: dict[str, _HeldFrame] = {}  # by path
        self._used_bytes: defaultdict[str, int] = defaultdict(int)  # by node
        self._stored_bytes: dict[str, int] = {}  # by node, of all groups that ever ended
        self._discarded: list[tuple[str, str]] = []  # node, path
        self._deleting = threading.Lock()
        self._in_use: set[str] = set()  # names of folders of processes that may still write
        self._newest = max((folder_number(path.name) for path in directory.iterdir()), default=0)
        # Made before others are removed: no number occurs twice, even if an earlier process still runs.
        own, folder = node if node_directory is not None else "", self.new_folder("driver")
        self._own = SpoolFolder(folder, own, frames=self.frame_folder(folder, own))

    @property
    def absent(self) -> set[str]:
        """Nodes that do not answer."""
        return self.nodes.absent

    @property
    def writers(self) -> Counter[str]:
        """By node: rollout workers that answer and store frames there."""
        return self.nodes.writers

    @property
    def used_bytes(self) -> int:
        """The bytes of the frames of groups that have ended, on the node that has the most."""
        return max(self._used_bytes.values(), default=0)

    def fits_groups(self, number: int) -> bool:
        """Return whether this many more groups would fit, each as large as the largest one so far.

        They are spread over the nodes as what was stored so far.
        """
        if self.max_bytes is None:
            return True
        nbytes = number * self.largest_group
        stored, used = self._stored_bytes, self._used_bytes
        total = sum(stored.values())
        shares = {node: each / total for node, each in stored.items()} if total else {"": 1.0}
        return all(used[node] + nbytes * share <= self.max_bytes for node, share in shares.items())

    def describe(self) -> str:
        """Return how full the fullest node is."""
        node = max(self._used_bytes, key=self._used_bytes.__getitem__, default="")
        return f"the spool{_of_node(node)} holds {self.used_bytes} of {self.max_bytes} bytes"

    def new_folder(self, name: str) -> Path:
        """Return the folder for a process, which no other process has had; `frame_folder` has its frames.

        Raises:
            SpoolFull: When there is no space, or no descriptor for it.
        """
        while True:
            with self._lock:
                self._newest += 1
                path = self.directory / f"{self._newest:06d}-{name}"
                self._in_use.add(path.name)
            try:
                path.mkdir(mode=0o700)
            except OSError as error:
                with self._lock:
                    self._in_use.discard(path.name)
                if isinstance(error, FileExistsError):
                    continue
                if not is_shortage(error) and error.errno not in DISK_ERRORS:
                    raise
                raise SpoolFull(f"{path} cannot be made: {describe_disk_error(error)}") from error
            return path

    def frame_folder(self, folder: Path, node: str = "") -> Path:
        """Return where a process with a folder keeps its frames: on its node, or there.

        Args:
            folder: The folder, from `new_folder`.
            node: The node of the process; empty where frames are in the run's folder.
        """
        return (
            folder
            if self._node_directory is None
            else folder_on_node(self._node_directory / folder.name, node)
        )

    def store_tree(self, tree: Sequence[Trajectory]) -> tuple[StoredTrajectory, ...]:
        """Implements `FrameStore.store_tree`: this process writes and holds the frames."""
        stored = self._own.store_tree(tree)
        self.hold(stored)
        return stored

    def store_completion(self, trajectory_id: str, completion: Completion) -> StoredCompletion:
        """Implements `FrameStore.store_completion`: this process writes and holds the file."""
        stored = self._own.store_completion(trajectory_id, completion)
        self.hold([stored])
        return stored

    def hold(self, stored: Iterable[StoredFile]) -> None:
        """Keep files that another process has written."""
        with self._lock:
            for entry in stored:
                self._frames.setdefault(entry.path, _HeldFrame(entry.node, entry.nbytes))

    def use_group(self, stored: Sequence[StoredTrajectory]) -> None:
        """Count the frames of a group that has ended as used.

        Raises:
            SpoolFull: When they exceed `max_bytes`; then nothing has changed.
        """
        added: defaultdict[str, int] = defaultdict(int)
        for entry in stored:
            added[entry.node] += entry.nbytes
        with self._lock:
            for node, nbytes in added.items():
                if self.max_bytes is not None and self._used_bytes[node] + nbytes > self.max_bytes:
                    raise SpoolFull(
                        f"the spool{_of_node(node)} holds {self._used_bytes[node]} bytes, another {nbytes} "
                        f"exceed queue.max_bytes = {self.max_bytes}; raise it, or lower "
                        "trainer.groups_per_batch or max_staleness"
                    )
            self._use(stored)

    def reopen_group(self, stored: Iterable[StoredTrajectory]) -> None:
        """Count the frames of a group that continues as those of one that has not ended."""
        with self._lock:
            for entry in stored:
                if self._remove(entry.path):
                    self._frames[entry.path] = _HeldFrame(entry.node, entry.nbytes)

    def discard(self, stored: Iterable[StoredFile]) -> None:
        """Let files be deleted by the next `delete_discarded`; their bytes count as free from now on."""
        with self._lock:
            for entry in stored:
                if self._remove(entry.path):
                    self._discarded.append((entry.node, entry.path))

    def refuse(self, stored: Iterable[StoredFile]) -> None:
        """Let files that another process has written be deleted, unless they are held."""
        with self._lock:
            self._discarded += [(each.node, each.path) for each in stored if each.path not in self._frames]

    def delete_discarded(self, before: Callable[[], None] = lambda: None) -> None:
        """Call `before`, then delete what was discarded when it began; nothing if it raises.

        Frames on a node that is absent are deleted by a later call.
        """
        with self._deleting:
            discarded = tuple(self._discarded)
            before()
            by_node: defaultdict[str, list[str]] = defaultdict(list)
            for node, path in discarded:
                by_node[node].append(path)
            for node, paths in by_node.items():
                self._delete_files(node, paths)
            with self._lock:
                self._discarded[: len(discarded)] = [each for each in discarded if each[0] in self.absent]

    def _delete_files(self, node: str, paths: list[str]) -> None:
        """Let a node delete files; those that it has not deleted are discarded again, for when it is back."""

        def discard_again() -> None:
            with self._lock:
                self._discarded += [(node, path) for path in paths]

        self.nodes.ask(node, lambda reader: reader.begin_delete(paths), discard_again)

    def end_folder(self, folder: Path, node: str = "") -> None:
        """Delete the files of a process that has ended, except those that are held.

        Args:
            folder: Its folder, from `new_folder`.
            node: The node that has its frames; empty: the run's folder.
        """
        with self._deleting:
            with self._lock:
                known, completions = self._known(node), self._known("")
                self._in_use.discard(folder.name)
                is_newest = folder_number(folder.name) == self._newest
            if is_newest:
                # Its folder may be removed, and the next start must not give its number again.
                with suppress(OSError):
                    (self.directory / f"{folder_number(folder.name):06d}").touch()
            if node:
                frames = str(self.frame_folder(folder, node))
                self.nodes.ask(node, lambda reader: reader.begin_end_folder(frames, known))
            ours = str(self.directory / folder.name)
            self.nodes.ask("", lambda reader: reader.begin_end_folder(ours, completions))

    @property
    def has_nodes(self) -> bool:
        """Whether frames are, or may be, on nodes instead of in the run's folder."""
        return self._node_directory is not None or any(self._nodes_with_frames())

    def give_up(self, node: str) -> None:
        """Take a node that is absent for lost."""
        self.nodes.lost.add(node)
        self._stored_bytes.pop(node, None)  # nothing more is stored there

    def _nodes_with_frames(self) -> set[str]:
        with self._lock:
            return {frame.node for frame in self._frames.values()}

    def _keep_known(self, reader: FrameReader, node: str) -> Callable[[], None]:
        """Let a node delete what is not known any more."""
        with self._lock:
            known, in_use, newest = self._known(node), set(self._in_use), self._newest
        return reader.begin_keep_only(known, in_use, newest)

    # -- restart ------------------------------------------------------------------------------------------

    def recover_frames(
        self, early: Iterable[StoredTrajectory], used: Iterable[Sequence[StoredTrajectory]]
    ) -> None:
        """Keep the frames of earlier processes that the ledger names, and delete all other files.

        On other nodes this happens when they are first asked for something.

        Args:
            early: The frames of groups that have not ended.
            used: The frames of each group that has.
        """
        self.hold(early)
        with self._lock:
            for group in used:
                self._use(group)
            known, in_use, newest = set(self._frames), set(self._in_use), self._newest
        for node in self.nodes.local:
            self.nodes.ask(node, lambda reader: reader.begin_keep_only(known, in_use, newest))

    def _use(self, stored: Sequence[StoredTrajectory]) -> None:
        self.largest_group = max(self.largest_group, sum(entry.nbytes for entry in stored))
        for entry in stored:
            self._frames[entry.path] = _HeldFrame(entry.node, entry.nbytes, is_used=True)
            self._used_bytes[entry.node] += entry.nbytes
            self._stored_bytes[entry.node] = self._stored_bytes.get(entry.node, 0) + entry.nbytes

    def _known(self, node: str) -> set[str]:
        known = {path for path, frame in self._frames.items() if frame.node == node}
        return known | {path for where, path in self._discarded if where == node}

    def _remove(self, path: str) -> bool:
        """Stop counting a frame; return whether it was counted."""
        frame = self._frames.pop(path, None)
        if frame is not None and frame.is_used:
            self._used_bytes[frame.node] -= frame.nbytes
        return frame is not None


class AnswerSpool(AnswerFolder):
    """The completions of one evaluation, in the place of a `Spool`."""

    absent: Collection[str] = ()
    """As `Spool.absent`."""

    def __init__(self, directory: Path) -> None:
        """Begin without workers.

        Args:
            directory: A folder that all nodes see, of this evaluation alone.
        """
        super().__init__(directory / "driver")
        self._parent = directory
        self._numbers = count()
        self.writers = Counter[str]()
        """As `Spool.writers`."""

    def new_folder(self, name: str) -> Path:
        """Return the folder for a process, which no other process has had."""
        return self._parent / f"{next(self._numbers):06d}-{name}"

    def frame_folder(self, folder: Path, node: str = "") -> None:
        """Return no folder."""

    def hold(self, stored: Iterable[StoredFile]) -> None:
        """Do nothing: files that nothing discards are there until the end of the evaluation."""

    refuse = hold

    def end_folder(self, folder: Path, node: str = "") -> None:
        """Do nothing, as `hold`."""

    def delete(self) -> None:
        """Delete all files."""
        shutil.rmtree(self._parent, ignore_errors=True)


def _write_all(file: int, frame: Frame) -> None:
    for piece in frame.buffers():
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(file, rest) :]
