"""Writes checkpoints in the background, one at a time; the ledger learns of each one when it is complete."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

from async_rl.config import TrainerConfig
from async_rl.errors import CheckpointError, StallError, TrainerError
from async_rl.evaluation.best_checkpoint import BestCheckpointFile
from async_rl.observability.metrics import Metrics
from async_rl.runtime.threads import run_to_end
from async_rl.runtime.waits import waiting
from async_rl.store.outstanding import OutstandingGroups
from async_rl.trainer_protocol import Trainer

log = logging.getLogger(__name__)

FOLDER: Final = "checkpoints"
"""Subfolder of the run's folder."""

MAX_FAILED_CHECKPOINTS: Final = 3
"""Checkpoints that may fail in a row while training continues; one more ends the run: a disk that stays full
makes a later crash lose too many steps."""

_TRAINER_WAITS: Final = frozenset(
    {"trainer start", "frames", "trainer step", "checkpoint", "snapshot", "publish", "send weights", "export"}
)
"""Waits for the trainer: when one of them stalls the run, the trainer cannot write a checkpoint."""


class Checkpoints:
    """The checkpoints of one incarnation of the trainer.

    Invariant: `step` is the newest checkpoint that the ledger knows of.
    """

    def __init__(
        self,
        config: TrainerConfig,
        run_dir: Path,
        trainer: Trainer,
        groups: OutstandingGroups,
        metrics: Metrics,
        before_write: Callable[[], Awaitable[None]],
        *,
        step: int,
        num_failed: int = 0,
        best: BestCheckpointFile,
        evaluates: Callable[[int], bool] = lambda step: False,
    ) -> None:
        """Write nothing yet.

        Args:
            config: When checkpoints are due, how many are kept.
            run_dir: The run's folder.
            trainer: Writes the checkpoints.
            groups: Their ledger records each complete checkpoint.
            metrics: The metrics of the run.
            before_write: Called before a checkpoint is begun; writes what must be on disk with its step.
            step: The step of the checkpoint that the trainer started from; 0 without one.
            num_failed: Consecutive failures when the previous incarnation of the trainer ended.
            best: Tells the trainer which old checkpoint it keeps.
            evaluates: Whether the version of a step is evaluated, or will be as soon as engines serve it.
        """
        self._config = config
        self._directory = str(run_dir / FOLDER)
        self._trainer = trainer
        self._groups = groups
        self._metrics = metrics
        self._before_write = before_write
        self.step = step
        """The step of the newest complete checkpoint on disk."""
        metrics.checkpoint_step.set(step)
        self._best = best
        self._evaluates = evaluates
        self.num_failed = num_failed
        """Consecutive failures."""
        self._writing: int | None = None
        """The step whose checkpoint is being written."""

    def is_due(self, step: int, *, served: bool = False) -> bool:
        """Whether the config asks for a checkpoint after this step.

        Args:
            step: The step.
            served: Whether engines have its weights, or get them next: then they may be evaluated.
        """
        every = self._config.checkpoint_every
        if every and step % every == 0:
            return True
        return served and self._best.metric is not None and self._evaluates(step)

    async def start_checkpoint(self, step: int) -> None:
        """Start to write the step that the ledger settled last, after the previous checkpoint is complete.

        Raises:
            CheckpointError: The previous one failed, and too many have failed in a row.
            AsyncRLError: Another driver has written the ledger since.
        """
        await self._settle_saved(wait=True)
        await self._before_write()
        with waiting("checkpoint"):
            # The checkpoints of another driver are not overwritten.
            await run_to_end(partial(self._groups.flush_ledger, durable=True))
            await run_to_end(self._best.write)
            await self._trainer.save_checkpoint(self._directory, {"weight_version": step})
        self._writing = step

    async def poll_saved(self) -> None:
        """Record a checkpoint that has been completed or has failed since the last call.

        Raises:
            CheckpointError: Too many checkpoints have failed in a row.
        """
        await self._settle_saved(wait=False)

    async def write_last_checkpoint(self, step: int) -> None:
        """Make sure that there is a complete checkpoint of the last step.

        Raises:
            CheckpointError: It cannot be written.
        """
        await self._settle_saved(wait=True)
        if self.step < step:
            await self.start_checkpoint(step)
            await self._settle_saved(wait=True, last=True)

    async def _settle_saved(self, *, wait: bool, last: bool = False) -> None:
        """Notify the ledger of a completed checkpoint. After a failure training continues to the next one."""
        if self._writing is None:
            return
        with waiting("checkpoint"):
            saved = await self._trainer.saved_checkpoint(wait)
        if saved.writing:
            return
        step, self._writing = self._writing, None
        if saved.failure is None:
            self.step, self.num_failed = step, 0
            self._metrics.observe_checkpoint(step, saved.pause_s, saved.write_s)
            self._groups.ledger.record_checkpoint(step, keep=self._config.keep_checkpoints)
            await run_to_end(self._best.write)
            return
        self.num_failed += 1
        self._metrics.checkpoint_failures_total.inc()
        if last or self.num_failed > MAX_FAILED_CHECKPOINTS:
            raise CheckpointError(
                f"{saved.failure}; {self.num_failed} checkpoints have failed in a row "
                f"(at most {MAX_FAILED_CHECKPOINTS} may)"
            )
        log.warning("%s; training continues; the newest checkpoint is of step %d", saved.failure, self.step)


def can_write_after(error: BaseException) -> bool:
    """Whether the trainer can still write a checkpoint after an error that ends the run."""
    if isinstance(error, StallError):
        return error.on not in _TRAINER_WAITS
    return not isinstance(error, TrainerError)
