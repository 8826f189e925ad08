"""Wires the parts of a run and drives the trainer.

```
 loop      consumes          waits for                    unblocked by                       produces
 train     batches (queue)   a batch ready by the bound   a group is put; a straggler ends   version n+1
 rollouts  tasks (feeder)    a slot, admission            a trajectory ends; a new version   groups
 repair    failed engines    a quarantine                 a call or an update failed         a serving engine
 watch     processes         a server that ends           it ends                            a quarantine
 health    calls, probes     the next look                time                               a quarantine
 members   the urls_file     the next look                time                               joins, departures
 stopper   the stop event    the first signal             Ctrl-C                             a drain
 pulse     statistics        a second                     time                               gauges, the panel
 doctor    waits, states     doctor.look_s                time                               the log, remedies
 journal   what is new       queue.journal_s              time                               the journal
 archive   what has ended    a second                     time                               their database
 evaluation served versions  one that is due              the pool                           its record
```

The order of a step is what keeps the bound hard: take a batch at version n, train, settle it, sync n+1 to the
engines, and only then let new groups in, so that none is born stale. With `weights.overlap` the next step may
begin meanwhile: admission counts what the engines serve then, one version less.
"""

from __future__ import annotations

import asyncio
import logging
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from uuid6 import uuid7

from async_rl.chat import load_chat_format
from async_rl.config import Config, SGLangEngines
from async_rl.diagnosis import Diagnosis
from async_rl.discovery import announced
from async_rl.doctor import Doctor, watched
from async_rl.endpoints import serve
from async_rl.engines.facts import check_served_by_sglang, load_facts
from async_rl.engines.health import HealthWatch
from async_rl.engines.membership import Membership
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.engines.protocol import Engine, EngineFacts
from async_rl.engines.repair import Repair
from async_rl.errors import (
    AsyncRLError,
    CheckpointError,
    ConfigError,
    EngineError,
    EnvironmentNotReady,
    NonFiniteLoss,
    StallError,
    TrainerError,
)
from async_rl.evaluation import records as evaluations
from async_rl.evaluation.examiner import Examiner
from async_rl.evaluation.records import EvaluationRecord, read_evaluations
from async_rl.evaluation.service import EvaluationService
from async_rl.metrics import Metrics
from async_rl.page.feed import Feed
from async_rl.page.routes import page_routes
from async_rl.page.view import Now, look
from async_rl.queue.holdings import QueueStatistics
from async_rl.queue.packing import TakenBatch
from async_rl.queue.trajectory_queue import TrajectoryQueue
from async_rl.records import (
    StepRecord,
    Summary,
    Totals,
    TrajectoryCounts,
    append_record,
    read_records,
    summarise,
)
from async_rl.recovery import Estate
from async_rl.report import Progress
from async_rl.rollout.dataset import Dataset, load_run_tasks, load_validation, prompt_rule
from async_rl.rollout.manager import RolloutManager
from async_rl.rollout.remote.messages import Link
from async_rl.sharing import Devices, OwnDevices, SharedDevices
from async_rl.supervision import Nursery, first_error, services
from async_rl.trackers.choice import tracking
from async_rl.trackers.tracker import Trackers
from async_rl.training import COUNTS, FIGURES, StepResult, Trainer
from async_rl.waits import Waits, acting, progressed, waiting
from async_rl.weights.local import LocalFolder
from async_rl.weights.sync import SyncReport, WeightSync

log = logging.getLogger(__name__)

_DIAGNOSIS_LASTS_S = 5.0
"""On the live page; 40 ms go into one of 4096 trajectories."""

_TRAINER_WAITS = frozenset(
    {"trainer start", "trainer step", "checkpoint", "snapshot", "publish", "send weights", "export"}
)
"""Waits for the trainer: when one stalls the run, no checkpoint can be had."""


class Cluster(Protocol):
    """Processes of a run: who starts engines and trainer, and where."""

    weight_backend: str
    """`gloo` or `nccl`, for distributed weight updates."""

    async def start_engines(self) -> list[Engine]:
        """Start all engines and wait until they answer."""
        ...

    async def start_trainer(self) -> Trainer:
        """Start all trainer ranks. Called again, it first ends those that there were, whatever their state.

        Raises:
            EnvironmentNotReady: When they do not come up.
        """
        ...

    def connect_engine(self, engine_id: str, url: str) -> Engine:
        """A client of a server that runs already; it connects to nothing yet."""
        ...

    async def disconnect_engine(self, engine_id: str) -> None:
        """Let go of a server that has left the job; it runs on."""
        ...

    async def stop_engine(self, engine_id: str) -> None:
        """End a failed engine, whatever its state, so that what it held of a device is free."""
        ...

    async def restart_engine(self, engine_id: str) -> None:
        """Bring a failed engine back to where it answers again."""
        ...

    async def watch_engines(self, died: Callable[[str, EngineError], None]) -> None:
        """Report engines whose process ends; never returns."""
        ...

    async def open_port(self) -> tuple[str, int]:
        """Host and free port on the trainer's rank 0."""
        ...

    def local_folder(self, engine_id: str) -> LocalFolder | None:
        """Where the host of an engine keeps weights; None for one that we did not start."""
        ...

    def rollout_worker(self, name: str) -> AbstractAsyncContextManager[Link]:
        """Start a rollout worker and yield the driver's end of its link; it ends with the block.

        Raises:
            EnvironmentNotReady: When it does not come up.
        """
        ...


async def run(
    config: Config,
    run_dir: Path,
    stop: asyncio.Event,
    cluster: Cluster,
    *,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
    new_id: Callable[[], str] = lambda: uuid7().hex,
) -> Summary:
    """Run a config to its end, or until `stop` is set and running work has drained.

    Args:
        config: What to run.
        run_dir: The run's folder; what an earlier life left there is continued.
        stop: Set by the first signal.
        cluster: Where processes run.
        progress: Where steps are shown; None shows nothing.
        clock: Monotonic seconds.
        new_id: Fixed-width unique ids.

    Raises:
        AsyncRLError: Of the service that failed, inside an exception group.
    """
    facts = load_facts(config.model.path)
    check_model(config, facts)
    tasks = load_run_tasks(config)
    validation = load_validation(config.data, prompt_rule(config)) if config.evaluation.enabled else []
    chat = load_chat_format(config.model.path)
    metrics = Metrics()
    orchestrator = Orchestrator(config, run_dir, stop, cluster, metrics, clock)
    page = Feed(config, orchestrator.now, lambda: orchestrator.records, lambda: orchestrator.evaluations)
    host = config.metrics.host
    async with (
        watched(orchestrator.named_waits, metrics, config.doctor),
        tracking(config, run_dir, metrics) as trackers,
        serve(metrics, host, config.metrics.port, orchestrator.health, page_routes(page, host)) as url,
        services(page=page.run),
    ):
        (run_dir / "url").write_text(url)
        targets = Path(config.metrics.targets_dir or run_dir.parent / ".prometheus")
        if progress is not None:
            progress.start(config, run_dir, url)
        try:
            with announced(url, config.run.name, targets):
                return await orchestrator.run(tasks, chat, facts, new_id, progress, trackers, validation)
        finally:
            if progress is not None:
                progress.stop()


def check_model(config: Config, facts: EngineFacts) -> None:
    """Refuse settings that the model cannot serve.

    Raises:
        ConfigError: With the remedy.
    """
    if config.routing.replay != "off" and not facts.is_moe:
        raise ConfigError(
            f"routing.replay is {config.routing.replay}, but {config.model.path} is a dense model "
            f"without experts: set "
            "routing.replay=off"
        )
    if config.rollout.max_context_tokens > facts.context_length:
        raise ConfigError(
            f"rollout.max_context_tokens is {config.rollout.max_context_tokens}, but "
            f"{config.model.path} has a context of "
            f"{facts.context_length} tokens: lower it"
        )
    if isinstance(config.engine, SGLangEngines):
        check_served_by_sglang(config.model.path)


class Orchestrator:
    """One run, from start-up to summary."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        stop: asyncio.Event,
        cluster: Cluster,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._dir = run_dir
        self._stop = stop
        self._cluster = cluster
        self._metrics = metrics
        metrics.max_staleness_versions.set(config.rollout.max_staleness)
        self._clock = clock
        self._phase = "starting"
        self._pool = EnginePool(metrics, clock, max_prefill_tokens=config.engine.max_prefill_tokens)
        self._health = HealthWatch(self._pool, config.engine, metrics, clock)
        self._devices: Devices = OwnDevices()
        if config.placement.shared:
            self._devices = SharedDevices(
                self._pool, cluster.stop_engine, metrics, clock, timeout_s=config.weights.timeout_s
            )
        self._repair = Repair(
            self._pool,
            cluster.restart_engine,
            self._catch_up,
            config.engine,
            metrics,
            clock,
            seed=config.run.seed,
            turns=self._devices.turns,
        )
        self._membership: Membership | None = None
        self._sync: WeightSync | None = None
        self.named_waits = Waits(clock)
        self._doctor = Doctor(config, self.named_waits, self._pool, metrics)
        self._queue: TrajectoryQueue | None = None
        self._manager: RolloutManager | None = None
        self._trainer: Trainer | None = None  # None while it has failed and is not back yet
        self._step = self._saved_step = 0
        self._saving: int | None = None
        """The step whose checkpoint is being written beside the training."""
        self._failed_saves = 0
        """In a row."""
        self._unsettled = False
        """Whether the trainer may hold a step that the ledger does not: a checkpoint would claim it."""
        self._begin_s: float | None = None
        self._trainer_failures = 0
        self._records = read_records(run_dir / "metrics.jsonl")
        """What the page shows while the trainer comes up; then those that its checkpoint knows."""
        self._diagnosis: Diagnosis | None = None
        self._diagnose_again_s = 0.0
        self._trackers: Trackers | None = None
        self._evaluation: EvaluationService | None = None
        self.evaluations = read_evaluations(run_dir / evaluations.FILE)
        """All evaluations so far, those of earlier lives included."""

    @property
    def records(self) -> Sequence[StepRecord]:
        """All steps so far, those of earlier lives included."""
        return self._records

    def now(self) -> Now:
        """For the live page: the run at this moment."""
        return look(
            phase=self._phase,
            max_steps=self._config.run.max_steps,
            elapsed_s=None if self._begin_s is None else self._clock() - self._begin_s,
            records=self._records,
            counts=None if self._queue is None else _counts(self._queue.statistics()),
            pool=self._pool,
            waits=self.named_waits,
            diagnosis=self._recent_diagnosis(),
            running=[] if self._manager is None else self._manager.running.values(),
        )

    def _recent_diagnosis(self) -> Diagnosis:
        """One for the live page: that of a run that moves may be some seconds old, for each costs."""
        now = self._clock()
        if self._diagnosis is None or self._diagnosis.state != "moving" or now >= self._diagnose_again_s:
            self._diagnosis, self._diagnose_again_s = self._doctor.diagnosis(), now + _DIAGNOSIS_LASTS_S
        return self._diagnosis

    def health(self) -> dict[str, Any]:
        """For `/health`: how the run is and what it waits for."""
        diagnosis = self._doctor.diagnosis()
        return {
            "status": "stalled" if diagnosis.state == "stalled" else "ok",
            "phase": self._phase,
            "step": self._records[-1].step if self._records else 0,
            "waiting_for": diagnosis.causes[0].chain if diagnosis.causes else (),
            "diagnosis": msgspec.to_builtins(diagnosis),
        }

    async def run(
        self,
        tasks: Any,
        chat: Any,
        facts: EngineFacts,
        new_id: Callable[[], str],
        progress: Progress | None,
        trackers: Trackers | None = None,
        validation: Sequence[Dataset] = (),
    ) -> Summary:
        """See the module's `run`; `trackers` are given every step, `validation` is what is evaluated."""
        self._trackers = trackers
        async with services(doctor=self._doctor.run):
            trainer = await self._start_both()
        if isinstance(num_reserved := self._config.evaluation.engines, int) and validation:
            for engine in self._pool.engines()[-num_reserved:]:
                self._pool.reserve(engine.engine_id)
        while True:
            # A trainer that came back starts from its checkpoint as a new driver does: with all that hangs on
            # the trainer's step made anew from the run's folder, and the engines brought back to it.
            sync = self._sync = self._weight_sync(trainer)
            estate = Estate(self._config, self._dir, tasks, facts, self._step, self._metrics, self._clock)
            queue = estate.queue
            manager = RolloutManager(
                self._config,
                feeder=estate.feeder,
                queue=queue,
                pool=self._pool,
                chat=chat,
                facts=facts,
                metrics=self._metrics,
                new_id=new_id,
                clock=self._clock,
                journal=estate.journal,
                journalled=estate.journalled,
                observer=estate.archive,
                open_worker=self._cluster.rollout_worker if self._config.rollout.num_workers else None,
            )
            self._queue, self._manager = queue, manager
            self._doctor.attend(queue, manager.slots)
            if validation:
                examiner = Examiner(
                    self._config, validation, chat=chat, facts=facts, new_id=new_id, clock=self._clock
                )
                self._evaluation = self._evaluate_with(examiner, sync)
            try:
                ended_s = await self._live(trainer, sync, estate, manager, progress)
            finally:
                estate.leave()
            counts = queue.statistics()
            queue.close()
            if ended_s is not None:
                return self._summary(counts, ended_s)
            assert self._trainer is not None, "a life of the run that is not the last leaves a new trainer"
            trainer = self._trainer

    async def _live(
        self,
        trainer: Trainer,
        sync: WeightSync,
        estate: Estate,
        manager: RolloutManager,
        progress: Progress | None,
    ) -> float | None:
        """Run until the end, or until the trainer has failed and is back at its newest checkpoint.

        Returns:
            When the last step ended, on the clock; None after a failure of the trainer.
        """
        queue = estate.queue

        async def stopper() -> None:
            await self._stop.wait()
            log.info("stopping: no new work; what runs may take run.drain_s = %s", self._config.run.drain_s)
            queue.stop()
            await asyncio.Future()

        try:
            async with services(
                rollouts=manager.run,
                watch=lambda: self._cluster.watch_engines(self._pool.quarantine),
                health=self._health.run,
                **self._members(),
                stopper=stopper,
                doctor=self._doctor.run,
                pulse=lambda: self._pulse(queue, manager, progress),
                **estate.services,
            ):
                try:
                    async with services(repair=self._repair.run, **self._evaluating()):
                        with acting("train loop"):
                            return await self._train_and_save(trainer, sync, queue, manager, progress)
                except ExceptionGroup as group:
                    cause = first_error(group)
                    if not isinstance(cause, TrainerError) or not cause.restartable:
                        raise
                    self._trainer = None
                    # Beside it the rollouts go on to the bound; what they have then is kept.
                    await self._restart_trainer(cause, progress)
        except ExceptionGroup as group:
            # What was trained since the last checkpoint is lost only if it was the trainer that failed.
            lost = self._unsettled or self._trainer is None or _of_the_trainer(first_error(group))
            if self._step > self._saved_step and not lost:
                self._enter("writing a checkpoint before the run ends with an error", progress)
                await self._devices.to_trainer(trainer)
                await self._save_last(trainer)
            raise
        return None

    async def _train_and_save(
        self,
        trainer: Trainer,
        sync: WeightSync,
        queue: TrajectoryQueue,
        manager: RolloutManager,
        progress: Progress | None,
    ) -> float:
        """All that needs the trainer, up to its end; returns when the last step ended."""
        self._enter("bringing engines to the trainer's weights", progress)
        with waiting("weight update", str(self._step)):
            path = Path(self._config.model.path) if self._step == 0 else None
            await self._devices.start(sync, trainer, self._step, path)
        if self._begin_s is None:
            # Seconds and tokens of earlier lives count on, so that shares and rates are of the whole run.
            self._begin_s = self._clock() - (self._records[-1].time_s if self._records else 0.0)
            self._metrics.sampled_tokens_total.inc(sampled_before(self._records))
            self._pool.restart_clock()
        self._enter("training", progress)
        await self._train(trainer, sync, queue, self._begin_s, progress)
        if self._evaluation is not None and not self._stop.is_set():
            self._enter("evaluating the last version", progress)
            await self._evaluation.finish(self._step)
        if self._stop.is_set():
            self._enter("draining", progress)
            await self._drain(manager)
        ended_s = self._clock()
        self._enter("writing the checkpoint and the Hugging Face export", progress)
        queue.stop()
        await self._devices.to_trainer(trainer)
        await self._save_last(trainer)
        with waiting("export"):
            await trainer.publish(str(self._dir / "hf"), self._step)
        await sync.close()
        await trainer.close()
        return ended_s

    def _summary(self, counts: QueueStatistics, ended_s: float) -> Summary:
        config, begin_s = self._config, self._begin_s
        assert begin_s is not None, "a run that has ended has begun"
        return summarise(
            self._records,
            Totals(
                trajectories=_counts(counts),
                rl_seconds=ended_s - begin_s,
                sampled_tokens=int(_value(self._metrics.sampled_tokens_total)),
                engine_idle_share=self._pool.idle_share,
                max_staleness=config.rollout.max_staleness,
                routing_merge=config.routing.merge if config.routing.from_engine else "off",
            ),
        )

    async def _drain(self, manager: RolloutManager) -> None:
        """Let running trajectories finish, for a while."""
        try:
            async with asyncio.timeout(self._config.run.drain_s), waiting("drain"):
                await manager.drained.wait()
        except TimeoutError:
            log.warning("some trajectories still run after run.drain_s; they go on when it resumes")

    def _enter(self, phase: str, progress: Progress | None) -> None:
        self._phase = phase
        log.info("%s", phase)
        if progress is not None:
            progress.phase(phase)

    # -- start-up --------------------------------------------------------------------------------------

    async def _start_both(self) -> Trainer:
        """Start engines and trainer at the same time; on devices that they share, one after the other."""
        if self._devices.shared:
            await self._start_engines()
            await self._devices.clear()
            return await self._start_trainer()
        async with Nursery() as nursery:
            nursery.start("engines", self._start_engines())
            starting_trainer = nursery.start("trainer", self._start_trainer())
        return starting_trainer.result()

    async def _start_engines(self) -> None:
        with waiting("engine start"):
            for engine in await self._cluster.start_engines():
                self._pool.add(engine)

    async def _start_trainer(self) -> Trainer:
        """Start all ranks from the newest checkpoint, and take up the records of the steps before it."""
        with waiting("trainer start"):
            trainer = await self._cluster.start_trainer()
            state = await trainer.setup(str(self._dir / "checkpoints"))
        self._trainer = trainer
        for flaw in state.passed_over:
            log.warning("a newer checkpoint is passed over: %s", flaw)
        self._step = self._saved_step = state.step
        self._saving = None
        self._unsettled = False
        self._records = [r for r in read_records(self._dir / "metrics.jsonl") if r.step <= state.step]
        return trainer

    async def _restart_trainer(self, cause: AsyncRLError, progress: Progress | None) -> None:
        """Start the trainer again, as often as `trainer.max_restarts` allows.

        Raises:
            TrainerError: When it failed once more than that.
        """
        limit = self._config.trainer.max_restarts
        while self._trainer is None:
            self._trainer_failures += 1
            if self._trainer_failures > limit:
                raise TrainerError(
                    f"the trainer failed {self._trainer_failures} times, trainer.max_restarts is {limit}; "
                    f"the last cause: {cause}"
                ) from cause
            log.warning("restart %d of %d of the trainer: %s", self._trainer_failures, limit, cause)
            self._metrics.trainer_restarts_total.inc()
            self._enter("restarting the trainer from its newest checkpoint", progress)
            try:
                await self._devices.clear()
                await self._start_trainer()
            except (TrainerError, EnvironmentNotReady) as error:
                cause = error
        log.info("the trainer is back at step %d", self._step)
        # All engines are to serve the checkpoint's weights; until they do they serve nobody.
        lent = EngineState.EVALUATING
        for engine in self._pool.engines(EngineState.SERVING, EngineState.UPDATING, lent):
            self._pool.rejoin(engine.engine_id)

    def _weight_sync(self, trainer: Trainer) -> WeightSync:
        config = self._config
        return WeightSync(
            config.weights,
            pool=self._pool,
            trainer=trainer,
            directory=self._dir / "weights",
            metrics=self._metrics,
            clock=self._clock,
            open_port=self._cluster.open_port,
            folder_of=self._cluster.local_folder,
            backend=self._cluster.weight_backend,
            tp_size=config.engine.tp_size if isinstance(config.engine, SGLangEngines) else 1,
            generation=self._trainer_failures,
        )

    # -- evaluation --------------------------------------------------------------------------------------

    def _evaluate_with(self, examiner: Examiner, sync: WeightSync) -> EvaluationService:
        self.evaluations = [r for r in self.evaluations if r.weight_version <= self._step]
        return EvaluationService(
            self._config.evaluation,
            self._dir,
            self._pool,
            sync.take_back,
            examiner,
            step=self._step,
            interrupt_timeout_s=self._config.weights.timeout_s,
            ended=self._evaluated,
            clock=self._clock,
        )

    def _evaluating(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {} if self._evaluation is None else {"evaluation": self._evaluation.run}

    def _evaluated(self, record: EvaluationRecord) -> EvaluationRecord:
        """An evaluation has ended: show it."""
        record = msgspec.structs.replace(record, time_s=self._clock() - (self._begin_s or self._clock()))
        self.evaluations.append(record)
        self._metrics.observe_evaluation(record)
        if self._trackers is not None:
            self._trackers.log_evaluation(record)
        return record

    # -- the trainer's loop ----------------------------------------------------------------------------

    async def _train(
        self,
        trainer: Trainer,
        sync: WeightSync,
        queue: TrajectoryQueue,
        begin: float,
        progress: Progress | None,
    ) -> None:
        """Take, train, settle, sync, advance; until `run.max_steps`, a stop, or the end of the data.

        With `weights.overlap` the sync of a step runs beside the next one, and is over before that one's.
        """
        config, metrics = self._config, self._metrics
        pace = _Pace(begin_s=begin, recorded_s=self._clock(), sampled=_value(metrics.sampled_tokens_total))
        step, every = self._step, config.trainer.checkpoint_every
        metrics.trainer_weight_version.set(step)
        ahead: TakenBatch | None = None  # ready in the trainer's turn on shared devices
        async with Nursery() as syncs:
            while step < config.run.max_steps and (ahead is not None or not self._stop.is_set()):
                wait_begin = self._clock()
                batch = ahead or await queue.take(step)
                if batch is None:
                    break
                wait_s = self._clock() - wait_begin
                await self._devices.to_trainer(trainer)
                async with sync.training():
                    train_begin = self._clock()
                    self._unsettled = True
                    result = await self._step_of(trainer, batch, step + 1)
                    _require_finite(result)
                    step += 1
                    queue.settle(batch, step)
                    self._step, self._unsettled = step, False
                    queue.published(step)
                    progressed()
                    done = _Done(
                        batch=batch,
                        result=result,
                        wait_s=wait_s,
                        step_s=self._clock() - train_begin,
                        sync_hidden_s=max(0.0, min(self._clock(), pace.synced_s) - train_begin),
                    )
                    pace.synced_s = math.inf
                    due = bool(every) and step % every == 0
                    if due and self._devices.shared:
                        await self._save(trainer)  # while it has its state where it can be copied from
                    ahead = None
                    if self._devices.shared and step < config.run.max_steps:
                        ahead = await queue.take(step, wait=False)
                    if ahead is not None:
                        self._write_down(done, SyncReport.none(step), queue, pace, progress)
                        continue
                    taken = asyncio.Event()
                    bringing = self._bring(done, taken, trainer, sync, queue, pace, progress)
                    if not config.weights.overlap:
                        await bringing
                    else:
                        syncing = syncs.start(f"weight sync {step}", bringing)
                        await taken.wait()
                if due and not self._devices.shared:
                    if config.weights.overlap:
                        await syncing  # what a checkpoint has is written down in metrics.jsonl
                    await self._save(trainer)

    async def _bring(
        self,
        done: _Done,
        taken: asyncio.Event,
        trainer: Trainer,
        sync: WeightSync,
        queue: TrajectoryQueue,
        pace: _Pace,
        progress: Progress | None,
    ) -> None:
        """Bring the weights of a step to the engines, let new groups in, and write the step down."""
        step = done.result.step
        with waiting("weight update", str(step)):
            if self._config.weights.overlap:
                report = await sync.hand_over(step, taken)
            else:
                report = await self._devices.to_engines(sync, trainer, step)
        queue.advance(step)
        self._write_down(done, report, queue, pace, progress)

    def _write_down(
        self,
        done: _Done,
        report: SyncReport,
        queue: TrajectoryQueue,
        pace: _Pace,
        progress: Progress | None,
    ) -> None:
        """A step is done, and its weights have gone where they were to go."""
        now, sampled = self._clock(), _value(self._metrics.sampled_tokens_total)
        pace.waited_s += done.wait_s
        record = _record(
            done,
            report,
            counts=_counts(queue.statistics()),
            time_s=now - pace.begin_s,
            tokens_per_s=(sampled - pace.sampled) / max(now - pace.recorded_s, 1e-9),
            length_ks=queue.length_ks,
            engine_idle_share=self._pool.idle_share,
        )
        pace.synced_s = pace.recorded_s = now
        pace.sampled = sampled
        self._records.append(record)
        append_record(self._dir / "metrics.jsonl", record)
        if self._trackers is not None:
            self._trackers.log(record)
        self._show(done.batch, record, pace.waited_s / max(now - pace.begin_s, 1e-9))
        if progress is not None:
            progress.step(record)

    async def _step_of(self, trainer: Trainer, batch: TakenBatch, step: int) -> StepResult:
        """One step; the trainer bounds it itself, this is for the doctor, who knows what is usual."""
        await self._note_saved(trainer, wait=False)
        try:
            async with (
                asyncio.timeout(None) as scope,
                waiting("trainer step", str(step), scope=scope) as wait,
            ):
                return await trainer.train_step(batch.path, step)
        except TimeoutError as error:
            if not wait.cut:
                raise
            raise TrainerError(
                f"trainer step {step} took far longer than any before: ended by the stall doctor"
            ) from error

    async def _save(self, trainer: Trainer) -> None:
        """Begin a checkpoint of the step that the ledger has settled last; the one before is waited for."""
        await self._note_saved(trainer, wait=True)
        with waiting("checkpoint"):
            await trainer.save_checkpoint(str(self._dir / "checkpoints"), {"weight_version": self._step})
        self._saving = self._step

    async def _save_last(self, trainer: Trainer) -> None:
        """Leave a checkpoint of the last step, whole.

        Raises:
            CheckpointError: When it cannot be written.
        """
        await self._note_saved(trainer, wait=True)
        if self._saved_step < self._step:
            await self._save(trainer)
            await self._note_saved(trainer, wait=True, last=True)

    async def _note_saved(self, trainer: Trainer, *, wait: bool, last: bool = False) -> None:
        """Tell the ledger of a checkpoint that stands by now; one that failed is tried again in its turn.

        Raises:
            CheckpointError: When one failed that was the last, or one too many in a row.
        """
        if self._saving is None:
            return
        with waiting("checkpoint"):
            saved = await trainer.saved_checkpoint(wait)
        if saved.writing:
            return
        step, self._saving = self._saving, None
        if saved.failure is None:
            self._saved_step, self._failed_saves = step, 0
            self._metrics.observe_checkpoint(step, saved.standstill_s, saved.write_s)
            assert self._queue is not None, "a run that has a step has a queue"
            self._queue.committed(step, keep=self._config.trainer.keep_checkpoints)
            return
        self._failed_saves += 1
        self._metrics.checkpoint_failures_total.inc()
        limit = self._config.trainer.max_failed_checkpoints
        if last or self._failed_saves > limit:
            raise CheckpointError(
                f"{saved.failure}; it is the {self._failed_saves}. in a row "
                f"(trainer.max_failed_checkpoints is {limit})"
            )
        newest = self._saved_step
        log.warning("%s; training goes on, the newest checkpoint is of step %d", saved.failure, newest)

    def _show(self, batch: TakenBatch, record: StepRecord, trainer_idle: float) -> None:
        """Bring the instruments up to date with a step."""
        m = self._metrics
        m.observe_step(record)
        for staleness in batch.staleness:
            m.staleness_versions.observe(staleness)
        for length in batch.lengths:
            m.trajectory_tokens.observe(length)
        m.trainer_idle_ratio.set(trainer_idle)
        m.engine_idle_ratio.set(self._pool.idle_share)

    async def _pulse(
        self, queue: TrajectoryQueue, manager: RolloutManager, progress: Progress | None
    ) -> None:
        """Show once a second what moves between steps."""
        m = self._metrics
        # As of the scrape, as the counters are that they must add up with.
        m.trajectories_in_flight.set_function(lambda: queue.statistics().in_flight)
        m.trajectories_queued.set_function(lambda: queue.statistics().queued)
        while True:
            counts = queue.statistics()
            m.queue_bytes.set(counts.bytes)
            disk = shutil.disk_usage(self._dir)
            m.disk_free_bytes.set(disk.free)
            m.disk_size_bytes.set(disk.total)
            if progress is not None:
                progress.flow(
                    in_flight=counts.in_flight,
                    queued=counts.queued,
                    waiting_for=self._doctor.waiting_for(),
                )
            with waiting("idle"):
                await asyncio.sleep(1.0)

    def _members(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """The loop that follows `engine.urls_file`, where there is one."""
        engine = self._config.engine
        if engine.urls_file is None:
            return {}
        if self._membership is None:
            self._membership = Membership(
                Path(engine.urls_file),
                self._pool,
                self._cluster.connect_engine,
                self._depart,
                drain_s=engine.drain_s,
            )
        return {"members": self._membership.run}

    async def _depart(self, engine_id: str) -> None:
        """Let go of an engine that has left the pool."""
        if self._sync is not None:
            await self._sync.leave(engine_id)
        await self._cluster.disconnect_engine(engine_id)

    async def _catch_up(self, engine_id: str) -> None:
        """Bring an engine to the weights of the trainer that there is now."""
        assert self._sync is not None, "engines are repaired while there is a weight sync"
        await self._sync.catch_up(engine_id)


def _of_the_trainer(error: BaseException) -> bool:
    """Whether it leaves no trainer that could write a checkpoint."""
    return isinstance(error, TrainerError) or (isinstance(error, StallError) and error.on in _TRAINER_WAITS)


def sampled_before(records: list[StepRecord]) -> float:
    """Tokens that an earlier life of the run sampled, from its rates."""
    starts = [0.0, *(record.time_s for record in records)]
    return sum(r.tokens_per_s * (r.time_s - start) for r, start in zip(records, starts, strict=False))


def _require_finite(result: StepResult) -> None:
    if result.metrics.get("updates_skipped"):
        return  # the trainer itself says when there were too many
    for name in ("loss", "grad_norm"):
        value = result.metrics[name]
        if not np.isfinite(value):
            raise NonFiniteLoss(
                f"step {result.step}: {name} is {value}, expected a finite number: lower "
                f"trainer.optimizer.lr, or look "
                "at importance_ratio_mean in metrics.jsonl"
            )


class _Done(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step that is done, whose weights are to be brought to the engines."""

    batch: TakenBatch
    result: StepResult
    wait_s: float
    step_s: float
    sync_hidden_s: float
    """Of the sync before; see `StepRecord`."""


class _Pace(msgspec.Struct, kw_only=True):
    """Where the steps stand in time, on the clock."""

    begin_s: float
    """Of the run."""
    recorded_s: float
    """When the last step was written down."""
    sampled: float
    """Tokens by then."""
    waited_s: float = 0.0
    """For batches, all in all."""
    synced_s: float = -math.inf
    """When the last sync ended; infinite while there is one."""


def _record(
    done: _Done,
    report: SyncReport,
    *,
    counts: TrajectoryCounts,
    time_s: float,
    tokens_per_s: float,
    length_ks: float | None,
    engine_idle_share: float,
) -> StepRecord:
    batch, result = done.batch, done.result
    measured: dict[str, Any] = {name: result.metrics.get(name) for name in FIGURES}
    measured |= {name: int(result.metrics.get(name, 0)) for name in COUNTS}
    return StepRecord(
        step=result.step,
        weight_version=report.weight_version,
        time_s=time_s,
        reward_mean=float(np.mean(batch.rewards)),
        reward_min=min(batch.rewards),
        reward_max=max(batch.rewards),
        **measured,
        extremes=result.extremes,
        staleness_mean=float(np.mean(batch.staleness)),
        staleness_p50=float(np.percentile(batch.staleness, 50)),
        staleness_p95=float(np.percentile(batch.staleness, 95)),
        staleness_max=max(batch.staleness),
        staleness_counts=tuple(np.bincount(batch.staleness).tolist()),
        length_ks=length_ks,
        trajectories=len(batch.trajectory_ids),
        interrupted=sum(1 for resumes in batch.resumes if resumes),
        sampled_tokens_mean=float(np.mean(batch.sampled_lengths)),
        sampled_tokens_min=min(batch.sampled_lengths),
        sampled_tokens_max=max(batch.sampled_lengths),
        masked_tokens=batch.num_masked_tokens,
        wait_s=done.wait_s,
        step_s=done.step_s,
        sync_s=report.total_s,
        handover_s=report.handover_s,
        sync_hidden_s=done.sync_hidden_s,
        transfer_s=report.publish_s + report.transfer_s,
        standstill_s=report.standstill_s,
        in_flight=counts.in_flight,
        queued=counts.queued,
        dropped=sum(counts.dropped.values()),
        dropped_reasons=counts.dropped,
        engine_idle_share=engine_idle_share,
        tokens_per_s=tokens_per_s,
    )


def _counts(conservation: Any) -> TrajectoryCounts:
    return TrajectoryCounts(
        dispatched=conservation.dispatched,
        trained=conservation.trained,
        in_flight=conservation.in_flight,
        queued=conservation.queued,
        dropped=dict(conservation.dropped),
    )


def _value(counter: Any) -> float:
    """What a counter stands at."""
    return float(counter._value.get())
