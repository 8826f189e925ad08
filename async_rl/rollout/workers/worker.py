"""A rollout worker: agent loops, tools and rewards of the attempts that the driver hands it.

```
 loop      consumes             waits for            unblocked by          produces
 run       messages             the next one         the driver; its end   plays, answers to sessions
 play      a task               turns, tools         the driver, time      reports
 pulse     waits, counts        a second             time                  a Pulse
```

It ends when the link is lost, whoever lost it: nothing in it is of use to anybody else.
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
from async_rl.rollout.attempt import play, score
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.rollout.workers.messages import (
    Ended,
    Failed,
    Failure,
    Growing,
    Heartbeat,
    Link,
    Message,
    Play,
    Scored,
    ScoreRequest,
    Stop,
    Worth,
    Wrote,
)
from async_rl.rollout.workers.metric_counts import Increments
from async_rl.rollout.workers.worker_session import WorkerChannel, WorkerSession
from async_rl.runtime.supervision import Nursery, first_error, services
from async_rl.runtime.waits import Waits, acting, waiting

log = logging.getLogger(__name__)

_PULSE_S: Final = 1.0
_TELL_S: Final = 5.0
"""A wait is told of once it has lasted so long."""


class RolloutWorker:
    """Plays what comes over a link.

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
            ConfigError: One cannot be loaded.
        """
        self._config = config
        self._chat = chat
        self._metrics = metrics
        self._clock = clock
        self._loops = AgentLoops(config.rollout)
        self._rewards = Rewards(config, decode=chat.decode, metrics=metrics, clock=clock)
        self._desks: dict[int, WorkerChannel] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._waits = Waits(clock)
        self._increments = Increments(metrics)

    async def run(self, link: Link) -> None:
        """Play for the driver until the link is lost."""
        self._link = link
        try:
            with acting("run", waits=self._waits):
                async with self._loops, services(pulse=self._pulse), Nursery() as plays:
                    try:
                        while True:
                            with waiting("idle"):
                                message = await self._link.receive()
                            self._heed(message, plays)
                    finally:
                        for desk in self._desks.values():
                            desk.close()
                        plays.cancel_tasks()
        except ExceptionGroup as errors:
            if not isinstance(first_error(errors), WorkerLost):
                raise
        finally:
            await self._rewards.close()

    def _heed(self, message: Message, plays: Nursery) -> None:
        match message:
            case Play():
                desk = self._desks[message.play] = WorkerChannel(message.play, self._link.post)
                work = self._play(message, desk)
                self._tasks[message.play] = plays.start_task(f"trajectory {message.trajectory_id}", work)
            case Wrote() if message.play in self._desks:
                self._desks[message.play].sessions[message.name].answer(message)
            case Growing() if message.play in self._desks:
                self._desks[message.play].sessions[message.name].hear(message.token_ids)
            case ScoreRequest():
                self._tasks[message.ask] = plays.start_task(f"reward {message.ask}", self._score(message))
            case Stop():
                if message.play in self._desks:
                    self._desks.pop(message.play).close()
                self._tasks.pop(message.play).cancel()
            case _:
                pass  # of an attempt that is no more

    async def _play(self, order: Play, desk: WorkerChannel) -> None:
        """Run a loop to its end, and say how it was."""
        task = order.task
        with acting("trajectory", order.trajectory_id):
            session = WorkerSession(
                task,
                order.trajectory_id,
                desk,
                chat=self._chat,
                rollout=self._config.rollout,
                metrics=self._metrics,
                clock=self._clock,
            )
            try:
                await play(task, session, self._loops, self._config.rollout)
                if self._rewards.scores_groups(task):
                    reports = [each.report({}, unscored=True) for each in session.tree]
                else:
                    parts = await score(task, session.tree, self._rewards)
                    reports = [each.report(parts[each.reward_source.trajectory_id]) for each in session.tree]
            except Exception as error:
                cause = error.__cause__
                if cause is not None and not isinstance(error, WorkerLost):
                    log.info("trajectory %s: %s", order.trajectory_id, error, exc_info=cause)
                failed = Failed(play=order.play, failure=Failure.of(error), report=session.report({}))
                self._link.post(failed)
            else:
                self._link.post(Ended(play=order.play, reports=tuple(reports)))

    async def _score(self, order: ScoreRequest) -> None:
        with acting("reward", str(order.ask)):
            try:
                scores = await self._rewards.score_group(order.task, order.completions)
            except AsyncRLError as error:
                self._link.post(Scored(ask=order.ask, failure=Failure.of(error)))
                return
            told = (
                Worth(failure=Failure.of(s)) if isinstance(s, RewardError) else Worth(parts=s) for s in scores
            )
            self._link.post(Scored(ask=order.ask, scores=tuple(told)))

    async def _pulse(self) -> None:
        while True:
            self._link.post(Heartbeat(waits=self._told(), counted=self._increments.since_last()))
            with waiting("idle"):
                await asyncio.sleep(_PULSE_S)

    def _told(self) -> dict[str, str]:
        """What trajectories wait for, those that have for a while; of each the newest."""
        return {
            wait.who.id: f"{phrase(wait.on, wait.target, wait.why)} for {wait.age_s:.0f} s"
            for wait in self._waits.open_waits()
            if wait.who.kind == "trajectory" and wait.age_s >= _TELL_S and wait.on != "agent loop"
        }
