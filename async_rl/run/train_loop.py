"""The train loop: take a batch, train on it, settle it, update the engines' weights, record the step.

This order makes the staleness bound hard: a batch is taken at version n, and new groups are admitted only
when the engines serve version n+1, so that no group is stale when it starts. Three strategies order the work
of a step differently; `choose_train_loop` selects one from the config.

```
 sequential    train ─► update engines ─► checkpoint
 overlapped    train ─► copy weights ─► next step          (weights.overlap)
                           └─► send them to the engines
 time-shared   engines sample ─► trainer trains all ready batches ─► update engines    (placement.shared)
```

While the overlapped strategy sends weights, admission counts with the version that the engines serve, which
is one version behind the trainer. So it does between two updates where engines take only every so manyth
version (`weights.every`); they always take the last one of the run.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod

import numpy as np

from async_rl.config import Config
from async_rl.errors import NonFiniteLoss, TrainerError
from async_rl.run.captures import Captures
from async_rl.run.checkpoints import Checkpoints
from async_rl.run.device_sharing import Devices
from async_rl.run.engine_comparison import EngineComparison
from async_rl.run.run_log import RunLogger, TrainedStep
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import progressed, waiting
from async_rl.store.trajectory_queue import TrajectoryQueue
from async_rl.trainer_protocol import StepResult, Trainer
from async_rl.types import TakenBatch
from async_rl.weights.weight_sync import SyncReport, WeightSync


class TrainLoop(ABC):
    """Trains one incarnation of the trainer, step by step, until the run ends.

    Invariant: `step` is the last step that the ledger has settled.
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
        captures: Captures,
        run_log: RunLogger,
    ) -> None:
        """Connect the components.

        Args:
            config: The run's config.
            stop: Set when the run is to end: the current step is the last one.
            trainer: A trainer that has finished its setup.
            queue: Provides batches, and is notified of what was trained.
            sync: Updates the engines' weights.
            devices: Hands the devices over between trainer and engines, if they share them.
            checkpoints: The checkpoints of this trainer; training continues from their `step`.
            captures: Keeps batches, and captures steps that fail or stand out.
            run_log: Records steps.
        """
        self._max_steps = config.run.max_steps
        self._comparison = EngineComparison(config)
        self._stop = stop
        self._trainer = trainer
        self._queue = queue
        self._sync = sync
        self._devices = devices
        self._checkpoints = checkpoints
        self._captures = captures
        self._run_log = run_log
        self._clock = queue.groups.clock
        self.step = checkpoints.step
        self._sent_step = checkpoints.step
        """The last step whose weights are, or are being, brought to the engines."""
        self._update_every = config.weights.every
        self.unsettled = False
        """Whether the trainer may hold a step that the ledger does not: a checkpoint would claim it."""

    async def run(self) -> None:
        """Train until `run.max_steps`, a stop, or the end of the data.

        Raises:
            AsyncRLError: From the trainer, the weight update or a checkpoint, bare or in an exception group.
        """
        while self._may_train():
            wait_begin = self._clock()
            batch = await self._next_batch()
            if batch is None:
                break
            await self._run_step(batch, self._clock() - wait_begin)
        if self._sent_step < self.step:
            await self._send_last_version()

    async def _send_last_version(self) -> None:
        """Bring the weights of the last step to the engines."""
        async with self._sync.exclusive_trainer():
            await self._sync.update_engines(self.step)

    def _may_train(self) -> bool:
        return self.step < self._max_steps and not self._stop.is_set()

    async def _next_batch(self) -> TakenBatch | None:
        """Wait for a batch; None at the end of the data."""
        return await self._queue.next_batch(self.step)

    @abstractmethod
    async def _run_step(self, batch: TakenBatch, wait_s: float) -> None:
        """Train on a batch and bring the new weights to the engines, in the order of the strategy."""

    async def _train(self, batch: TakenBatch, wait_s: float) -> TrainedStep:
        """Train on a batch and settle it."""
        begin, step = self._clock(), self.step + 1
        self.unsettled = True
        try:
            result = await self._train_batch(self._captures.keep_batch(batch, step), step)
            _require_finite(result)
            self._comparison.observe_step(result)
        except TrainerError as error:
            await self._captures.capture_step(step, f"it failed: {error}")
            raise
        cancelled = await self._queue.settle_batch(batch, step)
        self.step, self.unsettled = step, False
        progressed()
        now = self._clock()
        done = TrainedStep(
            batch=batch,
            result=result,
            wait_s=wait_s,
            step_s=now - begin,
            sync_hidden_s=self._sync_hidden_s(begin, now),
        )
        self._run_log.hold_step(done, self._queue)
        if cancelled is not None:
            raise cancelled
        await self._captures.observe_step(result, self._checkpoints.step)
        return done

    def _sync_hidden_s(self, begin: float, end: float) -> float:
        """Seconds between two times during which the weights of the step before were still being sent."""
        return 0.0

    async def _train_batch(self, batch: TakenBatch, step: int) -> StepResult:
        """Run one trainer step. The trainer bounds its duration; the scope lets the stall doctor end it."""
        await self._checkpoints.poll_saved()
        try:
            async with (
                asyncio.timeout(None) as scope,
                waiting("trainer step", str(step), scope=scope) as wait,
            ):
                return await self._trainer.train_step(batch, step)
        except TimeoutError as error:
            if not wait.cut:
                raise
            raise TrainerError(
                f"trainer step {step} took far longer than any before: ended by the stall doctor"
            ) from error

    @property
    def _update_is_due(self) -> bool:
        """Whether the engines take the weights of this step."""
        return self.step - self._sent_step >= self._update_every or not self._may_train()

    async def _skip_update(self, done: TrainedStep) -> None:
        """Record a step whose weights the engines do not take."""
        await self._run_log.log_step(done, SyncReport(weight_version=done.result.step), self._queue)

    async def _update_engines(self, done: TrainedStep) -> None:
        """Bring the weights of a step to the engines, admit new groups, and record the step."""
        step = self._sent_step = done.result.step
        with waiting("weight update", str(step)):
            report = await self._devices.hand_to_engines(self._sync, self._trainer, step)
        await self._finish_step(done, report)

    async def _finish_step(self, done: TrainedStep, report: SyncReport) -> None:
        """Admit new groups to the version that the engines now serve, and record the step."""
        self._queue.advance_version(done.result.step)
        await self._run_log.log_step(done, report, self._queue)


class SequentialLoop(TrainLoop):
    """Updates the engines after each step, before the next one starts."""

    async def _run_step(self, batch: TakenBatch, wait_s: float) -> None:
        async with self._sync.exclusive_trainer():
            if self._sync.current_version > self._sent_step:  # an engine needed the trainer's weights
                self._sent_step = self._sync.current_version
                self._queue.advance_version(self._sent_step)
            done = await self._train(batch, wait_s)
            self._sync.trainer_version = self.step
            if updated := self._update_is_due:
                await self._update_engines(done)
            else:
                await self._skip_update(done)
        if self._checkpoints.is_due(self.step, served=updated):
            await self._checkpoints.start_checkpoint(self.step)


class OverlappedLoop(TrainLoop):
    """Copies the weights of a step, and sends the copy to the engines while the next step runs.

    Invariant: the update of a step ends before the update of the next one starts.
    """

    _updates: Nursery
    _update: asyncio.Future[None]
    """The last one; records are written in its order."""
    _last_update_end_s = -math.inf
    """On the clock; infinite during an update."""

    async def run(self) -> None:
        """Train as `TrainLoop.run` does; the updates run in a nursery of their own."""
        self._update = asyncio.get_running_loop().create_future()
        self._update.set_result(None)
        async with Nursery() as self._updates:
            await super().run()

    async def _send_last_version(self) -> None:
        await self._sync.update_from_snapshot(self.step, asyncio.Event())

    async def _skip_after(self, before: asyncio.Future[None], done: TrainedStep) -> None:
        await before
        await self._skip_update(done)

    async def _run_step(self, batch: TakenBatch, wait_s: float) -> None:
        async with self._sync.exclusive_trainer():
            done = await self._train(batch, wait_s)
            if updated := self._update_is_due:
                self._last_update_end_s = math.inf
                self._sent_step = self.step
                copied = asyncio.Event()
                self._update = self._updates.start_task(
                    f"weight sync {self.step}", self._hand_over(done, copied)
                )
                await copied.wait()
            else:
                self._update = self._updates.start_task(
                    f"record {self.step}", self._skip_after(self._update, done)
                )
        if self._checkpoints.is_due(self.step, served=updated):
            await self._update  # metrics.jsonl must have the record of each step that a checkpoint holds
            await self._checkpoints.start_checkpoint(self.step)

    async def _hand_over(self, done: TrainedStep, copied: asyncio.Event) -> None:
        """Copy the weights of a step, set `copied`, and send the copy to the engines."""
        step = done.result.step
        with waiting("weight update", str(step)):
            report = await self._sync.update_from_snapshot(step, copied)
        self._last_update_end_s = self._clock()
        await self._finish_step(done, report)

    def _sync_hidden_s(self, begin: float, end: float) -> float:
        return max(0.0, min(end, self._last_update_end_s) - begin)


class TimeSharedLoop(TrainLoop):
    """Alternates with the engines on the same devices.

    Once the trainer holds the devices it trains on every batch that is ready. When no batch is left, the
    engines get the devices back, with the weights of the last step. So they do, without a step, when none
    serves and only the trainer has the weights that one waits for.
    """

    _ready_batch: TakenBatch | None = None
    """The next batch, if one was ready when the step before ended."""

    async def run(self) -> None:
        """Train as `TrainLoop.run` does."""
        async with Nursery() as nursery:
            feeding = nursery.start_task("starved engines", self._feed_engines())
            await super().run()
            async with self._sync.exclusive_trainer():  # not in the middle of a hand-over
                feeding.cancel()

    async def _feed_engines(self) -> None:
        """Bring the current weights to the engines whenever they are starved."""
        while True:
            await self._devices.wait_until_starved(self._sync)
            async with self._sync.exclusive_trainer():
                if self._devices.are_starved(self._sync):
                    await self._devices.hand_to_trainer(self._trainer)
                    await self._devices.hand_to_engines(self._sync, self._trainer, self.step)

    def _may_train(self) -> bool:
        return self.step < self._max_steps and (self._ready_batch is not None or not self._stop.is_set())

    async def _next_batch(self) -> TakenBatch | None:
        return self._ready_batch or await super()._next_batch()

    async def _run_step(self, batch: TakenBatch, wait_s: float) -> None:
        async with self._sync.exclusive_trainer():
            await self._devices.hand_to_trainer(self._trainer)
            done = await self._train(batch, wait_s)
            # While the state is on the device, from where it is copied.
            if saved := self._checkpoints.is_due(self.step):
                await self._checkpoints.start_checkpoint(self.step)
            self._ready_batch = None
            if self.step < self._max_steps:
                self._ready_batch = await self._queue.next_batch(self.step, wait=False)
            if self._ready_batch is None:
                if not saved and self._checkpoints.is_due(self.step, served=True):
                    await self._checkpoints.start_checkpoint(self.step)
                await self._update_engines(done)
            else:
                await self._run_log.log_step(done, SyncReport(weight_version=self.step), self._queue)


def choose_train_loop(config: Config) -> type[TrainLoop]:
    """Return the strategy that a config asks for; the config allows one of the two settings at most."""
    if config.placement.shared:
        return TimeSharedLoop
    return OverlappedLoop if config.weights.overlap else SequentialLoop


def _require_finite(result: StepResult) -> None:
    """Check that a step has not ruined the weights.

    Raises:
        NonFiniteLoss: The loss or the norm of the gradient is not a finite number.
    """
    if result.metrics.get("updates_skipped"):
        return  # the trainer itself reports too many skipped updates
    measured = ("loss", "grad_norm") if result.metrics.get("updates", 1) else ("loss",)  # a critic's warm-up
    for name in measured:
        value = result.metrics[name]
        if not np.isfinite(value):
            raise NonFiniteLoss(
                f"step {result.step}: {name} is {value}, expected a finite number: lower "
                "trainer.optimizer.lr, or look at importance_ratio_mean in metrics.jsonl"
            )
