"""Checkpoints, written beside the training one at a time; the ledger is told of each when it is whole."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from async_rl.config import TrainerConfig
from async_rl.errors import CheckpointError, StallError, TrainerError
from async_rl.observability.metrics import Metrics
from async_rl.queue.trajectory_queue import TrajectoryQueue
from async_rl.runtime.waits import waiting
from async_rl.trainer_protocol import Trainer

log = logging.getLogger(__name__)

FOLDER: Final = "checkpoints"
"""In the run's folder."""

_TRAINER_WAITS: Final = frozenset(
    {"trainer start", "trainer step", "checkpoint", "snapshot", "publish", "send weights", "export"}
)
"""Waits for the trainer: when one stalls the run, no checkpoint can be had."""


class Checkpoints:
    """Those of one trainer, up to its end.

    Invariant: `step` is the newest one that the ledger knows of.

    Example:
        >>> checkpoints = Checkpoints(config.trainer, run_dir, trainer, queue, metrics, step=4)
        >>> if checkpoints.due(8): await checkpoints.begin(8)
        >>> await checkpoints.look()  # now and then
        >>> await checkpoints.last(9)
    """

    def __init__(
        self,
        config: TrainerConfig,
        run_dir: Path,
        trainer: Trainer,
        queue: TrajectoryQueue,
        metrics: Metrics,
        *,
        step: int,
        failed: int = 0,
    ) -> None:
        """Nothing is written yet.

        Args:
            config: When they are due, how many are kept, how many may fail.
            run_dir: Of the run.
            trainer: Who writes them.
            queue: Whose ledger is told.
            metrics: Of the run.
            step: Of the one that the trainer has come up at.
            failed: How many had failed in a row when the trainer before it ended.
        """
        self._config = config
        self._directory = str(run_dir / FOLDER)
        self._trainer = trainer
        self._queue = queue
        self._metrics = metrics
        self.step = step
        """Of the newest one that stands on the disk."""
        self.failed = failed
        """In a row."""
        self._writing: int | None = None
        """The step whose checkpoint is being written."""

    def due(self, step: int) -> bool:
        """Whether one is to be written after this step."""
        every = self._config.checkpoint_every
        return bool(every) and step % every == 0

    async def begin(self, step: int) -> None:
        """Begin one of the step that the ledger has settled last; the one before is waited for.

        Raises:
            CheckpointError: When the one before failed, and was one too many in a row.
        """
        await self._note(wait=True)
        with waiting("checkpoint"):
            await self._trainer.save_checkpoint(self._directory, {"weight_version": step})
        self._writing = step

    async def look(self) -> None:
        """Take note of one that is whole by now, or has failed.

        Raises:
            CheckpointError: When it was one too many in a row.
        """
        await self._note(wait=False)

    async def last(self, step: int) -> None:
        """Leave one of the last step, whole.

        Raises:
            CheckpointError: When it cannot be written.
        """
        await self._note(wait=True)
        if self.step < step:
            await self.begin(step)
            await self._note(wait=True, last=True)

    async def _note(self, *, wait: bool, last: bool = False) -> None:
        """Tell the ledger of one that stands by now; one that failed is tried again in its turn."""
        if self._writing is None:
            return
        with waiting("checkpoint"):
            saved = await self._trainer.saved_checkpoint(wait)
        if saved.writing:
            return
        step, self._writing = self._writing, None
        if saved.failure is None:
            self.step, self.failed = step, 0
            self._metrics.observe_checkpoint(step, saved.pause_s, saved.write_s)
            self._queue.committed(step, keep=self._config.keep_checkpoints)
            return
        self.failed += 1
        self._metrics.checkpoint_failures_total.inc()
        limit = self._config.max_failed_checkpoints
        if last or self.failed > limit:
            raise CheckpointError(
                f"{saved.failure}; it is the {self.failed}. in a row "
                f"(trainer.max_failed_checkpoints is {limit})"
            )
        log.warning("%s; training goes on, the newest checkpoint is of step %d", saved.failure, self.step)


def can_follow(error: BaseException) -> bool:
    """Whether an error that ends the run leaves a trainer that can write one."""
    if isinstance(error, StallError):
        return error.on not in _TRAINER_WAITS
    return not isinstance(error, TrainerError)
