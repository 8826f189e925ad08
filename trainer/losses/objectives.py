"""Policy objectives per token, and the weights by which tokens are averaged.

| objective | ratio | bound |
|---|---|---|
| `ppo` | of each token | the minimum of the free and the clipped gain; a third bound for tokens with A < 0
(dual clip) |
| `gspo` | of the whole answer, its geometric mean | the same minimum |
| `cispo` | of each token, as a weight without gradient | clipped; every token keeps a gradient |

All of them use the proximal policy's log-probs. Importance weights (`trainer.losses.corrections`) correct for
the distance between the proximal and the behaviour policy. `token_weights` determines how tokens are
averaged.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from async_rl.config import LossConfig
from async_rl.types import Float32Array, Int64Array
from trainer.losses.sequences import Sequences


class Objective(NamedTuple):
    """The objective of each trained token, `[n]` each."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """1 where the ratio was bounded; under `ppo` and `gspo` such a token has no gradient."""


def policy_objective(
    config: LossConfig,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    sequences: Sequences,
) -> Objective:
    """Returns the objective that the config names.

    Args:
        config: `objective` and its clips.
        log_probs: `[n]` float32, log-probs of the current policy, with gradient.
        old_log_probs: `[n]` float32, log-probs of the proximal policy.
        advantages: `[n]`.
        weights: `[n]`, importance weights of the proximal over the behaviour policy.
        sequences: The trajectories that the tokens belong to.
    """
    low, high = config.clip_low, config.clip_high
    match config.objective:
        case "ppo":
            return ppo(log_probs, old_log_probs, advantages, weights, low, high, config.dual_clip)
        case "gspo":
            return gspo(log_probs, old_log_probs, advantages, weights, low, high, sequences)
        case "cispo":
            return cispo(log_probs, old_log_probs, advantages, weights, low, high)


def ppo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Objective:
    """Returns clipped PPO around the proximal policy, weighted for the behaviour policy.

    `-w · min(r · A, clip(r, 1 - clip_low, 1 + clip_high) · A)` with `r = exp(log_probs - old_log_probs)`;
    where A < 0 it is at most `-w · dual_clip · A`, so that a token that has become likely cannot dominate the
    step.

    Source: arXiv 1707.06347 (PPO), equation 7; decoupled: arXiv 2110.00641, equation 5; two clips: arXiv
    2503.14476 (DAPO), section 3.1; dual clip: arXiv 1912.09729, equation 5.
    """
    return _clipped((log_probs - old_log_probs).exp(), advantages, weights, clip_low, clip_high, dual_clip)


def gspo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
    sequences: Sequences,
) -> Objective:
    """Returns PPO with the ratio of the whole answer: `s = exp(mean of log_probs - old_log_probs)`.

    Each token has the value `s` and its own share of the gradient of `s`. Averaged over the tokens of each
    answer and then over answers (`aggregate: sequence_mean`), this is the objective of the source. Useful
    clips are about a hundredth of PPO's.

    Source: arXiv 2507.18071 (GSPO), equations 5, 7 and 13 (the token form).
    """
    difference = log_probs - old_log_probs
    ratio = sequences.means(difference).exp()[sequences.index] * (difference - difference.detach()).exp()
    return _clipped(ratio, advantages, weights, clip_low, clip_high, None)


def cispo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> Objective:
    """Returns REINFORCE with a clipped importance weight: `-w · sg(clip(r)) · A · log_probs`.

    Source: arXiv 2506.13585 (MiniMax-M1), equations 4 and 5.
    """
    ratio = (log_probs - old_log_probs).detach().exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Objective(-weights * bounded * advantages * log_probs, (bounded != ratio).to(log_probs.dtype))


def _clipped(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Objective:
    free = ratio * advantages
    bound = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    gain, clipped = torch.minimum(free, bound), bound < free
    if dual_clip is not None:
        floor = dual_clip * advantages
        too_bad = (advantages < 0) & (gain < floor)
        gain, clipped = torch.where(too_bad, floor, gain), clipped | too_bad
    return Objective(-weights * gain, clipped.to(ratio.dtype).detach())


def token_weights(aggregate: str, attempt: Int64Array, longest: int) -> Float32Array:
    """Returns the weight of each trained token; the weighted sum over a batch is its loss.

    An attempt is what papers call an answer; the tokens of all its conversations belong to it.

    Args:
        aggregate: `token_mean` weights all tokens of the batch equally; `sequence_mean` weights all attempts
            equally, and tokens equally within an attempt; `constant` divides by the number of attempts and
            the longest possible answer, so that the weight of a token does not depend on its attempt's
            length or on the batch's.
        attempt: `[n]`, the attempt of each trained token; attempts without any do not count.
        longest: The number of tokens of the longest possible answer.

    Returns:
        `[n] float32`; the weights depend only on the batch, not on how it is split.

    Source: `token_mean`: arXiv 2503.14476 (DAPO), section 3.3; `sequence_mean`: arXiv 2402.03300 (GRPO),
    equation 3; `constant`: arXiv 2503.20783 (Dr. GRPO), appendix A.
    """
    _, index, lengths = np.unique(attempt, return_inverse=True, return_counts=True)
    match aggregate:
        case "token_mean":
            weights = np.full(len(attempt), 1 / max(len(attempt), 1))
        case "sequence_mean":
            weights = 1 / (len(lengths) * lengths[index])
        case "constant":
            weights = np.full(len(attempt), 1 / max(len(lengths) * longest, 1))
        case _:
            raise ValueError(f"aggregate is {aggregate!r}; expected token_mean, sequence_mean or constant")
    return weights.astype(np.float32)
