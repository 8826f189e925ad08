"""The worker's half of a session: the conversation. The driver writes its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Literal, Self

from async_rl.config import RolloutConfig
from async_rl.data.chat_format import ChatFormat
from async_rl.errors import WorkerLost
from async_rl.observability.metrics import Metrics
from async_rl.rollout.session.conversation import Conversation
from async_rl.rollout.session.tokens import TokenLog
from async_rl.rollout.workers.messages import Cut, Grow, Message, Read, Report, Write, Wrote
from async_rl.runtime.supervision import finished
from async_rl.runtime.waits import waiting
from async_rl.types import Context, Int32Array, Segment, Task

_CUT_S: Final = 30.0
"""So long the driver may take to end a call that nobody wants any more: it has only to close a stream."""


class WorkerChannel:
    """One attempt's end of the link: posts for its sessions, and holds what comes for them."""

    def __init__(self, play: int, post: Callable[[Message], None]) -> None:
        """For the attempt of a `Play`."""
        self.play = play
        self.post = post
        self.sessions: dict[str, WorkerSession] = {}
        """All that the loop has opened."""
        self.closed = False
        """The attempt is no more: nothing will be answered."""

    def close(self) -> None:
        """Nothing more will come."""
        self.closed = True
        for session in self.sessions.values():
            session.answer(None)


class WorkerSession(Conversation):
    """The session of a loop in a worker. It has the same tokens as the driver's half, one turn later."""

    def __init__(
        self,
        task: Task,
        trajectory_id: str,
        desk: WorkerChannel,
        *,
        chat: ChatFormat,
        rollout: RolloutConfig,
        metrics: Metrics,
        clock: Callable[[], float],
        inherited: Sequence[Segment] = (),
    ) -> None:
        TokenLog.__init__(
            self,
            trajectory_id,
            chat=chat,
            rollout=rollout,
            metrics=metrics,
            clock=clock,
            segments=list(inherited),
        )
        Conversation.__init__(self, task)
        self._desk = desk
        self._answered = asyncio.Event()
        self._answer: Wrote | None = None
        desk.sessions[trajectory_id] = self

    def hear(self, token_ids: Int32Array) -> None:
        """Tokens of the turn that is being written."""
        if self._growing is not None:
            self._growing.take(token_ids.tolist())

    def answer(self, wrote: Wrote | None) -> None:
        """What came of the turn that was asked for; None when nothing will."""
        self._answer = wrote
        self._answered.set()

    def report(self, parts: dict[str, float], *, unscored: bool = False) -> Report:
        """What the driver does not know of it, at its end.

        Args:
            parts: Its reward.
            unscored: It comes later, from the completion as it is now.
        """
        self._read_pending()
        return Report(
            name=self.trajectory_id,
            stop_reason=self.stop_reason,
            turns=tuple(self._turns),
            num_tool_calls=self.num_tool_calls,
            num_tool_errors=self.num_tool_errors,
            reward_source=self.reward_source.trajectory_id,
            parts=parts,
            completion=self.completion if unscored else None,
        )

    # -- who writes the tokens -------------------------------------------------------------------------

    def _read(self, token_ids: Int32Array) -> None:
        self._append(Context(token_ids=token_ids))
        self._desk.post(Read(play=self._desk.play, name=self.trajectory_id, token_ids=token_ids))

    async def _write(self, budget: int, stop: Sequence[str]) -> Literal["stop", "length"]:
        """Have the driver write a turn; what was sampled is kept here too, however it ends."""
        desk, name = self._desk, self.trajectory_id
        self._check_desk()
        self._answered.clear()
        streams = self._growing is not None
        desk.post(Write(play=desk.play, name=name, budget=budget, stop=tuple(stop), streams=streams))
        try:
            with waiting("turn"):
                await self._answered.wait()
        except asyncio.CancelledError:
            if not self._answered.is_set():
                desk.post(Cut(play=desk.play, name=name))
                await finished(self._settled(), limit_s=_CUT_S)
            else:
                self._take()
            raise
        self._take()
        wrote = self._answer
        assert wrote is not None, "a desk that is closed answers nothing, which raises"
        if wrote.error is not None:
            raise wrote.error.error
        if wrote.reason == "cut":
            raise WorkerLost(f"the driver cut a turn of {name} that nobody had cut here")
        return wrote.reason

    async def _settled(self) -> None:
        with waiting("turn"):
            await self._answered.wait()
        self._take()

    def _take(self) -> None:
        """Have the same tokens as the driver's half."""
        wrote = self._answer
        if wrote is None:
            self._check_desk()
            return
        for segment in wrote.segments:
            self._append(segment)
        self._num_interruptions = wrote.num_interruptions
        self._num_resumes = wrote.num_resumes
        self._num_failovers = wrote.num_failovers
        self._engine_s = wrote.engine_s

    def _check_desk(self) -> None:
        if self._desk.closed:
            raise WorkerLost(f"trajectory {self.trajectory_id} has been ended by the driver")

    def _sibling(self, name: str, inherited: tuple[Segment, ...]) -> Self:
        desk = self._desk
        desk.post(Grow(play=desk.play, parent=self.trajectory_id, name=name, inherits=bool(inherited)))
        return type(self)(
            self.task,
            name,
            desk,
            chat=self._chat,
            rollout=self._config,
            metrics=self._metrics,
            clock=self._clock,
            inherited=inherited,
        )
