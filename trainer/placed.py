"""A micro-batch on a rank's device, and the way back from its tokens to the batch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from async_rl.types import Float32Array, Int64Array
from trainer.losses.log_probs import KeptTokens
from trainer.megatron.model import MicroBatchInputs


@dataclass(frozen=True)
class PlacedMicroBatch:
    """One micro-batch on this rank's device, with the tokens that are trained on."""

    inputs: MicroBatchInputs
    rows: torch.Tensor  # [n] int64, the rows of the hidden states that predict trained tokens
    token_indices: Int64Array  # [n] indices in the batch of the predicting positions
    labels: torch.Tensor  # [n] int64
    kept: KeptTokens | None = None  # the tokens that could be sampled in each of the n rows; None: all could
    scale: torch.Tensor | None = None  # [n] float32, the run's temperature over the row's; None: all are 1


def spread_values(
    placed: Sequence[PlacedMicroBatch], parts: Sequence[torch.Tensor], num_tokens: int
) -> Float32Array:
    """Return the values of micro-batches' trained tokens at their positions in the batch, `[S]`; 0
    elsewhere.

    Args:
        placed: The micro-batches.
        parts: The values of each micro-batch, `[n]`; empty on pipeline stages before the last.
        num_tokens: The batch's number of tokens, S.
    """
    spread = np.zeros(num_tokens, np.float32)
    for micro_batch, values in zip(placed, parts, strict=False):
        spread[micro_batch.token_indices] = values.cpu().numpy()
    return spread
