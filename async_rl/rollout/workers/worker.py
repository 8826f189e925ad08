"""A rollout worker: runs the agent loops, tools and rewards of the attempts that the driver starts.

```
 loop       consumes             waits for            unblocked by          produces
 run        messages             the next message     the driver; its end   attempts, answers to sessions
 attempt    a task               turns, tools         the driver, time      reports
 heartbeat  waits, metrics       a second             time                  a Heartbeat
```

A worker ends when its link is lost, at whichever end: its state is useless without the driver.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from async_rl.config import Config
from async_rl.data.chat_format import ChatFormat
from async_rl.errors import AsyncRLError, RewardError, WorkerLost
from async_rl.observability.diagnosis import phrase
from async_rl.observability.metrics import Metrics
from async_rl.rollout.attempt import run_agent_loop, score_sources
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.rollout.session.context import ConversationContext
from async_rl.rollout.workers.messages import (
    AttemptEnded,
    AttemptFailed,
    CancelRequest,
    Failure,
    GroupScored,
    Heartbeat,
    Link,
    Message,
    ScoreGroup,
    ServingChanged,
    StartAttempt,
    TrajectoryScore,
    TurnGrown,
    TurnWritten,
)
from async_rl.rollout.workers.metric_counts import IncrementCollector
from async_rl.rollout.workers.worker_session import RemoteWriter, WorkerChannel, WorkerSession
from async_rl.runtime.serving_clock import ServingClock
from async_rl.runtime.supervision import Nursery, first_error, services
from async_rl.runtime.waits import Waits, acting, waiting

log = logging.getLogger(__name__)

_HEARTBEAT_S: Final = 1.0
_MIN_REPORTED_WAIT_S: Final = 5.0
"""A heartbeat reports waits that have lasted at least this long."""


class RolloutWorker:
    """Runs the attempts that the driver starts over a link.

    Example:
        >>> worker = RolloutWorker(config, chat=chat, metrics=Metrics(), clock=time.monotonic)
        >>> await worker.run(link)  # until it is lost
    """

    def __init__(
        self,
        config: Config,
        *,
        chat: ChatFormat,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """Load the agent loop and the rewards that the config names.

        Raises:
            ConfigError: One of them cannot be loaded.
        """
        self._config = config
        self._serving_clock = ServingClock(clock)  # follows the driver's
        self._context = ConversationContext(
            chat=chat,
            rollout=config.rollout,
            metrics=metrics,
            clock=clock,
            serving_clock=self._serving_clock,
        )
        self._loops = AgentLoops(config.rollout, metrics)
        self._rewards = Rewards(config, decode=chat.decode, metrics=metrics, clock=clock)
        self._channels: dict[int, WorkerChannel] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._waits = Waits(clock)
        self._increments = IncrementCollector(metrics)

    async def run(self, link: Link) -> None:
        """Serve the driver until the link is lost."""
        self._link = link
        try:
            with acting("run", waits=self._waits):
                async with self._loops, services(heartbeat=self._send_heartbeats), Nursery() as attempts:
                    try:
                        while True:
                            with waiting("idle"):
                                message = await self._link.receive()
                            self._handle_message(message, attempts)
                    finally:
                        for channel in self._channels.values():
                            channel.close()
                        attempts.cancel_tasks()
        except ExceptionGroup as errors:
            if not isinstance(first_error(errors), WorkerLost):
                raise
        finally:
            await self._rewards.close()

    def _handle_message(self, message: Message, attempts: Nursery) -> None:
        match message:
            case StartAttempt():
                channel = WorkerChannel(message.request_id, self._link.post)
                self._channels[message.request_id] = channel
                attempt = self._run_attempt(message, channel)
                self._tasks[message.request_id] = attempts.start_task(
                    f"trajectory {message.trajectory_id}", attempt
                )
            case TurnWritten() if message.request_id in self._channels:
                self._channels[message.request_id].writers[message.trajectory_id].receive_turn(message)
            case TurnGrown() if message.request_id in self._channels:
                writer = self._channels[message.request_id].writers[message.trajectory_id]
                writer.receive_tokens(message.token_ids)
            case ServingChanged():
                self._serving_clock.set_paused(message.paused)
            case ScoreGroup():
                scoring = self._score_group(message)
                self._tasks[message.request_id] = attempts.start_task(f"reward {message.request_id}", scoring)
            case CancelRequest():
                if message.request_id in self._channels:
                    self._channels.pop(message.request_id).close()
                self._tasks.pop(message.request_id).cancel()
            case _:
                pass  # of an attempt that was cancelled

    async def _run_attempt(self, request: StartAttempt, channel: WorkerChannel) -> None:
        """Run an agent loop to its end, score its sessions, and report to the driver."""
        task, rollout = request.task, self._config.rollout
        with acting("trajectory", request.trajectory_id):
            writer = RemoteWriter(request.trajectory_id, channel, rollout.max_context_tokens)
            session = WorkerSession(self._context, task, writer)
            try:
                await run_agent_loop(task, session, self._loops, rollout)
                if self._rewards.scores_groups(task):
                    reports = [each.report({}, unscored=True) for each in session.tree]
                else:
                    parts = await score_sources(task, session.tree, self._rewards)
                    reports = [each.report(parts[each.reward_source.trajectory_id]) for each in session.tree]
                # Inside the block: messages of the loop may hold what cannot be encoded.
                self._link.post(AttemptEnded(request_id=request.request_id, reports=tuple(reports)))
            except Exception as error:
                cause = error.__cause__
                if cause is not None and not isinstance(error, WorkerLost):
                    log.info("trajectory %s: %s", request.trajectory_id, error, exc_info=cause)
                failure, report = Failure.of(error), session.report({})
                self._link.post(AttemptFailed(request_id=request.request_id, failure=failure, report=report))

    async def _score_group(self, request: ScoreGroup) -> None:
        with acting("reward", str(request.request_id)):
            try:
                results = await self._rewards.score_group(request.task, request.completions)
            except AsyncRLError as error:
                self._link.post(GroupScored(request_id=request.request_id, failure=Failure.of(error)))
                return
            scores = [
                TrajectoryScore(failure=Failure.of(result))
                if isinstance(result, RewardError)
                else TrajectoryScore(parts=result)
                for result in results
            ]
            self._link.post(GroupScored(request_id=request.request_id, scores=tuple(scores)))

    async def _send_heartbeats(self) -> None:
        while True:
            increments = self._increments.collect_increments()
            self._link.post(Heartbeat(waits=self._long_waits(), increments=increments))
            with waiting("idle"):
                await asyncio.sleep(_HEARTBEAT_S)

    def _long_waits(self) -> dict[str, str]:
        """Return what trajectories have been waiting for, the newest wait of each."""
        return {
            wait.who.id: f"{phrase(wait.on, wait.target, wait.why)} for {wait.age_s:.0f} s"
            for wait in self._waits.open_waits()
            if wait.who.kind == "trajectory"
            and wait.age_s >= _MIN_REPORTED_WAIT_S
            and wait.on != "agent loop"
        }
