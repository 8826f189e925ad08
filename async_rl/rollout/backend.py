"""Where attempts run: in the driver's event loop, or in rollout workers (`async_rl.rollout.workers`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from async_rl.config import Config
from async_rl.data.chat_format import ChatFormat
from async_rl.errors import RewardError
from async_rl.observability.metrics import Metrics
from async_rl.rollout.attempt import AttemptResult, run_agent_loop, score_tree
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.types import Completion, Task


class RolloutBackend(Protocol):
    """Runs agent loops and rewards inside its block."""

    session_class: type[RolloutSession]
    """The class of the sessions that `run_attempt` takes."""

    async def __aenter__(self) -> Self:
        """Get ready to run attempts."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release everything that loops and rewards hold."""
        ...

    async def run_attempt(self, task: Task, session: RolloutSession) -> Sequence[AttemptResult]:
        """Run the agent loop of a task, and score its session and branches.

        Returns:
            The results of the session and of its branches that sampled something.

        Raises:
            RolloutError: The loop, a tool or the reward failed.
            EngineError: Engines failed the attempt.
            WorkerLost: The worker ended, for no known fault of the attempt: run it again.
        """
        ...

    async def score_group(
        self, task: Task, completions: Sequence[Completion]
    ) -> Sequence[dict[str, float] | RewardError]:
        """Score all trajectories of a group by one call, as `Rewards.score_group` does."""
        ...


class LocalBackend(RolloutBackend):
    """Runs attempts in this event loop."""

    session_class = RolloutSession

    def __init__(
        self, config: Config, *, chat: ChatFormat, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        """Load the agent loop and the rewards that the config names.

        Raises:
            ConfigError: One of them cannot be loaded.
        """
        self._config = config.rollout
        self.loops = AgentLoops(config.rollout, metrics)
        self._rewards = Rewards(config, decode=chat.decode, metrics=metrics, clock=clock)

    async def __aenter__(self) -> Self:
        await self.loops.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.loops.__aexit__(kind, error, traceback)
        finally:
            await self._rewards.close()

    async def run_attempt(self, task: Task, session: RolloutSession) -> Sequence[AttemptResult]:
        """Implements `RolloutBackend.run_attempt`."""
        await run_agent_loop(task, session, self.loops, self._config)
        if not self._rewards.scores_groups(task):
            return await score_tree(task, session.tree, self._rewards)
        return [
            AttemptResult(session=each, reward_source=each.reward_source.trajectory_id, parts=None)
            for each in session.tree
        ]

    async def score_group(
        self, task: Task, completions: Sequence[Completion]
    ) -> Sequence[dict[str, float] | RewardError]:
        """Implements `RolloutBackend.score_group`."""
        return await self._rewards.score_group(task, completions)
