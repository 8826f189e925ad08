"""Wires the parts of a run, and leads it from start to end through the lives of its trainer.

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

What the train loop does in which order, and why, stands in `async_rl.run.train_loop`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from uuid6 import uuid7

from async_rl.config import Config, SGLangEngines
from async_rl.data.chat_format import ChatFormat, load_chat_format
from async_rl.data.dataset import Dataset, load_run_tasks, load_validation, prompt_rule
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.health import HealthWatch
from async_rl.engines.membership import Membership
from async_rl.engines.model_facts import check_model, load_facts
from async_rl.engines.pool import EnginePool
from async_rl.engines.repair import Repair
from async_rl.errors import TrainerError
from async_rl.evaluation.evaluator import Evaluator
from async_rl.evaluation.service import EvaluationService
from async_rl.observability.console_report import RunProgress
from async_rl.observability.discovery import announced
from async_rl.observability.endpoints import serve
from async_rl.observability.metrics import Metrics
from async_rl.observability.page.feed import Feed
from async_rl.observability.page.routes import page_routes
from async_rl.observability.records import Summary
from async_rl.observability.trackers.choice import tracking
from async_rl.observability.trackers.tracker import Trackers
from async_rl.queue.trajectory_queue import TrajectoryQueue
from async_rl.rollout.backend import LocalBackend, RolloutBackend
from async_rl.rollout.manager import RolloutManager
from async_rl.rollout.workers.worker_backend import WorkerBackend
from async_rl.run.checkpoints import Checkpoints, can_follow
from async_rl.run.cluster import Cluster
from async_rl.run.device_sharing import Devices, OwnDevices, SharedDevices
from async_rl.run.doctor import Doctor, watched
from async_rl.run.live_status import LiveStatus
from async_rl.run.recovery import RecoveredState
from async_rl.run.run_log import RunLogger
from async_rl.run.train_loop import TrainLoop
from async_rl.run.trainer_restarts import TrainerHandle, TrainerRestarts
from async_rl.runtime.supervision import Nursery, first_error, services
from async_rl.runtime.waits import Waits, acting, waiting
from async_rl.trainer_protocol import Trainer
from async_rl.weights.weight_sync import WeightSync

log = logging.getLogger(__name__)


async def run(
    config: Config,
    run_dir: Path,
    stop: asyncio.Event,
    cluster: Cluster,
    *,
    progress: RunProgress | None = None,
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
    pulse, run_log = orchestrator.pulse, orchestrator.run_log
    page = Feed(config, pulse.now, lambda: run_log.records, lambda: run_log.evaluations)
    host = config.metrics.host
    async with (
        watched(orchestrator.named_waits, metrics, config.doctor),
        tracking(config, run_dir, metrics) as trackers,
        serve(metrics, host, config.metrics.port, pulse.health, page_routes(page, host)) as url,
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


class _RunInputs(NamedTuple):
    """What all lives of a run work on."""

    tasks: Any
    chat: Any
    facts: EngineFacts
    new_id: Callable[[], str]
    validation: Sequence[Dataset]


class _Incarnation(NamedTuple):
    """What hangs on one trainer, from where it has come up to where it ends."""

    trainer: Trainer
    sync: WeightSync
    recovered: RecoveredState
    manager: RolloutManager
    checkpoints: Checkpoints
    loop: TrainLoop
    evaluation: EvaluationService | None


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
        pool = self.pool = EnginePool(metrics, clock, max_prefill_tokens=config.engine.max_prefill_tokens)
        self._health = HealthWatch(pool, config.engine, metrics, clock)
        self._devices: Devices = OwnDevices()
        if config.placement.shared:
            self._devices = SharedDevices(
                pool, cluster.stop_engine, metrics, clock, timeout_s=config.weights.timeout_s
            )
        self._repair = Repair(
            pool,
            cluster.restart_engine,
            self._catch_up,
            config.engine,
            metrics,
            clock,
            seed=config.run.seed,
            turns=self._devices.turns,
        )
        self._membership: Membership | None = None
        self.named_waits = Waits(clock)
        self.doctor = Doctor(config, self.named_waits, pool, metrics)
        self.run_log = RunLogger(config, run_dir, pool, metrics, clock)
        self.pulse = LiveStatus(
            self.run_log,
            self.doctor,
            pool,
            self.named_waits,
            metrics,
            clock,
            run_dir,
            max_steps=config.run.max_steps,
        )
        self._starts = TrainerRestarts(
            cluster,
            run_dir,
            pool,
            self._devices,
            self.run_log,
            metrics,
            max_restarts=config.trainer.max_restarts,
        )
        self._life: _Incarnation | None = None

    @property
    def queue(self) -> TrajectoryQueue | None:
        """That of the present life; None before the first."""
        return None if self._life is None else self._life.recovered.queue

    async def run(
        self,
        tasks: Any,
        chat: Any,
        facts: EngineFacts,
        new_id: Callable[[], str],
        progress: RunProgress | None,
        trackers: Trackers | None = None,
        validation: Sequence[Dataset] = (),
    ) -> Summary:
        """See the module's `run`; `trackers` are given every step, `validation` is what is evaluated."""
        self.run_log.progress, self.run_log.trackers = progress, trackers
        async with services(doctor=self.doctor.run):
            trainer_handle = await self._start_both()
        if isinstance(num_reserved := self._config.evaluation.engines, int) and validation:
            for engine in self.pool.engines()[-num_reserved:]:
                self.pool.reserve(engine.engine_id)
        given = _RunInputs(tasks, chat, facts, new_id, validation)
        failed_saves = 0
        while True:
            # A trainer that came back starts from its checkpoint as a new driver does: with all that hangs on
            # the trainer's step made anew from the run's folder, and the engines brought back to it.
            life = self._life = self._begin_life(given, trainer_handle, failed_saves)
            queue = life.recovered.queue
            try:
                end = await self._live(life)
            finally:
                life.recovered.leave()
            trajectories = queue.statistics().counts
            queue.close()
            if not isinstance(end, TrainerHandle):
                return self.run_log.summary(trajectories, ended_s=end)
            trainer_handle, failed_saves = end, life.checkpoints.failed

    # -- a life ----------------------------------------------------------------------------------------

    def _begin_life(
        self, given: _RunInputs, trainer_handle: TrainerHandle, failed_saves: int
    ) -> _Incarnation:
        """All that hangs on the trainer's step, as what is in the run's folder has it."""
        config, metrics, clock = self._config, self._metrics, self._clock
        trainer, step = trainer_handle
        sync = self._weight_sync(trainer)
        recovered = RecoveredState(config, self._dir, given.tasks, given.facts, step, metrics, clock)
        queue = recovered.queue
        manager = RolloutManager(
            config,
            feeder=recovered.feeder,
            queue=queue,
            pool=self.pool,
            backend=self._rollout_backend(given.chat),
            chat=given.chat,
            facts=given.facts,
            metrics=metrics,
            new_id=given.new_id,
            clock=clock,
            journal=recovered.journal,
            journalled=recovered.journalled,
            observer=recovered.archive,
        )
        checkpoints = Checkpoints(
            config.trainer, self._dir, trainer, queue, metrics, step=step, failed=failed_saves
        )
        self.doctor.attend(queue, manager.slots)
        self.pulse.attend(queue, manager)
        return _Incarnation(
            trainer=trainer,
            sync=sync,
            recovered=recovered,
            manager=manager,
            checkpoints=checkpoints,
            loop=TrainLoop(
                config,
                self._stop,
                trainer,
                queue,
                sync,
                self._devices,
                checkpoints,
                self.run_log,
                clock,
            ),
            evaluation=self._evaluation(given, sync, step) if given.validation else None,
        )

    def _rollout_backend(self, chat: ChatFormat) -> RolloutBackend:
        """Rollout workers where the config asks for them, else this event loop."""
        config = self._config
        if config.rollout.num_workers:
            return WorkerBackend(config.rollout, self._cluster.rollout_worker, self._metrics)
        return LocalBackend(config, chat=chat, metrics=self._metrics, clock=self._clock)

    def _weight_sync(self, trainer: Trainer) -> WeightSync:
        config = self._config
        return WeightSync(
            config.weights,
            pool=self.pool,
            trainer=trainer,
            directory=self._dir / "weights",
            metrics=self._metrics,
            clock=self._clock,
            open_port=self._cluster.open_port,
            folder_of=self._cluster.local_folder,
            backend=self._cluster.weight_backend,
            tp_size=config.engine.tp_size if isinstance(config.engine, SGLangEngines) else 1,
            generation=self._starts.failures,
        )

    def _evaluation(self, given: _RunInputs, sync: WeightSync, step: int) -> EvaluationService:
        evaluator = Evaluator(
            self._config,
            given.validation,
            chat=given.chat,
            facts=given.facts,
            new_id=given.new_id,
            clock=self._clock,
        )
        return EvaluationService(
            self._config.evaluation,
            self._dir,
            self.pool,
            sync.take_back,
            evaluator,
            step=step,
            interrupt_timeout_s=self._config.weights.timeout_s,
            ended=self.run_log.evaluated,
            clock=self._clock,
            turns=self._devices.turns,
        )

    async def _live(self, life: _Incarnation) -> float | TrainerHandle:
        """Run until the end, or until the trainer has failed and is back at its newest checkpoint.

        Returns:
            When the last step ended, on the clock; or where the trainer stands that is back.
        """
        queue, loop, checkpoints = life.recovered.queue, life.loop, life.checkpoints
        evaluating = {} if life.evaluation is None else {"evaluation": life.evaluation.run}
        failed = False

        async def stopper() -> None:
            await self._stop.wait()
            log.info("stopping: no new work; what runs may take run.drain_s = %s", self._config.run.drain_s)
            queue.stop()
            if life.evaluation is not None:
                life.evaluation.leave()
            await asyncio.Future()

        try:
            async with services(
                rollouts=life.manager.run,
                watch=lambda: self._cluster.watch_engines(self.pool.quarantine),
                health=self._health.run,
                **self._members(),
                stopper=stopper,
                doctor=self.doctor.run,
                pulse=self.pulse.run,
                **life.recovered.services,
            ):
                try:
                    async with services(repair=self._repair.run, **evaluating):
                        with acting("train loop"):
                            return await self._train_and_save(life)
                except ExceptionGroup as group:
                    cause = first_error(group)
                    if not isinstance(cause, TrainerError) or not cause.restartable:
                        raise
                    failed = True
                    # Beside it the rollouts go on to the bound; what they have then is kept.
                    return await self._starts.again(cause)
        except ExceptionGroup as group:
            # What was trained since the last checkpoint is lost only if it was the trainer that failed.
            lost = loop.unsettled or failed or not can_follow(first_error(group))
            if loop.step > checkpoints.step and not lost:
                self.run_log.enter("writing a checkpoint before the run ends with an error")
                await self._devices.to_trainer(life.trainer)
                await checkpoints.last(loop.step)
            raise

    async def _train_and_save(self, life: _Incarnation) -> float:
        """All that needs the trainer, up to its end; returns when the last step ended."""
        trainer, sync, loop = life.trainer, life.sync, life.loop
        self.run_log.enter("bringing engines to the trainer's weights")
        with waiting("weight update", str(loop.step)):
            path = Path(self._config.model.path) if loop.step == 0 else None
            await self._devices.start(sync, trainer, loop.step, path)
        self.run_log.begin(loop.step)
        self.run_log.enter("training")
        await loop.run()
        if life.evaluation is not None and not self._stop.is_set():
            self.run_log.enter("evaluating the last version")
            await life.evaluation.finish(loop.step)
        if self._stop.is_set():
            self.run_log.enter("draining")
            await self._drain(life.manager)
        ended_s = self._clock()
        self.run_log.enter("writing the checkpoint and the Hugging Face export")
        life.recovered.queue.stop()
        await self._devices.to_trainer(trainer)
        await life.checkpoints.last(loop.step)
        with waiting("export"):
            await trainer.publish(str(self._dir / "hf"), loop.step)
        await sync.close()
        await trainer.close()
        return ended_s

    async def _drain(self, manager: RolloutManager) -> None:
        """Let running trajectories finish, for a while."""
        try:
            async with asyncio.timeout(self._config.run.drain_s), waiting("drain"):
                await manager.drained.wait()
        except TimeoutError:
            log.warning("some trajectories still run after run.drain_s; they go on when it resumes")

    # -- engines and trainer ---------------------------------------------------------------------------

    async def _start_both(self) -> TrainerHandle:
        """Start engines and trainer at the same time; on devices that they share, one after the other."""
        if self._devices.shared:
            await self._start_engines()
            await self._devices.clear()
            return await self._starts.first()
        async with Nursery() as nursery:
            nursery.start_task("engines", self._start_engines())
            starting_trainer = nursery.start_task("trainer", self._starts.first())
        return starting_trainer.result()

    async def _start_engines(self) -> None:
        with waiting("engine start"):
            for engine in await self._cluster.start_engines():
                self.pool.add(engine)

    def _members(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """The loop that follows `engine.urls_file`, where there is one."""
        engine = self._config.engine
        if engine.urls_file is None:
            return {}
        if self._membership is None:
            self._membership = Membership(
                Path(engine.urls_file),
                self.pool,
                self._cluster.connect_engine,
                self._depart,
                drain_s=engine.drain_s,
            )
        return {"members": self._membership.run}

    async def _depart(self, engine_id: str) -> None:
        """Let go of an engine that has left the pool."""
        if self._life is not None:
            await self._life.sync.leave(engine_id)
        await self._cluster.disconnect_engine(engine_id)

    async def _catch_up(self, engine_id: str) -> None:
        """Bring an engine to the weights of the trainer that there is now."""
        assert self._life is not None, "engines are repaired in a life"
        await self._life.sync.catch_up(engine_id)
