"""The driver's half of a session: its tokens. The conversation is in a rollout worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from async_rl.errors import AlignmentError, EngineError, RolloutError
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.workers.messages import (
    AppendContext,
    Failure,
    Message,
    OpenBranch,
    SessionReport,
    TurnGrown,
    TurnWritten,
    WriteTurn,
)
from async_rl.types import Sampled, TurnRecord


class DriverSession(RolloutSession):
    """Carries out what the worker's half asks for.

    Both halves have the same segments whenever no turn is being written. Messages, budgets and pending text
    are in the worker's half only.
    """

    def append_context(self, message: AppendContext) -> None:
        """Append tokens that the policy did not write."""
        self.writer.append_context(message.token_ids)

    def open_branch(self, message: OpenBranch) -> DriverSession:
        """Open a branch or another conversation; both halves derive its id from their count."""
        other = self._open_sibling(inherits=message.inherits)
        assert other.trajectory_id == message.trajectory_id, "both halves number their branches alike"
        return other

    async def write_turn(self, message: WriteTurn, post: Callable[[Message], None]) -> None:
        """Write a turn and post the result, however the turn ends."""
        tokens = self.writer.tokens
        first, begin = len(tokens.segments), len(tokens)
        interruptions, engine_s = tokens.num_interruptions + tokens.num_failovers, tokens.engine_s
        error: Failure | None = None
        reason: Literal["stop", "length", "cancelled"] = "cancelled"
        listener = _TurnRelay(message, post) if message.streams else None
        try:
            reason = ended = await self.writer.write_turn(message.budget, message.stop, listener)
            self._turns.append(
                TurnRecord(
                    start=begin,
                    end=len(tokens),
                    finish_reason=ended,
                    num_interruptions=tokens.num_interruptions + tokens.num_failovers - interruptions,
                    engine_s=tokens.engine_s - engine_s,
                )
            )
        except (EngineError, RolloutError, AlignmentError) as failure:  # these fail the attempt, not the run
            error = Failure.of(failure)
        finally:
            post(
                TurnWritten(
                    request_id=message.request_id,
                    trajectory_id=message.trajectory_id,
                    segments=tuple(s for s in tokens.segments[first:] if isinstance(s, Sampled)),
                    reason=reason,
                    error=error,
                    num_interruptions=tokens.num_interruptions,
                    num_resumes=tokens.num_resumes,
                    num_failovers=tokens.num_failovers,
                    engine_s=tokens.engine_s,
                )
            )

    def apply_report(self, report: SessionReport) -> None:
        """Take over what only the worker's half knows."""
        self._turns = list(report.turns)
        self.stop_reason = report.stop_reason
        self.num_tool_calls, self.num_tool_errors = report.num_tool_calls, report.num_tool_errors


class _TurnRelay:
    """Posts the tokens of a growing turn to the worker."""

    def __init__(self, message: WriteTurn, post: Callable[[Message], None]) -> None:
        self._message = message
        self._post = post

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Post more tokens of the turn."""
        self._post(
            TurnGrown(
                request_id=self._message.request_id,
                trajectory_id=self._message.trajectory_id,
                token_ids=np.array(token_ids, np.int32),
            )
        )
