"""Where attempts run: in the driver's event loop, or in rollout workers (`async_rl.rollout.workers`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from async_rl.config import Config
from async_rl.errors import RewardError
from async_rl.queue.archive import InspectedTrajectories
from async_rl.queue.journal import Journal
from async_rl.queue.journal_folders import JournalReader
from async_rl.queue.spool import FrameStore
from async_rl.rollout.attempt import (
    Attempt,
    AttemptEnd,
    AttemptEntries,
    AttemptResult,
    UnscoredCompletion,
    finish_trajectories,
    run_agent_loop,
    score_tree,
)
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.model_answers import ModelAnswers
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.session.transcript import Transcript
from async_rl.rollout.teacher import Teacher
from async_rl.runtime.model_questions import asking
from async_rl.runtime.threads import run_uncancellable
from async_rl.types import Completion, StoredTrajectory, Task


class RolloutBackend(Protocol):
    """Runs agent loops and rewards inside its block."""

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

    async def run_attempt(self, attempt: Attempt) -> AttemptEnd:
        """Run the agent loop of a task, score its session and branches, and store their trajectories.

        Raises:
            SpoolFull: There was no space for the trajectories: run it again from what it has sampled.
            RolloutError: The loop, a tool or the reward failed.
            EngineError: Engines failed the attempt.
            AlignmentError: The routing of a trajectory does not fit its tokens.
            WorkerLost: The worker ended, for no known fault of the attempt: run it again.
        """
        ...

    async def score_group(
        self, task: Task, completions: Sequence[Completion]
    ) -> Sequence[dict[str, float] | RewardError]:
        """Score all trajectories of a group by one call, as `Rewards.score_group` does."""
        ...


class LocalBackend(RolloutBackend):
    """Runs attempts in this event loop: the driver's, or that of a rollout worker."""

    def __init__(
        self,
        config: Config,
        context: SessionContext,
        frames: FrameStore,
        inspected: InspectedTrajectories | None = None,
    ) -> None:
        """Load the agent loop and the rewards that the config names.

        Until `journal` is set, no attempt is journalled.

        Args:
            config: The settings of the run.
            context: What all sessions share.
            frames: Stores the trajectories of attempts that succeeded.
            inspected: Keeps a copy of each trajectory for inspection.

        Raises:
            ConfigError: One of them cannot be loaded.
        """
        self._config = config.rollout
        self._context = context
        self.journal: Journal | None = None
        """The journal of this process."""
        self._reader = JournalReader(context.metrics)
        self._frames = frames
        self._inspected = inspected
        self.loops = AgentLoops(config.rollout, context.metrics)
        teacher = config.trainer.loss.teacher.model
        self._teacher = None
        if teacher is not None:
            calls = context.models[teacher]
            self._teacher = Teacher(teacher, calls, context.new_id, context.metrics, context.clock)
        self._answers = ModelAnswers(
            config, context.models, context.chat, context.new_id, context.metrics, context.clock
        )
        self._rewards = Rewards(
            config, decode=context.chat.decode, metrics=context.metrics, clock=context.clock
        )

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

    async def run_attempt(self, attempt: Attempt) -> AttemptEnd:
        """Implements `RolloutBackend.run_attempt`."""
        if self.journal is not None:
            attempt.on_start(self.journal.directory)
        left = await self._reader.read_claim(attempt.claim, attempt.trajectory_id, attempt.number)
        asking.set(self._answers.ask)
        entries, task = AttemptEntries(attempt, self.journal, left), attempt.task
        entry = entries.open_entry(attempt.trajectory_id)
        transcript = Transcript(self._context, entry, entries.open_entry)
        session = RolloutSession(self._context, task, transcript, group_id=attempt.group_id)
        try:
            await run_agent_loop(task, session, self.loops, self._config)
            if not self._rewards.scores_groups(task):
                results = await score_tree(task, session.tree, self._rewards)
                return AttemptEnd(trajectories=await self._store_tree(attempt, results))
            results = [
                AttemptResult(session=each, reward_source=each.reward_source.trajectory_id, parts=None)
                for each in session.tree
            ]
            return AttemptEnd(
                trajectories=await self._store_tree(attempt, results),
                unscored=tuple(
                    UnscoredCompletion(
                        trajectory_id=each.trajectory_id,
                        reward_source=each.reward_source.trajectory_id,
                        completion=each.completion,
                    )
                    for each in session.tree
                ),
            )
        except Exception as error:
            failed = session.failed_trajectory(error)
            summary = StoredTrajectory.of(failed)
            attempt.failed = lambda error: summary
            if (inspected := self._inspected) is not None:
                await asyncio.to_thread(inspected.keep, failed, attempt.number)
            raise

    async def _store_tree(
        self, attempt: Attempt, results: Sequence[AttemptResult]
    ) -> tuple[StoredTrajectory, ...]:
        """Make the trajectories of sessions that have ended well, and store them in a thread."""
        tree = await finish_trajectories(results)
        if self._teacher is not None:
            tree = await self._teacher.score_trajectories(tree)

        def store() -> tuple[StoredTrajectory, ...]:
            stored = self._frames.store_tree(tree)
            if self._inspected is not None:
                for trajectory in tree:
                    self._inspected.keep(trajectory, attempt.number)
            return stored

        stored, cancelled = await run_uncancellable(None, store)
        if cancelled is not None:
            await run_uncancellable(None, lambda: self._frames.discard(stored))
            raise cancelled
        return stored

    async def score_group(
        self, task: Task, completions: Sequence[Completion]
    ) -> Sequence[dict[str, float] | RewardError]:
        """Implements `RolloutBackend.score_group`."""
        asking.set(self._answers.ask)
        return await self._rewards.score_group(task, completions)
