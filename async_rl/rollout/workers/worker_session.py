"""The worker's half of a session: its conversation. The driver writes the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Literal

from async_rl.errors import WorkerLost
from async_rl.rollout.session.conversation import Conversation
from async_rl.rollout.session.tokens import TokenListener, TokenLog, TokenWriter
from async_rl.rollout.workers.messages import (
    AppendContext,
    CancelTurn,
    Message,
    OpenBranch,
    SessionReport,
    TurnWritten,
    WriteTurn,
)
from async_rl.runtime.supervision import finished
from async_rl.runtime.waits import waiting
from async_rl.types import Context, Int32Array, Segment

_CANCEL_S: Final = 30.0
"""How long the driver may take to end a cancelled engine call: it only has to close a stream."""


class WorkerChannel:
    """One attempt's end of the link: posts for its sessions, and hands them the driver's answers."""

    def __init__(self, request_id: int, post: Callable[[Message], None]) -> None:
        """Open the channel of the attempt that a `StartAttempt` began."""
        self.request_id = request_id
        self.post = post
        self.writers: dict[str, RemoteWriter] = {}
        """The token writers of all sessions that the loop has opened, by trajectory."""
        self.closed = False
        """Whether the attempt has ended, so that the driver answers no more."""

    def close(self) -> None:
        """End the attempt: turns that are being written get no answer."""
        self.closed = True
        for writer in self.writers.values():
            writer.receive_turn(None)


class RemoteWriter(TokenWriter):
    """Has the driver write the tokens of one trajectory, and keeps a copy that is at most one turn behind."""

    def __init__(
        self,
        trajectory_id: str,
        channel: WorkerChannel,
        max_tokens: int,
        inherited: Sequence[Segment] = (),
    ) -> None:
        """Start without tokens; a branch starts with the segments that it inherits.

        Args:
            trajectory_id: Names the trajectory at both ends of the link.
            channel: The attempt's end of the link.
            max_tokens: The most tokens of a trajectory.
            inherited: Segments of a branch, whose tokens `open_branch` copies.
        """
        self.trajectory_id = trajectory_id
        self.tokens = TokenLog(list(inherited), max_tokens)
        self._channel = channel
        self._max_tokens = max_tokens
        self._listener: TokenListener | None = None
        self._answered = asyncio.Event()
        self._answer: TurnWritten | None = None
        channel.writers[trajectory_id] = self

    def receive_tokens(self, token_ids: Int32Array) -> None:
        """Pass on tokens of the turn that is being written."""
        if self._listener is not None:
            self._listener.add_tokens(token_ids.tolist())

    def receive_turn(self, answer: TurnWritten | None) -> None:
        """Receive the driver's answer to the turn that was requested; None if there will be none."""
        self._answer = answer
        self._answered.set()

    def append_context(self, token_ids: Int32Array) -> None:
        """Append tokens that the policy did not write, here and in the driver."""
        self.tokens.append_segment(Context(token_ids=token_ids))
        self._channel.post(
            AppendContext(
                request_id=self._channel.request_id, trajectory_id=self.trajectory_id, token_ids=token_ids
            )
        )

    async def write_turn(
        self, budget: int, stop: Sequence[str], listener: TokenListener | None
    ) -> Literal["stop", "length"]:
        """Have the driver write a turn; sampled tokens are kept here too, however the turn ends.

        Raises:
            AsyncRLError: The error with which the turn failed in the driver.
            WorkerLost: The driver has ended the attempt.
        """
        channel, name = self._channel, self.trajectory_id
        self._check_channel()
        self._answered.clear()
        self._listener = listener
        channel.post(
            WriteTurn(
                request_id=channel.request_id,
                trajectory_id=name,
                budget=budget,
                stop=tuple(stop),
                streams=listener is not None,
            )
        )
        try:
            with waiting("turn"):
                await self._answered.wait()
        except asyncio.CancelledError:
            if not self._answered.is_set():
                channel.post(CancelTurn(request_id=channel.request_id, trajectory_id=name))
                await finished(self._wait_for_answer(), limit_s=_CANCEL_S)
            else:
                self._append_answer()
            raise
        self._append_answer()
        answer = self._answer
        assert answer is not None, "_append_answer raises without an answer"
        if answer.error is not None:
            raise answer.error.error
        if answer.reason == "cancelled":
            raise WorkerLost(f"the driver cancelled a turn of {name} that this worker had not cancelled")
        return answer.reason

    def open_branch(self, trajectory_id: str, *, inherits: bool) -> RemoteWriter:
        """Open another trajectory of the same attempt, here and in the driver."""
        channel = self._channel
        channel.post(
            OpenBranch(
                request_id=channel.request_id,
                parent_id=self.trajectory_id,
                trajectory_id=trajectory_id,
                inherits=inherits,
            )
        )
        inherited = self.tokens.segments if inherits else ()
        other = RemoteWriter(trajectory_id, channel, self._max_tokens, inherited)
        if inherits:
            other.tokens.inherit_tokens(self.tokens)
        return other

    async def _wait_for_answer(self) -> None:
        with waiting("turn"):
            await self._answered.wait()
        self._append_answer()

    def _append_answer(self) -> None:
        """Append what the driver wrote, so that both halves have the same tokens."""
        answer, tokens = self._answer, self.tokens
        if answer is None:
            self._check_channel()
            return
        for segment in answer.segments:
            tokens.append_segment(segment)
        tokens.num_interruptions = answer.num_interruptions
        tokens.num_resumes = answer.num_resumes
        tokens.num_failovers = answer.num_failovers
        tokens.engine_s = answer.engine_s

    def _check_channel(self) -> None:
        if self._channel.closed:
            raise WorkerLost(f"the driver has ended trajectory {self.trajectory_id}")


class WorkerSession(Conversation[RemoteWriter]):
    """The session of an agent loop that runs in a rollout worker."""

    def report(self, parts: dict[str, float], *, unscored: bool = False) -> SessionReport:
        """Return what the driver does not know of this session, once it has ended.

        Args:
            parts: Its reward.
            unscored: Whether the reward comes later, from the completion as it is now.
        """
        self._append_pending()
        return SessionReport(
            trajectory_id=self.trajectory_id,
            stop_reason=self.stop_reason,
            turns=tuple(self._turns),
            num_tool_calls=self.num_tool_calls,
            num_tool_errors=self.num_tool_errors,
            reward_source=self.reward_source.trajectory_id,
            parts=parts,
            completion=self.completion if unscored else None,
        )
