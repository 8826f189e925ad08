"""Rollout workers as tasks of the simulated loop: links with a delay, workers that die and fall silent."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self, TypeVar, cast

from msgspec.structs import replace

from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import Chunk, Engine, EngineFacts, Finish, GenerateRequest, PayloadProgress
from async_rl.engines.simulated import SimulatedEngine
from async_rl.errors import (
    ConnectionLost,
    EngineBusy,
    EngineUnreachable,
    NodeUnreachable,
    SpoolFull,
    WorkerLost,
)
from async_rl.observability.metrics import Metrics
from async_rl.rollout.attempt import Attempt, AttemptEnd
from async_rl.rollout.workers.messages import (
    AttemptEnded,
    AttemptFailed,
    AttemptProgress,
    Failure,
    GroupScored,
    Heartbeat,
    Link,
    Message,
    MessageNumbers,
    OpenJournal,
    RevokeEngines,
    StartAttempt,
    decode,
    encode,
)
from async_rl.rollout.workers.worker import RolloutWorker, WorkerFiles
from async_rl.rollout.workers.worker_backend import WorkerSpec
from async_rl.runtime.supervision import Nursery, first_error
from async_rl.store.archive import InspectedTrajectories
from async_rl.store.frame_reader import FrameReader, LocalFrameReader
from async_rl.store.journal_file import journal_files
from async_rl.store.journal_folders import JournalSummary
from async_rl.store.progress import ProgressReport
from async_rl.store.spool import AnswerFolder, SpoolFolder, folder_on_node
from async_rl.types import Completion, StoredCompletion, StoredTrajectory, Task, Trajectory
from verification.simulation.invariant_checker import caller_is_given_up
from verification.simulation.users import bad_environment

T = TypeVar("T")

LinkFault = Literal["lose_message", "repeat_message", "reorder_messages"]
"""What can happen to a message under way."""


class _Frame(NamedTuple):
    """A message under way."""

    number: int
    encoded: bytes


class MemoryLink(Link):
    """One end of a link within a process; messages are encoded, so that both sides have their own.

    Example:
        >>> ours, theirs = MemoryLink.pair(lambda: 0.0)
        >>> ours.post(CancelRequest(request_id=1))
        >>> await theirs.receive()
        CancelRequest(request_id=1)
    """

    def __init__(self, delay_s: Callable[[], float]) -> None:
        """Make one end; see `pair`."""
        self._delay_s = delay_s
        self.numbers = MessageNumbers()
        self._under_way: deque[_Frame | None] = deque()
        self._arrived: deque[_Frame] = deque()
        self._news = asyncio.Event()
        self._last_s = 0.0
        self._other: MemoryLink | None = None
        self._lost = ""
        self.is_cut_off = False
        self.is_deaf = False
        """Whether nothing that arrives is received."""
        self._faults: deque[tuple[LinkFault, Callable[[], None]]] = deque()
        self.at_node: Callable[[Message], Message] = lambda message: message
        """Returns a received message as it reads at the node of this end, whose files are its own."""
        self._overtaken: _Frame | None = None

    @classmethod
    def pair(cls, delay_s: Callable[[], float]) -> tuple[Self, Self]:
        """Both ends; `delay_s` draws how long a message is under way, which never overtakes another."""
        one, other = cls(delay_s), cls(delay_s)
        one._other, other._other = other, one
        return one, other

    def post(self, message: Message) -> None:
        """Implements `Link.post`."""
        other = self._other
        assert other is not None, "ends are made in pairs"
        if self._lost or other._lost:
            return
        encoded = encode(message)  # a message that cannot be encoded has no number
        frames = [_Frame(self.numbers.next_number(), encoded)]
        if self._overtaken is not None:
            frames.append(self._overtaken)
            self._overtaken = None
        elif self._faults:
            fault, met = self._faults.popleft()
            met()
            if fault == "repeat_message":
                frames *= 2
            elif (frame := frames.pop()) and fault == "reorder_messages":
                self._overtaken = frame
        for frame in frames:
            self._send(frame)

    def inject(self, fault: LinkFault, met: Callable[[], None], *, by_peer: bool, times: int = 1) -> None:
        """Let something happen to the next messages of this end, or of the other; each calls `met` then."""
        end = self._other if by_peer else self
        assert end is not None, "ends are made in pairs"
        end._faults.extend([(fault, met)] * times)

    def _send(self, frame: _Frame | None) -> None:
        other, loop = self._other, asyncio.get_running_loop()
        assert other is not None, "ends are made in pairs"
        self._last_s = max(self._last_s, loop.time() + self._delay_s())
        other._under_way.append(frame)
        loop.call_at(self._last_s, other._arrive)

    async def receive(self) -> Message:
        """Implements `Link.receive`."""
        while True:
            while not self._arrived or self.is_deaf:
                if self._lost:
                    raise WorkerLost(self._lost)
                self._news.clear()
                await self._news.wait()
            number, encoded = self._arrived.popleft()
            (message,) = decode(encoded)
            if self.numbers.is_next(number):
                return self.at_node(message)

    def close(self) -> None:
        """Implements `Link.close`: what is under way from here arrives first."""
        if not self._lost:
            self._send(None)
            self._lose("the link was closed")

    def lose(self, cause: str) -> None:
        """Both ends hear of it; what is under way is lost."""
        for end in (self,) if self.is_cut_off else (self, self._other):
            if end is not None:
                end._lose(cause)

    @property
    def is_given_up(self) -> bool:
        """Whether the other end may have given this one up."""
        return self.is_cut_off or bool(self._lost or (self._other is not None and self._other._lost))

    def cut_off(self) -> None:
        """Let nothing arrive any more at either end, which does not notice that."""
        for end in (self, self._other):
            if end is not None:
                end.is_cut_off = True

    def delay(self, for_s: float) -> None:
        """Let nothing that is sent from now on arrive earlier than after this time, at either end."""
        until_s = asyncio.get_running_loop().time() + for_s
        for end in (self, self._other):
            if end is not None:
                end._last_s = max(end._last_s, until_s)

    def _arrive(self) -> None:
        """The oldest message, for timers of one moment have no order."""
        if self._lost or self.is_cut_off:
            return
        if (frame := self._under_way.popleft()) is None:
            self._lose("its process has ended, or is no longer reachable")
        else:
            self._arrived.append(frame)
            self._news.set()

    def _lose(self, cause: str) -> None:
        if not self._lost:
            self._lost = cause
            self._news.set()


class DistantEngine:
    """A worker's client of an engine: a request arrives some time after it was sent."""

    def __init__(
        self,
        engine: SimulatedEngine,
        delay_s: Callable[[], float],
        late_requests: deque[LateRequest],
        is_isolated: Callable[[], bool] = lambda: False,
        on_call: Callable[[GenerateRequest], Callable[[], None]] = lambda request: _nothing_reached,
        blocked_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Call an engine over a network that takes `delay_s` for a request; `late_requests` take longer.

        While the worker is isolated it gets no connection, and loses those it has. It reads nothing for as
        long as `blocked_s` returns.
        """
        self.engine_id = engine.engine_id
        self.decode_routing, self.read_at_once = engine.decode_routing, engine.read_at_once
        self._engine = engine
        self._delay_s = delay_s
        self._late_requests = late_requests
        self._is_isolated = is_isolated
        self._on_call = on_call
        self._blocked_s = blocked_s

    async def close(self) -> None:
        """Implements `Engine.close`: there is no connection."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk | PayloadProgress | Finish, None]:
        """Implements `Engine.generate`."""
        return self._generate(request, self._on_call(request))

    async def _generate(
        self, request: GenerateRequest, reached: Callable[[], None]
    ) -> AsyncGenerator[Chunk | PayloadProgress | Finish, None]:
        if self._late_requests:
            await self._wait_for_late_request(self._late_requests.popleft())
            self._engine.check_open()  # all clocks may have jumped: a server without its memory refuses it
        await asyncio.sleep(self._delay_s())
        if self._is_isolated():
            raise EngineUnreachable(f"{self.engine_id} cannot be reached from here")
        await self._engine.wait_until_resumed()
        reached()
        async with aclosing(self._engine.generate(request)) as stream:
            async for event in stream:
                yield event
                if (blocked_s := self._blocked_s()) > 0:  # not before: what was read would be lost
                    await asyncio.sleep(blocked_s)
                if not isinstance(event, Finish) and self._is_isolated():
                    raise ConnectionLost(f"{self.engine_id}: connection lost")

    async def _wait_for_late_request(self, late: LateRequest) -> None:
        """Wait until a request arrives; it also does if its caller leaves before."""
        loop = asyncio.get_running_loop()
        arrives_s = loop.time() + late.delay_s
        try:
            await asyncio.sleep(late.delay_s)
        except BaseException:
            late.met()  # now: its caller may have taken it for the silence of the engine
            loop.call_at(arrives_s, self._arrive_without_caller)
            raise

    def _arrive_without_caller(self) -> None:
        """A server with all its memory drops the request; one without would die of it, and refuses it."""
        with suppress(EngineBusy):
            self._engine.check_open()


def _nothing_reached() -> None: ...


class LateRequest(NamedTuple):
    """What makes a request late."""

    delay_s: float
    met: Callable[[], None]
    """Called if its caller leaves before it arrives."""


class FaultySpoolFolder(SpoolFolder):
    """The spool folder of a worker, whose disk may be full, or which may be killed once a frame is there."""

    def __init__(
        self, directory: Path, node: str, frames: Path, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Call functions around each write."""
        super().__init__(directory, node, frames=frames if node else None)
        self._before = before
        self._after = after

    def store_tree(self, tree: Sequence[Trajectory]) -> tuple[StoredTrajectory, ...]:
        """Implements `FrameStore.store_tree`."""
        self._before()
        stored = super().store_tree(tree)
        self._after()
        return stored

    def store_completion(self, trajectory_id: str, completion: Completion) -> StoredCompletion:
        """Implements `FrameStore.store_completion`."""
        self._before()
        return super().store_completion(trajectory_id, completion)


_NUM_NODES: Final = 2
"""The nodes on which workers run, where frames stay on their nodes."""


class SimulatedNodes:
    """The nodes of a run, whose disks and absence outlive the driver.

    Example:
        >>> nodes = SimulatedNodes()
        >>> nodes.node_of("rollout-worker-3")
        'node-1-0'
    """

    def __init__(self) -> None:
        """Begin with all nodes present."""
        self.lost: set[str] = set()
        self.wiped: set[str] = set()
        """The folders of rollout workers that nodes have lost."""
        self.absent_until_s: dict[str, float] = {}
        self.unasked: set[str] = set()
        """Nodes that this driver has asked for nothing yet, or not since they failed to answer."""

    def node_of(self, name: str) -> str:
        """Return the node that a worker starts on; another one takes the place of a lost one."""
        number = int(name.rpartition("-")[2]) % _NUM_NODES
        return next(node for i in count() if (node := f"node-{number}-{i}") not in self.lost)

    def begin_incarnation(self) -> None:
        """Let a new driver ask each node when it first needs something there."""
        self.unasked |= self.names

    @property
    def names(self) -> set[str]:
        """All nodes on which workers have been or may start."""
        return {f"node-{number}-{i}" for number in range(_NUM_NODES) for i in range(len(self.lost) + 1)}

    def lose(self, node: str, folders: Iterable[Path]) -> None:
        """Let a node and its frames be gone."""
        self.lost.add(node)
        self.wipe(folders)

    def wipe(self, folders: Iterable[Path]) -> None:
        """Delete folders of a node."""
        for folder in folders:
            self.wiped.update(str(path) for path in folder.glob("*"))
            shutil.rmtree(folder, ignore_errors=True)

    def stay_away(self, node: str, until_s: float) -> None:
        """Let nothing on a node answer until a time on the loop's clock; its workers go on."""
        self.absent_until_s[node] = until_s

    def open_reader(self, node: str, directory: Path | None, clock: Callable[[], float]) -> FrameReader:
        """Return the reader of a node, whose processes write into folders of a directory.

        Raises:
            NodeUnreachable: It does not answer.
        """
        reader = _SimulatedReader(
            node, directory, lambda: self.require(node, clock()), partial(self.unasked.discard, node)
        )
        reader.begin_ping(0.0)()
        return reader

    def require(self, node: str, now: float) -> None:
        """Check that a node answers.

        Raises:
            NodeUnreachable: It does not.
        """
        if node in self.lost or now < self.absent_until_s.get(node, 0.0):
            self.unasked.add(node)
            error = NodeUnreachable(f"{node} does not answer")
            error.node = node
            raise error


class _SimulatedReader(LocalFrameReader):
    """Reads the files of another node while that answers; it does nothing meanwhile."""

    def __init__(
        self, node: str, directory: Path | None, require: Callable[[], None], on_asked: Callable[[], None]
    ) -> None:
        super().__init__(directory)
        self._node = node
        self._require = require
        self._on_asked = on_asked

    def begin_ping(self, limit_s: float) -> Callable[[], None]:
        """Implements `FrameReader.begin_ping`."""
        return self._require

    def begin_find_missing(self, paths: Sequence[str]) -> Callable[[], list[str]]:
        """Implements `FrameReader.begin_find_missing`."""
        return self._when_there(super().begin_find_missing(paths))

    def begin_delete(self, paths: Sequence[str]) -> Callable[[], None]:
        """Implements `FrameReader.begin_delete`."""
        return self._if_there(lambda: super(_SimulatedReader, self).begin_delete(paths))

    def begin_end_folder(self, folder: str, known: Collection[str]) -> Callable[[], None]:
        """Implements `FrameReader.begin_end_folder`."""
        return self._if_there(lambda: super(_SimulatedReader, self).begin_end_folder(folder, known))

    def begin_keep_only(
        self, known: Collection[str], in_use: Collection[str], newest: int
    ) -> Callable[[], None]:
        """Implements `FrameReader.begin_keep_only`."""
        self._on_asked()
        return self._if_there(lambda: super(_SimulatedReader, self).begin_keep_only(known, in_use, newest))

    def begin_read_journals(
        self, base: str, alive: Collection[str], restarts: Mapping[int, int]
    ) -> Callable[[], dict[str, JournalSummary]]:
        """Implements `NodeJournals.begin_read_journals`."""
        ours = str(Path(base).with_name(self._node))
        return self._when_there(super().begin_read_journals(ours, alive, restarts))

    def begin_delete_journals(self, folders: Sequence[str]) -> Callable[[], None]:
        """Implements `NodeJournals.begin_delete_journals`."""
        ours = [_folder_on(self._node, folder) for folder in folders]
        return self._if_there(lambda: super(_SimulatedReader, self).begin_delete_journals(ours))

    def _when_there(self, wait: Callable[[], T]) -> Callable[[], T]:
        """Let an answer arrive if the node answers then."""

        def answer() -> T:
            self._require()
            return wait()

        return answer

    def _if_there(self, begin: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Do something at once; if the node does not answer now, that is lost, and there is no answer."""
        try:
            self._require()
        except NodeUnreachable as error:
            return partial(_raise, error)
        return begin()


def _raise(error: Exception) -> None:
    raise error


CUT_OFF_S: Final = 25.0
"""How long a worker that is cut off from the driver continues: longer than its leases are valid."""


_MAX_REPEATED: Final = 50
"""How many messages in a row arrive twice at most."""

_MAX_TORN_BYTES: Final = 1000
"""How much of its journal a killed worker may not have written: a few records."""


class SimulatedWorkers:
    """Starts workers in this process, and ends them on demand.

    Example:
        >>> workers = SimulatedWorkers(seed, chat, engines, facts, delay_s=lambda: 0.001)
        >>> async with WorkerBackend(config, workers.open, metrics, {"": pool}, clock, spool): ...
        >>> workers.kill(0)
    """

    def __init__(
        self,
        seed: int,
        chat: ChatFormat,
        engines: Sequence[Engine],
        facts: EngineFacts,
        *,
        delay_s: Callable[[], float],
        start_s: float = 0.0,
        nodes: SimulatedNodes | None = None,
    ) -> None:
        """Start nothing yet; a start takes `start_s`."""
        self._engines = {engine.engine_id: engine for engine in engines}
        self._facts = facts
        self._chat = chat
        self._delay_s = delay_s
        self._start_s = start_s
        self.ends: dict[str, MemoryLink] = {}
        """The workers' ends of their links, by name."""
        self._running: dict[str, RolloutWorker] = {}
        self._places: dict[str, tuple[str, Path | None]] = {}  # node and folder of frames, by worker
        self.nodes = nodes or SimulatedNodes()
        """The nodes that workers are on."""
        self.cut_off_folders: set[str] = set()
        """The names of the folders of workers that were cut off."""
        self._torn = random.Random(f"torn journals {seed}")
        self._isolated_until_s: dict[str, float] = {}  # by worker
        self._bad_until_s: dict[str, float] = {}  # by worker
        self._blocked_until_s: dict[str, float] = {}  # by worker
        self.on_bad_environment: Callable[[], None] = _do_nothing
        """Called once an agent loop has raised for the bad environment of its worker."""
        self.on_call: Callable[[GenerateRequest], Callable[[], None]] = lambda request: _nothing_reached
        """Called with each request of a worker; what it returns is called when the engine gets it."""
        self.late_requests: deque[LateRequest] = deque()
        """The next requests of workers, which are late."""
        self.metrics: list[Metrics] = []
        """All workers that ever existed."""
        self.on_full_disk: Callable[[], None] | None = None
        """Called when a worker finds no space for a frame; None while there is space."""
        self.full_nodes: dict[str, Callable[[], None]] = {}
        """Nodes whose workers find no space for a frame, and what is called when one finds none."""
        self.on_store: Callable[[], None] = lambda: None
        """Called when a worker has stored a frame."""
        self.on_kill_after_frame: Callable[[], None] | None = None
        """Called when the next worker that stores a frame is killed; None when none is to be."""

    @asynccontextmanager
    async def open(self, spec: WorkerSpec) -> AsyncIterator[Link]:
        """Implements `OpenWorker` of the worker backend."""
        name = spec.name
        await asyncio.sleep(self._start_s)
        ours, theirs = MemoryLink.pair(self._delay_s)
        ours.peer_node = self.nodes.node_of(name)
        node = "" if spec.config.queue.spool_dir is None else ours.peer_node
        clock = asyncio.get_running_loop().time
        self.metrics.append(Metrics())
        prefix, numbers = f"w{len(self.metrics):07x}", count()
        worker = RolloutWorker(
            spec.config,
            chat=self._chat,
            facts=self._facts,
            connect=lambda engine_id, address: cast(
                Engine,
                DistantEngine(
                    cast(SimulatedEngine, self._engines[engine_id]),
                    self._delay_s,
                    self.late_requests,
                    lambda: clock() < self._isolated_until_s.get(name, 0.0),
                    lambda request: self.on_call(request),
                    lambda: self._blocked_until_s.get(name, 0.0) - clock(),
                ),
            ),
            new_id=lambda: f"{prefix}{next(numbers):024x}",
            metrics=self.metrics[-1],
            clock=clock,
            files=WorkerFiles(
                AnswerFolder(spec.folder) if spec.frames is None else self._spool(spec, spec.frames, node),
                None if spec.inspected is None else InspectedTrajectories(spec.inspected),
            ),
        )
        if spec.config.queue.journal_dir is not None:
            theirs.at_node = partial(_with_journals_of, ours.peer_node)
        self.ends[name], self._running[name] = theirs, worker
        self._places[name] = node, spec.frames
        async with Nursery() as process:
            bad_environment.set(partial(self._lacks_package, name))
            process.start_task(name, _run_process(worker, theirs))
            try:
                yield ours
            finally:
                if theirs.is_cut_off:
                    await asyncio.sleep(CUT_OFF_S)
                theirs.lose("the worker was ended")
                process.cancel_tasks()
                ours.peer_has_ended = not theirs.is_cut_off
                del self.ends[name], self._running[name], self._places[name]
                self._isolated_until_s.pop(name, None)
                self._blocked_until_s.pop(name, None)

    def _spool(self, spec: WorkerSpec, frames: Path, node: str) -> FaultySpoolFolder:
        before, after = partial(self._refuse_if_full, node), partial(self._kill_if_due, spec.name)
        return FaultySpoolFolder(spec.folder, node, folder_on_node(frames, node), before, after)

    def add_engines(self, engines: Iterable[Engine]) -> None:
        """Let workers reach further engines."""
        self._engines |= {engine.engine_id: engine for engine in engines}

    def _refuse_if_full(self, node: str) -> None:
        if self.on_full_disk is not None:
            note, self.on_full_disk = self.on_full_disk, _do_nothing
        elif node in self.full_nodes:
            note, self.full_nodes[node] = self.full_nodes[node], _do_nothing
        else:
            return
        note()
        raise SpoolFull("the disk is full") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _kill_if_due(self, name: str) -> None:
        self.on_store()
        if self.on_kill_after_frame is not None and name in self.ends:
            self.on_kill_after_frame()
            self.on_kill_after_frame = None
            self._kill(name)

    def _pick(self, index: int) -> list[str]:
        """Return the name of one of the workers; none if there is none."""
        names = sorted(self.ends)
        return [names[index % len(names)]] if names else []

    def kill(self, index: int) -> bool:
        """End a worker as SIGKILL does: it says nothing more, and its link is lost; whether there was one."""
        for name in (picked := self._pick(index)):
            self._kill(name)
        return bool(picked)

    def _kill(self, name: str) -> None:
        worker = self._running[name]
        worker.close()  # it writes nothing more
        if worker.journal_folder is not None and self._torn.random() < 0.5:
            _tear(worker.journal_folder, self._torn.randrange(1, _MAX_TORN_BYTES))
        self.ends[name].lose("the worker was killed")

    def cut_off(self, index: int) -> bool:
        """Let a worker and the driver hear nothing of each other, while both go on; whether there was one."""
        for name in (picked := self._pick(index)):
            self.ends[name].cut_off()
            if (folder := self._places[name][1]) is not None:
                self.cut_off_folders.add(folder.name)
        return bool(picked)

    def some_node(self, index: int) -> str:
        """Return one of the nodes that workers are on; empty where frames are in the run's folder."""
        nodes = sorted({node for node, _ in self._places.values()} - {""})
        return nodes[index % len(nodes)] if nodes else ""

    def lose_node(self, index: int, *, is_back: bool = False) -> bool:
        """End all workers of a node, and delete its files; whether there was one.

        Args:
            index: Chooses the node.
            is_back: Whether it is there again at once, with an empty disk.
        """
        if not (lost := self.some_node(index)):
            return False
        journals = {worker.journal_folder for worker in self._running.values() if worker.journal_folder}
        for name in [name for name, (node, _) in self._places.items() if node == lost and name in self.ends]:
            self._kill(name)
        folders = {folder.parent / lost for node, folder in self._places.values() if folder and node == lost}
        folders |= {path.parent for path in journals if path.parent.name == lost}
        if is_back:
            self.nodes.wipe(folders)
        else:
            self.nodes.lose(lost, folders)
        return True

    def disturb(self, fault: LinkFault, index: int, amount: float, met: Callable[[], None]) -> bool:
        """Let something happen to messages from a worker, or from the driver to it; whether there was one."""
        times = 1 + int(_MAX_REPEATED * amount) if fault == "repeat_message" else 1
        for name in (picked := self._pick(index // 2)):
            self.ends[name].inject(fault, met, by_peer=index % 2 == 1, times=times)
        return bool(picked)

    def spoil_environment(self, index: int, for_s: float, met: Callable[[], None]) -> None:
        """Let all agent loops of one worker raise at once for a while, also when it was restarted.

        It is always the same worker: where they raise in all of them, one after the other, the run may end.
        """
        now = asyncio.get_running_loop().time()
        if all(until_s < now for until_s in self._bad_until_s.values()):
            self._bad_until_s = dict.fromkeys(self._bad_until_s or self._pick(index), now + for_s)
            self.on_bad_environment = met

    def _lacks_package(self, name: str) -> bool:
        if asyncio.get_running_loop().time() >= self._bad_until_s.get(name, 0.0):
            return False
        note, self.on_bad_environment = self.on_bad_environment, _do_nothing
        note()
        return True

    def send_wrong_message(self, index: int, amount: float) -> bool:
        """Let a worker send what fits none of its requests; whether there was one."""
        for name in (picked := self._pick(index)):
            messages = list(self._wrong_messages(name))
            self.ends[name].post(messages[int(amount * len(messages))])
        return bool(picked)

    def _wrong_messages(self, name: str) -> Iterator[Message]:
        """Yield messages of a worker about what it was not given."""
        own, (node, frames) = self._running[name]._attempts, self._places[name]
        others = [worker._attempts for other, worker in self._running.items() if other != name]
        folder = frames and folder_on_node(frames, node)

        def end_of(attempt: Attempt, file: Path | None = None) -> AttemptEnd:
            path = file or (folder and folder / f"{attempt.trajectory_id}-0")
            stored = replace(attempt.failed(_LIE.error), path=str(path or ""), node=node)
            return AttemptEnd(trajectories=(stored,))

        nothing = end_of(Attempt(Task(task_id="none", messages=[]), "none", "none", 1, started_s=0.0))
        yield AttemptEnded(request_id=1 << 40, end=nothing)
        yield GroupScored(request_id=1 << 40)
        yield RevokeEngines(engines={}, newest_version=0, number=1 << 40)
        for request_id, attempt in (pair for attempts in others for pair in attempts.items()):
            yield AttemptEnded(request_id=request_id, end=end_of(attempt))
            yield AttemptFailed(request_id=request_id, failure=_LIE, trajectory=attempt.failed(_LIE.error))
        for request_id, attempt in own.items():
            yield AttemptEnded(request_id=request_id, end=nothing)
            yield AttemptFailed(request_id=request_id, failure=_LIE, trajectory=nothing.trajectories[0])
            yield GroupScored(request_id=request_id)
            report = AttemptProgress(request_id=request_id, trajectory_id="none", report=ProgressReport())
            yield Heartbeat(progress=(report,))
            for path in [] if folder is None else sorted(folder.glob("*-0")):  # finished by another attempt
                if not path.name.startswith(attempt.trajectory_id):
                    yield AttemptEnded(request_id=request_id, end=end_of(attempt, path))

    def delay(self, index: int, for_s: float) -> bool:
        """Let messages of a worker and for it take longer for once; whether there was one.

        For an odd index it reads no streams meanwhile either, as one whose event loop user code blocks.
        """
        for name in (picked := self._pick(index // 2)):
            self.ends[name].delay(for_s)
            if index % 2:
                self._blocked_until_s[name] = asyncio.get_running_loop().time() + for_s
        return bool(picked)

    def isolate(self, index: int, for_s: float) -> bool:
        """Let a worker reach no engine for a while, unless it ends; whether there was one."""
        until_s = asyncio.get_running_loop().time() + for_s
        self._isolated_until_s |= dict.fromkeys(picked := self._pick(index), until_s)
        return bool(picked)

    def deafen(self, index: int) -> bool:
        """Let a worker handle no more messages, while its heartbeats go on; whether there was one."""
        for name in (picked := self._pick(index)):
            self.ends[name].is_deaf = True
        return bool(picked)

    def mute(self, index: int) -> bool:
        """Let a worker say nothing more, as one whose event loop is blocked; whether there was one."""
        for name in (picked := self._pick(index)):
            self.ends[name].post = _nothing  # type: ignore[method-assign]
        return bool(picked)


def _with_journals_of(node: str, message: Message) -> Message:
    """Return a message that names the journals of a node, where the folder of journals is another one."""
    match message:
        case OpenJournal(folder=folder):
            return replace(message, folder=_folder_on(node, folder))
        case StartAttempt(claim=claim):
            sources = tuple(
                replace(source, folder=_folder_on(node, source.folder)) for source in claim.sources
            )
            return replace(message, claim=replace(claim, sources=sources))
    return message


def _tear(folder: Path, nbytes: int) -> None:
    """Cut off the end of a journal, as when its process is killed in a write; without descriptors, do not."""
    with suppress(OSError):
        for path in journal_files(folder):
            os.truncate(path, max(0, path.stat().st_size - nbytes))


async def _run_process(worker: RolloutWorker, link: MemoryLink) -> None:
    caller_is_given_up.set(lambda: link.is_given_up)
    try:
        await worker.run(link)
    except ExceptionGroup as errors:  # it has said so; a process ends by it alone
        if not isinstance(first_error(errors), OSError):
            raise
    finally:
        worker.write_and_close()


def exponential(rng: random.Random, mean_s: float) -> Callable[[], float]:
    """Delays with this mean; none when it is 0."""
    return lambda: rng.expovariate(1 / mean_s) if mean_s else 0.0


_LIE: Final = Failure(kind="AgentLoopError", text="a lie")


def _do_nothing() -> None:
    """In the place of a note that was made."""


def _nothing(message: Message) -> None:
    """In the place of `Link.post`."""


def _folder_on(node: str, folder: str) -> str:
    """Return where a node has the folder of a journal, by its path in the driver."""
    return str(Path(folder).parent.with_name(node) / Path(folder).name)
