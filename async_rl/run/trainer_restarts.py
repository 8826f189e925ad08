"""Starts the trainer from its newest checkpoint, at the start of a run and after each failure."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

from async_rl.engines.pool import EnginePool, EngineState
from async_rl.errors import AsyncRLError, EnvironmentNotReady, TrainerError
from async_rl.observability.metrics import Metrics
from async_rl.run import checkpoints
from async_rl.run.cluster import Cluster
from async_rl.run.device_sharing import Devices
from async_rl.run.run_engines import RunEngines
from async_rl.run.run_log import RunLogger
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import waiting
from async_rl.trainer_protocol import Trainer

log = logging.getLogger(__name__)


class TrainerHandle(NamedTuple):
    """A trainer that has finished its setup."""

    trainer: Trainer
    step: int
    """The step of the checkpoint that it started from; 0 without one."""


class TrainerRestarts:
    """Starts and restarts the trainer, up to `trainer.max_restarts` times."""

    def __init__(
        self,
        cluster: Cluster,
        run_dir: Path,
        pool: EnginePool,
        devices: Devices,
        run_log: RunLogger,
        metrics: Metrics,
        *,
        max_restarts: int,
    ) -> None:
        """Start nothing yet.

        Args:
            cluster: Starts the trainer's ranks.
            run_dir: The run's folder, which holds the checkpoints.
            pool: The engines of the run.
            devices: Frees the devices for the trainer, if the engines share them.
            run_log: Loads the records of the steps up to the checkpoint.
            metrics: The metrics of the run.
            max_restarts: How often this process may restart the trainer.
        """
        self._cluster = cluster
        self._checkpoints = str(run_dir / checkpoints.FOLDER)
        self._pool = pool
        self._devices = devices
        self._run_log = run_log
        self._metrics = metrics
        self._max_restarts = max_restarts
        self.failures = 0
        """Failures of the trainer since this driver process started."""

    async def start_first_trainer(self, engines: RunEngines) -> TrainerHandle:
        """Start engines and trainer at the same time, or one after the other on shared devices.

        Raises:
            EnvironmentNotReady: An engine or a rank does not start.
            TrainerError: A rank fails during its setup.
        """
        if self._devices.shared:
            for frozen in engines.frozen:
                await frozen.start_engines()
            await engines.start_engines()
            await self._devices.clear_devices()
            return await self.start_trainer()
        # Groups of ranks want nodes of their own; engines take what is left.
        await self._cluster.place_trainer()
        async with Nursery() as nursery:
            for frozen in engines.frozen:
                nursery.start_task(f"engines of {frozen.name}", frozen.start_engines())
            nursery.start_task("engines", engines.start_engines())
            starting_trainer = nursery.start_task("trainer", self.start_trainer())
        return starting_trainer.result()

    async def start_trainer(self) -> TrainerHandle:
        """Start all ranks from the newest checkpoint, and load the records of the steps before it.

        Raises:
            EnvironmentNotReady: The ranks do not start.
            TrainerError: A rank fails during its setup.
        """
        with waiting("trainer start"):
            trainer = await self._cluster.start_trainer()
            state = await trainer.setup(self._checkpoints)
        for flaw in state.skipped_checkpoints:
            self._run_log.warn(f"a newer checkpoint is skipped: {flaw}")
        await self._run_log.load_records_until(state.step)
        if state.step or state.skipped_checkpoints:
            self._run_log.enter_phase(f"continuing from step {state.step}")
        return TrainerHandle(trainer, state.step)

    async def restart_trainer(self, cause: AsyncRLError) -> TrainerHandle:
        """Restart the trainer after a failure; if that fails too, try again up to `trainer.max_restarts`.

        Raises:
            TrainerError: The trainer failed more often than `trainer.max_restarts`.
        """
        trainer_handle = None
        while trainer_handle is None:
            self.failures += 1
            if self.failures > self._max_restarts:
                raise TrainerError(
                    f"the trainer failed {self.failures} times, trainer.max_restarts is "
                    f"{self._max_restarts}; the last cause: {cause}"
                ) from cause
            log.warning("restart %d of %d of the trainer: %s", self.failures, self._max_restarts, cause)
            self._metrics.trainer_restarts_total.inc()
            self._run_log.enter_phase("restarting the trainer from its newest checkpoint")
            try:
                await self._devices.clear_devices()
                trainer_handle = await self.start_trainer()
            except (TrainerError, EnvironmentNotReady) as error:
                cause = error
        # No engine serves again before it has the checkpoint's weights.
        for engine in self._pool.engines(EngineState.SERVING, EngineState.UPDATING, EngineState.EVALUATING):
            self._pool.rejoin_engine(engine.engine_id)
        return trainer_handle
