"""Where attempts run: in the driver's event loop, or in rollout workers (`async_rl.rollout.workers`)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, Self

from async_rl.errors import CorruptFrame, RewardError
from async_rl.rollout.attempt import (
    ATTEMPT_ERRORS,
    Attempt,
    AttemptEnd,
    AttemptEntries,
    AttemptResult,
    attempt_boundary,
    finish_trajectories,
    run_agent_loop,
    score_sources,
)
from async_rl.rollout.groups import UnscoredTrajectory
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.model_answers import ModelAnswers
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.session.transcript import Transcript
from async_rl.rollout.teacher import Teacher
from async_rl.runtime.model_questions import asking
from async_rl.runtime.shortages import wait_out_shortage
from async_rl.runtime.threads import run_uncancellable
from async_rl.store.archive import InspectedTrajectories
from async_rl.store.frames import read_completion
from async_rl.store.journal import Journal
from async_rl.store.journal_folders import JournalReader
from async_rl.store.spool import FrameStore
from async_rl.types import Completion, StoredCompletion, StoredTrajectory, Task


class RolloutBackend(AbstractAsyncContextManager[Any, None], Protocol):
    """Runs agent loops and rewards inside its block, which releases everything that they hold."""

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

    @property
    def has_space_elsewhere(self) -> bool:
        """Whether an attempt that has just found no space may find some on another node."""
        ...

    async def score_group(
        self, task: Task, completions: Sequence[StoredCompletion]
    ) -> Sequence[dict[str, float] | RewardError]:
        """Score all trajectories of a group by one call, as `Rewards.score_group` does.

        A trajectory whose completion is damaged gets an error, and the others are scored without it.
        """
        ...


async def rewards_of_group(
    backend: RolloutBackend, task: Task, completions: Sequence[StoredCompletion]
) -> Sequence[dict[str, float] | RewardError]:
    """Score all trajectories of a group by one call; where that fails, each has its error."""
    try:
        with attempt_boundary():
            return await backend.score_group(task, completions)
    except ATTEMPT_ERRORS as error:
        failure = error if isinstance(error, RewardError) else RewardError(str(error))
        return [failure] * len(completions)


class LocalBackend(RolloutBackend):
    """Runs attempts in this event loop: the driver's, or that of a rollout worker."""

    def __init__(
        self,
        context: SessionContext,
        frames: FrameStore,
        inspected: InspectedTrajectories | None = None,
    ) -> None:
        """Load the agent loop and the rewards that the config names.

        Until `journal` is set, no attempt is journalled.

        Args:
            context: What all sessions share.
            frames: Stores the trajectories of attempts that succeeded.
            inspected: Keeps a copy of each trajectory for inspection.

        Raises:
            ConfigError: One of them cannot be loaded.
        """
        config = context.config
        self._config = config.rollout
        self._context = context
        self.journal: Journal | None = None
        """The journal of this process."""
        self._reader = JournalReader(context.metrics)
        self._frames = frames
        self._inspected = inspected
        self.loops = AgentLoops(config.rollout, context.metrics)
        teacher = config.trainer.loss.teacher.model
        self._teacher = None if teacher is None else Teacher(teacher, context)
        self._answers = ModelAnswers(context)
        self._rewards = Rewards(
            config, decode=context.chat.decode, metrics=context.metrics, clock=context.clock
        )

    async def __aenter__(self) -> Self:
        await self.loops.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self.loops.__aexit__(*error)
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
            completions: dict[str, Completion] = {}
            scores: Mapping[str, dict[str, float]] = {}
            if self._rewards.scores_groups(task):
                completions = {each.reward_source.trajectory_id: each.completion for each in session.tree}
            else:
                scores = await score_sources(task, session.tree, self._rewards)
            results = [
                AttemptResult(session=each, parts=scores.get(each.reward_source.trajectory_id))
                for each in session.tree
            ]
            return await self._store_tree(attempt, results, completions)
        except Exception as error:
            failed = session.failed_trajectory(error)
            summary = StoredTrajectory.of(failed)
            attempt.failed = lambda error: summary
            if (inspected := self._inspected) is not None:
                await asyncio.to_thread(inspected.keep, failed, attempt.number)
            raise

    async def _store_tree(
        self, attempt: Attempt, results: Sequence[AttemptResult], completions: Mapping[str, Completion]
    ) -> AttemptEnd:
        """Make the trajectories of sessions that have ended well, and store them in a thread.

        Args:
            attempt: Their attempt.
            results: The sessions.
            completions: What the group's reward function will receive, by reward source.
        """
        tree = await finish_trajectories(results)
        if self._teacher is not None:
            tree = await self._teacher.score_trajectories(tree)

        def store() -> AttemptEnd:
            kept: dict[str, StoredCompletion] = {}
            try:
                for source, completion in completions.items():
                    kept[source] = self._frames.store_completion(source, completion)
                stored = self._frames.store_tree(tree)
            except BaseException:
                self._frames.discard(kept.values())
                raise
            if self._inspected is not None:
                for trajectory in tree:
                    self._inspected.keep(trajectory, attempt.number)
            return AttemptEnd(
                trajectories=stored,
                unscored=tuple(
                    UnscoredTrajectory(
                        trajectory_id=each.session.trajectory_id,
                        attempt=attempt.number,
                        reward_source=each.reward_source,
                        completion=kept[each.reward_source],
                    )
                    for each in results
                    if each.parts is None
                ),
            )

        end, cancelled = await run_uncancellable(None, store)
        if cancelled is not None:
            await run_uncancellable(None, lambda: self._frames.discard([*end.trajectories, *end.completions]))
            raise cancelled
        return end

    @property
    def has_space_elsewhere(self) -> bool:
        """Implements `RolloutBackend.has_space_elsewhere`: this process has one disk."""
        return False

    async def score_group(
        self, task: Task, completions: Sequence[StoredCompletion]
    ) -> Sequence[dict[str, float] | RewardError]:
        """Implements `RolloutBackend.score_group`."""
        asking.set(self._answers.ask)
        found = await self._read_completions(completions)
        intact = [each for each in found if isinstance(each, Completion)]
        scores = iter(await self._rewards.score_group(task, intact) if intact else ())
        return [each if isinstance(each, RewardError) else next(scores) for each in found]

    async def _read_completions(
        self, stored: Sequence[StoredCompletion]
    ) -> Sequence[Completion | RewardError]:
        def read() -> list[Completion | RewardError]:
            found: list[Completion | RewardError] = []
            for each in stored:
                try:
                    found.append(read_completion(each))
                except CorruptFrame as flaw:
                    found.append(RewardError(f"a completion cannot be read: {flaw}"))
            return found

        try:
            return await wait_out_shortage(lambda: asyncio.to_thread(read))
        except OSError as error:
            raise RewardError(f"the completions of a group cannot be read: {error}") from error
