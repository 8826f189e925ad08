"""Has engines of one weight version answer the validation sets, and scores the answers.

```
 loop      consumes           waits for          unblocked by            produces
 evaluate  tasks, samples     free capacity      an answer ends          attempts
 answer    capacity           engines, rewards   chunks, pool events     an answer, or the reason of its loss
 health    calls, probes      the next check     time                    a quarantine in its pool
 lost      that pool          no engine serving  a quarantine            the end of the evaluation
```

Sessions, loops and rewards are those of rollouts. The pool belongs to the evaluation: rollouts do not use its
engines, and no answer enters the trainer's queue or ledger. Every requested answer is scored, or dropped with
its reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from async_rl.config import Config, RolloutConfig, RoutingConfig
from async_rl.data.chat_format import ChatFormat
from async_rl.data.dataset import Dataset
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.health import HealthWatch
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.errors import AsyncRLError, EngineError, PromptTooLong, RewardError
from async_rl.evaluation.estimates import EvaluatedAnswer, scores
from async_rl.observability.evaluation_record import EvaluationRecord
from async_rl.observability.metrics import Metrics, value_of
from async_rl.queue.archive import Archive
from async_rl.queue.journal import JournalEntry
from async_rl.rollout.attempt import (
    ATTEMPT_ERRORS,
    attempt_boundary,
    finish_trajectories,
    run_agent_loop,
    score_tree,
)
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.session.transcript import Transcript
from async_rl.runtime.supervision import Nursery, first_error, services
from async_rl.runtime.waits import acting, progressed, waiting
from async_rl.types import Completion, StoredTrajectory, Task, Trajectory

log = logging.getLogger(__name__)

MIXED_VERSION = "mixed_version"
"""Why an answer is dropped that has tokens of another than the pinned version."""


def rollout_settings(config: Config) -> RolloutConfig:
    """Return the rollouts' settings as changed by those of evaluation."""
    evaluation, rollout = config.evaluation, config.rollout
    changed = {
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
        "top_k": evaluation.top_k,
        "max_new_tokens": evaluation.max_new_tokens,
        "agent_loop": evaluation.agent_loop,
        "agent_loop_args": None if evaluation.agent_loop is None else evaluation.agent_loop_args,
    }
    return replace(rollout, **{name: value for name, value in changed.items() if value is not None})


class _EvaluationInputs(NamedTuple):
    """What all evaluations of an evaluator share."""

    config: Config
    rollout: RolloutConfig
    """The rollouts' settings, as changed by `evaluation`."""
    datasets: Sequence[Dataset]
    chat: ChatFormat
    facts: EngineFacts
    new_id: Callable[[], str]
    clock: Callable[[], float]


class Evaluator:
    """Evaluates weight versions on the validation sets of a config.

    Example:
        >>> evaluator = Evaluator(config, datasets, chat=chat, facts=facts, new_id=new_id, clock=clock)
        >>> record = await evaluator.evaluate_sets(pool, weight_version=12)
    """

    def __init__(
        self,
        config: Config,
        datasets: Sequence[Dataset],
        *,
        chat: ChatFormat,
        facts: EngineFacts,
        new_id: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        """Store the inputs of every evaluation.

        Args:
            config: The run's config.
            datasets: The validation sets.
            chat: The model's chat format.
            facts: What the model's config says about it.
            new_id: Returns fixed-width unique ids.
            clock: Monotonic seconds.
        """
        rollout = rollout_settings(config)
        self._inputs = _EvaluationInputs(config, rollout, datasets, chat, facts, new_id, clock)

    @property
    def num_answers(self) -> int:
        """Number of answers of one evaluation."""
        samples = self._inputs.config.evaluation.samples
        return samples * sum(len(dataset.tasks) for dataset in self._inputs.datasets)

    def new_pool(self) -> EnginePool:
        """Return an empty pool for the engines of one evaluation, with metrics of its own."""
        limit = self._inputs.config.engine.max_prefill_tokens
        return EnginePool(Metrics(), self._inputs.clock, max_prefill_tokens=limit)

    async def evaluate_sets(
        self, pool: EnginePool, weight_version: int, archive: Archive | None = None
    ) -> EvaluationRecord:
        """Get all answers once, and score them.

        Args:
            pool: Engines that serve the version. To take one away, quarantine it in this pool.
            weight_version: The pinned version: an answer with a token of another one is dropped and counted.
            archive: Keeps the answers.

        Raises:
            EngineError: No engine is left, or the evaluation exceeds `evaluation.timeout_s`.
            AsyncRLError: A loop or a reward cannot be loaded.
        """
        evaluation, clock = self._inputs.config.evaluation, self._inputs.clock
        began_s, metrics = clock(), Metrics()
        engines = tuple(engine.engine_id for engine in pool.engines())
        run = _EvaluationRun(self._inputs, pool, weight_version, metrics, archive)
        limit_s = evaluation.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await run.answer_all()
        except ExceptionGroup as group:
            raise first_error(group) from group
        except TimeoutError as error:
            raise EngineError(
                f"the evaluation of version {weight_version} had {run.num_ended} of {self.num_answers} "
                f"answers after evaluation.timeout_s = {limit_s}: raise it, or ask for fewer"
            ) from error
        return EvaluationRecord(
            weight_version=weight_version,
            status="done",
            duration_s=clock() - began_s,
            engines=engines,
            scores=scores(run.answers, pass_at=evaluation.pass_at, pass_reward=evaluation.pass_reward),
            asked=self.num_answers,
            dropped=dict(run.dropped),
            sampled_tokens=int(value_of(metrics.sampled_tokens_total)),
        )


class _EvaluationRun:
    """One evaluation of one weight version."""

    def __init__(
        self,
        inputs: _EvaluationInputs,
        pool: EnginePool,
        weight_version: int,
        metrics: Metrics,
        archive: Archive | None,
    ) -> None:
        config = inputs.config
        self._inputs = inputs
        self._pool = pool
        self._weight_version = weight_version
        self._metrics = metrics
        self._archive = archive
        self._loops = AgentLoops(inputs.rollout, metrics)
        self._rewards = Rewards(config, decode=inputs.chat.decode, metrics=metrics, clock=inputs.clock)
        self._capacity = asyncio.Semaphore(config.evaluation.max_concurrent)
        self.answers: list[EvaluatedAnswer] = []
        self.dropped: Counter[str] = Counter()

    @property
    def num_ended(self) -> int:
        """Answers that are scored or dropped."""
        return len(self.answers) + self.dropped.total()

    async def answer_all(self) -> None:
        """Get all answers; returns when each is scored or dropped."""
        config, new_id = self._inputs.config, self._inputs.new_id
        samples = config.evaluation.samples
        health = HealthWatch(self._pool, config.engine, self._metrics, self._inputs.clock)
        try:
            async with (
                services(health=health.watch_engines, lost=self._watch),
                self._loops,
                Nursery() as nursery,
            ):
                for dataset in self._inputs.datasets:
                    for task in dataset.tasks:
                        group = _AnswerGroup(new_id(), dataset.name, task, samples)
                        for _ in range(samples):
                            with waiting("evaluation"):
                                await self._capacity.acquire()
                            name = new_id()
                            nursery.start_task(f"answer {name}", self._answer(name, group))
        finally:
            await self._rewards.close()

    async def _watch(self) -> None:
        """End the evaluation when no engine is left, because nothing repairs its engines."""
        with waiting("idle"):
            while self._pool.has_engine(EngineState.SERVING):
                await self._pool.wait_for_change()
        engines = {engine.engine_id: self._pool.error_of(engine.engine_id) for engine in self._pool.engines()}
        errors = "; ".join(f"{name}: {error}" for name, error in engines.items())
        raise EngineError(f"no engine of the evaluation is left: {errors}")

    async def _answer(self, name: str, group: _AnswerGroup) -> None:
        """Get one answer; the last one of a group also scores the group, if its reward needs all of them."""
        try:
            with acting("answer", name):
                await self._attempts(name, group)
                group.ended += 1
                if group.complete and group.unscored:
                    await self._score_group(group)
        finally:
            self._capacity.release()
        progressed()

    def _new_session(self, task: Task, answer_id: str, group_id: str) -> RolloutSession:
        """Return the session of one attempt at an answer; it needs no routing, as it is not trained on."""
        inputs = self._inputs
        context = SessionContext(
            chat=inputs.chat,
            rollout=inputs.rollout,
            metrics=self._metrics,
            clock=inputs.clock,
            serving_clock=self._pool.serving_clock,
            calls=self._pool,
            facts=inputs.facts,
            routing=RoutingConfig(replay="off"),
            interrupt=inputs.config.weights.interrupt,
            new_id=inputs.new_id,
        )
        return RolloutSession(context, task, Transcript(context, JournalEntry(answer_id)), group_id=group_id)

    async def _attempts(self, name: str, group: _AnswerGroup) -> None:
        limit = self._inputs.config.rollout.max_attempts
        for attempt in range(1, limit + 1):
            session = self._new_session(group.task, name, group.group_id)
            try:
                with attempt_boundary():
                    await run_agent_loop(group.task, session, self._loops, self._inputs.rollout)
                    if self._rewards.scores_groups(group.task):
                        # Only the root: rewards of branches are for training.
                        trajectory = await session.finish_trajectory(session.stop_reason, {})
                        group.unscored[name] = trajectory, session.completion
                        return
                    results = await score_tree(group.task, session.tree, self._rewards)
                    tree = await finish_trajectories(results)
            except ATTEMPT_ERRORS as error:
                if self._archive is not None:
                    kept = await self._keep(session.failed_trajectory(error), attempt)
                    self._archive.failed(kept, attempt, error)
                log.info("an answer to task %s, attempt %d: %s", group.task.task_id, attempt, error)
                if attempt == limit or isinstance(error, PromptTooLong):
                    self.dropped[type(error).__name__] += 1
                    return
            else:
                await self._count_answer(group, tree[0], tree[0].outcome.reward_parts)
                return

    async def _score_group(self, group: _AnswerGroup) -> None:
        """Score all answers of a task by one call."""
        trajectories, completions = zip(*group.unscored.values(), strict=True)
        results = await self._rewards.score_group(group.task, list(completions))
        for trajectory, parts in zip(trajectories, results, strict=True):
            if isinstance(parts, RewardError):
                self.dropped[type(parts).__name__] += 1
                continue
            outcome = replace(trajectory.outcome, reward=parts["reward"], reward_parts=parts)
            await self._count_answer(group, replace(trajectory, outcome=outcome), parts)

    async def _keep(self, trajectory: Trajectory, attempt: int) -> StoredTrajectory:
        """Keep the tokens of an answer for inspection, and return its summary."""
        assert self._archive is not None, "answers are kept"
        await asyncio.to_thread(self._archive.inspected.keep, trajectory, attempt)
        return StoredTrajectory.of(trajectory)

    async def _count_answer(
        self, group: _AnswerGroup, trajectory: Trajectory, parts: dict[str, float]
    ) -> None:
        """Count an answer if all its tokens are of the pinned version."""
        if self._archive is not None:
            self._archive.ended(await self._keep(trajectory, 1), 1)
        if {segment.weight_version for segment in trajectory.sampled} != {self._weight_version}:
            self.dropped[MIXED_VERSION] += 1
            return
        self.answers.append(
            EvaluatedAnswer(
                dataset=group.dataset,
                source=group.task.data_source,
                task_id=group.task.task_id,
                parts=parts,
                tokens=trajectory.num_sampled_tokens,
                truncated=trajectory.outcome.stop_reason == "length",
            )
        )


class _AnswerGroup:
    """The answers to one task."""

    def __init__(self, group_id: str, dataset: str, task: Task, size: int) -> None:
        self.group_id = group_id
        self.dataset = dataset
        self.task = task
        self._size = size
        self.ended = 0
        self.unscored: dict[str, tuple[Trajectory, Completion]] = {}

    @property
    def complete(self) -> bool:
        """Whether all of them have ended."""
        return self.ended == self._size


def missing_record(weight_version: int, error: AsyncRLError, *, duration_s: float) -> EvaluationRecord:
    """Return the record of an evaluation that was cancelled or failed."""
    return EvaluationRecord(
        weight_version=weight_version, status="missing", reason=str(error), duration_s=duration_s
    )
