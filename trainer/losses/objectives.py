"""Policy objectives per token, and the weights by which tokens are averaged.

| objective | ratio | bound |
|---|---|---|
| `ppo` | of each token | the minimum of the free and the clipped gain; a third bound for tokens with A < 0
(dual clip) |
| `gspo` | of the whole answer, its geometric mean | the same minimum |
| `cispo` | of each token, as a weight without gradient | clipped; every token keeps a gradient |

Each is a pure function of `PolicyTokens` and the settings of the loss; `trainer.loss.objective` names one of
them, or a function of the user's by its dotted path. It uses the proximal policy's log-probs; importance
weights (`trainer.losses.corrections`) correct for the distance between the proximal and the behaviour policy.
`token_weights` determines how tokens are averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch

from async_rl.config import LossConfig
from async_rl.types import Float32Array, Int64Array
from trainer.losses.named_functions import load_function
from trainer.losses.sequences import MAX_LOG_RATIO, Sequences


class PolicyTokens(NamedTuple):
    """The trained tokens of a micro-batch as an objective sees them, `[n]` float32 each."""

    log_probs: torch.Tensor
    """Log-probs of the current policy, with gradient."""
    old_log_probs: torch.Tensor
    """Log-probs of the proximal policy, from which the updates start."""
    rollout_log_probs: torch.Tensor
    """Log-probs of the behaviour policy, which sampled the tokens."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """Importance weights of the proximal over the behaviour policy; 0 for tokens of rejected answers."""
    sequences: Sequences
    """The answers that the tokens belong to. Sums and means cover whole answers, also where context-parallel
    ranks share them; they are collective, so every call must make the same ones."""


class Objective(NamedTuple):
    """The objective of each trained token, `[n]` each."""

    loss: torch.Tensor
    """To be minimised, with gradient. A token's own depends on no other answer than its own."""
    clipped: torch.Tensor
    """1 where the ratio was bounded; under `ppo` and `gspo` such a token has no gradient."""


ObjectiveFunction = Callable[[PolicyTokens, LossConfig], Objective]


def ppo(tokens: PolicyTokens, loss: LossConfig) -> Objective:
    """Return clipped PPO around the proximal policy, weighted for the behaviour policy.

    `-w · min(r · A, clip(r, 1 - clip_low, 1 + clip_high) · A)` with `r = exp(log_probs - old_log_probs)`;
    where A < 0 it is at most `-w · dual_clip · A`, so that a token that has become likely cannot dominate the
    step.

    Source: arXiv 1707.06347 (PPO), equation 7; decoupled: arXiv 2110.00641, equation 5; two clips: arXiv
    2503.14476 (DAPO), section 3.1; dual clip: arXiv 1912.09729, equation 5.
    """
    log_ratios = (tokens.log_probs - tokens.old_log_probs).clamp(max=MAX_LOG_RATIO)
    return _clipped(log_ratios.exp(), tokens, loss)


def gspo(tokens: PolicyTokens, loss: LossConfig) -> Objective:
    """Return PPO with the ratio of the whole answer: `s = exp(mean of log_probs - old_log_probs)`.

    Each token has the value `s` and its own share of the gradient of `s`. Averaged over the tokens of each
    answer and then over answers (`aggregate: sequence_mean`), this is the objective of the source. Useful
    clips are about a hundredth of PPO's.

    Source: arXiv 2507.18071 (GSPO), equations 5, 7 and 13 (the token form).
    """
    difference, sequences = tokens.log_probs - tokens.old_log_probs, tokens.sequences
    means = sequences.means(difference)[sequences.index] + (difference - difference.detach())
    return _clipped(means.clamp(max=MAX_LOG_RATIO).exp(), tokens, loss)


def cispo(tokens: PolicyTokens, loss: LossConfig) -> Objective:
    """Return REINFORCE with a clipped importance weight: `-w · sg(clip(r)) · A · log_probs`.

    Source: arXiv 2506.13585 (MiniMax-M1), equations 4 and 5.
    """
    ratio = (tokens.log_probs - tokens.old_log_probs).detach().exp()
    bounded = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    gain = tokens.weights * bounded * tokens.advantages * tokens.log_probs
    return Objective(-gain, (bounded != ratio).to(gain.dtype))


OBJECTIVES: Final[dict[str, ObjectiveFunction]] = {"ppo": ppo, "gspo": gspo, "cispo": cispo}


def load_objective(loss: LossConfig) -> ObjectiveFunction:
    """Return the objective that the config names, with the keyword arguments of the config.

    Raises:
        ConfigError: The dotted path leads to no function.
    """
    return load_function("trainer.loss.objective", loss.objective, OBJECTIVES, loss.objective_args)


def _clipped(ratio: torch.Tensor, tokens: PolicyTokens, loss: LossConfig) -> Objective:
    advantages = tokens.advantages
    free = ratio * advantages
    bound = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high) * advantages
    gain, clipped = torch.minimum(free, bound), bound < free
    if loss.dual_clip is not None:
        floor = loss.dual_clip * advantages
        too_bad = (advantages < 0) & (gain < floor)
        gain, clipped = torch.where(too_bad, floor, gain), clipped | too_bad
    return Objective(-tokens.weights * gain, clipped.to(ratio.dtype).detach())


def token_weights(aggregate: str, attempt: Int64Array, longest: int) -> Float32Array:
    """Return the weight of each trained token; the weighted sum over a batch is its loss.

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
