"""The session of one trajectory: a conversation on a transcript, and the trajectory it becomes.

```
 Conversation (session/conversation.py)    messages, turns and budgets, as the agent loop sees them
 Transcript   (session/transcript.py)      tokens and routing rows, as engines see them ──► one Trajectory
```
"""

from __future__ import annotations

from typing import Self

from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.conversation import Conversation, SessionTree
from async_rl.rollout.session.transcript import Transcript
from async_rl.types import (
    Outcome,
    RoutingTrace,
    StopReason,
    Task,
    Trajectory,
    turn_rewards_of,
    with_turn_rewards,
)


class RolloutSession(Conversation[Transcript]):
    """Implements `session.api.Session` for agent loops, and becomes a trajectory for the rollout manager."""

    def __init__(
        self,
        context: SessionContext,
        task: Task,
        writer: Transcript,
        *,
        group_id: str,
        tree: SessionTree | None = None,
    ) -> None:
        """Start the session of a new trajectory of a group, on a transcript without a prompt."""
        super().__init__(context, task, writer, tree=tree)
        self._group_id = group_id

    def _with_writer(self, writer: Transcript) -> Self:
        return type(self)(self._context, self.task, writer, group_id=self._group_id, tree=self._tree)

    async def finish_trajectory(self, stop_reason: StopReason, reward_parts: dict[str, float]) -> Trajectory:
        """Return the trajectory, with its routing decoded once and checked against its tokens.

        Raises:
            AlignmentError: The routing does not fit the tokens.
        """
        self._append_unread()
        try:
            trace = await self.writer.build_trace()  # may fetch rows from the engine that has them cached
        finally:
            self.writer.release_engine()
        return self._trajectory(trace, stop_reason, reward_parts, error=None)

    def failed_trajectory(self, error: Exception) -> Trajectory:
        """Return what a failed attempt sampled, for display only: without routing, never trained."""
        return self._trajectory(None, "error", {}, error=f"{type(error).__name__}: {error}")

    def _trajectory(
        self,
        trace: RoutingTrace | None,
        stop_reason: StopReason,
        reward_parts: dict[str, float],
        *,
        error: str | None,
    ) -> Trajectory:
        tokens = self.writer.tokens
        own_turns = self._turns[self._num_inherited_turns :]
        reward_parts = with_turn_rewards(reward_parts, turn_rewards_of(own_turns))
        return Trajectory(
            trajectory_id=self.trajectory_id,
            group_id=self._group_id,
            task_id=self.task.task_id,
            segments=tuple(tokens.segments),
            trace=trace,
            outcome=Outcome(
                stop_reason=stop_reason,
                reward=reward_parts.get("reward"),
                reward_parts=reward_parts,
                error=error,
                num_turns=len(self._turns),
                num_tool_calls=self.num_tool_calls,
                num_tool_errors=self.num_tool_errors,
                num_interruptions=tokens.num_interruptions,
                num_resumes=tokens.num_resumes,
                num_failovers=tokens.num_failovers,
                started_s=self.started_s,
                finished_s=self._context.clock(),
            ),
            turns=tuple(self._turns),
            num_inherited=self._num_inherited,
        )
