"""What a step measures in its update: sums over trained tokens, which micro-batches and ranks add up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from async_rl.config import LossConfig
from trainer.corrections import truncated_importance_weights
from trainer.losses import clipped_policy_loss

SUMS = (
    "loss",
    "ppo_kl",
    "clip_fraction",
    "entropy",
    "importance_ratio_mean",
    "importance_truncated_fraction",
)
"""What a micro-batch sums over its trained tokens, for means over all of them."""


def policy_sums(
    config: LossConfig,
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    proximal: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss of one micro-batch's trained tokens, and its other sums in the order of `SUMS`.

    `ppo_kl` is the k1 estimator, the mean of proximal minus current log-probs over tokens of the behaviour
    policy, as the field reports it; it may be negative.

    Source: k1: John Schulman, "Approximating KL Divergence" (2020).
    """
    weights, ratios = truncated_importance_weights(proximal, rollout, config.importance_cap)
    policy = clipped_policy_loss(log_probs, proximal, advantages, weights, config.clip_low, config.clip_high)
    summed = policy.loss.sum()
    with torch.no_grad():
        cap = math.inf if config.importance_cap is None else config.importance_cap
        sums = torch.stack(
            [
                values.sum(dtype=torch.float64)
                for values in (
                    policy.loss,
                    proximal - log_probs,
                    policy.clipped,
                    entropy,
                    ratios,
                    (ratios > cap).float(),
                )
            ]
        )
    return summed, sums


def means(sums: Sequence[float], trained: int, *, bypass: bool) -> dict[str, float]:
    """The metrics that `SUMS` amount to.

    Args:
        sums: Over all ranks.
        trained: Tokens.
        bypass: Whether the engine's log-probs were the proximal ones. What is then proximal minus current is
            another quantity, staleness and the engines' mismatch together, and has another name.
    """
    named = {name: value / trained for name, value in zip(SUMS, sums, strict=True)}
    ppo_kl = named["ppo_kl"]
    return named | {
        "ppo_kl": math.nan if bypass else ppo_kl,
        "ppo_kl_bypass": ppo_kl if bypass else math.nan,
    }
