"""Has the validation sets answered by engines of one weight version, and scores what they say.

```
 loop      consumes           waits for          unblocked by            produces
 examine   tasks, samples     a free place       an answer ends          attempts
 answer    a place            engines, rewards   chunks, pool events     an Answer, or why there is none
 health    calls, probes      the next look      time                    a quarantine in its pool
 lost      that pool          that none serves   a quarantine            the end of the evaluation
```

Sessions, loops and rewards are those of rollouts, the pool is the evaluation's own: no call of a rollout
comes to its engines, and nothing of an evaluation reaches the trainer's queue or ledger. Conservation is
simple: every answer that was asked for is scored, or dropped with its reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from async_rl.config import Config, RolloutConfig, RoutingConfig
from async_rl.data.chat_format import ChatFormat
from async_rl.data.dataset import Dataset
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.health import HealthWatch
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.errors import (
    AlignmentError,
    AsyncRLError,
    EngineError,
    PromptTooLong,
    RewardError,
    RolloutError,
)
from async_rl.evaluation.estimates import EvaluatedAnswer, scores
from async_rl.observability.evaluation_record import EvaluationRecord
from async_rl.observability.metrics import Metrics, value_of
from async_rl.queue.archive import Observer
from async_rl.queue.journal import JournalEntry
from async_rl.rollout.attempt import finish_trajectories, run_agent_loop, score_tree
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.session.transcript import Transcript
from async_rl.runtime.supervision import Nursery, first_error, services
from async_rl.runtime.waits import acting, progressed, waiting
from async_rl.types import Completion, Task, Trajectory

log = logging.getLogger(__name__)

MIXED_VERSION = "mixed_version"
"""Why an answer is dropped that is not wholly of the pinned version."""


def rollout_settings(config: Config) -> RolloutConfig:
    """The rollouts' settings, as an evaluation changes them."""
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


class Evaluator:
    """See the module.

    Example:
        >>> evaluator = Evaluator(config, datasets, chat=chat, facts=facts, new_id=new_id, clock=clock)
        >>> record = await evaluator.examine(pool, weight_version=12)
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
        """Take what every evaluation needs.

        Args:
            config: Of the run.
            datasets: The validation sets.
            chat: The model's chat format.
            facts: The model.
            new_id: Fixed-width unique ids.
            clock: Monotonic seconds.
        """
        self._config = config
        self._rollout = rollout_settings(config)
        self._datasets = datasets
        self._chat = chat
        self._facts = facts
        self._new_id = new_id
        self._clock = clock

    @property
    def num_answers(self) -> int:
        """Of one evaluation."""
        return self._config.evaluation.samples * sum(len(dataset.tasks) for dataset in self._datasets)

    def pool(self) -> EnginePool:
        """An empty pool for the engines of one evaluation; what it measures is nobody's."""
        return EnginePool(Metrics(), self._clock, max_prefill_tokens=self._config.engine.max_prefill_tokens)

    async def evaluate_sets(
        self, pool: EnginePool, weight_version: int, observer: Observer | None = None
    ) -> EvaluationRecord:
        """Have everything answered once, and score it.

        Args:
            pool: Engines that serve the version. Whoever takes one away quarantines it here.
            weight_version: Pinned: an answer with a token of another one is dropped and counted.
            observer: Told of each answer.

        Raises:
            EngineError: No engine is left, or it took longer than `evaluation.timeout_s`.
            AsyncRLError: A loop or a reward cannot be had.
        """
        began_s, metrics = self._clock(), Metrics()
        engines = tuple(engine.engine_id for engine in pool.engines())
        sitting = _EvaluationRun(self, pool, weight_version, metrics, observer or Observer())
        limit_s = self._config.evaluation.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await sitting.run(self._datasets)
        except ExceptionGroup as group:
            raise first_error(group) from group
        except TimeoutError as error:
            raise EngineError(
                f"the evaluation of version {weight_version} had {sitting.num_ended} of {self.num_answers} "
                f"answers after evaluation.timeout_s = {limit_s}: raise it, or ask for fewer"
            ) from error
        evaluation = self._config.evaluation
        return EvaluationRecord(
            weight_version=weight_version,
            status="done",
            duration_s=self._clock() - began_s,
            engines=engines,
            scores=scores(sitting.answers, pass_at=evaluation.pass_at, pass_reward=evaluation.pass_reward),
            asked=self.num_answers,
            dropped=dict(sitting.dropped),
            sampled_tokens=int(value_of(metrics.sampled_tokens_total)),
        )

    def session(
        self, task: Task, answer_id: str, group_id: str, pool: EnginePool, metrics: Metrics
    ) -> RolloutSession:
        """One attempt at an answer. It asks for no routing: nobody trains on it."""
        context = SessionContext(
            chat=self._chat,
            rollout=self._rollout,
            metrics=metrics,
            clock=self._clock,
            pool=pool,
            facts=self._facts,
            routing=RoutingConfig(replay="off"),
            interrupt=self._config.weights.interrupt,
            new_id=self._new_id,
        )
        return RolloutSession(context, task, Transcript(context, JournalEntry(answer_id)), group_id=group_id)


class _EvaluationRun:
    """One evaluation under way."""

    def __init__(
        self,
        evaluator: Evaluator,
        pool: EnginePool,
        weight_version: int,
        metrics: Metrics,
        observer: Observer,
    ) -> None:
        self._evaluator = evaluator
        self._config = evaluator._config
        self._pool = pool
        self._weight_version = weight_version
        self._metrics = metrics
        self._observer = observer
        self._loops = AgentLoops(evaluator._rollout)
        self._rewards = Rewards(
            self._config, decode=evaluator._chat.decode, metrics=metrics, clock=evaluator._clock
        )
        self._places = asyncio.Semaphore(self._config.evaluation.max_concurrent)
        self.answers: list[EvaluatedAnswer] = []
        self.dropped: Counter[str] = Counter()

    @property
    def num_ended(self) -> int:
        """Answers that are scored or dropped."""
        return len(self.answers) + self.dropped.total()

    async def run(self, datasets: Sequence[Dataset]) -> None:
        """Answer everything."""
        health = HealthWatch(self._pool, self._config.engine, self._metrics, self._evaluator._clock)
        try:
            async with (
                services(health=health.watch_engines, lost=self._watch),
                self._loops,
                Nursery() as nursery,
            ):
                for dataset in datasets:
                    for task in dataset.tasks:
                        group = _AnswerGroup(self._evaluator._new_id(), dataset.name, task, self._config)
                        for _ in range(self._config.evaluation.samples):
                            with waiting("evaluation"):
                                await self._places.acquire()
                            name = self._evaluator._new_id()
                            nursery.start_task(f"answer {name}", self._answer(name, group))
        finally:
            await self._rewards.close()

    async def _watch(self) -> None:
        """Nobody repairs engines here: when none is left, that is the end."""
        with waiting("idle"):
            while self._pool.engines(EngineState.SERVING):
                await self._pool.wait_for_change()
        engines = {engine.engine_id: self._pool.error_of(engine.engine_id) for engine in self._pool.engines()}
        told = "; ".join(f"{name}: {error}" for name, error in engines.items())
        raise EngineError(f"no engine of the evaluation is left: {told}")

    async def _answer(self, name: str, group: _AnswerGroup) -> None:
        """Try until it comes to something; the last one of its group has the group scored, if that is due."""
        try:
            with acting("answer", name):
                await self._attempts(name, group)
                group.ended += 1
                if group.complete and group.unscored:
                    await self._score_group(group)
        finally:
            self._places.release()
        progressed()

    async def _attempts(self, name: str, group: _AnswerGroup) -> None:
        limit = self._config.rollout.max_attempts
        for attempt in range(1, limit + 1):
            session = self._evaluator.session(group.task, name, group.group_id, self._pool, self._metrics)
            try:
                await run_agent_loop(group.task, session, self._loops, self._evaluator._rollout)
                if self._rewards.scores_groups(group.task):
                    # Only the root: what a branch is worth is for training.
                    trajectory = await session.finish_trajectory(session.stop_reason, {})
                    group.unscored[name] = trajectory, session.completion
                    return
                results = await score_tree(group.task, session.tree, self._rewards)
                tree = await finish_trajectories(results)
            except (RolloutError, EngineError, AlignmentError) as error:
                self._observer.failed(session.failed_trajectory(error), attempt, error)
                log.info("an answer to task %s, attempt %d: %s", group.task.task_id, attempt, error)
                if attempt == limit or isinstance(error, PromptTooLong):
                    self.dropped[type(error).__name__] += 1
                    return
            else:
                self._take(group, tree[0], tree[0].outcome.reward_parts)
                return

    async def _score_group(self, group: _AnswerGroup) -> None:
        """By one call for all answers of a task."""
        trajectories, completions = zip(*group.unscored.values(), strict=True)
        results = await self._rewards.score_group(group.task, list(completions))
        for trajectory, parts in zip(trajectories, results, strict=True):
            if isinstance(parts, RewardError):
                self.dropped[type(parts).__name__] += 1
                continue
            outcome = replace(trajectory.outcome, reward=parts["reward"], reward_parts=parts)
            self._take(group, replace(trajectory, outcome=outcome), parts)

    def _take(self, group: _AnswerGroup, trajectory: Trajectory, parts: dict[str, float]) -> None:
        """Count an answer, if all of it is of the pinned version."""
        self._observer.ended(trajectory, 1)
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
    """The answers of one task."""

    def __init__(self, group_id: str, dataset: str, task: Task, config: Config) -> None:
        self.group_id = group_id
        self.dataset = dataset
        self.task = task
        self._size = config.evaluation.samples
        self.ended = 0
        self.unscored: dict[str, tuple[Trajectory, Completion]] = {}

    @property
    def complete(self) -> bool:
        """Whether all of them have ended."""
        return self.ended == self._size


def missing(weight_version: int, error: AsyncRLError, *, duration_s: float) -> EvaluationRecord:
    """What is written down of an evaluation that was cut off."""
    return EvaluationRecord(
        weight_version=weight_version, status="missing", reason=str(error), duration_s=duration_s
    )
