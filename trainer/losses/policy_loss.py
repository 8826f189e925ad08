"""Loss and metrics of an update, as sums over trained tokens that add up over micro-batches and ranks."""

from __future__ import annotations

import math
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
    "teacher_kl",
)
"""The quantities that each micro-batch sums over its trained tokens; the metrics are their means."""


class TrainedTokens(NamedTuple):
    """The trained tokens of a micro-batch, `[n]` each."""

    old_log_probs: torch.Tensor | None
    """Log-probs of the proximal policy, from which the updates start; None: the current ones, detached."""
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
    teacher_log_probs: torch.Tensor | None = None
    """Log-probs of the teacher, if there is one; NaN for tokens that it has not scored."""


def policy_sums(
    config: LossConfig,
    objective: ObjectiveFunction,
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    tokens: TrainedTokens,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of one micro-batch's trained tokens, and its sums in the order of `SUMS`.

    `loss = objective + kl · coefficient - entropy · bonus`, each token multiplied by its weight; tokens of
    rejected answers add nothing. With `teacher.where: loss`, `w · k2(log_probs, teacher)` is added, times its
    coefficient, with the importance weight `w`: the gradient of k2 at sampled tokens is that of the reverse
    KL, `E[(log p - log q) · grad log p]`. `ppo_kl` is the k1 estimator, the mean of proximal minus current
    log-probs over tokens of the behaviour policy, as is usual in the literature; it may be negative.

    Args:
        config: The settings of the loss.
        objective: The policy objective (`trainer.losses.objectives.load_objective`).
        log_probs: `[n]`, log-probs of the current policy, with gradient.
        entropy: `[n]`, entropies of its distributions, with gradient.
        tokens: The other inputs of the same tokens.

    Source: k1: John Schulman, "Approximating KL Divergence" (2020). Reverse KL to a teacher on the policy's
    own tokens: arXiv 2306.13649 (GKD), section 3, and arXiv 2306.08543 (MiniLLM), equation 1; k2 as a loss:
    arXiv 2506.09477.
    """
    old = log_probs.detach() if tokens.old_log_probs is None else tokens.old_log_probs
    correction = importance_correction(
        config.importance, old, tokens.rollout_log_probs, tokens.rejected, tokens.sequences
    )
    policy = objective(
        PolicyTokens(
            log_probs,
            old,
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
    behind = torch.zeros_like(log_probs)
    if tokens.teacher_log_probs is not None:
        scored = ~tokens.teacher_log_probs.isnan()
        behind = torch.where(scored, log_probs - tokens.teacher_log_probs.nan_to_num(), behind)
        if config.teacher.where == "loss":
            loss = loss + config.teacher.coefficient * correction.weights * behind.square() / 2
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
                    old - log_probs,
                    policy.clipped,
                    entropy,
                    correction.ratios,
                    correction.bounded,
                    correction.rejected,
                    away,
                    behind,
                )
            ]
        )
    return loss.sum(), sums


class UpdateSums(NamedTuple):
    """What one or more updates of a batch add up to, over all ranks."""

    sums: torch.Tensor
    """In the order of `SUMS`, float64."""
    trained: int
    """Trained tokens."""

    def add(self, sums: torch.Tensor, trained: int) -> UpdateSums:
        """Return the sums with those of one more update."""
        return UpdateSums(self.sums + sums, self.trained + trained)

    def means(self) -> dict[str, float]:
        """Return the means over trained tokens, by name; 0 if there are none."""
        return {
            name: value / max(self.trained, 1) for name, value in zip(SUMS, self.sums.tolist(), strict=True)
        }


NO_UPDATES = UpdateSums(torch.zeros(len(SUMS), dtype=torch.float64), 0)


def mean_metrics(
    updates: UpdateSums, later: UpdateSums, *, bypass: bool, reference: bool, teacher: bool
) -> dict[str, float]:
    """Return the metrics of a batch's updates.

    `ppo_kl` is that of the later updates: in the first, the current policy is the proximal one, and it would
    be 0 by construction.

    Args:
        updates: The sums of all updates.
        later: Those of updates that an optimizer step on the same batch precedes.
        bypass: Whether the engine's log-probs were used as the proximal ones. The difference of proximal and
            current log-probs then combines staleness and engine mismatch in every update, and is reported
            under another name.
        reference: Whether there is a reference policy.
        teacher: Whether there is a teacher.
    """
    named = updates.means()
    return named | {
        "ppo_kl": later.means()["ppo_kl"] if later.trained and not bypass else math.nan,
        "ppo_kl_bypass": named["ppo_kl"] if bypass else math.nan,
        "reference_kl": named["reference_kl"] if reference else math.nan,
        "teacher_kl": named["teacher_kl"] if teacher else math.nan,
    }
