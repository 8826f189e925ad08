"""Supervised training on the trainer's own model: one rank of `async-rl sft`.

The loss of a step is the mean negative log-prob of its trained tokens over all ranks and micro-batches, so
that it does not depend on how the batch was split. The model routes experts natively.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch

from async_rl.sft.schedule import SftBatch
from async_rl.trainer_protocol import StepResult
from trainer.megatron.packing import make_targets
from trainer.worker import TrainerWorker


class SftWorker(TrainerWorker):
    """Implements a rank of `async_rl.trainer_protocol.Trainer` for batches of type `SftBatch`."""

    @property
    def syncs_adapter(self) -> bool:
        """What is published is a model of its own, with adapters merged into it."""
        return False

    def train_step(self, batch: SftBatch, step: int) -> StepResult:
        """Take one optimizer step, or only measures the loss.

        Args:
            batch: The batch, the same on every rank.
            step: The number of this step, from 1; reported back.

        Returns:
            Metrics, the same on every rank. `loss` is the mean over trained tokens before the step, in nats.

        Raises:
            NonFiniteLoss: As `TrainerWorker.train_on`.
        """
        begin = time.perf_counter()
        wanted = make_targets(batch.rows)
        placed = self.place_micro_batches(batch.rows, wanted, range(batch.rows.num_trajectories))

        def loss(index: int, hidden: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
            part = placed[index]
            log_probs, _ = self.model.log_probs(hidden.index_select(0, part.rows), part.labels, 1.0)
            summed = -log_probs.sum()
            return summed, len(part.token_indices), summed.detach().double()

        parts = self.model.run_schedule([part.inputs for part in placed], loss, forward_only=not batch.train)
        own = sum(parts, torch.zeros((), dtype=torch.float64, device=self.model.device))
        trained = int(np.count_nonzero(wanted.mask))
        mean = float(self.model.sum_over_ranks(own)) / max(trained, 1)
        norm: float | None = math.nan
        if batch.train:
            norm = self._take_optimizer_step(mean, batch.learning_rate, step, batch.rows)
            self.num_steps += 1
        return StepResult(
            step=step,
            metrics={
                "loss": mean,
                "grad_norm": math.nan if norm is None else norm,
                "learning_rate": batch.learning_rate,
                "updates_skipped": float(norm is None),
                "tokens": float(batch.rows.num_tokens),
                "trained_tokens": float(trained),
                "step_s": time.perf_counter() - begin,
            },
        )
