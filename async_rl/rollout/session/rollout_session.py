"""A session: a conversation on a transcript, and the trajectory that comes of it.

```
 conversation (rollout.conversation)    what the loop says and reads, as messages
 transcript (rollout.transcript)        what engines write and read, as tokens ──► one trajectory
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from async_rl.config import RolloutConfig, RoutingConfig
from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import EngineFacts, InterruptMode
from async_rl.engines.pool import EnginePool
from async_rl.observability.metrics import Metrics
from async_rl.queue.journal import Entry
from async_rl.rollout.session.conversation import Conversation
from async_rl.rollout.session.transcript import Transcript
from async_rl.types import Outcome, RoutingTrace, Segment, StopReason, Task, Trajectory

OpenBranch = Callable[[str, Sequence[Segment]], Entry]
"""Makes the journal's entry of a branch, from its id and what it inherits."""


class RolloutSession(Transcript, Conversation):
    """See `async_rl.rollout.session.api.Session` for what agent loops may use; the rest is the manager's."""

    def __init__(
        self,
        *,
        task: Task,
        trajectory_id: str,
        group_id: str,
        pool: EnginePool,
        chat: ChatFormat,
        facts: EngineFacts,
        rollout: RolloutConfig,
        routing_config: RoutingConfig,
        interrupt: InterruptMode,
        metrics: Metrics,
        new_id: Callable[[], str],
        clock: Callable[[], float],
        entry: Entry | None = None,
        open_branch: OpenBranch = lambda name, inherited: Entry(name, inherited=inherited),
    ) -> None:
        Transcript.__init__(
            self,
            trajectory_id,
            pool=pool,
            chat=chat,
            facts=facts,
            rollout=rollout,
            routing_config=routing_config,
            interrupt=interrupt,
            metrics=metrics,
            new_id=new_id,
            clock=clock,
            entry=entry,
        )
        Conversation.__init__(self, task)
        self._group_id = group_id
        self._interrupt: InterruptMode = interrupt
        self._open_branch = open_branch

    def _sibling(self, name: str, inherited: tuple[Segment, ...]) -> Self:
        return type(self)(
            task=self.task,
            trajectory_id=name,
            group_id=self._group_id,
            pool=self._pool,
            chat=self._chat,
            facts=self._facts,
            rollout=self._config,
            routing_config=self._routing,
            interrupt=self._interrupt,
            metrics=self._metrics,
            new_id=self._new_id,
            clock=self._clock,
            entry=self._open_branch(name, inherited),
            open_branch=self._open_branch,
        )

    async def finish(self, stop_reason: StopReason, reward_parts: dict[str, float]) -> Trajectory:
        """Close the trajectory: decode its routing once, and check it against the tokens.

        Raises:
            AlignmentError: When the routing does not fit the tokens.
        """
        self._pool.dispatcher.forget_trajectory(self.trajectory_id)
        self._read_pending()
        trace = await self._trace() if self._routing.from_engine else None
        return self._trajectory(trace, stop_reason, reward_parts, error=None)

    def unfinished(self, error: Exception) -> Trajectory:
        """What there is of an attempt that failed, for people to look at: without routing, never trained."""
        return self._trajectory(None, "error", {}, error=f"{type(error).__name__}: {error}")

    def _trajectory(
        self,
        trace: RoutingTrace | None,
        stop_reason: StopReason,
        reward_parts: dict[str, float],
        *,
        error: str | None,
    ) -> Trajectory:
        return Trajectory(
            trajectory_id=self.trajectory_id,
            group_id=self._group_id,
            task_id=self.task.task_id,
            segments=tuple(self._segments),
            trace=trace,
            outcome=Outcome(
                stop_reason=stop_reason,
                reward=reward_parts.get("reward"),
                reward_parts=reward_parts,
                error=error,
                num_turns=len(self._turns),
                num_tool_calls=self.num_tool_calls,
                num_tool_errors=self.num_tool_errors,
                num_interruptions=self._num_interruptions,
                num_resumes=self._num_resumes,
                num_failovers=self._num_failovers,
                started_s=self.started_s,
                finished_s=self._clock(),
            ),
            turns=tuple(self._turns),
            num_inherited=self._num_inherited,
        )
