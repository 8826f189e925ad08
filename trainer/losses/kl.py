"""Estimates of the KL divergence from a reference policy, by samples of the current policy."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from async_rl.config import TeacherConfig
from async_rl.types import Float32Array, Int64Array
from trainer.losses.sequences import MAX_LOG_RATIO

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(kind: KlEstimator, log_probs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return an estimate of KL(policy, reference) at each token, `[n]` nats.

    With `d = log_probs - reference`: `k1` is `d`, unbiased, of either sign; `k2` is `d² / 2`, biased, never
    negative, and its gradient is that of the KL; `k3` is `exp(-d) - 1 + d`, unbiased and never negative, and
    its gradient is that of the reverse divergence, KL(reference, policy).

    Args:
        kind: The estimator. As a term of the loss, `k1` has a gradient of mean zero: use `k2` or `k3`.
        log_probs: `[n]`, log-probs of the trained policy, with gradient where the estimate is part of the
        loss.
        reference: `[n]`, log-probs of the reference policy.

    Source: John Schulman, "Approximating KL Divergence" (2020); the gradients: arXiv 2506.09477.
    """
    difference = log_probs - reference
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            difference = difference.clamp(min=-MAX_LOG_RATIO)
            return torch.expm1(-difference) + difference


def sums_to_go(values: np.ndarray, trajectory: Int64Array) -> np.ndarray:
    """Return the sum of each token's value and those of later tokens of its trajectory, `[S]` float64.

    Args:
        values: `[S]`.
        trajectory: `[S]`, the trajectory of each token, ascending.
    """
    before = np.cumsum(values, dtype=np.float64) - values
    totals = np.bincount(trajectory, values)
    starts = np.cumsum(totals) - totals
    rest: np.ndarray = totals[trajectory] - (before - starts[trajectory])
    return rest


def teacher_advantages(
    config: TeacherConfig, advantages: Float32Array, log_probs: Float32Array, teacher: Float32Array
) -> Float32Array:
    """Return the advantages of tokens with the reward that a teacher gives each of them, `[S]`.

    With `where: reward` it is `coefficient · (teacher - log_probs)`, the negative reverse KL at the sampled
    token. No baseline is subtracted and later tokens do not count: a discount of 0, as in the source.

    Args:
        config: The settings of the teacher.
        advantages: `[S]`, from the rewards; left out with `only`.
        log_probs: `[S]`, of the policy that the update starts from.
        teacher: `[S]`, of the teacher; NaN for tokens that it has not scored.

    Source: Kevin Lu and Thinking Machines Lab, "On-Policy Distillation" (2025), "reverse KL" and the
    pseudocode of its implementation; arXiv 2306.13649 (GKD), section 3.
    """
    rewarded = np.zeros_like(advantages) if config.only else advantages
    if config.where == "loss":
        return rewarded
    return rewarded + np.float32(config.coefficient) * np.nan_to_num(teacher - log_probs)
