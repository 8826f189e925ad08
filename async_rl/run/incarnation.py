"""One incarnation of the trainer: what it consists of, and its way from the first step to the last.

`build_incarnation` builds it from the parts that outlast it and the run's folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from async_rl.config import Config
from async_rl.engines.pool import EnginePool
from async_rl.evaluation import service as evaluation_service
from async_rl.evaluation.best_checkpoint import BestCheckpointFile
from async_rl.evaluation.evaluator import Evaluator
from async_rl.evaluation.service import EvaluationService
from async_rl.observability.metrics import Metrics
from async_rl.observability.page.view import TRAINING
from async_rl.rollout.manager import RolloutManager
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.workers.backend_choice import choose_backend
from async_rl.run import checkpoints as checkpoint_files
from async_rl.run.captures import Captures
from async_rl.run.checkpoints import Checkpoints, can_write_after
from async_rl.run.cluster import Cluster
from async_rl.run.device_sharing import Devices
from async_rl.run.inputs import RunInputs
from async_rl.run.recovery import RecoveredState, RestoredProgress, restore_progress
from async_rl.run.run_log import RunLogger
from async_rl.run.train_loop import TrainLoop, choose_train_loop
from async_rl.run.trainer_restarts import TrainerHandle
from async_rl.runtime.supervision import cut_by
from async_rl.runtime.waits import waiting
from async_rl.store.journal_folders import OtherNodes
from async_rl.trainer_protocol import Trainer
from async_rl.weights.checksums import ChecksumComparison
from async_rl.weights.weight_sync import WeightSync

log = logging.getLogger(__name__)


class RunParts(NamedTuple):
    """The parts of a run that outlast the incarnations of its trainer."""

    config: Config
    directory: Path
    """The run's folder."""
    stop: asyncio.Event
    """Set by the first signal."""
    cluster: Cluster
    metrics: Metrics
    clock: Callable[[], float]
    """Monotonic seconds."""
    inputs: RunInputs
    pool: EnginePool
    models: Mapping[str, EnginePool]
    """The engines of further models, by the model's name."""
    devices: Devices
    run_log: RunLogger
    checksums: ChecksumComparison
    """Kept when the trainer is restarted: engines may have other weights than its first ones then."""

    def until_cut(self, generation: int) -> AbstractAsyncContextManager[object]:
        """Let a signal that ends a start end the block, too; the start of later trainers is not cut."""
        return cut_by(self.stop) if generation == 0 else nullcontext()


class Incarnation(NamedTuple):
    """The components that are built anew each time the trainer starts."""

    run: RunParts
    generation: int
    """How many trainers failed before in this process."""
    trainer: Trainer
    sync: WeightSync
    recovered: RecoveredState
    manager: RolloutManager
    checkpoints: Checkpoints
    loop: TrainLoop
    evaluation: EvaluationService | None

    @property
    def evaluations(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """The loop that evaluates, if the config asks for it."""
        return {} if self.evaluation is None else {"evaluation": self.evaluation.run_evaluations}

    async def train_to_end(self) -> float:
        """Train to the end, drain, save and export; return the time at which the last step ended."""
        run, loop, devices = self.run, self.loop, self.run.devices
        run.run_log.enter_phase("bringing engines to the trainer's weights")
        with waiting("weight update", str(loop.step)):
            path = Path(run.config.model.path) if loop.step == 0 else None
            async with run.until_cut(self.generation):
                await devices.start_engines(self.sync, self.trainer, loop.step, path)
        run.run_log.begin_training(loop.step)
        run.run_log.enter_phase(TRAINING)
        await loop.run()
        if self.evaluation is not None and not run.stop.is_set():
            run.run_log.enter_phase("evaluating the last version")
            await self.evaluation.finish_evaluations(loop.step)
        if run.stop.is_set():
            run.run_log.enter_phase("draining")
            await self._drain()
        ended_s = run.clock()
        run.run_log.enter_phase("writing the checkpoint and the Hugging Face export")
        self.recovered.queue.stop()
        await devices.hand_to_trainer(self.trainer)
        await self.checkpoints.write_last_checkpoint(loop.step)
        with waiting("export"):
            await self.trainer.publish(str(run.directory / "hf"), loop.step)
        await self.sync.close()
        await self.trainer.close()
        return ended_s

    async def stop_when_asked(self) -> None:
        """Start no new work after the first signal; never returns."""
        await self.run.stop.wait()
        drain_s = self.run.config.run.drain_s
        log.info("stopping: no new work; running trajectories have run.drain_s = %s", drain_s)
        self.run.run_log.enter_phase("stopping: running work ends, then a checkpoint is written")
        self.recovered.queue.stop()
        if self.evaluation is not None:
            self.evaluation.cancel_evaluations()
        await asyncio.Future()

    async def _drain(self) -> None:
        """Let running trajectories finish for up to `run.drain_s`."""
        try:
            async with asyncio.timeout(self.run.config.run.drain_s), waiting("drain"):
                await self.manager.drained.wait()
        except TimeoutError:
            log.warning("some trajectories still run after run.drain_s; they continue when the run resumes")

    async def save_before_error(self, error: BaseException, *, trainer_failed: bool) -> None:
        """Write a checkpoint of the last step before the run ends with an error, if the trainer still can.

        Steps since the last checkpoint are lost only if the trainer itself failed.
        """
        loop = self.loop
        lost = loop.unsettled or trainer_failed or not can_write_after(error)
        if loop.step > self.checkpoints.step and not lost:
            self.run.run_log.enter_phase("writing a checkpoint before the run ends with an error")
            await self.run.devices.hand_to_trainer(self.trainer)
            await self.checkpoints.write_last_checkpoint(loop.step)


async def restore(run: RunParts, step: int) -> RestoredProgress:
    """Restore how far trajectories were at the checkpoint of a step."""
    return await restore_progress(
        run.config.queue,
        run.directory,
        step,
        run.metrics,
        run.run_log.enter_phase,
        node=run.cluster.node,
        others=OtherNodes(run.cluster.other_nodes, run.cluster.open_frame_reader),
    )


def build_incarnation(
    run: RunParts,
    trainer_handle: TrainerHandle,
    progress: RestoredProgress,
    *,
    generation: int,
    failed_checkpoints: int,
) -> Incarnation:
    """Build the components that depend on the trainer's step from the state in the run's folder.

    Args:
        run: What outlasts the incarnation.
        trainer_handle: The trainer.
        progress: How far trajectories were, from `restore`.
        generation: How many trainers failed before in this process.
        failed_checkpoints: How many checkpoints failed before in this process.
    """
    config, inputs, metrics, clock = run.config, run.inputs, run.metrics, run.clock
    trainer, step = trainer_handle
    sync = _weight_sync(run, trainer, generation)
    recovered = RecoveredState(
        config,
        progress,
        run.directory,
        inputs.tasks,
        inputs.facts,
        metrics,
        clock,
        trainer.read_batch,
        open_reader=run.cluster.open_frame_reader,
    )
    queue = recovered.queue
    context = SessionContext(
        chat=inputs.chat,
        config=config,
        metrics=metrics,
        clock=clock,
        serving_clock=run.pool.own.serving_clock,
        calls=run.pool.dispatcher,
        facts=inputs.facts,
        new_id=inputs.new_id,
        models={name: pool.dispatcher for name, pool in run.models.items()},
    )
    manager = RolloutManager(
        context,
        feeder=recovered.feeder,
        pool=run.pool,
        queue=queue,
        backend=choose_backend(
            context,
            run.pool,
            recovered.spool,
            run.cluster.rollout_worker,
            inspected=None if recovered.archive is None else recovered.archive.inspected,
            journal=recovered.journal,
            journals=recovered.journals,
            models=run.models,
        ),
        journals=recovered.journals,
        journalled=recovered.journalled,
        observer=recovered.archive,
        warn=run.run_log.warn,
    )
    directory = run.directory / checkpoint_files.FOLDER
    best = BestCheckpointFile(config.trainer.keep_best, directory, lambda: run.run_log.evaluations)
    evaluation = _evaluation(run, sync, context, step, best) if inputs.validation else None
    checkpoints = Checkpoints(
        config.trainer,
        run.directory,
        trainer,
        recovered.groups,
        metrics,
        run.run_log.write_held_steps,
        step=step,
        num_failed=failed_checkpoints,
        best=best,
        **({} if evaluation is None else {"evaluates": evaluation.evaluates}),
    )
    captures = Captures(config, run.directory, step)
    loop = choose_train_loop(config)(
        config, run.stop, trainer, queue, sync, run.devices, checkpoints, captures, run.run_log
    )
    return Incarnation(run, generation, trainer, sync, recovered, manager, checkpoints, loop, evaluation)


def _weight_sync(run: RunParts, trainer: Trainer, generation: int) -> WeightSync:
    return WeightSync(
        run.config,
        pool=run.pool,
        trainer=trainer,
        routes=run.cluster,
        directory=run.directory / "weights",
        metrics=run.metrics,
        clock=run.clock,
        generation=generation,
        comparison=run.checksums,
    )


def _evaluation(
    run: RunParts, sync: WeightSync, context: SessionContext, step: int, best: BestCheckpointFile
) -> EvaluationService:
    evaluator = Evaluator(
        context,
        run.inputs.validation,
        open_worker=run.cluster.rollout_worker,
        completions=run.directory / evaluation_service.FOLDER / "completions",
        models=run.models,
    )
    return EvaluationService(
        run.directory,
        run.pool,
        sync.catch_up.take_back_engine,
        evaluator,
        step=step,
        log_evaluation=run.run_log.log_evaluation,
        clock=run.clock,
        best=best,
        phases=run.devices.phases,
    )
