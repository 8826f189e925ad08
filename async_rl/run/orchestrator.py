"""Connects the components of a run and leads it from start to end, across restarts of its trainer.

```
 loop         consumes         waits for                  unblocked by                  produces
 train loop   batches (queue)  a batch ready by its bound a group arrives or is dropped version n+1
 rollouts     tasks (feeder)   a slot, admission          a trajectory ends; a version  groups
 repair       failed engines   a quarantine               a call or an update fails     a serving engine
 watch        processes        a server that exits        its exit                      a quarantine
 health       calls, probes    the next check             time                          a quarantine
 members      the urls_file    the next check             time                          joins, departures
 stopper      the stop event   the first signal           Ctrl-C                        a drain
 live_status  statistics       a second                   time                          gauges, the panel
 doctor       waits, states    doctor.look_s              time                          log, remedies
 journal      new tokens       queue.journal_s            time                          the journal
 archive      trajectories     a second                   time                          their database
 evaluation   served versions  a version that is due      the pool                      its record
```

`async_rl.run.train_loop` documents the order of the train loop and its reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from async_rl.config import Config
from async_rl.data.chat_format import load_chat_format
from async_rl.data.dataset import Dataset, load_run_tasks, load_validation, prompt_rule
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.frozen_models import FrozenModel
from async_rl.engines.health import HealthWatch
from async_rl.engines.membership import EngineMembership
from async_rl.engines.model_facts import check_model, load_facts
from async_rl.engines.pool import EnginePool
from async_rl.engines.repair import EngineRepair
from async_rl.errors import StallError, TrainerError
from async_rl.evaluation import service as evaluation_service
from async_rl.evaluation.evaluator import Evaluator
from async_rl.evaluation.service import EvaluationService
from async_rl.observability.console_report import RunProgress
from async_rl.observability.discovery import URL_FILE, announced
from async_rl.observability.endpoints import serve
from async_rl.observability.metrics import Metrics
from async_rl.observability.page.feed import Feed
from async_rl.observability.page.routes import page_routes
from async_rl.observability.page.view import TRAINING
from async_rl.observability.records import Summary
from async_rl.observability.trackers.choice import tracking
from async_rl.observability.trackers.tracker import Trackers
from async_rl.rollout.manager import RolloutManager
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.workers.backend_choice import choose_backend
from async_rl.run.captures import Captures
from async_rl.run.checkpoints import Checkpoints, can_write_after
from async_rl.run.cluster import Cluster
from async_rl.run.device_sharing import Devices, OwnDevices, SharedDevices
from async_rl.run.doctor import Doctor, recording_waits
from async_rl.run.live_status import LiveStatus
from async_rl.run.recovery import RecoveredState, RestoredProgress, restore_progress
from async_rl.run.run_log import RunLogger
from async_rl.run.train_loop import TrainLoop, choose_train_loop
from async_rl.run.trainer_restarts import TrainerHandle, TrainerRestarts
from async_rl.runtime.ids import new_id
from async_rl.runtime.shortages import wait_for_files
from async_rl.runtime.supervision import Nursery, cut_by, first_error, observer, services
from async_rl.runtime.threads import call_until_cancelled
from async_rl.runtime.waits import Waits, acting, waiting
from async_rl.store.journal_folders import OtherNodes
from async_rl.store.trajectory_queue import TrajectoryQueue
from async_rl.trainer_protocol import Trainer
from async_rl.weights.checksums import ChecksumComparison
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
    new_id: Callable[[], str] = new_id,
) -> Summary:
    """Run a config to its end, or until `stop` is set and the running trajectories have drained.

    Args:
        config: The run's config.
        run_dir: The run's folder. An earlier incarnation of the run is continued from it.
        stop: Set by the first signal.
        cluster: Starts the processes of the run.
        progress: Shows phases and steps on the terminal; None shows nothing.
        clock: Monotonic seconds.
        new_id: Returns fixed-width unique ids.

    Raises:
        AsyncRLError: The error of the service that failed, inside an exception group.
    """
    async with cut_by(stop):
        inputs = await call_until_cancelled(lambda: RunInputs.load(config, new_id), name="inputs")
    metrics, waits = Metrics(), Waits(clock)
    async with recording_waits(waits, metrics, config.doctor), tracking(config, run_dir, metrics) as trackers:
        orchestrator = Orchestrator(
            config,
            run_dir,
            stop,
            cluster,
            metrics,
            clock,
            inputs,
            waits=waits,
            progress=progress,
            trackers=trackers,
        )
        status, run_log, host = orchestrator.live_status, orchestrator.run_log, config.metrics.host
        page = Feed(config, status.now, lambda: run_log.records, lambda: run_log.evaluations)
        async with (
            serve(metrics, host, config.metrics.port, status.health, page_routes(page)) as url,
            services(page=observer(page.run)),
        ):
            (run_dir / URL_FILE).write_text(url)
            targets = Path(config.metrics.targets_dir or run_dir.parent / ".prometheus")
            if progress is not None:
                progress.start(config, run_dir, url)
            try:
                with announced(url, config.run.name, targets):
                    return await orchestrator.run()
            finally:
                if progress is not None:
                    progress.stop()


class RunInputs(NamedTuple):
    """Model and data of a run, shared by all incarnations of its trainer."""

    tasks: Any
    """The training tasks."""
    chat: Any
    """The model's chat format."""
    facts: EngineFacts
    """What the model's config says about it."""
    new_id: Callable[[], str]
    """Returns fixed-width unique ids."""
    validation: Sequence[Dataset] = ()
    """The validation sets; empty without evaluation."""

    @classmethod
    def load(cls, config: Config, new_id: Callable[[], str]) -> RunInputs:
        """Read the model's folder and the datasets of a config.

        Raises:
            ConfigError: Model, data and config do not fit together.
        """
        facts = load_facts(config.model.path)
        check_model(config, facts)
        tasks = load_run_tasks(config)
        validation = load_validation(config.data, prompt_rule(config)) if config.evaluation.enabled else []
        return cls(
            tasks, load_chat_format(config.model.path, config.model.trusted_roles), facts, new_id, validation
        )


class _Incarnation(NamedTuple):
    """The components that are built anew each time the trainer starts."""

    trainer: Trainer
    sync: WeightSync
    recovered: RecoveredState
    manager: RolloutManager
    checkpoints: Checkpoints
    loop: TrainLoop
    evaluation: EvaluationService | None


class Orchestrator:
    """Leads one run from start-up to summary."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        stop: asyncio.Event,
        cluster: Cluster,
        metrics: Metrics,
        clock: Callable[[], float],
        inputs: RunInputs,
        *,
        waits: Waits | None = None,
        progress: RunProgress | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        """Build the components that last for the whole run.

        Args:
            config: The run's config.
            run_dir: The run's folder.
            stop: Set by the first signal.
            cluster: Starts the processes of the run.
            metrics: The metrics of the run.
            clock: Monotonic seconds.
            inputs: Model and data.
            waits: The waits of the run; None for new ones.
            progress: Shows phases and steps on the terminal; None shows nothing.
            trackers: Get every step and evaluation; None for none.
        """
        self._config = config
        self._dir = run_dir
        self._stop = stop
        self._cluster = cluster
        self._metrics = metrics
        metrics.max_staleness_versions.set(config.rollout.max_staleness)
        self._clock = clock
        self._inputs = inputs
        pool = self.pool = EnginePool(metrics, clock, max_prefill_tokens=config.engine.max_prefill_tokens)
        self._health = HealthWatch(pool, config.engine, metrics, clock)
        self.devices: Devices = OwnDevices()
        if config.placement.shared:
            self.devices = SharedDevices(
                pool,
                cluster.stop_engine,
                metrics,
                clock,
                timeout_s=config.weights.timeout_s,
                keep_weights=config.adapters is not None,
            )
        self._repair = EngineRepair(
            pool,
            cluster.restart_engine,
            self._catch_up,
            config.engine,
            metrics,
            clock,
            seed=config.run.seed,
            phases=self.devices.phases,
        )
        self._frozen = [
            FrozenModel(name, config.of_model(name), cluster.engines_of(name), metrics, clock)
            for name in config.models
        ]
        self._membership: EngineMembership | None = None
        self._incarnation: _Incarnation | None = None
        self.waits = waits or Waits(clock)
        self.doctor = Doctor(
            config,
            self.waits,
            pool,
            metrics,
            queue=lambda: self.queue,
            slots=lambda: None if self._manager is None else self._manager.slots,
        )
        self.run_log = RunLogger(config, run_dir, pool, metrics, clock, progress=progress, trackers=trackers)
        self.live_status = LiveStatus(
            self.run_log,
            self.doctor,
            pool,
            self.waits,
            metrics,
            run_dir,
            queue=lambda: self.queue,
            manager=lambda: self._manager,
            max_steps=config.run.max_steps,
        )
        # Kept when the trainer is restarted: engines may have other weights than its first ones then.
        self._checksums = ChecksumComparison()
        self._trainer_restarts = TrainerRestarts(
            cluster,
            run_dir,
            pool,
            self.devices,
            self.run_log,
            metrics,
            max_restarts=config.trainer.max_restarts,
        )

    @property
    def queue(self) -> TrajectoryQueue | None:
        """The queue of the current incarnation; None before the trainer has started."""
        return None if self._incarnation is None else self._incarnation.recovered.queue

    @property
    def _models(self) -> dict[str, EnginePool]:
        """The engines of further models, by the model's name."""
        return {frozen.name: frozen.pool for frozen in self._frozen}

    @property
    def _manager(self) -> RolloutManager | None:
        return None if self._incarnation is None else self._incarnation.manager

    async def run(self) -> Summary:
        """Start engines and trainer, train to the end, and return the summary.

        Raises:
            AsyncRLError: The error of the service that failed, inside an exception group.
        """
        async with cut_by(self._stop), services(doctor=self._watching_doctor):
            trainer_handle = await self._start_engines_and_trainer()
        if isinstance(num_reserved := self._config.evaluation.engines, int) and self._inputs.validation:
            for engine in self.pool.engines()[-num_reserved:]:
                self.pool.reserve_engine(engine.engine_id)
        failed_checkpoints = 0
        while True:
            # A restarted trainer continues from its checkpoint exactly as a new process does: the components
            # that depend on its step are rebuilt from the run's folder, and the engines get its weights.
            await wait_for_files(self._dir / "spool")
            progress = await self._restore_progress(trainer_handle.step)
            await wait_for_files(self._dir / "spool")
            incarnation = self._incarnation = self._build_incarnation(
                trainer_handle, progress, failed_checkpoints
            )
            queue = incarnation.recovered.queue
            try:
                end = await self._run_incarnation(incarnation)
            finally:
                incarnation.recovered.write_and_close()
            trajectories = queue.groups.ledger.counts()
            queue.close()
            if not isinstance(end, TrainerHandle):
                return self.run_log.summary(trajectories, ended_s=end)
            trainer_handle, failed_checkpoints = end, incarnation.checkpoints.num_failed

    @property
    def _watching_doctor(self) -> Callable[[], Awaitable[None]]:
        return observer(self.doctor.run_checks, ends_run_with=(StallError,))

    # -- one incarnation of the trainer ------------------------------------------------------------------

    async def _restore_progress(self, step: int) -> RestoredProgress:
        """Restore how far trajectories were; a signal that ends a start ends this too."""
        is_start = self._trainer_restarts.failures == 0
        async with (
            cut_by(self._stop) if is_start else nullcontext(),
            services(doctor=self._watching_doctor),
        ):
            return await restore_progress(
                self._config.queue,
                self._dir,
                step,
                self._metrics,
                self.run_log.enter_phase,
                node=self._cluster.node,
                others=OtherNodes(self._cluster.other_nodes, self._cluster.open_frame_reader),
            )

    def _build_incarnation(
        self, trainer_handle: TrainerHandle, progress: RestoredProgress, failed_checkpoints: int
    ) -> _Incarnation:
        """Build the components that depend on the trainer's step from the state in the run's folder."""
        config, inputs, metrics, clock = self._config, self._inputs, self._metrics, self._clock
        trainer, step = trainer_handle
        sync = self._weight_sync(trainer)
        recovered = RecoveredState(
            config,
            progress,
            self._dir,
            inputs.tasks,
            inputs.facts,
            step,
            metrics,
            clock,
            trainer.read_batch,
            node=self._cluster.node,
            open_reader=self._cluster.open_frame_reader,
        )
        queue = recovered.queue
        context = SessionContext(
            chat=inputs.chat,
            config=config,
            metrics=metrics,
            clock=clock,
            serving_clock=self.pool.serving_clock,
            calls=self.pool.dispatcher,
            facts=inputs.facts,
            new_id=inputs.new_id,
            models={name: pool.dispatcher for name, pool in self._models.items()},
        )
        manager = RolloutManager(
            context,
            feeder=recovered.feeder,
            pool=self.pool,
            queue=queue,
            backend=choose_backend(
                context,
                self.pool,
                recovered.spool,
                self._cluster.rollout_worker,
                inspected=None if recovered.archive is None else recovered.archive.inspected,
                journal=recovered.journal,
                journals=recovered.journals,
                models=self._models,
            ),
            journals=recovered.journals,
            journalled=recovered.journalled,
            observer=recovered.archive,
            warn=self.run_log.warn,
        )
        checkpoints = Checkpoints(
            config.trainer,
            self._dir,
            trainer,
            recovered.groups,
            metrics,
            self.run_log.write_held_steps,
            step=step,
            num_failed=failed_checkpoints,
        )
        captures = Captures(config, self._dir, step)
        loop = choose_train_loop(config)(
            config, self._stop, trainer, queue, sync, self.devices, checkpoints, captures, self.run_log, clock
        )
        evaluation = self._evaluation(sync, context, step) if inputs.validation else None
        return _Incarnation(trainer, sync, recovered, manager, checkpoints, loop, evaluation)

    def _weight_sync(self, trainer: Trainer) -> WeightSync:
        return WeightSync(
            self._config,
            pool=self.pool,
            trainer=trainer,
            routes=self._cluster,
            directory=self._dir / "weights",
            metrics=self._metrics,
            clock=self._clock,
            generation=self._trainer_restarts.failures,
            comparison=self._checksums,
        )

    def _evaluation(self, sync: WeightSync, context: SessionContext, step: int) -> EvaluationService:
        evaluator = Evaluator(
            context,
            self._inputs.validation,
            open_worker=self._cluster.rollout_worker,
            completions=self._dir / evaluation_service.FOLDER / "completions",
            models=self._models,
        )
        return EvaluationService(
            self._dir,
            self.pool,
            sync.catch_up.take_back_engine,
            evaluator,
            step=step,
            log_evaluation=self.run_log.log_evaluation,
            clock=self._clock,
            phases=self.devices.phases,
        )

    async def _run_incarnation(self, incarnation: _Incarnation) -> float | TrainerHandle:
        """Run until the end, or until the trainer has failed and has been restarted from its checkpoint.

        Returns:
            The time on the clock at which the last step ended, or the restarted trainer.
        """
        queue, loop, checkpoints = incarnation.recovered.queue, incarnation.loop, incarnation.checkpoints
        evaluation = incarnation.evaluation
        evaluating = {} if evaluation is None else {"evaluation": evaluation.run_evaluations}
        trainer_failed = False

        async def stopper() -> None:
            await self._stop.wait()
            log.info(
                "stopping: no new work; running trajectories have run.drain_s = %s", self._config.run.drain_s
            )
            self.run_log.enter_phase("stopping: running work ends, then a checkpoint is written")
            queue.stop()
            if evaluation is not None:
                evaluation.cancel_evaluations()
            await asyncio.Future()

        try:
            async with services(
                rollouts=incarnation.manager.run,
                watch=lambda: self._cluster.watch_engines(self.pool.quarantine_engine),
                health=self._health.watch_engines,
                **{name: each for frozen in self._frozen for name, each in frozen.services.items()},
                **self._members(),
                stopper=stopper,
                doctor=self._watching_doctor,
                live_status=observer(self.live_status.update_gauges),
                **incarnation.recovered.services,
            ):
                try:
                    async with services(repair=self._repair.repair_engines, **evaluating):
                        with acting("train loop"):
                            return await self._train_and_save(incarnation)
                except ExceptionGroup as group:
                    cause = first_error(group)
                    if not isinstance(cause, TrainerError) or not cause.restartable:
                        raise
                    trainer_failed = True
                    # Meanwhile rollouts continue up to the staleness bound; the next incarnation keeps them.
                    return await self._trainer_restarts.restart_trainer(cause)
        except ExceptionGroup as group:
            # Steps since the last checkpoint are lost only if the trainer itself failed.
            lost = loop.unsettled or trainer_failed or not can_write_after(first_error(group))
            if loop.step > checkpoints.step and not lost:
                self.run_log.enter_phase("writing a checkpoint before the run ends with an error")
                await self.devices.hand_to_trainer(incarnation.trainer)
                await checkpoints.write_last_checkpoint(loop.step)
            raise

    async def _train_and_save(self, incarnation: _Incarnation) -> float:
        """Train to the end, drain, save and export; return the time at which the last step ended."""
        trainer, sync, loop = incarnation.trainer, incarnation.sync, incarnation.loop
        evaluation = incarnation.evaluation
        self.run_log.enter_phase("bringing engines to the trainer's weights")
        with waiting("weight update", str(loop.step)):
            path = Path(self._config.model.path) if loop.step == 0 else None
            is_start = self._trainer_restarts.failures == 0
            async with cut_by(self._stop) if is_start else nullcontext():
                await self.devices.start_engines(sync, trainer, loop.step, path)
        self.run_log.begin_training(loop.step)
        self.run_log.enter_phase(TRAINING)
        await loop.run()
        if evaluation is not None and not self._stop.is_set():
            self.run_log.enter_phase("evaluating the last version")
            await evaluation.finish_evaluations(loop.step)
        if self._stop.is_set():
            self.run_log.enter_phase("draining")
            await self._drain(incarnation.manager)
        ended_s = self._clock()
        self.run_log.enter_phase("writing the checkpoint and the Hugging Face export")
        incarnation.recovered.queue.stop()
        await self.devices.hand_to_trainer(trainer)
        await incarnation.checkpoints.write_last_checkpoint(loop.step)
        with waiting("export"):
            await trainer.publish(str(self._dir / "hf"), loop.step)
        await sync.close()
        await trainer.close()
        return ended_s

    async def _drain(self, manager: RolloutManager) -> None:
        """Let running trajectories finish for up to `run.drain_s`."""
        try:
            async with asyncio.timeout(self._config.run.drain_s), waiting("drain"):
                await manager.drained.wait()
        except TimeoutError:
            log.warning("some trajectories still run after run.drain_s; they continue when the run resumes")

    # -- engines and trainer ---------------------------------------------------------------------------

    async def _start_engines_and_trainer(self) -> TrainerHandle:
        """Start engines and trainer at the same time, or one after the other on shared devices."""
        if self.devices.shared:
            for frozen in self._frozen:
                await frozen.start_engines()
            await self._start_engines()
            await self.devices.clear_devices()
            return await self._trainer_restarts.start_trainer()
        # Groups of ranks want nodes of their own; engines take what is left.
        await self._cluster.place_trainer()
        async with Nursery() as nursery:
            for frozen in self._frozen:
                nursery.start_task(f"engines of {frozen.name}", frozen.start_engines())
            nursery.start_task("engines", self._start_engines())
            starting_trainer = nursery.start_task("trainer", self._trainer_restarts.start_trainer())
        return starting_trainer.result()

    async def _start_engines(self) -> None:
        with waiting("engine start"):
            for engine in await self._cluster.start_engines():
                self.pool.add_engine(engine)

    def _members(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return the service that follows `engine.urls_file`, if the config names one."""
        engine = self._config.engine
        if engine.urls_file is None:
            return {}
        if self._membership is None:
            self._membership = EngineMembership(
                Path(engine.urls_file),
                self.pool,
                self._cluster.connect_engine,
                self._depart,
                drain_s=engine.drain_s,
            )
        return {"members": self._membership.follow_file}

    async def _depart(self, engine_id: str) -> None:
        """Release an engine that has left the pool."""
        if self._incarnation is not None:
            await self._incarnation.sync.remove_engine(engine_id)
        await self._cluster.disconnect_engine(engine_id)

    async def _catch_up(self, engine_id: str) -> None:
        """Bring an engine to the current trainer's weights."""
        assert self._incarnation is not None, "engines are repaired while there is a trainer"
        await self._incarnation.sync.catch_up_engine(engine_id)
