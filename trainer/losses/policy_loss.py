"""Loss and metrics of an update, as sums over trained tokens that add up over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from async_rl.config import LossConfig
from trainer.losses.corrections import importance_correction
from trainer.losses.kl import kl_estimate
from trainer.losses.objectives import ObjectiveFunction, PolicyTokens
from trainer.losses.sequences import Sequences

SUMS = (
    "loss",
    "ppo_kl",
    "clip_fraction",
    "entropy",
    "importance_ratio_mean",
    "importance_truncated_fraction",
    "importance_rejected_fraction",
    "reference_kl",
)
"""The quantities that each micro-batch sums over its trained tokens; the metrics are their means."""


class TrainedTokens(NamedTuple):
    """The trained tokens of a micro-batch, `[n]` each."""

    old_log_probs: torch.Tensor
    """Log-probs of the proximal policy, from which the updates start."""
    rollout_log_probs: torch.Tensor
    """Log-probs of the behaviour policy, which sampled the tokens."""
    advantages: torch.Tensor
    rejected: torch.Tensor
    """1 for tokens of answers that are left out, else 0."""
    weights: torch.Tensor
    """The weight of each token, times the update's number of trained tokens: 1 for a mean over tokens."""
    sequences: Sequences
    reference_log_probs: torch.Tensor | None = None
    """Log-probs of the reference policy, if there is a KL penalty."""


def policy_sums(
    config: LossConfig,
    objective: ObjectiveFunction,
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    tokens: TrainedTokens,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the summed loss of one micro-batch's trained tokens, and its sums in the order of `SUMS`.

    `loss = objective + kl · coefficient - entropy · bonus`, each token multiplied by its weight; tokens of
    rejected answers add nothing. `ppo_kl` is the k1 estimator, the mean of proximal minus current log-probs
    over tokens of the behaviour policy, as is usual in the literature; it may be negative.

    Args:
        config: The settings of the loss.
        objective: The policy objective (`trainer.losses.objectives.load_objective`).
        log_probs: `[n]`, log-probs of the current policy, with gradient.
        entropy: `[n]`, entropies of its distributions, with gradient.
        tokens: The other inputs of the same tokens.

    Source: k1: John Schulman, "Approximating KL Divergence" (2020).
    """
    correction = importance_correction(
        config.importance, tokens.old_log_probs, tokens.rollout_log_probs, tokens.rejected, tokens.sequences
    )
    policy = objective(
        PolicyTokens(
            log_probs,
            tokens.old_log_probs,
            tokens.rollout_log_probs,
            tokens.advantages,
            correction.weights,
            tokens.sequences,
        ),
        config,
    )
    loss, kept = policy.loss, 1 - correction.rejected
    if config.entropy_bonus:
        loss = loss - config.entropy_bonus * kept * entropy
    if tokens.reference_log_probs is not None and config.kl.where == "loss":
        distance = kl_estimate(config.kl.estimator, log_probs, tokens.reference_log_probs)
        loss = loss + config.kl.coefficient * kept * distance
    loss = loss * tokens.weights
    with torch.no_grad():
        away = torch.zeros_like(log_probs)
        if tokens.reference_log_probs is not None:
            away = kl_estimate(config.kl.estimator, log_probs, tokens.reference_log_probs)
        sums = torch.stack(
            [
                values.sum(dtype=torch.float64)
                for values in (
                    loss,
                    tokens.old_log_probs - log_probs,
                    policy.clipped,
                    entropy,
                    correction.ratios,
                    correction.bounded,
                    correction.rejected,
                    away,
                )
            ]
        )
    return loss.sum(), sums


def mean_metrics(sums: Sequence[float], trained: int, *, bypass: bool, reference: bool) -> dict[str, float]:
    """Returns the metrics of an update from its sums.

    Args:
        sums: The sums over all ranks, in the order of `SUMS`.
        trained: The number of trained tokens.
        bypass: Whether the engine's log-probs were used as the proximal ones. The difference of proximal and
            current log-probs then combines staleness and engine mismatch, and is reported under another name.
        reference: Whether there is a reference policy.
    """
    named = {name: value / trained for name, value in zip(SUMS, sums, strict=True)}
    ppo_kl = named["ppo_kl"]
    return named | {
        "ppo_kl": math.nan if bypass else ppo_kl,
        "ppo_kl_bypass": ppo_kl if bypass else math.nan,
        "reference_kl": named["reference_kl"] if reference else math.nan,
    }
