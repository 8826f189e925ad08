"""Builds what a trainer's incarnation consists of, from the parts that outlast it and the run's folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from async_rl.config import Config
from async_rl.engines.pool import EnginePool
from async_rl.evaluation import service as evaluation_service
from async_rl.evaluation.evaluator import Evaluator
from async_rl.evaluation.service import EvaluationService
from async_rl.observability.metrics import Metrics
from async_rl.rollout.manager import RolloutManager
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.workers.backend_choice import choose_backend
from async_rl.run.captures import Captures
from async_rl.run.checkpoints import Checkpoints
from async_rl.run.cluster import Cluster
from async_rl.run.device_sharing import Devices
from async_rl.run.inputs import RunInputs
from async_rl.run.recovery import RecoveredState, RestoredProgress, restore_progress
from async_rl.run.run_log import RunLogger
from async_rl.run.train_loop import TrainLoop, choose_train_loop
from async_rl.run.trainer_restarts import TrainerHandle
from async_rl.store.journal_folders import OtherNodes
from async_rl.trainer_protocol import Trainer
from async_rl.weights.checksums import ChecksumComparison
from async_rl.weights.weight_sync import WeightSync


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


class Incarnation(NamedTuple):
    """The components that are built anew each time the trainer starts."""

    trainer: Trainer
    sync: WeightSync
    recovered: RecoveredState
    manager: RolloutManager
    checkpoints: Checkpoints
    loop: TrainLoop
    evaluation: EvaluationService | None


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
        serving_clock=run.pool.serving_clock,
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
    checkpoints = Checkpoints(
        config.trainer,
        run.directory,
        trainer,
        recovered.groups,
        metrics,
        run.run_log.write_held_steps,
        step=step,
        num_failed=failed_checkpoints,
    )
    captures = Captures(config, run.directory, step)
    loop = choose_train_loop(config)(
        config, run.stop, trainer, queue, sync, run.devices, checkpoints, captures, run.run_log
    )
    evaluation = _evaluation(run, sync, context, step) if inputs.validation else None
    return Incarnation(trainer, sync, recovered, manager, checkpoints, loop, evaluation)


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


def _evaluation(run: RunParts, sync: WeightSync, context: SessionContext, step: int) -> EvaluationService:
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
        phases=run.devices.phases,
    )
