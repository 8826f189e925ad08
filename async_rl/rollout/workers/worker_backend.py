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
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Final, Self, cast

import msgspec

from async_rl.config import Config, NamedLoop
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
from async_rl.rollout.attempt import Attempt, AttemptEnd, RolloutBackend
from async_rl.rollout.workers.messages import (
    AttemptEnded,
    AttemptFailed,
    AttemptProgress,
    CancelRequest,
    EnginesReleased,
    GroupScored,
    Heartbeat,
    Link,
    Message,
    OpenJournal,
    ScoreGroup,
    StartAttempt,
    WorkerFailed,
)
from async_rl.rollout.workers.metric_counts import add_increments
from async_rl.rollout.workers.worker_choice import WorkerChoice
from async_rl.rollout.workers.worker_grants import WorkerGrants
from async_rl.rollout.workers.worker_handle import Inbox, WorkerHandle
from async_rl.runtime.loading import load_object
from async_rl.runtime.shortages import is_shortage
from async_rl.runtime.supervision import Nursery, first_error, services
from async_rl.runtime.threads import run_to_end, run_uncancellable
from async_rl.runtime.waits import acting, sleep_idle, waiting
from async_rl.store.archive import InspectedTrajectories
from async_rl.store.journal_folders import JournalFolders
from async_rl.store.spool import AnswerSpool, Spool
from async_rl.types import StoredCompletion, Task

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

_MAX_SCORE_TRIES: Final = 3
"""How often a group's reward is requested if its workers end."""


class WorkerBackend(RolloutBackend):
    """Runs attempts in the rollout workers of a run."""

    def __init__(
        self,
        config: Config,
        open_worker: OpenWorker,
        metrics: Metrics,
        pools: Mapping[str, EnginePool],
        clock: Callable[[], float],
        spool: Spool | AnswerSpool,
        folders: JournalFolders | None = None,
        *,
        inspected: InspectedTrajectories | None = None,
        name: str = "rollout-worker",
    ) -> None:
        """Prepare to start the workers of a config.

        Args:
            config: Their number, and the settings that their sessions follow.
            open_worker: Starts a worker.
            metrics: To which those of the workers are added.
            pools: The engines that workers call, by model; "" is the policy.
            clock: Monotonic seconds.
            spool: Has a folder for each worker, and holds the frames that they write.
            folders: The journals of the run; without, workers keep none.
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
        self._spool = spool
        self._folders = folders
        self._open_worker = open_worker
        self._metrics = metrics
        self._pools = pools
        self._clock = clock
        self._choice = WorkerChoice(config, pools[""], spool, clock)
        self._failing: set[str] = set()
        """Workers that have failed `_MAX_FAILED_STARTS` times in a row."""
        self._actors: dict[str, acting] = {}
        """The trajectories that wait for their workers."""
        self._grants: list[WorkerGrants] = []
        """Those of all workers that may still run."""
        self._request_ids = count(1)
        self._keepers = Nursery()
        self._served = AsyncExitStack()
        """What the driver serves to the loops in the workers."""

    @property
    def workers(self) -> Mapping[str, WorkerHandle]:
        """The workers that are alive, by name."""
        return self._choice.workers

    async def __aenter__(self) -> Self:
        """Start all workers; attempts wait for the first of them."""
        await self._serve_loops()
        await self._keepers.__aenter__()
        for index in range(self._spec.config.num_workers):
            name = f"{self._spec.name}-{index}"
            self._choice.starting.add(name)
            self._keepers.start_task(name, self._keep_worker(name))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End all workers."""
        self._keepers.cancel_tasks()
        try:
            await self._keepers.__aexit__(kind, error, traceback)
        finally:
            await self._served.aclose()
            for grants in self._grants:
                await grants.expire()  # of workers that may still run

    async def _serve_loops(self) -> None:
        """Run the driver's part of agent loops that have one, and give the workers' loops what it yields."""
        rollout = self._spec.config.rollout
        named = dict(rollout.agent_loops)
        if rollout.agent_loop not in named:
            named[""] = NamedLoop(loop=rollout.agent_loop, args=rollout.agent_loop_args)
        for name, each in named.items():
            loop = load_object(each.loop, what="agent loop")
            if hasattr(loop, "serve_workers"):
                serving = loop(**each.args).serve_workers()
                try:
                    yielded = await self._served.enter_async_context(serving)
                except BaseException:
                    await self._served.aclose()
                    raise
                named[name] = msgspec.structs.replace(each, args={**each.args, **yielded})
        default = named.pop("", None)
        args = rollout.agent_loop_args if default is None else default.args
        rollout = msgspec.structs.replace(rollout, agent_loops=named, agent_loop_args=args)
        config = msgspec.structs.replace(self._spec.config, rollout=rollout)
        self._spec = msgspec.structs.replace(self._spec, config=config)

    # -- requests ------------------------------------------------------------------------------------------

    async def run_attempt(self, attempt: Attempt) -> AttemptEnd:
        """Implements `RolloutBackend.run_attempt`."""
        node = None if self._folders is None else self._folders.node_of(attempt.claim)
        worker, was_moved = await self._choice.choose_for(attempt, node)
        name, request_id = attempt.trajectory_id, next(self._request_ids)
        inbox = Inbox(may_move=not was_moved)
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
        worker.attempts[request_id] = attempt
        answer: Message | None = None
        if worker.folder is not None:
            attempt.on_start(worker.folder)
        try:
            with waiting(
                "agent loop",
                loop,
                scope=inbox,
                why=lambda: worker.name,
            ) as wait:
                self._actors[name] = wait.actor
                answer = await inbox.answer()
        except TimeoutError as error:
            if not wait.cut:
                raise
            raise AgentLoopError(
                f"agent loop {loop} was ended by the stall doctor: bound the loop's own waits"
            ) from error
        finally:
            del worker.inboxes[request_id], worker.attempts[request_id]
            self._actors.pop(name, None)
            self._choice.free.set()
            if answer is None:
                worker.link.post(CancelRequest(request_id=request_id))
                if isinstance(unheard := inbox.message, AttemptEnded):
                    self._metrics.late_results_total.inc()
                    self._spool.discard([*unheard.end.trajectories, *unheard.end.completions])
        worker.has_completed_attempt = True
        if isinstance(answer, AttemptFailed):
            failed = answer.trajectory
            attempt.failed = lambda error: failed
            cause = answer.failure.error
            if isinstance(cause, SpoolFull) and worker.frame_node:
                self._choice.avoid_node(worker.frame_node)
            raise cause
        assert isinstance(answer, AttemptEnded), "the only other answer to a StartAttempt"
        self._choice.note_space(worker.frame_node)
        return answer.end

    @property
    def has_space_elsewhere(self) -> bool:
        """Implements `RolloutBackend.has_space_elsewhere`."""
        return self._choice.has_space_elsewhere

    async def score_group(
        self, task: Task, completions: Sequence[StoredCompletion]
    ) -> Sequence[dict[str, float] | RewardError]:
        """Implements `RolloutBackend.score_group`; if its worker ends, it asks another one."""
        for left in reversed(range(_MAX_SCORE_TRIES)):
            worker = await self._choice.choose()
            request_id, inbox = next(self._request_ids), Inbox(num_scores=len(completions))
            request = ScoreGroup(request_id=request_id, task=task, completions=tuple(completions))
            worker.post_request(request, inbox)
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
                if answer is None:
                    worker.link.post(CancelRequest(request_id=request_id))
            assert isinstance(answer, GroupScored), "the only answer to a ScoreGroup"
            if answer.failure is not None:
                raise answer.failure.error
            return [cast(RewardError, s.failure.error) if s.failure else s.parts for s in answer.scores]
        raise AssertionError("the last try raises or returns")

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
                        name, link, folder, frames, frame_node, self._new_grants, self._folders
                    )
                    cause = await self._receive_messages(worker)
                    # Its process ends with the block. Until that is known its grants expire.
                    self._keepers.start_task(f"grants of {name}", worker.grants.expire())
            except (EnvironmentNotReady, ConfigError) as error:
                if isinstance(error, ConfigError) and not has_started:
                    raise  # later a file may have been changed, or this node may lack what others have
                failed_starts += 1
                node = None
                self._choice.starting.discard(name)
                self._choice.free.set()
                log.warning("%s did not start: %s", name, error)
                self._count_failures(name, failed_starts, error)
            finally:
                if worker is not None and worker.link.peer_has_ended:
                    worker.grants.close()
                if worker is not None and worker.folder is not None and self._folders is not None:
                    self._folders.end_owner(worker.folder)
                if worker is None or worker.link.peer_has_ended:
                    place = "" if worker is None else worker.frame_node
                    await run_to_end(partial(self._spool.end_folder, folder, place))
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
            await sleep_idle(_RESTART_DELAY_S * 2.0**doublings)

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
            if isinstance(last, SpoolFull):
                raise last  # the disk of all workers fails
            raise EnvironmentNotReady(
                f"{name} did not start, or failed before it had completed an attempt, {number} times in a "
                f"row; the last time: {last}"
            ) from last

    def _new_grants(self, worker: WorkerHandle) -> WorkerGrants:
        grants = WorkerGrants(
            worker.name,
            self._pools,
            worker.link.post,
            clock=self._clock,
            on_revoke=worker.assume_sampling,
            worker_stall_s=self._config.worker_stall_s,
        )
        self._grants = [each for each in self._grants if not each.is_closed] + [grants]
        return grants

    async def _receive_messages(self, worker: WorkerHandle) -> str:
        """Receive a worker's messages until it ends, and return why it ended."""
        self._spool.writers[worker.frame_node] += 1
        if worker.folder is not None:
            worker.link.post(OpenJournal(folder=str(worker.folder)))
        self._choice.add(worker)
        cause, are_excused = f"{worker.name} is ended with the run", True
        try:
            async with services(
                watch=lambda: self._watch_silence(worker), checks=worker.grants.checks.check_engines
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
            cause, are_excused = f"{worker.name}: {lost}", lost.is_excused
            return cause
        finally:
            self._choice.remove(worker)
            self._metrics.journal_bytes.dec(worker.journal_bytes)
            self._spool.writers[worker.frame_node] -= 1
            worker.fail_requests(cause, are_excused=are_excused)
            worker.link.close()

    def _deliver_message(self, worker: WorkerHandle, message: Message) -> None:
        match message:
            case Heartbeat():
                hears = worker.record_heartbeat(message.received)
                worker.record_waits(message.waits, self._actors)
                try:
                    add_increments(message.increments, self._metrics)
                except ValueError as error:
                    raise WorkerLost(f"it sent counts that do not fit their metrics: {error}") from error
                self._apply_progress(worker, message)
                worker.grants.renew(message, hears=hears)
            case EnginesReleased():
                self._record_progress(worker, message.progress)
                worker.grants.record_release(message)
            case AttemptEnded(request_id=request_id, end=end):
                if not worker.has_written(end):
                    raise WorkerLost("it sent references to files that are not in its folder")
                self._check_answer(worker, message)
                self._choice.failures.record_success(worker.name)
                if (inbox := worker.inboxes.get(request_id)) is not None and inbox.put_message(message):
                    self._spool.hold([*end.trajectories, *end.completions])
                else:  # the attempt is not wanted any more
                    self._metrics.late_results_total.inc()
                    self._spool.refuse([*end.trajectories, *end.completions])
            case AttemptFailed() | GroupScored():
                self._check_answer(worker, message)
                inbox = worker.inboxes.get(message.request_id)
                moved = self._record_failure(worker, message) if isinstance(message, AttemptFailed) else None
                if inbox is None or not inbox.put_message(moved or message):
                    self._metrics.late_results_total.inc()
            case WorkerFailed():
                worker.failure = message.failure.error
                self._record_progress(worker, message.progress)
                if isinstance(worker.failure, SpoolFull):
                    if is_shortage(worker.failure) and (self._folders is None or not self._folders.on_nodes):
                        raise worker.failure  # the disk of the run's folder is full for all workers
                    self._choice.avoid_node(worker.link.peer_node)
                lost = WorkerLost(f"it failed: {worker.failure}")
                lost.is_excused = isinstance(worker.failure, SpoolFull)
                raise lost
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

    def _record_failure(self, worker: WorkerHandle, message: AttemptFailed) -> WorkerLost | None:
        """Record an attempt that has failed; return the error of one that another worker is to try.

        A loop that raises before it asks for an engine does so in any worker if its task is to blame, and in
        one of them if that lacks a package or a file.

        Raises:
            WorkerLost: The worker is to blame for what fails in it.
        """
        attempt, error = worker.attempts.get(message.request_id), message.failure.error
        if attempt is None or not isinstance(error, RolloutError) or isinstance(error, PromptTooLong):
            return None
        at_once, failures = not message.has_sampled, self._choice.failures
        failures.record_failure(worker.name, attempt.trajectory_id, attempt.task.task_id, at_once=at_once)
        others = self._choice.others(worker)
        lost = WorkerLost(
            "its attempts fail, unlike those of other workers: compare the packages, files and network of "
            f"its node with those of others; the last error: {error}"
        )
        lost.is_excused = True
        may_move = worker.inboxes[message.request_id].may_move
        if moves := at_once and may_move and failures.fail_less_elsewhere(worker.name, others):
            self._choice.move(attempt)
        if failures.is_to_blame(worker.name, others):
            worker.inboxes[message.request_id].put_message(lost if moves else message)
            raise lost
        return lost if moves else None

    def _record_progress(self, worker: WorkerHandle, progress: Sequence[AttemptProgress]) -> None:
        """Take over how far the worker's trajectories are."""
        if worker.record_progress(progress):
            self._choice.failures.record_sampling(worker.name)

    def _apply_progress(self, worker: WorkerHandle, heartbeat: Heartbeat) -> None:
        """Take over how far the worker's trajectories are, and what its journal has."""
        self._record_progress(worker, heartbeat.progress)
        if worker.folder is None or self._folders is None:
            return
        self._folders.record_written(worker.folder, heartbeat.written_claims)
        self._metrics.journal_bytes.inc(heartbeat.journal_bytes - worker.journal_bytes)
        worker.journal_bytes = heartbeat.journal_bytes

    async def _watch_silence(self, worker: WorkerHandle) -> None:
        """End a worker that sends no heartbeats, or handles no messages."""
        limit_s = self._config.worker_stall_s
        while True:
            await sleep_idle(limit_s / _TICKS)
            worker.silent_ticks += 1
            if worker.silent_ticks > _TICKS:
                raise WorkerLost(
                    f"it has not answered for rollout.worker_stall_s = {limit_s}: code that blocks its event "
                    "loop, which its log names, must be a plain function, which gets a thread, or await"
                )
