"""The trainer's loop: take a batch, train, settle it, sync the weights, let new groups in, write it down.

That order keeps the bound on staleness hard: a batch is taken at version n, and only when n+1 is on the
engines are new groups let in, so that none is born stale. With `weights.overlap` the next step may begin
meanwhile: admission counts what the engines serve then, one version less.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import numpy as np

from async_rl.config import Config
from async_rl.errors import NonFiniteLoss, TrainerError
from async_rl.queue.packing import TakenBatch
from async_rl.queue.trajectory_queue import TrajectoryQueue
from async_rl.run.checkpoints import Checkpoints
from async_rl.run.device_sharing import Devices
from async_rl.run.run_log import RunLogger
from async_rl.run.step_record import StepDone
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import progressed, waiting
from async_rl.trainer_protocol import StepResult, Trainer
from async_rl.weights.weight_sync import SyncReport, WeightSync


class TrainLoop:
    """The loop of one life of a run.

    Invariant: `step` is the one that the ledger has settled last.

    Example:
        >>> loop = TrainLoop(config, stop, trainer, queue, sync, devices, checkpoints, run_log, clock)
        >>> await loop.run()
        >>> loop.step
    """

    def __init__(
        self,
        config: Config,
        stop: asyncio.Event,
        trainer: Trainer,
        queue: TrajectoryQueue,
        sync: WeightSync,
        devices: Devices,
        checkpoints: Checkpoints,
        run_log: RunLogger,
        clock: Callable[[], float],
    ) -> None:
        """Wire the parts.

        Args:
            config: Of the run.
            stop: Set when the run is to end: the step under way is the last.
            trainer: That has come up.
            queue: Where batches come from, and who is told what was trained.
            sync: Brings weights to the engines.
            devices: Whether trainer and engines take turns on them.
            checkpoints: Of this trainer; the step that it has come up at is theirs.
            run_log: Where steps are written down.
            clock: Monotonic seconds.
        """
        self._max_steps = config.run.max_steps
        self._overlap = config.weights.overlap
        self._stop = stop
        self._trainer = trainer
        self._queue = queue
        self._sync = sync
        self._devices = devices
        self._checkpoints = checkpoints
        self._run_log = run_log
        self._clock = clock
        self.step = checkpoints.step
        self.unsettled = False
        """Whether the trainer may hold a step that the ledger does not: a checkpoint would claim it."""
        self._synced_s = -math.inf
        """When the last sync ended; infinite while there is one."""

    async def run(self) -> None:
        """Go on until `run.max_steps`, a stop, or the end of the data.

        With `weights.overlap` the sync of a step runs beside the next one, and is over before that one's.

        Raises:
            AsyncRLError: Of the trainer, the weights or a checkpoint, inside an exception group or bare.
        """
        ahead: TakenBatch | None = None  # ready in the trainer's turn on shared devices
        shared = self._devices.shared
        async with Nursery() as syncs:
            while self.step < self._max_steps and (ahead is not None or not self._stop.is_set()):
                wait_begin = self._clock()
                batch = ahead or await self._queue.take(self.step)
                if batch is None:
                    break
                wait_s = self._clock() - wait_begin
                await self._devices.to_trainer(self._trainer)
                async with self._sync.training():
                    done = await self._train(batch, wait_s)
                    due = self._checkpoints.due(self.step)
                    if due and shared:  # while it has its state where it can be copied from
                        await self._checkpoints.begin(self.step)
                    ahead = None
                    if shared and self.step < self._max_steps:
                        ahead = await self._queue.take(self.step, wait=False)
                    if ahead is not None:
                        self._end(done, SyncReport.none(self.step))
                        continue
                    taken = asyncio.Event()
                    if not self._overlap:
                        await self._bring(done, taken)
                    else:
                        syncing = syncs.start_task(f"weight sync {self.step}", self._bring(done, taken))
                        await taken.wait()
                if due and not shared:
                    if self._overlap:
                        await syncing  # what a checkpoint has is written down in metrics.jsonl
                    await self._checkpoints.begin(self.step)

    async def _train(self, batch: TakenBatch, wait_s: float) -> StepDone:
        """Train on a batch, and settle it."""
        begin, step = self._clock(), self.step + 1
        self.unsettled = True
        result = await self._step_on(batch, step)
        _require_finite(result)
        self._queue.settle(batch, step)
        self.step, self.unsettled = step, False
        self._queue.published(step)
        progressed()
        now = self._clock()
        hidden_s = max(0.0, min(now, self._synced_s) - begin)
        self._synced_s = math.inf
        return StepDone(batch=batch, result=result, wait_s=wait_s, step_s=now - begin, sync_hidden_s=hidden_s)

    async def _step_on(self, batch: TakenBatch, step: int) -> StepResult:
        """One step; the trainer bounds it itself, this is for the doctor, who knows what is usual."""
        await self._checkpoints.look()
        try:
            async with (
                asyncio.timeout(None) as scope,
                waiting("trainer step", str(step), scope=scope) as wait,
            ):
                return await self._trainer.train_step(batch.path, step)
        except TimeoutError as error:
            if not wait.cut:
                raise
            raise TrainerError(
                f"trainer step {step} took far longer than any before: ended by the stall doctor"
            ) from error

    async def _bring(self, done: StepDone, taken: asyncio.Event) -> None:
        """Bring the weights of a step to the engines, let new groups in, and write the step down."""
        step = done.result.step
        with waiting("weight update", str(step)):
            if self._overlap:
                report = await self._sync.hand_over(step, taken)
            else:
                report = await self._devices.to_engines(self._sync, self._trainer, step)
        self._queue.advance(step)
        self._end(done, report)

    def _end(self, done: StepDone, report: SyncReport) -> None:
        """A step is done, and its weights have gone where they were to go."""
        self._synced_s = self._clock()
        self._run_log.step_done(done, report, self._queue)


def _require_finite(result: StepResult) -> None:
    """Refuse to go on from a step that has ruined the weights.

    Raises:
        NonFiniteLoss: With the remedy.
    """
    if result.metrics.get("updates_skipped"):
        return  # the trainer itself says when there were too many
    for name in ("loss", "grad_norm"):
        value = result.metrics[name]
        if not np.isfinite(value):
            raise NonFiniteLoss(
                f"step {result.step}: {name} is {value}, expected a finite number: lower "
                "trainer.optimizer.lr, or look at importance_ratio_mean in metrics.jsonl"
            )
