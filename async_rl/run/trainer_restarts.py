"""Bringing the trainer up: from its newest checkpoint, at first and each time after it has failed."""

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
from async_rl.run.run_log import RunLogger
from async_rl.runtime.waits import waiting
from async_rl.trainer_protocol import Trainer

log = logging.getLogger(__name__)


class TrainerHandle(NamedTuple):
    """What a life begins with."""

    trainer: Trainer
    step: int
    """Of the checkpoint that it has come up at; 0 without one."""


class TrainerRestarts:
    """See the module.

    Example:
        >>> starts = TrainerRestarts(cluster, run_dir, pool, devices, run_log, metrics, max_restarts=3)
        >>> trainer_handle = await starts.first()
        >>> trainer_handle = await starts.again(cause=error)
    """

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
        """Start nothing yet."""
        self._cluster = cluster
        self._checkpoints = str(run_dir / checkpoints.FOLDER)
        self._pool = pool
        self._devices = devices
        self._run_log = run_log
        self._metrics = metrics
        self._max_restarts = max_restarts
        self.failures = 0
        """Of the trainer, in the life of this driver."""

    async def first(self) -> TrainerHandle:
        """Start all ranks from the newest checkpoint, and take up the records of the steps before it.

        Raises:
            EnvironmentNotReady: When they do not come up.
            TrainerError: When a rank fails in it.
        """
        with waiting("trainer start"):
            trainer = await self._cluster.start_trainer()
            state = await trainer.setup(self._checkpoints)
        for flaw in state.passed_over:
            log.warning("a newer checkpoint is passed over: %s", flaw)
        self._run_log.back_to(state.step)
        return TrainerHandle(trainer, state.step)

    async def again(self, cause: AsyncRLError) -> TrainerHandle:
        """Start the trainer again, as often as `trainer.max_restarts` allows.

        Raises:
            TrainerError: When it failed once more than that.
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
            self._run_log.enter("restarting the trainer from its newest checkpoint")
            try:
                await self._devices.clear_devices()
                trainer_handle = await self.first()
            except (TrainerError, EnvironmentNotReady) as error:
                cause = error
        log.info("the trainer is back at step %d", trainer_handle.step)
        # All engines are to serve the checkpoint's weights; until they do they serve nobody.
        lent = EngineState.EVALUATING
        for engine in self._pool.engines(EngineState.SERVING, EngineState.UPDATING, lent):
            self._pool.rejoin_engine(engine.engine_id)
        return trainer_handle
