"""The driver's half of a session: the tokens. Its conversation is had in a rollout worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from async_rl.errors import AlignmentError, EngineError, RolloutError
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.workers.messages import Failure, Growing, Message, Read, Report, Write, Wrote
from async_rl.types import Sampled, TurnRecord


class DriverSession(RolloutSession):
    """A session that does as its other half says.

    Its segments are those of the other half whenever no turn is being written; what a loop is told of a
    trajectory (messages, budgets, pending text) is there and not here.
    """

    def read(self, message: Read) -> None:
        """The policy reads something."""
        self._read(message.token_ids)

    def grow(self, *, inherits: bool) -> DriverSession:
        """Branch, or begin another conversation; its name follows from how many there were."""
        other = self._grow(tuple(self._segments) if inherits else ())
        if inherits:
            other._inherit(self)
            other._num_inherited = len(self._segments)
            other._turns = list(self._turns)
        return other

    async def write(self, message: Write, post: Callable[[Message], None]) -> None:
        """Write a turn, and say what came of it, however it ends."""
        first, begin = len(self._segments), self._length
        interruptions, engine_s = self._num_interruptions + self._num_failovers, self._engine_s
        error: Failure | None = None
        reason: Literal["stop", "length", "cut"] = "cut"
        self._growing = _Relay(message, post) if message.streams else None
        try:
            reason = ended = await self._write(message.budget, message.stop)
            self._turns.append(
                TurnRecord(
                    start=begin,
                    end=self._length,
                    finish_reason=ended,
                    num_interruptions=self._num_interruptions + self._num_failovers - interruptions,
                    engine_s=self._engine_s - engine_s,
                )
            )
        except (EngineError, RolloutError, AlignmentError) as failure:  # it is the attempt that fails
            error = Failure.of(failure)
        finally:
            self._growing = None
            post(
                Wrote(
                    play=message.play,
                    name=message.name,
                    segments=tuple(s for s in self._segments[first:] if isinstance(s, Sampled)),
                    reason=reason,
                    error=error,
                    num_interruptions=self._num_interruptions,
                    num_resumes=self._num_resumes,
                    num_failovers=self._num_failovers,
                    engine_s=self._engine_s,
                )
            )

    def settle(self, report: Report) -> None:
        """Take over what only the other half knows."""
        self._turns = list(report.turns)
        self.stop_reason = report.stop_reason
        self.num_tool_calls, self.num_tool_errors = report.num_tool_calls, report.num_tool_errors


class _Relay:
    """Passes a growing turn on."""

    def __init__(self, message: Write, post: Callable[[Message], None]) -> None:
        self._message = message
        self._post = post

    def take(self, token_ids: Sequence[int]) -> None:
        """See `growing_text.Listener`."""
        ids = np.array(token_ids, np.int32)
        self._post(Growing(play=self._message.play, name=self._message.name, token_ids=ids))
