"""The driver's side of rollout workers: who plays what, and what becomes of it when a worker ends.

```
 loop        consumes            waits for             unblocked by             produces
 keeper      one worker          its messages          the worker; its end      answers, a restart
 watch       ticks               the next tick         time                     the end of a silent worker
 play        messages of one     the next of them      the worker; its end      turns, reports
```

A worker that ends, or says nothing for `rollout.worker_stall_s`, is started again. What it played raises
`WorkerLost` at once, with everything that engines said so far in the sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from itertools import count
from types import TracebackType
from typing import Final, Self

from async_rl.config import RolloutConfig
from async_rl.errors import AgentLoopError, EnvironmentNotReady, RewardError, WorkerLost
from async_rl.observability.metrics import Metrics
from async_rl.rollout.attempt import Played
from async_rl.rollout.backend import RolloutBackend
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.workers.driver_session import DriverSession
from async_rl.rollout.workers.messages import (
    Cut,
    Ended,
    Failed,
    Grow,
    Heartbeat,
    Link,
    Message,
    Play,
    Read,
    Scored,
    ScoreRequest,
    Stop,
    Write,
)
from async_rl.rollout.workers.metric_counts import add
from async_rl.runtime.supervision import Nursery, first_error, services
from async_rl.runtime.waits import waiting
from async_rl.types import Completion, Task

log = logging.getLogger(__name__)

OpenWorker = Callable[[str], AbstractAsyncContextManager[Link]]
"""Starts the worker of a name; it ends with the block, whatever state it is in."""

_TICKS: Final = 8
"""Silence is counted in so many ticks of the driver's own, so that a driver that stood still itself does not
take its workers for dead."""

_MAX_FAILED_STARTS: Final = 3
"""In a row, of one worker; then the run ends: user code that cannot be loaded will not load the next time."""

_RESTART_DELAY_S: Final = 0.5
"""Before a worker is started again; doubled for each life in a row in which it played nothing to its end."""

_MAX_DOUBLINGS: Final = 6

_MAX_SCORE_TRIES: Final = 3
"""Of a group's reward whose workers end."""


class _Inbox:
    """What came of one attempt, or of one group's reward, and was not looked at yet."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Message | WorkerLost] = asyncio.Queue()

    def __len__(self) -> int:
        return self._messages.qsize()

    def put(self, message: Message | WorkerLost) -> None:
        """One more."""
        self._messages.put_nowait(message)

    async def next(self) -> Message:
        """The oldest.

        Raises:
            WorkerLost: There will be none.
        """
        message = await self._messages.get()
        if isinstance(message, WorkerLost):
            raise message
        return message


class _Worker:
    """One life of a worker."""

    def __init__(self, name: str, link: Link) -> None:
        self.name = name
        self.post = link.post
        self.close = link.close
        self.receive = link.receive
        self.inboxes: dict[int, _Inbox] = {}
        self.waits: dict[str, str] = {}
        """What trajectories wait for, as it said last."""
        self.silent_ticks = 0
        self.has_played = False

    def lose(self, cause: str) -> None:
        """Everything that it was at has come to nothing."""
        for inbox in self.inboxes.values():
            inbox.put(WorkerLost(cause))


class WorkerBackend(RolloutBackend):
    """The rollout workers of a run.

    Example:
        >>> async with WorkerBackend(config.rollout, cluster.rollout_worker, metrics) as workers:
        ...     played = await workers.play(task, session)
    """

    session = DriverSession

    def __init__(self, config: RolloutConfig, open_worker: OpenWorker, metrics: Metrics) -> None:
        """Start nothing yet."""
        self._config = config
        self._open = open_worker
        self._metrics = metrics
        self._live: dict[str, _Worker] = {}
        self._joined = asyncio.Event()
        self._numbers = count(1)
        # Between two turns a session is made, reads once, asks once, cuts once; then it waits for an answer.
        self._max_unread = 4 * (config.max_branches + 2)
        self._keepers = Nursery()

    async def __aenter__(self) -> Self:
        """Start all of them; who plays waits for the first."""
        await self._keepers.__aenter__()
        for index in range(self._config.num_workers):
            name = f"rollout-worker-{index}"
            self._keepers.start_task(name, self._keep(name))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End all of them."""
        self._keepers.cancel_tasks()
        await self._keepers.__aexit__(kind, error, traceback)

    # -- attempts ------------------------------------------------------------------------------------------

    async def play(self, task: Task, session: RolloutSession) -> Sequence[Played]:
        """See `Stage.play`."""
        assert isinstance(session, DriverSession), "made as this stage's `session`"
        worker = await self._seat()
        number, inbox = next(self._numbers), _Inbox()
        worker.inboxes[number] = inbox
        name = task.agent_loop or self._config.agent_loop
        worker.post(Play(play=number, task=task, trajectory_id=session.trajectory_id))
        try:
            async with (
                asyncio.timeout(None) as scope,
                waiting(
                    "agent loop",
                    name,
                    scope=scope,
                    why=lambda: f"{worker.name}: {worker.waits.get(session.trajectory_id, 'at work')}",
                ) as wait,
            ):
                end = await self._attend(inbox, session, worker.post)
        except TimeoutError as error:
            if not wait.cut:
                raise
            raise AgentLoopError(
                f"agent loop {name} was ended by the stall doctor: bound the loop's own waits"
            ) from error
        finally:
            del worker.inboxes[number]
            worker.post(Stop(play=number))
        worker.has_played = True
        return end

    async def _attend(
        self, inbox: _Inbox, root: DriverSession, post: Callable[[Message], None]
    ) -> Sequence[Played]:
        """Do as the worker says until its loop has ended."""
        sessions = {root.trajectory_id: root}
        writers: dict[str, asyncio.Task[None]] = {}
        try:
            async with Nursery() as writing:
                while True:
                    match await inbox.next():
                        case Read() as message:
                            sessions[message.name].read(message)
                        case Grow() as message:
                            other = sessions[message.parent].grow(inherits=message.inherits)
                            assert other.trajectory_id == message.name, "both halves count branches alike"
                            sessions[message.name] = other
                        case Write() as message:
                            writer = sessions[message.name].write(message, post)
                            # The name tells whose call it is.
                            writers[message.name] = writing.start_task(f"trajectory {message.name}", writer)
                        case Cut() as message:
                            writers[message.name].cancel()
                        case Failed() as message:
                            root.settle(message.report)
                            raise message.failure.error
                        case Ended() as message:
                            break
                writing.cancel_tasks()  # turns that nobody awaits
        except ExceptionGroup as errors:
            raise first_error(errors) from errors
        played = []
        for report in message.reports:
            sessions[report.name].settle(report)
            played.append(
                Played(
                    session=sessions[report.name],
                    reward_source=report.reward_source,
                    parts=report.parts or None,
                    completion=report.completion,
                )
            )
        return played

    async def score_group(
        self, task: Task, completions: Sequence[Completion]
    ) -> Sequence[dict[str, float] | RewardError]:
        """See `Stage.score_group`; asked of another worker when one ends."""
        for left in reversed(range(_MAX_SCORE_TRIES)):
            worker = await self._seat()
            number, inbox = next(self._numbers), _Inbox()
            worker.inboxes[number] = inbox
            worker.post(ScoreRequest(ask=number, task=task, completions=tuple(completions)))
            try:
                with waiting("reward", worker.name):
                    answer = await inbox.next()
            except WorkerLost as error:
                if not left:
                    raise RewardError(
                        f"its rollout worker ended {_MAX_SCORE_TRIES} times: {error}"
                    ) from error
                continue
            finally:
                del worker.inboxes[number]
                worker.post(Stop(play=number))
            assert isinstance(answer, Scored), "the only answer to a Score"
            if answer.failure is not None:
                raise answer.failure.error
            return [RewardError(w.failure.text) if w.failure else w.parts for w in answer.scores]
        raise AssertionError("the last try raises or returns")

    async def _seat(self) -> _Worker:
        """The worker that does least, once there is one."""
        while not self._live:
            self._joined.clear()
            with waiting("rollout worker"):
                await self._joined.wait()
        return min(self._live.values(), key=lambda worker: len(worker.inboxes))

    # -- workers -------------------------------------------------------------------------------------------

    async def _keep(self, name: str) -> None:
        """Start a worker, attend to it, and start it again when it ends."""
        failed_starts = idle_lives = 0
        while True:
            worker: _Worker | None = None
            cause = ""
            try:
                async with AsyncExitStack() as stack:
                    with waiting("rollout worker", name):
                        link = await stack.enter_async_context(self._open(name))
                    worker = _Worker(name, link)
                    cause = await self._live_through(worker)
            except EnvironmentNotReady as error:
                failed_starts += 1
                if failed_starts == _MAX_FAILED_STARTS:
                    raise EnvironmentNotReady(
                        f"{name} did not start {failed_starts} times in a row; the last time: {error}"
                    ) from error
                log.warning("%s did not start: %s", name, error)
            if worker is not None:
                failed_starts, idle_lives = 0, 0 if worker.has_played else idle_lives + 1
                self._metrics.rollout_worker_restarts_total.inc()
                log.error("%s: it is started again, and what it played is played on by others", cause)
            delay_s = _RESTART_DELAY_S * 2.0 ** min(failed_starts + idle_lives, _MAX_DOUBLINGS)
            with waiting("idle"):
                await asyncio.sleep(delay_s)

    async def _live_through(self, worker: _Worker) -> str:
        """Attend to a worker until it ends; why it did."""
        self._live[worker.name] = worker
        self._joined.set()
        cause = f"{worker.name} is ended with the run"
        try:
            async with services(watch=lambda: self._watch(worker)):
                while True:
                    with waiting("idle"):
                        message = await worker.receive()
                    worker.silent_ticks = 0
                    self._deliver(worker, message)
        except ExceptionGroup as errors:
            lost = first_error(errors)
            if not isinstance(lost, WorkerLost):
                raise
            cause = f"{worker.name}: {lost}"
            return cause
        finally:
            del self._live[worker.name]
            worker.lose(cause)
            worker.close()

    def _deliver(self, worker: _Worker, message: Message) -> None:
        match message:
            case Heartbeat():
                worker.waits = message.waits
                add(message.counted, self._metrics)
            case Read() | Grow() | Write() | Cut() | Ended() | Failed():
                number = message.play
            case Scored():
                number = message.ask
            case _:
                raise WorkerLost(f"it said {type(message).__name__}, which is not for it to say")
        if not isinstance(message, Heartbeat) and (inbox := worker.inboxes.get(number)) is not None:
            if len(inbox) > self._max_unread:
                raise WorkerLost(f"it said {len(inbox)} things of one attempt that nobody has asked for")
            inbox.put(message)

    async def _watch(self, worker: _Worker) -> None:
        """End a worker that says nothing."""
        limit_s = self._config.worker_stall_s
        while True:
            with waiting("idle"):
                await asyncio.sleep(limit_s / _TICKS)
            worker.silent_ticks += 1
            if worker.silent_ticks > _TICKS:
                raise WorkerLost(
                    f"it has said nothing for rollout.worker_stall_s = {limit_s}: code that blocks its event "
                    "loop, which its log names, must be a plain function, which gets a thread, or await"
                )
