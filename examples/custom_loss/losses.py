"""An advantage estimator and a policy objective of one's own: see README.md."""

from __future__ import annotations

from math import comb

import numpy as np
import torch

from async_rl.config import LossConfig
from trainer.losses.advantages import ComparedRewards
from trainer.losses.objectives import Objective, PolicyTokens


def pass_at_k(compared: ComparedRewards, k: int = 2) -> np.ndarray:
    """Return advantages that reward a task for being solved by any of k attempts.

    Of the N attempts of a group, F fail. Sets of k attempts have the mean reward `R = 1 - C(F, k) / C(N, k)`
    and the deviation `S = sqrt(R (1 - R))`. An attempt has the mean advantage of the sets that it is in:
    `(1 - R) / S` if it succeeds, `(1 - R - C(F - 1, k - 1) / C(N - 1, k - 1)) / S` if it fails. A group whose
    sets all have the same reward has advantages 0.

    Args:
        compared: The rewards; an attempt succeeds if the mean of its own is above 1/2.
        k: How many attempts have one chance together, at least 1. A group of fewer has advantages 0.

    Returns:
        `[N] float64`.

    Source: arXiv 2508.10751 (Pass@k Training), section 2, the analytical derivation.
    """
    succeeds = compared.vote(compared.rewards) > 0.5
    attempts = np.rint(compared.attempts()).astype(int)
    failures = np.rint(compared.attempts() * compared.group_mean(1.0 - succeeds)).astype(int)
    advantages = np.zeros(len(succeeds))
    for i, (n, failed) in enumerate(zip(attempts.tolist(), failures.tolist(), strict=True)):
        if n < k:
            continue
        mean = 1 - comb(failed, k) / comb(n, k)
        if 0 < mean < 1:
            worse = 0.0 if succeeds[i] else comb(failed - 1, k - 1) / comb(n - 1, k - 1)
            advantages[i] = (1 - mean - worse) / (mean * (1 - mean)) ** 0.5
    return advantages


def soft_gate(tokens: PolicyTokens, loss: LossConfig, good: float = 1.0, bad: float = 1.05) -> Objective:
    """Return a policy gradient whose tokens fade out with the distance of their ratio from 1.

    `-w · A · sigmoid(t (r - 1)) · 4 / t` with `r = exp(log_probs - old_log_probs)` and the temperature `t`,
    where PPO clips. At r = 1 its gradient is REINFORCE's.

    Args:
        tokens: The trained tokens, `[n]`.
        loss: The settings of the loss; unused.
        good: The temperature t where A > 0.
        bad: The temperature t elsewhere; the larger, the faster a token fades out.

    Source: arXiv 2511.20347 (SAPO), section 3.
    """
    ratio = (tokens.log_probs - tokens.old_log_probs).exp()
    temperature = torch.where(tokens.advantages > 0, good, bad)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return Objective(-tokens.weights * tokens.advantages * gate, torch.zeros_like(ratio).detach())
