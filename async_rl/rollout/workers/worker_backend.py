"""The driver's side of rollout workers: distributes attempts, and replaces workers that end.

```
 loop       consumes                waits for           unblocked by          produces
 keeper     one worker's messages   the next message    the worker; its end   inbox entries, a restart
 watch      ticks                   the next tick       time                  the end of a silent worker
 attempt    its inbox               the answer          the worker; its end   trajectories
```

A worker that ends, or does not answer for `rollout.worker_stall_s`, is restarted. Its attempts raise
`WorkerLost` at once; its journal has everything up to its last write.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Final, Self, cast

import msgspec

from async_rl.config import Config
from async_rl.engines import health
from async_rl.engines.pool import EnginePool
from async_rl.errors import (
    AgentLoopError,
    ConfigError,
    EnvironmentNotReady,
    PromptTooLong,
    RewardError,
    RewardUnavailable,
    RolloutError,
    SpoolFull,
    WorkerLost,
)
from async_rl.observability.metrics import Metrics
from async_rl.rollout.attempt import Attempt, AttemptEnd
from async_rl.rollout.backend import RolloutBackend
from async_rl.rollout.workers.messages import (
    AttemptEnded,
    AttemptFailed,
    CancelRequest,
    EntriesReleased,
    GroupScored,
    Heartbeat,
    LeaseWanted,
    Link,
    Message,
    OpenJournal,
    ScoreGroup,
    ServingChanged,
    StartAttempt,
    WorkerFailed,
)
from async_rl.rollout.workers.metric_counts import add_increments
from async_rl.rollout.workers.relayed_leases import RelayedLeases
from async_rl.rollout.workers.remote_progress import apply_report, remote_progress
from async_rl.rollout.workers.worker import LEASE_S
from async_rl.runtime.supervision import Nursery, first_error, services
from async_rl.runtime.threads import run_uncancellable
from async_rl.runtime.waits import Scope, waiting
from async_rl.store.archive import InspectedTrajectories
from async_rl.store.journal_folders import JournalFolders
from async_rl.store.spool import AnswerSpool, Spool
from async_rl.types import StoredCompletion, Task, root_of

log = logging.getLogger(__name__)


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout worker is started for."""

    name: str
    config: Config
    """The settings that its sessions follow."""
    folder: Path
    """Its own folder in that of the run, for the completions of groups that one call rewards."""
    frames: Path | None
    """Where it writes the frames of finished trajectories; None: nowhere."""
    inspected: Path | None
    """Where it keeps a copy of each trajectory for inspection; None: nowhere."""
    node: str | None = None
    """The address of the node at which it starts if it can: that of the worker before has its journal."""


OpenWorker = Callable[[WorkerSpec], AbstractAsyncContextManager[Link]]
"""Starts a worker; it ends with the block, whatever its state."""

_TICKS: Final = 8
"""Silence is counted in this many ticks of the driver, so that a driver that stalled itself does not take its
workers for dead."""

_MESSAGES_PER_TURN: Final = 64
"""The event loop comes round after this many messages of one worker."""

_MAX_FAILED_STARTS: Final = 3
"""The run ends when all workers have failed this many times in a row to start, or to complete an attempt
before an error of their own: user code that fails now fails later. One worker alone may lack a place on its
node."""

_RESTART_DELAY_S: Final = 0.5
"""Delay before a worker is restarted, doubled for each incarnation in a row that completed no attempt."""

_MAX_DOUBLINGS: Final = 6

_FULL_S: Final = 600.0
"""How long attempts avoid a node that had no space for a frame, if others have some. A shortage is waited out
there for a tenth of that: otherwise attempts would go to and fro between nodes that are all full."""

_MAX_FAILED_AT_ONCE: Final = 3
"""A worker is ended when the loops of this many tasks have raised in it before they asked for an engine,
while loops in other workers ask for engines: one broken task says nothing, and three in a row are hardly all
so."""

_SHARE_OF_SLACK: Final = 8
"""A worker is given siblings until it has an eighth of its share more requests than the least loaded one."""

_MAX_SCORE_TRIES: Final = 3
"""How often a group's reward is requested if its workers end."""


class _Inbox(Scope):
    """The answer to one attempt, or to one group's reward."""

    def __init__(self, *, num_scores: int = 0, may_move: bool = False) -> None:
        self.num_scores = num_scores
        """How many scores the answer must have."""
        self.may_move = may_move
        """Whether another worker tries the attempt if its loop raises at once."""
        self._answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def put_message(self, message: Message | Exception) -> bool:
        """Set the answer, or the error in its place; return False when it is no longer awaited."""
        if self._answer.done():
            return False
        if isinstance(message, Exception):
            self._answer.set_exception(message)
        else:
            self._answer.set_result(message)
        return True

    @property
    def message(self) -> Message | None:
        """The answer, if there is one."""
        answer = self._answer
        arrived = answer.done() and not answer.cancelled() and answer.exception() is None
        return answer.result() if arrived else None

    async def answer(self) -> Message:
        """Wait for the answer.

        Raises:
            WorkerLost: The worker has ended.
            TimeoutError: The stall doctor has ended the wait.
        """
        return await self._answer

    def expired(self) -> bool:
        """Implements `Scope.expired`."""
        return self._answer.done()

    def reschedule(self, when: float) -> None:
        """Implements `Scope.reschedule`: ends the wait."""
        self.put_message(TimeoutError())


class WorkerHandle:
    """One incarnation of a worker."""

    def __init__(
        self,
        name: str,
        link: Link,
        completion_folder: Path,
        frame_folder: Path | None,
        frame_node: str,
        leases: Callable[[WorkerHandle], RelayedLeases],
        folders: JournalFolders | None,
    ) -> None:
        self.name = name
        self.folder: Path | None = None
        """The folder of its journal."""
        if folders is not None:
            self.folder = folders.add_owner(name, self.release_entries, link.peer_node)
        self.journal_bytes = 0
        self.link = link
        self.frame_node = frame_node
        """The node that has the frames; empty: the run's folder has them."""
        self.frame_folder = "" if frame_folder is None else str(frame_folder)
        """The folder of its frames; empty: it writes none."""
        self.completion_folder = str(completion_folder)
        self.post = link.post
        self.close = link.close
        self.newest_request = 0
        """The request that it was given last."""
        self.inboxes: dict[int, _Inbox] = {}
        self.attempts: dict[int, Attempt] = {}
        """Its running attempts, by request."""
        self.callers = set[str]()
        """Trajectories whose attempts have asked for an engine here."""
        self.by_trajectory: dict[str, Attempt] = {}
        """The same, by sibling."""
        self.waits: dict[str, str] = {}
        """What trajectories wait for, according to the last heartbeat."""
        self.silent_ticks = 0
        """Ticks since it has shown by a heartbeat that it handles messages."""
        self._expected = 0
        """The number of the message that it must have handled to show that."""
        self.has_completed_attempt = False
        self.failure: Exception | None = None
        """The error of its own that ended it."""
        self.leases = leases(self)
        """What it may call engines for."""

    def post_request(self, request: StartAttempt | ScoreGroup, inbox: _Inbox) -> None:
        """Send a request, whose answer the inbox gets.

        Raises:
            RolloutError: Its task holds something that messages cannot, such as an integer of more than 64
                bits.
        """
        try:
            self.post(request)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise RolloutError(
                f"task {request.task.task_id} cannot be sent to a rollout worker ({error}): "
                "write numbers of more than 64 bits as strings"
            ) from error
        self.newest_request = request.request_id
        self.inboxes[request.request_id] = inbox

    def is_answer(self, message: AttemptEnded | AttemptFailed | GroupScored) -> bool:
        """Return whether a message is about what a request of its own asked for; it may be a late one."""
        request_id = message.request_id
        if (inbox := self.inboxes.get(request_id)) is None:
            return request_id <= self.newest_request
        attempt = self.attempts.get(request_id)
        if attempt is None or isinstance(message, GroupScored):
            return (
                attempt is None
                and isinstance(message, GroupScored)
                and (message.failure is not None or len(message.scores) == inbox.num_scores)
            )
        if isinstance(message, AttemptFailed):
            return message.trajectory.trajectory_id == attempt.trajectory_id
        return message.end.is_of(attempt)

    def has_written(self, end: AttemptEnd) -> bool:
        """Return whether all references of an attempt's end are to files in its folders."""
        frames = {(each.node, each.path.rpartition("/")[0]) for each in end.trajectories}
        completions = {each.path.rpartition("/")[0] for each in end.completions}
        return frames <= {(self.frame_node, self.frame_folder)} and completions <= {self.completion_folder}

    def record_heartbeat(self, received: int) -> bool:
        """Return whether it has handled the messages that were sent before an earlier heartbeat."""
        if received >= self._expected:
            self.silent_ticks, self._expected = 0, self.link.numbers.sent
            return True
        return False

    def record_lease(self, trajectory_id: str, version: int | None) -> None:
        """Note the version under which a trajectory samples; None when its call has ended."""
        attempt = self.by_trajectory.get(root_of(trajectory_id))
        if attempt is not None:
            progress = remote_progress(attempt, trajectory_id)
            if version is None:
                progress.end_call()
            else:
                progress.begin_call(version)

    def release_entries(self, root_ids: Sequence[str]) -> None:
        """Let the worker know that its journal need not have trajectories any longer."""
        self.post(EntriesReleased(trajectory_ids=tuple(root_ids)))

    def fail_requests(self, cause: str) -> None:
        """Fail everything that was requested of the worker."""
        callers = self.leases.callers
        for request_id, inbox in self.inboxes.items():
            lost, attempt = WorkerLost(cause), self.attempts.get(request_id)
            lost.is_excused = attempt is not None and attempt.trajectory_id in callers
            inbox.put_message(lost)


class _WorkerLoad:
    """The worker with the fewest requests, in O(log workers)."""

    def __init__(self, workers: Mapping[str, WorkerHandle]) -> None:
        self._workers = workers
        self._numbers = count()
        self._heap: list[tuple[int, str, int, WorkerHandle]] = []  # outdated entries are skipped

    def offer(self, worker: WorkerHandle) -> None:
        """Note the number of requests of a worker, after each change of it."""
        if len(self._heap) > 8 * len(self._workers) + 64:
            self._heap = [self._entry(each) for each in self._workers.values()]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, self._entry(worker))

    def _entry(self, worker: WorkerHandle) -> tuple[int, str, int, WorkerHandle]:
        return len(worker.inboxes), worker.name, next(self._numbers), worker

    def least_loaded(self) -> WorkerHandle | None:
        """Return the worker, if any is alive."""
        while self._heap:
            load, *_, worker = self._heap[0]
            if self._workers.get(worker.name) is worker and len(worker.inboxes) == load:
                return worker
            heapq.heappop(self._heap)
        return None


class WorkerBackend(RolloutBackend):
    """Runs attempts in the rollout workers of a run."""

    def __init__(
        self,
        config: Config,
        open_worker: OpenWorker,
        metrics: Metrics,
        pool: EnginePool,
        clock: Callable[[], float],
        spool: Spool | AnswerSpool,
        folders: JournalFolders | None = None,
        *,
        models: Mapping[str, EnginePool] | None = None,
        inspected: InspectedTrajectories | None = None,
        name: str = "rollout-worker",
    ) -> None:
        """Prepare to start the workers of a config.

        Args:
            config: Their number, and the settings that their sessions follow.
            open_worker: Starts a worker.
            metrics: To which those of the workers are added.
            pool: The engines that workers call, whose serving clock they follow.
            clock: Monotonic seconds.
            spool: Has a folder for each worker, and holds the frames that they write.
            folders: The journals of the run; without, workers keep none.
            models: The engines of further models, by the model's name.
            inspected: Where workers keep a copy of each trajectory for inspection.
            name: The name of a worker begins with it.
        """
        # Workers do not choose the number again: on their nodes `engine.urls_file` may be another one.
        rollout = msgspec.structs.replace(config.rollout, num_workers=config.num_workers)
        self._spec = WorkerSpec(
            name=name,
            config=msgspec.structs.replace(config, rollout=rollout),
            folder=Path(),
            frames=None,
            inspected=None if inspected is None else inspected.folder,
        )
        self._config = config.rollout
        self._max_attempts = config.max_attempts_per_worker
        self._spool = spool
        self._folders = folders
        self._open_worker = open_worker
        self._metrics = metrics
        self._pools = {"": pool, **(models or {})}
        self._clock = clock
        self._serving_clock = pool.serving_clock
        self.workers: dict[str, WorkerHandle] = {}
        """The workers that are alive, by name."""
        self._starting: set[str] = set()
        self._failing: set[str] = set()
        """Workers that have failed `_MAX_FAILED_STARTS` times in a row."""
        self._full_until_s: dict[str, float] = {}
        """When a node that had no space is tried again, by node."""
        self._failed_at_once: dict[str, set[str]] = {}
        """The tasks whose loops have raised in a worker, by its name, since one last asked for an engine."""
        self._moved: set[str] = set()
        """Trajectories that another worker is to try, because their loops have raised at once."""
        self._leases: list[RelayedLeases] = []
        """Those of all workers that may still run."""
        self._load = _WorkerLoad(self.workers)
        self._last_chosen: tuple[str, WorkerHandle] | None = None
        """The group of the last attempt, and its worker."""
        share = self._share = -(-config.rollout.max_concurrent_trajectories // max(1, config.num_workers))
        self._slack = max(1, min(config.rollout.group_size, share // _SHARE_OF_SLACK))
        self._readers: dict[str, WorkerHandle] = {}
        """The living worker that has read a folder of journals, or is reading it, by folder."""
        self._worker_free = asyncio.Event()
        self._request_ids = count(1)
        self._keepers = Nursery()

    async def __aenter__(self) -> Self:
        """Start all workers; attempts wait for the first of them."""
        self._serving_clock.listeners[self._post_serving_change] = None
        await self._keepers.__aenter__()
        for index in range(self._spec.config.num_workers):
            name = f"{self._spec.name}-{index}"
            self._starting.add(name)
            self._keepers.start_task(name, self._keep_worker(name))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End all workers."""
        self._serving_clock.listeners.pop(self._post_serving_change)
        self._keepers.cancel_tasks()
        try:
            await self._keepers.__aexit__(kind, error, traceback)
        finally:
            for leases in self._leases:
                await leases.expire()  # of workers that may still run

    # -- requests ------------------------------------------------------------------------------------------

    async def run_attempt(self, attempt: Attempt) -> AttemptEnd:
        """Implements `RolloutBackend.run_attempt`."""
        node = None if self._folders is None else self._folders.node_of(attempt.claim)
        journal = attempt.claim.sources[-1].folder if attempt.claim.sources else None
        moved, name = attempt.trajectory_id in self._moved, attempt.trajectory_id
        worker = await self._choose_worker(self._max_attempts, node, attempt.group_id, journal, moved=moved)
        self._moved.discard(name)
        if journal is not None and self.workers.get(worker.name) is worker:
            self._readers[journal] = worker
        self._last_chosen = attempt.group_id, worker
        request_id, inbox = next(self._request_ids), _Inbox(may_move=not moved)
        loop = attempt.task.agent_loop or self._config.agent_loop
        worker.post_request(
            StartAttempt(
                request_id=request_id,
                task=attempt.task,
                trajectory_id=name,
                group_id=attempt.group_id,
                attempt=attempt.number,
                claim=attempt.claim,
            ),
            inbox,
        )
        self._load.offer(worker)
        worker.attempts[request_id] = worker.by_trajectory[name] = attempt
        answer: Message | None = None
        if worker.folder is not None:
            attempt.on_start(worker.folder)
        try:
            with waiting(
                "agent loop",
                loop,
                scope=inbox,
                why=lambda: f"{worker.name}: {worker.waits.get(name, 'at work')}",
            ) as wait:
                answer = await inbox.answer()
        except TimeoutError as error:
            if not wait.cut:
                raise
            raise AgentLoopError(
                f"agent loop {loop} was ended by the stall doctor: bound the loop's own waits"
            ) from error
        finally:
            del worker.inboxes[request_id], worker.attempts[request_id], worker.by_trajectory[name]
            worker.callers.discard(name)
            self._load.offer(worker)
            self._worker_free.set()
            if answer is None:
                worker.post(CancelRequest(request_id=request_id))
                if isinstance(unheard := inbox.message, AttemptEnded):
                    self._metrics.late_results_total.inc()
                    self._spool.discard([*unheard.end.trajectories, *unheard.end.completions])
        worker.has_completed_attempt = True
        if isinstance(answer, AttemptFailed):
            failed = answer.trajectory
            attempt.failed = lambda error: failed
            cause = answer.failure.error
            if isinstance(cause, SpoolFull) and worker.frame_node:
                self._avoid_node(worker.frame_node)
            raise cause
        assert isinstance(answer, AttemptEnded), "the only other answer to a StartAttempt"
        self._full_until_s.pop(worker.frame_node, None)
        return answer.end

    @property
    def has_space_elsewhere(self) -> bool:
        """Implements `RolloutBackend.has_space_elsewhere`."""
        avoided = self._avoided_nodes
        return bool(self._full_until_s) and any(
            worker.frame_node not in avoided for worker in self.workers.values()
        )

    def _avoid_node(self, node: str) -> None:
        """Note that a node has no space."""
        self._full_until_s[node] = self._clock() + _FULL_S

    @property
    def _avoided_nodes(self) -> Set[str]:
        """Nodes that do not answer, or have no space for frames."""
        now = self._clock()
        self._full_until_s = {node: until_s for node, until_s in self._full_until_s.items() if until_s > now}
        return self._spool.absent | self._full_until_s.keys()

    async def score_group(
        self, task: Task, completions: Sequence[StoredCompletion]
    ) -> Sequence[dict[str, float] | RewardError]:
        """Implements `RolloutBackend.score_group`; if its worker ends, it asks another one."""
        for left in reversed(range(_MAX_SCORE_TRIES)):
            worker = await self._choose_worker()
            request_id, inbox = next(self._request_ids), _Inbox(num_scores=len(completions))
            request = ScoreGroup(request_id=request_id, task=task, completions=tuple(completions))
            worker.post_request(request, inbox)
            self._load.offer(worker)
            answer: Message | None = None
            try:
                with waiting("reward", worker.name):
                    answer = await inbox.answer()
            except WorkerLost as error:
                if not left:
                    raise RewardUnavailable(
                        f"its rollout worker ended {_MAX_SCORE_TRIES} times: {error}"
                    ) from error
                continue
            finally:
                del worker.inboxes[request_id]
                self._load.offer(worker)
                if answer is None:
                    worker.post(CancelRequest(request_id=request_id))
            assert isinstance(answer, GroupScored), "the only answer to a ScoreGroup"
            if answer.failure is not None:
                raise answer.failure.error
            return [cast(RewardError, s.failure.error) if s.failure else s.parts for s in answer.scores]
        raise AssertionError("the last try raises or returns")

    async def _choose_worker(
        self,
        max_attempts: int | None = None,
        node: str | None = None,
        group_id: str | None = None,
        journal: str | None = None,
        *,
        moved: bool = False,
    ) -> WorkerHandle:
        """Wait until a worker is alive and has fewer attempts; return the one with the fewest requests.

        Siblings that begin one after the other have the same worker, which tokenises their prompt once,
        unless it then has too many more requests than others. Attempts that go on from the same folder of
        journals have the same worker up to its share of all, because it reads the whole folder: after a
        restart each worker would otherwise read those of all workers.

        While a worker is missing, the others take over its attempts up to this limit, which bounds their
        memory. Where only one node has the journal of an attempt, it waits for a worker there while one is
        starting; without one, it begins anew elsewhere. An attempt that was moved goes to the worker in
        which the fewest loops have raised at once.
        """

        def has_capacity(worker: WorkerHandle) -> bool:
            return max_attempts is None or len(worker.attempts) < max_attempts

        while True:
            avoided = self._avoided_nodes
            if node in self._full_until_s:
                node = None
            worker = None if node is not None or avoided or moved else self._load.least_loaded()
            if worker is not None and has_capacity(worker):
                reader = None if journal is None else self._readers.get(journal)
                if reader is not None and len(reader.attempts) < self._share:
                    return reader
                last_group, last = self._last_chosen or (None, worker)
                if (
                    last_group == group_id
                    and self.workers.get(last.name) is last
                    and has_capacity(last)
                    and len(last.inboxes) < len(worker.inboxes) + self._slack
                ):
                    return last
                return worker
            free = [w for w in self.workers.values() if has_capacity(w)]
            if near := [w for w in free if w.link.peer_node == node]:
                free = near
            elif node is not None and self._starting:
                free = []
            if moved:
                names = {n for n, w in self.workers.items() if not near or w.link.peer_node == node}
                least = min(map(self._num_failed_at_once, names | self._starting), default=0)
                free = [w for w in free if self._num_failed_at_once(w.name) == least]
            present = [w for w in free if w.link.peer_node not in avoided]
            if free:  # what a worker stores on a node that does not answer may be lost
                return min(present or free, key=lambda worker: len(worker.inboxes))
            self._worker_free.clear()
            with waiting("rollout worker"):
                await self._worker_free.wait()

    # -- workers -------------------------------------------------------------------------------------------

    async def _keep_worker(self, name: str) -> None:
        """Start a worker, receive its messages, and restart it when it ends."""
        failed_starts = failed_incarnations = idle_incarnations = 0
        has_started = False
        node: str | None = None
        while True:
            worker: WorkerHandle | None = None
            cause = ""
            folder, cancelled = await run_uncancellable(None, partial(self._spool.new_folder, name))
            try:
                if cancelled is not None:
                    raise cancelled
                async with AsyncExitStack() as stack:
                    with waiting("rollout worker", name):
                        spec = msgspec.structs.replace(
                            self._spec,
                            name=name,
                            folder=folder,
                            frames=self._spool.frame_folder(folder),
                            node=node,
                        )
                        link = await stack.enter_async_context(self._open_worker(spec))
                    failed_starts, has_started = 0, True
                    self._count_failures(name, failed_incarnations)
                    on_node = spec.frames is not None and spec.config.queue.spool_dir is not None
                    frame_node = link.peer_node if on_node else ""
                    frames = self._spool.frame_folder(folder, frame_node)
                    worker = WorkerHandle(
                        name, link, folder, frames, frame_node, self._new_leases, self._folders
                    )
                    cause = await self._receive_messages(worker)
                    # Its process ends with the block. Until that is known its leases expire.
                    self._keepers.start_task(f"leases of {name}", worker.leases.expire())
            except (EnvironmentNotReady, ConfigError) as error:
                if isinstance(error, ConfigError) and not has_started:
                    raise  # later a file may have been changed, or this node may lack what others have
                failed_starts += 1
                node = None
                self._starting.discard(name)
                self._worker_free.set()
                log.warning("%s did not start: %s", name, error)
                self._count_failures(name, failed_starts, error)
            finally:
                if worker is not None and worker.link.peer_has_ended:
                    worker.leases.close()
                if worker is not None and worker.folder is not None and self._folders is not None:
                    self._folders.end_owner(worker.folder)
                if worker is None or worker.link.peer_has_ended:
                    place = "" if worker is None else worker.frame_node
                    end_folder = partial(self._spool.end_folder, folder, place)
                    _, cancelled = await run_uncancellable(None, end_folder)
                    if cancelled is not None:
                        raise cancelled
            if worker is not None:
                if self._folders is not None and self._folders.on_nodes:
                    node = worker.link.peer_node
                idle_incarnations = 0 if worker.has_completed_attempt else idle_incarnations + 1
                self._metrics.rollout_worker_restarts_total.inc()
                log.error("%s: it is restarted, and its attempts go on in other workers", cause)
                failed = worker.failure is not None and not worker.has_completed_attempt
                failed_incarnations = failed_incarnations + 1 if failed else 0
                self._count_failures(name, failed_incarnations, worker.failure)
            doublings = min(failed_starts + idle_incarnations, _MAX_DOUBLINGS)
            with waiting("idle"):
                await asyncio.sleep(_RESTART_DELAY_S * 2.0**doublings)

    def _count_failures(self, name: str, number: int, last: Exception | None = None) -> None:
        """Note how many times in a row a worker has failed.

        Raises:
            EnvironmentNotReady: All workers have failed too often.
        """
        if number < _MAX_FAILED_STARTS:
            self._failing.discard(name)
            return
        self._failing.add(name)
        others_work = any(worker.has_completed_attempt for worker in self.workers.values())
        if len(self._failing) == self._spec.config.num_workers and last is not None and not others_work:
            raise EnvironmentNotReady(
                f"{name} did not start, or failed before it had completed an attempt, {number} times in a "
                f"row; the last time: {last}"
            ) from last

    def _new_leases(self, worker: WorkerHandle) -> RelayedLeases:
        leases = RelayedLeases(
            worker.name,
            self._pools,
            worker.post,
            lease_s=LEASE_S,
            clock=self._clock,
            on_lease=worker.record_lease,
            probe_timeout_s=health.PROBE_TIMEOUT_S,
            worker_stall_s=self._config.worker_stall_s,
        )
        self._leases = [each for each in self._leases if not each.is_closed] + [leases]
        return leases

    async def _receive_messages(self, worker: WorkerHandle) -> str:
        """Receive a worker's messages until it ends, and return why it ended."""
        self.workers[worker.name] = worker
        self._spool.writers[worker.frame_node] += 1
        self._load.offer(worker)
        self._starting.discard(worker.name)
        if worker.folder is not None:
            worker.post(OpenJournal(folder=str(worker.folder)))
        worker.post(ServingChanged(paused=self._serving_clock.is_paused))
        self._worker_free.set()
        cause = f"{worker.name} is ended with the run"
        try:
            async with services(
                watch=lambda: self._watch_silence(worker), checks=worker.leases.checks.check_engines
            ):
                for number in count(1):
                    if (message := worker.link.receive_arrived()) is None:
                        with waiting("idle"):
                            message = await worker.link.receive()
                    self._deliver_message(worker, message)
                    if number % _MESSAGES_PER_TURN == 0:
                        await asyncio.sleep(0)
                raise AssertionError("a worker's messages end by an error")
        except ExceptionGroup as errors:
            lost = first_error(errors)
            if not isinstance(lost, WorkerLost):
                raise
            cause = f"{worker.name}: {lost}"
            return cause
        finally:
            del self.workers[worker.name]
            self._readers = {path: reader for path, reader in self._readers.items() if reader is not worker}
            self._metrics.journal_bytes.dec(worker.journal_bytes)
            self._spool.writers[worker.frame_node] -= 1
            self._starting.add(worker.name)
            worker.fail_requests(cause)
            worker.close()

    def _deliver_message(self, worker: WorkerHandle, message: Message) -> None:
        if worker.leases.handle_message(message):  # most do
            if type(message) is LeaseWanted and not message.model:
                self._failed_at_once.pop(worker.name, None)
                worker.callers.add(root_of(message.key))
            return
        match message:
            case Heartbeat():
                hears = worker.record_heartbeat(message.received)
                worker.waits = message.waits
                try:
                    add_increments(message.increments, self._metrics)
                except ValueError as error:
                    raise WorkerLost(f"it sent counts that do not fit their metrics: {error}") from error
                self._apply_progress(worker, message)
                worker.leases.renew(message, hears=hears)
            case AttemptEnded(request_id=request_id, end=end):
                if not worker.has_written(end):
                    raise WorkerLost("it sent references to files that are not in its folder")
                self._check_answer(worker, message)
                if (inbox := worker.inboxes.get(request_id)) is not None and inbox.put_message(message):
                    self._spool.hold([*end.trajectories, *end.completions])
                else:  # the attempt is not wanted any more
                    self._metrics.late_results_total.inc()
                    self._spool.refuse([*end.trajectories, *end.completions])
            case AttemptFailed() | GroupScored():
                self._check_answer(worker, message)
                inbox = worker.inboxes.get(message.request_id)
                lost = self._blame_worker(worker, message) if isinstance(message, AttemptFailed) else None
                if inbox is None or not inbox.put_message(lost or message):
                    self._metrics.late_results_total.inc()
                if lost is not None and self._must_end(worker):
                    raise lost
            case WorkerFailed():
                worker.failure = message.failure.error
                if isinstance(worker.failure, SpoolFull):
                    if self._folders is None or not self._folders.on_nodes:
                        raise worker.failure  # the disk of the run's folder is full for all workers
                    self._avoid_node(worker.link.peer_node)
                raise WorkerLost(f"it failed: {worker.failure}")
            case _:
                raise WorkerLost(f"it sent {type(message).__name__}, which only the driver sends")

    def _check_answer(
        self, worker: WorkerHandle, message: AttemptEnded | AttemptFailed | GroupScored
    ) -> None:
        """Check that a worker answers what it was asked.

        Raises:
            WorkerLost: It does not.
        """
        request_id, is_late = message.request_id, message.request_id not in worker.inboxes
        others = is_late and any(request_id in other.inboxes for other in self.workers.values())
        if others or not worker.is_answer(message):
            raise WorkerLost(
                f"it sent {type(message).__name__} for request {request_id}, which is not what that asked for"
            )

    def _blame_worker(self, worker: WorkerHandle, message: AttemptFailed) -> WorkerLost | None:
        """Return the error of an attempt that another worker is to try; None for one that has failed.

        A loop that raises before it asks for an engine does so in any worker if its task is to blame, and in
        one of them if that lacks a package or a file. Such a worker is always free, so that it would fail
        most attempts of the run.
        """
        attempt, error = worker.attempts.get(message.request_id), message.failure.error
        if (
            attempt is None
            or not isinstance(error, RolloutError)
            or isinstance(error, PromptTooLong)
            or attempt.trajectory_id in worker.callers
        ):
            return None
        self._failed_at_once.setdefault(worker.name, set()).add(attempt.task.task_id)
        others = (self.workers.keys() | self._starting) - {worker.name}
        least = min(map(self._num_failed_at_once, others), default=self._num_failed_at_once(worker.name))
        if least >= self._num_failed_at_once(worker.name) or not worker.inboxes[message.request_id].may_move:
            return None
        self._moved.add(attempt.trajectory_id)
        lost = WorkerLost(
            "its agent loops raise before they call an engine, unlike those of other workers: compare the "
            f"packages and files of its node with those of others; the last one: {error}"
        )
        lost.is_excused = True
        return lost

    def _must_end(self, worker: WorkerHandle) -> bool:
        """Return whether loops raise at once for many tasks in a worker, and ask for engines in another."""
        number = self._num_failed_at_once(worker.name)
        return number >= _MAX_FAILED_AT_ONCE and any(
            each.leases.has_asked and 2 * self._num_failed_at_once(each.name) < number
            for each in self.workers.values()
        )

    def _num_failed_at_once(self, name: str) -> int:
        """Return the number of tasks whose loops have raised in a worker since one asked for an engine."""
        return len(self._failed_at_once.get(name, ()))

    def _apply_progress(self, worker: WorkerHandle, heartbeat: Heartbeat) -> None:
        """Take over how far the worker's trajectories are, and what its journal has.

        Raises:
            WorkerLost: A trajectory is not that of its request.
        """
        for each in heartbeat.progress:
            if (attempt := worker.attempts.get(each.request_id)) is not None:
                if root_of(each.trajectory_id) != attempt.trajectory_id:
                    raise WorkerLost(
                        f"it sent progress of {each.trajectory_id} for request {each.request_id}, expected "
                        f"{attempt.trajectory_id}"
                    )
                apply_report(attempt, each.trajectory_id, each.report)
        if worker.folder is None or self._folders is None:
            return
        self._folders.record_written(worker.folder, heartbeat.written_claims)
        self._metrics.journal_bytes.inc(heartbeat.journal_bytes - worker.journal_bytes)
        worker.journal_bytes = heartbeat.journal_bytes

    def _post_serving_change(self, paused: bool) -> None:
        for worker in self.workers.values():
            worker.post(ServingChanged(paused=paused))

    async def _watch_silence(self, worker: WorkerHandle) -> None:
        """End a worker that sends no heartbeats, or handles no messages."""
        limit_s = self._config.worker_stall_s
        while True:
            with waiting("idle"):
                await asyncio.sleep(limit_s / _TICKS)
            worker.silent_ticks += 1
            if worker.silent_ticks > _TICKS:
                raise WorkerLost(
                    f"it has not answered for rollout.worker_stall_s = {limit_s}: code that blocks its event "
                    "loop, which its log names, must be a plain function, which gets a thread, or await"
                )
