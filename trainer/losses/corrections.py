"""Importance weights that correct for tokens sampled by another policy than the proximal one.

The ratio `exp(old - rollout)` compares the proximal policy with the behaviour policy: per token, per answer
(`sequence`: the product of its tokens' ratios) or by the geometric mean over an answer. A ratio out of bounds
is truncated, or its tokens are masked. Answers whose ratios are too far from 1 can be rejected as a whole,
once per batch (`rejected_answers`): they also have no vote in their group's baseline.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from async_rl.config import ImportanceConfig, RejectConfig
from trainer.losses.sequences import MAX_LOG_RATIO, Sequences


class Correction(NamedTuple):
    """The correction of each trained token, `[n]` each; no field has a gradient."""

    weights: torch.Tensor
    """Importance weights; 0 for masked tokens and for tokens of rejected answers."""
    ratios: torch.Tensor
    """Ratios of single tokens, before any bound."""
    bounded: torch.Tensor
    """1 where a bound changed the weight."""
    rejected: torch.Tensor
    """1 for tokens of rejected answers."""


def importance_correction(
    importance: ImportanceConfig,
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    rejected: torch.Tensor,
    sequences: Sequences,
) -> Correction:
    """Return the importance weights of the proximal over the behaviour policy.

    Args:
        importance: Level, bounds, and the treatment of ratios beyond them.
        old_log_probs: `[n]` float32, the trainer's log-probs at the start of the update.
        rollout_log_probs: `[n]` float32, the engine's log-probs.
        rejected: `[n]` float32, 1 for tokens of rejected answers.
        sequences: The trajectories that the tokens belong to.

    Source: token, truncated: arXiv 2505.24298 (AReaL), section 5.2, and IMPALA, arXiv 1802.01561, section
    4.1; token, masked on both sides: IcePop, arXiv 2510.18855, section 3; sequence and geometric levels,
    truncated or masked: Liu, Li et al., "When Speed Kills Stability" (2025).
    """
    log_ratios = (old_log_probs - rollout_log_probs).detach()
    ratios = log_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    match importance.level:
        case "off":
            weights = torch.ones_like(ratios)
            bounded = torch.zeros_like(ratios)
        case "token":
            weights, bounded = _bounded(importance, ratios)
        case "sequence" | "geometric":
            over = sequences.sums if importance.level == "sequence" else sequences.means
            answers = over(log_ratios).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            weights, bounded = (part[sequences.index] for part in _bounded(importance, answers))
    return Correction(weights * (1 - rejected), ratios, bounded, rejected)


def rejected_answers(
    reject: RejectConfig, old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, sequences: Sequences
) -> torch.Tensor:
    """Return which answers are rejected, `[N]` bool.

    Args:
        reject: The conditions under which a whole answer is rejected.
        old_log_probs: `[n]` float32, the trainer's log-probs at the start of the update.
        rollout_log_probs: `[n]` float32, the engine's log-probs.
        sequences: The N answers that the tokens belong to.

    Source: Liu, Li et al., "When Speed Kills Stability" (2025).
    """
    log_ratios = old_log_probs - rollout_log_probs
    out = torch.zeros(len(sequences.lengths), dtype=torch.bool, device=log_ratios.device)
    if reject.geometric_low is not None or reject.geometric_high is not None:
        means = sequences.means(log_ratios).exp()
        low, high = reject.geometric_low or 0.0, reject.geometric_high or float("inf")
        out |= (means < low) | (means > high)
    if reject.token_below is not None:
        out |= sequences.sums((log_ratios.exp() < reject.token_below).float()) > 0
    return out


def _bounded(importance: ImportanceConfig, ratios: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = importance.low, importance.high
    outside = (ratios > high) | (ratios < low)
    if importance.beyond == "truncate":
        return ratios.clamp(low, high), outside.to(ratios.dtype)
    return torch.where(outside, torch.zeros_like(ratios), ratios), outside.to(ratios.dtype)
