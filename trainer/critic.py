"""The critic of one rank: a value model of its own, for `trainer.loss.advantages: gae`.

It is built as the policy is, from the same folder and under the same layout, with a `ValueHead` as its last
layer. It shares no weight with the policy: the value loss cannot disturb the policy, and neither the policy's
gradient norm nor its learning rate depends on the scale of rewards.

It routes experts natively: the rows of a batch are the policy's choices, by routers that it does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from async_rl.config import Config
from async_rl.types import Float32Array
from trainer.losses.gae import value_losses
from trainer.megatron.model import LossFunction, MegatronModel
from trainer.placed import PlacedMicroBatch, spread_values


class ValueTargets(NamedTuple):
    """What the values of a batch are trained towards, `[S]` each, at the predicting positions."""

    old_values: Float32Array
    """Before the updates of the batch."""
    returns: Float32Array


class Critic:
    """The value model, its optimizer and its passes over micro-batches."""

    def __init__(self, config: Config, device: torch.device) -> None:
        """Build the model from `model.path`; process groups must exist.

        Raises:
            ConfigError: When model and layout are incompatible.
        """
        self.settings = config.trainer.critic
        self.model = MegatronModel(config, device, is_critic=True)

    def compute_values(self, placed: Sequence[PlacedMicroBatch], num_tokens: int) -> Float32Array:
        """Compute the value of the context that each trained token follows, `[S]`, for this rank's tokens
        only.
        """

        def keep(index: int, values: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
            found = _of_trained(placed[index], values)
            return found.sum(), 0, found

        return spread_values(placed, self._run_schedule(placed, keep, forward_only=True), num_tokens)

    def accumulate_gradients(
        self, placed: Sequence[PlacedMicroBatch], weights: Float32Array, targets: ValueTargets
    ) -> torch.Tensor:
        """Accumulate the gradients of one update.

        Args:
            placed: This rank's micro-batches of the update.
            weights: `[S]`, the weight of each token, times the update's number of trained tokens.
            targets: The targets of the whole batch.

        Returns:
            This rank's sums over tokens: of the weighted loss, and of tokens whose value was clipped.
        """

        def loss(index: int, values: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
            tokens = placed[index].token_indices
            old, returns, weight = (
                torch.from_numpy(each[tokens]).to(values.device) for each in (*targets, weights)
            )
            found = _of_trained(placed[index], values)
            losses, clipped = value_losses(found, old, returns, self.settings.value_clip)
            losses = losses * weight
            sums = torch.stack([each.detach().sum(dtype=torch.float64) for each in (losses, clipped)])
            return losses.sum(), len(tokens), sums

        parts = self._run_schedule(placed, loss, forward_only=False)
        return sum(parts, torch.zeros(2, dtype=torch.float64, device=self.model.device))

    def _run_schedule(
        self,
        placed: Sequence[PlacedMicroBatch],
        loss: LossFunction[torch.Tensor],
        *,
        forward_only: bool,
    ) -> list[torch.Tensor]:
        inputs = [each.inputs._replace(routing=None) for each in placed]
        return self.model.run_schedule(inputs, loss, forward_only=forward_only)


def _of_trained(micro_batch: PlacedMicroBatch, values: torch.Tensor) -> torch.Tensor:
    """Return the values of a micro-batch's trained tokens, `[n]`, of those of all its rows, `[t, 1]`."""
    return values.index_select(0, micro_batch.rows)[:, 0]
