"""Where attempts are played: here, in the driver's event loop, or in rollout workers (`rollout.remote`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from async_rl.config import Config
from async_rl.data.chat_format import ChatFormat
from async_rl.errors import RewardError
from async_rl.observability.metrics import Metrics
from async_rl.rollout.attempt import Played, play, score_tree
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.types import Completion, Task


class RolloutBackend(Protocol):
    """Runs agent loops and rewards while its block lasts."""

    session: type[RolloutSession]
    """What `play` is to be given."""

    async def __aenter__(self) -> Self:
        """Be ready to play."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let go of all that loops and rewards hold."""
        ...

    async def play(self, task: Task, session: RolloutSession) -> Sequence[Played]:
        """Run the agent loop of a task and score what comes of it.

        Returns:
            The session and its branches that sampled something.

        Raises:
            RolloutError: Of the loop, a tool, the reward.
            EngineError: Engines failed it.
            WorkerLost: It was cut short through no fault of its own that is known: play it again.
        """
        ...

    async def score_group(
        self, task: Task, completions: Sequence[Completion]
    ) -> Sequence[dict[str, float] | RewardError]:
        """Score all trajectories of a group by one call; see `Rewards.score_group`."""
        ...


class LocalBackend(RolloutBackend):
    """In this event loop."""

    session = RolloutSession

    def __init__(
        self, config: Config, *, chat: ChatFormat, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        """Load the agent loop and the rewards that the config names.

        Raises:
            ConfigError: One cannot be loaded.
        """
        self._config = config.rollout
        self._loops = AgentLoops(config.rollout)
        self._rewards = Rewards(config, decode=chat.decode, metrics=metrics, clock=clock)

    async def __aenter__(self) -> Self:
        await self._loops.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._loops.__aexit__(kind, error, traceback)
        finally:
            await self._rewards.close()

    async def play(self, task: Task, session: RolloutSession) -> Sequence[Played]:
        """See `Stage.play`."""
        await play(task, session, self._loops, self._config)
        if not self._rewards.scores_groups(task):
            return await score_tree(task, session.tree, self._rewards)
        return [
            Played(session=each, reward_source=each.reward_source.trajectory_id, parts=None)
            for each in session.tree
        ]

    async def score_group(
        self, task: Task, completions: Sequence[Completion]
    ) -> Sequence[dict[str, float] | RewardError]:
        """See `Stage.score_group`."""
        return await self._rewards.score_group(task, completions)
