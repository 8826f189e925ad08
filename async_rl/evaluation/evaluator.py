"""Has engines of one weight version answer the validation sets, and scores the answers.

```
 loop      consumes           waits for          unblocked by            produces
 evaluate  tasks, samples     free capacity      an answer ends          attempts
 answer    capacity           engines, rewards   chunks, pool events     an answer, or the reason of its loss
 health    calls, probes      the next check     time                    a quarantine in its pool
 lost      that pool          no engine serving  a quarantine            the end of the evaluation
```

Sessions run where those of rollouts do: in this process, or in rollout workers that an evaluation starts for
itself. The pool belongs to the evaluation: rollouts do not use its engines, and no answer enters the
trainer's queue or ledger. Every requested answer is scored, or dropped with its reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from async_rl.config import Config, RoutingConfig, TeacherConfig
from async_rl.config.worker_count import workers_needed
from async_rl.data.dataset import Dataset
from async_rl.engines.health import HealthWatch
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.errors import AsyncRLError, EngineError, PromptTooLong, RewardError
from async_rl.evaluation.estimates import EvaluatedAnswer, scores
from async_rl.observability.evaluation_record import EvaluationRecord
from async_rl.observability.metrics import Metrics
from async_rl.rollout.attempt import (
    ATTEMPT_ERRORS,
    Attempt,
    AttemptEnd,
    LostWorkers,
    attempt_boundary,
    rewards_of_group,
)
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.workers.backend_choice import choose_backend
from async_rl.rollout.workers.worker_backend import OpenWorker
from async_rl.runtime.supervision import Nursery, first_error, services
from async_rl.runtime.threads import run_to_end
from async_rl.runtime.waits import acting, progressed, sleep_idle, waiting
from async_rl.store.archive import Archive
from async_rl.store.spool import AnswerSpool
from async_rl.types import StoredCompletion, StoredTrajectory, Task, without_turn_rewards

log = logging.getLogger(__name__)

_SHARED: Final = ("user_processes_reaped_total", "rollout_worker_restarts_total", "local_shortages_total")
"""Metrics about user code and the machine, whatever they work on. The others are about rollouts."""

MIXED_VERSION = "mixed_version"
"""Why an answer is dropped that has tokens of another than the pinned version."""


def evaluation_config(config: Config) -> Config:
    """Return the settings of sessions that answer: those of rollouts, as `evaluation` changes them.

    With rollout workers there is one per 512 answers at a time, at most as many as for rollouts.
    """
    evaluation, rollout, longest = config.evaluation, config.rollout, config.evaluation.max_new_tokens
    changed: dict[str, Any] = {
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
        "top_k": evaluation.top_k,
        "replay_sampling": False,  # answers are not trained on
        "max_new_tokens": longest and min(longest, rollout.max_context_tokens - 1),
        "agent_loop": evaluation.agent_loop,
        "agent_loop_args": None if evaluation.agent_loop is None else {},
    }
    workers = workers_needed(evaluation.max_concurrent, one_machine=False).number
    return replace(
        config,
        rollout=replace(
            rollout,
            max_concurrent_trajectories=evaluation.max_concurrent,
            num_workers=min(config.num_workers, workers),
            **{name: value for name, value in changed.items() if value is not None},
        ),
        routing=RoutingConfig(replay="off"),  # answers are not trained on
        trainer=replace(
            config.trainer,
            # The first limits `max_new_tokens`; answers are not trained on, so no teacher scores them.
            loss=replace(config.trainer.loss, overlong_buffer_tokens=None, teacher=TeacherConfig()),
        ),
    )


class Evaluator:
    """Evaluates weight versions on the validation sets of a config."""

    def __init__(
        self,
        context: SessionContext,
        datasets: Sequence[Dataset],
        *,
        open_worker: OpenWorker,
        completions: Path,
        models: Mapping[str, EnginePool] | None = None,
    ) -> None:
        """Store the inputs of every evaluation.

        Args:
            context: What sessions of the run share. Its metrics count what evaluations do to the machine.
            datasets: The validation sets.
            open_worker: Starts a rollout worker, where the config has some.
            completions: A folder that all nodes see, for answers that one call scores together. It is
                deleted with each evaluation.
            models: The engines of judges, which `context` has too, by the model's name.
        """
        self.config = evaluation_config(context.config)
        """The settings of the run, as changed by `evaluation`."""
        self.context = context
        self.datasets = datasets
        self.open_worker = open_worker
        self.completions = completions
        self.models = models or {}

    @property
    def pass_reward(self) -> float:
        """The least reward of an answer that passes."""
        return self.config.evaluation.pass_reward

    @property
    def num_answers(self) -> int:
        """Number of answers of one evaluation."""
        samples = self.config.evaluation.samples
        return samples * sum(len(dataset.tasks) for dataset in self.datasets)

    def new_pool(self) -> EnginePool:
        """Return an empty pool for the engines of one evaluation, with metrics of its own."""
        metrics = Metrics().share(self.context.metrics, _SHARED)
        return EnginePool(metrics, self.context.clock, max_calls=self.config.engine.max_calls)

    async def evaluate_sets(
        self,
        pool: EnginePool,
        weight_version: int,
        archive: Archive | None = None,
        *,
        show_ended: Callable[[int], None] | None = None,
    ) -> EvaluationRecord:
        """Get all answers once, and score them.

        Args:
            pool: Engines that serve the version. To take one away, quarantine it in this pool.
            weight_version: The pinned version: an answer with a token of another one is dropped and counted.
            archive: Keeps the answers.
            show_ended: Called once a second with the number of answers that have ended; None for nobody.

        Raises:
            EngineError: No engine is left, or the evaluation exceeds `evaluation.timeout_s`.
            AsyncRLError: A loop or a reward cannot be loaded.
        """
        evaluation, clock = self.config.evaluation, self.context.clock
        began_s = clock()
        engines = tuple(engine.engine_id for engine in pool.engines())
        run = _EvaluationRun(self, pool, weight_version, archive)
        limit_s = evaluation.timeout_s
        try:
            await run.delete_completions()  # of one that was killed
            async with asyncio.timeout(limit_s):
                await run.answer_all(show_ended)
        except ExceptionGroup as group:
            raise first_error(group) from group
        except TimeoutError as error:
            raise EngineError(
                f"the evaluation of version {weight_version} had {run.num_ended} of {self.num_answers} "
                f"answers after evaluation.timeout_s = {limit_s}: raise it, or ask for fewer"
            ) from error
        finally:
            await run.delete_completions()
        return EvaluationRecord(
            weight_version=weight_version,
            status="done" if run.answers else "missing",
            reason="" if run.answers else run.describe_drops(),
            duration_s=clock() - began_s,
            engines=engines,
            scores=scores(run.answers, samples=evaluation.samples, pass_reward=evaluation.pass_reward),
            asked=self.num_answers,
            dropped=dict(run.dropped),
            sampled_tokens=run.sampled_tokens,
        )


class _EvaluationRun:
    """One evaluation of one weight version."""

    def __init__(
        self, evaluator: Evaluator, pool: EnginePool, weight_version: int, archive: Archive | None
    ) -> None:
        self._config = evaluator.config
        self._datasets = evaluator.datasets
        self._pool = pool
        self._weight_version = weight_version
        self._archive = archive
        self._context = dataclasses.replace(
            evaluator.context,
            config=evaluator.config,
            metrics=Metrics().share(evaluator.context.metrics, _SHARED),
            serving_clock=pool.own.serving_clock,
            calls=pool.dispatcher,
        )
        self._spool = AnswerSpool(evaluator.completions)
        self._backend = choose_backend(
            self._context,
            pool,
            self._spool,
            evaluator.open_worker,
            inspected=None if archive is None else archive.inspected,
            models=evaluator.models,
            name="evaluation-worker",
        )
        self._capacity = asyncio.Semaphore(self._config.evaluation.max_concurrent)
        self.answers: list[EvaluatedAnswer] = []
        self.dropped: Counter[str] = Counter()
        self._last_error = ""
        """Why the last answer was dropped, if it was an error of its loop or reward."""
        self.sampled_tokens = 0
        """Tokens of all attempts that have ended."""

    async def delete_completions(self) -> None:
        """Delete what answers left in files."""
        await run_to_end(self._spool.delete)

    @property
    def num_ended(self) -> int:
        """Answers that are scored or dropped."""
        return len(self.answers) + self.dropped.total()

    async def answer_all(self, show_ended: Callable[[int], None] | None) -> None:
        """Get all answers; returns when each is scored or dropped."""
        config, context = self._config, self._context
        samples = config.evaluation.samples
        health = HealthWatch(self._pool, config.engine, context.metrics, context.clock)

        async def show_each_second(show: Callable[[int], None]) -> None:
            while True:
                show(self.num_ended)
                await sleep_idle(1.0)

        shown = {} if show_ended is None else {"progress": partial(show_each_second, show_ended)}
        async with (
            services(health=health.watch_engines, lost=self._watch, **shown),
            self._backend,
            Nursery() as nursery,
        ):
            for dataset in self._datasets:
                for task in dataset.tasks:
                    group = _AnswerGroup(context.new_id(), dataset.name, task, samples)
                    for _ in range(samples):
                        with waiting("evaluation"):
                            await self._capacity.acquire()
                        name = context.new_id()
                        nursery.start_task(f"answer {name}", self._answer(name, group))

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

    async def _attempts(self, name: str, group: _AnswerGroup) -> None:
        limit = self._config.rollout.max_attempts
        for number in range(1, limit + 1):
            try:
                end = await self._run_attempt(name, number, group)
            except ATTEMPT_ERRORS as error:
                log.info("an answer to task %s, attempt %d: %s", group.task.task_id, number, error)
                if number == limit or isinstance(error, PromptTooLong):
                    self._drop_answer(error)
                    return
                continue
            # Only the root: branches are for training.
            stored = end.trajectories[0]
            unscored = [each for each in end.unscored if each.trajectory_id == name]
            if unscored:
                group.unscored[name] = stored, number, unscored[0].completion
            else:
                self._count_answer(group, stored, number)
            return

    async def _run_attempt(self, name: str, number: int, group: _AnswerGroup) -> AttemptEnd:
        """Run an attempt; if its worker ends, run it again in another one, from the prompt."""
        losses = LostWorkers()
        while True:
            attempt = Attempt(group.task, name, group.group_id, number, started_s=self._context.clock())
            try:
                with attempt_boundary():
                    end = await self._backend.run_attempt(attempt)
            except ATTEMPT_ERRORS as error:
                failed = attempt.failed(error)
                self.sampled_tokens += failed.num_sampled_tokens
                if losses.may_go_on(error, attempt):
                    continue
                if self._archive is not None:
                    self._archive.failed(failed, number, error)
                raise
            self.sampled_tokens += sum(each.num_sampled_tokens for each in end.trajectories)
            return end

    async def _score_group(self, group: _AnswerGroup) -> None:
        """Score all answers of a task by one call; drop those that it fails."""
        completions = [completion for _, _, completion in group.unscored.values()]
        results = await rewards_of_group(self._backend, group.task, completions)
        await asyncio.to_thread(self._spool.discard, completions)
        for (stored, number, _), parts in zip(group.unscored.values(), results, strict=True):
            if isinstance(parts, RewardError):
                log.info("an answer to task %s: %s", group.task.task_id, parts)
                self._drop_answer(parts)
            else:
                self._count_answer(group, stored.with_reward(parts), number)

    def _drop_answer(self, error: BaseException) -> None:
        self.dropped[type(error).__name__] += 1
        self._last_error = str(error)

    def describe_drops(self) -> str:
        """Return how many answers were dropped, by reason, and why the last one was."""
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))
        last = f"; the last: {self._last_error}" if self._last_error else ""
        return f"all answers were dropped: {counts}{last}"

    def _count_answer(self, group: _AnswerGroup, stored: StoredTrajectory, number: int) -> None:
        """Count an answer if all its tokens are of the pinned version."""
        if self._archive is not None:
            self._archive.ended(stored, number)
        if {span.weight_version for span in stored.spans if span.is_sampled} != {self._weight_version}:
            self.dropped[MIXED_VERSION] += 1
            return
        self.answers.append(
            EvaluatedAnswer(
                dataset=group.dataset,
                source=group.task.data_source,
                task_id=group.task.task_id,
                parts=without_turn_rewards(stored.reward_parts),
                tokens=stored.num_sampled_tokens,
                truncated=stored.stop_reason == "length",
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
        self.unscored: dict[str, tuple[StoredTrajectory, int, StoredCompletion]] = {}
        """Answers that have no reward yet, with the number of their attempt, by trajectory."""

    @property
    def complete(self) -> bool:
        """Whether all of them have ended."""
        return self.ended == self._size


def missing_record(weight_version: int, error: AsyncRLError, *, duration_s: float) -> EvaluationRecord:
    """Return the record of an evaluation that was cancelled or failed."""
    return EvaluationRecord(
        weight_version=weight_version, status="missing", reason=str(error), duration_s=duration_s
    )
