"""What makes up for tokens sampled by another policy than the one the update starts from."""

from __future__ import annotations

import torch


def truncated_importance_weights(
    old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, cap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance weight of each token between the proximal and the behaviour policy, truncated from above.

    `w = min(exp(old - rollout), cap)`. It carries no gradient. Where old and rollout log-probs are the same
    array it is 1 everywhere.

    Args:
        old_log_probs: `[n]` float32, the trainer's at the start of the update.
        rollout_log_probs: `[n]` float32, the engine's.
        cap: Largest weight; None turns the correction off (all weights 1).

    Returns:
        The weights, and the ratios before truncation, both `[n]`.

    Source: arXiv 2505.24298 (AReaL, decoupled objective), section 5.2; truncation as in IMPALA, arXiv
    1802.01561, section 4.1.
    """
    ratios = (old_log_probs - rollout_log_probs).detach().exp()
    weights = torch.ones_like(ratios) if cap is None else ratios.clamp(max=cap)
    return weights, ratios
