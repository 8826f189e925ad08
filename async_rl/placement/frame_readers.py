"""One actor on each node that has frames or journals, or trains: it reads, deletes, sends and receives them.

```
 node a: worker ─► files ◄─ FrameReaderActor ── Ray's store ──► FrameReaderActor ─► memory ◄─ ranks of node b
                     ▲            ▲                                  ▲
   ranks of node a ──┘            └── delete: driver ────────────────┘ hold
```

Each frame goes to a node once, whatever the number of ranks there that read it. The driver sees references.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import ray
from ray.exceptions import (
    ActorUnschedulableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_rl.codec import ALIGNMENT, Bytes, map_file
from async_rl.errors import NodeUnreachable
from async_rl.placement.actor_shutdown import EXIT_LIMIT_S, end_actor
from async_rl.placement.actors import ActorSetup, NodeActor
from async_rl.placement.placements import node_addresses
from async_rl.placement.ray_trainer import last_line
from async_rl.runtime.processes import die_with_parent
from async_rl.runtime.shortages import is_shortage
from async_rl.runtime.supervision import Nursery
from async_rl.store.frame_reader import FrameReader, LocalFrameReader
from async_rl.store.journal_folders import JournalSummary, read_journals
from async_rl.types import StoredTrajectory

log = logging.getLogger(__name__)

T = TypeVar("T")

_ANSWER_LIMIT_S: Final = 120.0
"""A reader may be sending all frames of a batch on its node."""

_JOIN_LIMIT_S: Final = 10.0
"""A reader that has not started by then is killed at the end of the run."""

_PINGS: Final = "pings"
"""The concurrency group of a reader that answers while it reads."""

_DELETIONS: Final = "deletions"
"""The concurrency group of a reader that deletes while it sends: what is known now may be old in a minute."""


_GROUPS: Final = {_PINGS: 1, _DELETIONS: 1}

_ENDED: Final = RayActorError, ActorUnschedulableError, OutOfMemoryError
"""The errors of calls to an actor that has ended, or whose node has."""


class FrameReaderActor(NodeActor):
    """Reads the frames on its node for the driver."""

    def __init__(self, directory: str | None) -> None:
        die_with_parent()
        os.environ["OMP_NUM_THREADS"] = "1"
        self._local = LocalFrameReader(None if directory is None else Path(directory))
        self._held: SharedFrames | None = None
        self._num_journals = 0

    def ping(self) -> None:
        """Answer."""

    def call_local(self, method: str, *arguments: Any) -> Any:
        """Call a method of `LocalFrameReader`, and return the answer for which it waits."""
        return getattr(self._local, method)(*arguments)()

    def read_journals(
        self, base: str, alive: Collection[str], restarts: Mapping[int, int]
    ) -> dict[str, JournalSummary]:
        """Read how far trajectories are in the journals on this node."""

        def count() -> None:
            self._num_journals += 1

        return read_journals(Path(base), alive, restarts, count)

    def num_journals_read(self) -> int:
        """Return how many journals it has read."""
        return self._num_journals

    def send_frames(self, stored: Sequence[StoredTrajectory]) -> list[Any]:
        """Put frames into Ray's store, and return references to them; each is copied once."""
        return [ray.put(map_frame(each.path)) for each in stored]

    def hold_frames(self, objects: Sequence[Any]) -> tuple[str, list[int]]:
        """Keep frames that arrive through Ray's store in memory, for all ranks of this node.

        Those of the call before are freed. The ranks verify them.

        Returns:
            The path of a file with all frames, and where each begins.
        """
        self._held = None
        self._held = held = SharedFrames()
        # One after the other, so that only one of them is in the store and in the file.
        return held.path, [held.append(ray.get(reference)) for reference in objects]

    def holds(self, path: str) -> bool:
        """Return whether frames are held in this file: not those of a reader that has ended."""
        return self._held is not None and self._held.path == path


def map_frame(path: str) -> Bytes:
    """Map a frame. One whose file cannot be opened is empty, which ranks report as they do damaged ones.

    Raises:
        OSError: There is no descriptor for it.
    """
    try:
        return np.frombuffer(map_file(path), np.uint8)
    except OSError as error:
        if is_shortage(error):
            raise
        log.warning("a frame cannot be sent: %s", error)
        return np.empty(0, np.uint8)


class SharedFrames:
    """Frames in memory under a path that other processes of this host and user can open.

    The path belongs to this process (an anonymous file), so nothing is left behind when the process is
    killed.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create("async_rl_frames", os.MFD_CLOEXEC)
        self._end = 0

    def append(self, data: Any) -> int:
        """Add a frame and return where it begins, aligned as the codec requires."""
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        view = memoryview(data)
        while view:
            self._end = offset + len(data) - len(view)
            view = view[os.pwrite(self._file, view, self._end) :]
        self._end = offset + len(data)
        return offset

    @property
    def path(self) -> str:
        """The path, valid as long as this object."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def __del__(self) -> None:
        os.close(self._file)


class FrameReaders:
    """Starts the readers of a run, one on each node when it is first needed; from any thread."""

    def __init__(self, setup: ActorSetup, log_dir: Path, directory: Path | None) -> None:
        """Start none yet.

        Args:
            setup: How an actor finds the files of the run.
            log_dir: The folder of their logs.
            directory: The folder of each node with frames of the run; None: nodes have none.
        """
        self._setup = setup
        self._log_dir = log_dir
        self._directory = directory
        self._lock = threading.Lock()
        self._actors: dict[str, tuple[Any, Any]] = {}  # by node: the actor, and a reference to its process

    def actor_on(self, node: str) -> Any:
        """Return the reader on the node with an address; start it if there is none.

        Raises:
            NodeUnreachable: There is no such node now.
        """
        with self._lock:
            if node not in self._actors:
                ids = [node_id for node_id, address in node_addresses().items() if address == node]
                if not ids:
                    raise NodeUnreachable(f"node {node}, which has data of the run, has left Ray's cluster")
                actor_class: Any = ray.remote(concurrency_groups=_GROUPS)(FrameReaderActor)  # type: ignore[call-overload]
                there = NodeAffinitySchedulingStrategy(ids[0], soft=False)
                actor = actor_class.options(num_cpus=0, scheduling_strategy=there).remote(
                    None if self._directory is None else str(self._directory / node)
                )
                path = str(self._log_dir / f"frame-reader-{node}.log")
                self._actors[node] = actor, actor.join_run.remote(self._setup, path)
            return self._actors[node][0]

    async def call(self, node: str, method: str, *arguments: Any) -> Any:
        """Call a method of the reader on a node. If the reader has ended, start another one and call that.

        Raises:
            NodeUnreachable: There is no such node now.
            RayError: The call failed, or the other reader has ended as well.
        """
        actor = await asyncio.to_thread(self.actor_on, node)
        try:
            return await getattr(actor, method).remote(*arguments)
        except _ENDED as error:
            log.warning("the reader of frames on node %s has ended: %s", node, last_line(error))
            await asyncio.to_thread(self.forget, node, actor)
        actor = await asyncio.to_thread(self.actor_on, node)
        return await getattr(actor, method).remote(*arguments)

    def open_reader(self, node: str) -> FrameReader:
        """Implements `Cluster.open_frame_reader`."""
        return RayFrameReader(self, node)

    def forget(self, node: str, actor: Any) -> None:
        """Let the next `actor_on` start another reader instead of this one, which does not answer."""
        with self._lock:
            if node in self._actors and self._actors[node][0] is actor:
                del self._actors[node]
                ray.kill(actor)

    async def close(self, *, at_once: bool = False) -> None:
        """End all readers."""
        async with Nursery() as nursery:
            for actor, joining in self._actors.values():
                nursery.start_task("end a reader of frames", _end_reader(actor, joining, at_once))
        self._actors.clear()


async def _end_reader(actor: Any, joining: Any, at_once: bool) -> None:
    process = None
    with suppress(RayError, TimeoutError):
        async with asyncio.timeout(_JOIN_LIMIT_S):
            process = await joining
    await end_actor(actor, process, grace_s=0.0 if at_once else EXIT_LIMIT_S)


class RayFrameReader(FrameReader):
    """Implements `FrameReader` by the actor on another node."""

    def __init__(self, readers: FrameReaders, node: str) -> None:
        self._node = node
        self._readers = readers
        self._actor = readers.actor_on(node)

    def begin_ping(self, limit_s: float) -> Callable[[], None]:
        """Implements `FrameReader.begin_ping`."""
        return self._ask(self._actor.ping, _PINGS, limit_s)

    def begin_find_missing(self, paths: Sequence[str]) -> Callable[[], list[str]]:
        """Implements `FrameReader.begin_find_missing`."""
        return self._answer(self._actor.call_local.remote("begin_find_missing", list(paths)), _ANSWER_LIMIT_S)

    def begin_delete(self, paths: Sequence[str]) -> Callable[[], None]:
        """Implements `FrameReader.begin_delete`."""
        return self._delete("begin_delete", list(paths))

    def begin_end_folder(self, folder: str, known: Collection[str]) -> Callable[[], None]:
        """Implements `FrameReader.begin_end_folder`."""
        return self._delete("begin_end_folder", folder, set(known))

    def begin_keep_only(
        self, known: Collection[str], in_use: Collection[str], newest: int
    ) -> Callable[[], None]:
        """Implements `FrameReader.begin_keep_only`."""
        return self._delete("begin_keep_only", set(known), set(in_use), newest)

    def begin_read_journals(
        self, base: str, alive: Collection[str], restarts: Mapping[int, int]
    ) -> Callable[[], dict[str, JournalSummary]]:
        """Implements `NodeJournals.begin_read_journals`: the limit is that of each journal."""
        reference = self._actor.read_journals.remote(base, alive, restarts)
        wait = self._answer(reference, _ANSWER_LIMIT_S)

        def wait_for_all() -> dict[str, JournalSummary]:
            num_read = 0
            while True:
                try:
                    summaries: dict[str, JournalSummary] = wait()
                    return summaries
                except NodeUnreachable as error:
                    if not isinstance(error.__cause__, GetTimeoutError):
                        raise
                    before = num_read
                    num_read = self._ask(self._actor.num_journals_read, _PINGS, _ANSWER_LIMIT_S)()
                    if num_read == before:
                        raise

        return wait_for_all

    def begin_delete_journals(self, folders: Sequence[str]) -> Callable[[], None]:
        """Implements `NodeJournals.begin_delete_journals`."""
        return self._delete("begin_delete_journals", list(folders))

    def end(self) -> None:
        """Implements `FrameReader.end`."""
        self._readers.forget(self._node, self._actor)

    def _delete(self, method: str, *arguments: Any) -> Callable[[], None]:
        return self._ask(self._actor.call_local, _DELETIONS, _ANSWER_LIMIT_S, method, *arguments)

    def _ask(self, method: Any, group: str, limit_s: float, *arguments: Any) -> Callable[[], Any]:
        return self._answer(method.options(concurrency_group=group).remote(*arguments), limit_s)

    def _answer(self, reference: Any, limit_s: float) -> Callable[[], Any]:
        def wait() -> Any:
            try:
                return ray.get(reference, timeout=limit_s)
            except RayError as error:
                unreachable = NodeUnreachable(
                    f"node {self._node}, which has data of the run, does not answer: {last_line(error)}"
                )
                if isinstance(error, _ENDED):  # not one that is slow to start
                    unreachable.reader_has_ended = True
                    self._readers.forget(self._node, self._actor)
                raise unreachable from error

        return wait
