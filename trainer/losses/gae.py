"""Advantages from a critic (GAE), and the critic's loss.

```
 tokens      prompt  a0   a1 | tool output | a2   a3
 values              V0   V1               V2   V3   0      of the context that each trained token follows
 rewards             0    r1               0    r3
 delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}        return_t = A_t + V_t
```

Only trained tokens are actions. Tokens between them, of tools or of turns that are not trained here, belong
to the environment's transition: V2 above is the value of the context after the tool's output, and follows V1.

The end of a trajectory is final, also where a limit of length cut it off: the limit is part of the task, and
the reward judges what was written. Nothing follows it, so the last value is 0. Attempts that failed or were
aborted are not in a batch; an answer that was interrupted and resumed is one trajectory.
"""

from __future__ import annotations

import numpy as np
import torch

from async_rl.types import BoolArray, Float32Array, Float64Array, Int64Array


def token_rewards(
    rewards: Float32Array,
    positions: Int64Array,
    values: Float32Array,
    mask: BoolArray,
    trajectory: Int64Array,
) -> Float64Array:
    """Return the reward of each trained token, `[S]`; 0 for others.

    A turn's own reward is of the last trained token up to its end. The rest of the trajectory's reward is of
    its last trained token. A turn's reward before the first trained token (a branch inherits such turns) is
    left out, as no token of this trajectory could earn it.

    Args:
        rewards: `[N]`, the whole reward of each trajectory, rewards of its turns included.
        positions: `[R]`, the index in the batch of the last token of each turn with a reward of its own.
        values: `[R]`, these rewards.
        mask: `[S]`, whether predicting a token is trained on, at the predicting positions (`make_targets`).
        trajectory: `[S]`, the trajectory of each token, ascending.
    """
    found = np.zeros(len(mask))
    tokens = np.flatnonzero(mask)
    if not len(tokens):
        return found
    rest = rewards.astype(np.float64)
    np.subtract.at(rest, trajectory[positions], values)
    nearest = np.searchsorted(tokens, positions - 1, side="right") - 1  # a token is predicted one before it
    at = tokens[np.maximum(nearest, 0)]
    earned = (nearest >= 0) & (trajectory[at] == trajectory[positions])
    np.add.at(found, at[earned], values[earned])
    last = tokens[_is_last(trajectory[tokens])]
    found[last] += rest[trajectory[last]]
    return found


def gae(
    rewards: Float64Array, values: Float64Array, trajectory: Int64Array, gamma: float, gae_lambda: float
) -> tuple[Float64Array, Float64Array]:
    """Return the advantage and the return of each trained token, `[n]` each.

    With `gae_lambda` 1 the return is the discounted sum of rewards from the token on, without any value in
    it; with 0 it is the next reward plus the next value.

    Args:
        rewards: `[n]`, the reward of each trained token, in order.
        values: `[n]`, the value of the context that each follows.
        trajectory: `[n]`, the trajectory of each, ascending.
        gamma: The discount per trained token.
        gae_lambda: The weight of later differences.

    Source: arXiv 1506.02438 (Schulman et al. 2016), equation 16, as the recursion over its sum; skipping what
    the policy did not write: verl/trainer/ppo/core_algos.py, compute_gae_advantage_return.
    """
    last = _is_last(trajectory)
    following = np.where(last, 0, np.append(values[1:], 0))
    deltas = (rewards + gamma * following - values).tolist()
    decays = np.where(last, 0, gamma * gae_lambda).tolist()
    advantages, later = np.zeros(len(deltas)), 0.0
    for token in reversed(range(len(deltas))):
        later = advantages[token] = deltas[token] + decays[token] * later
    return advantages, advantages + values


def value_losses(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token's value, and 1 where it was clipped and has no gradient, `[n]` each.

    `max((V - R)^2, (V_clipped - R)^2) / 2`, where `V_clipped` is at most `clip` away from the value before
    the updates of the batch: an update gains nothing by moving a value further.

    Args:
        values: `[n]`, with gradient.
        old_values: `[n]`, before the updates.
        returns: `[n]`, the targets.
        clip: The largest difference from `old_values`, in units of rewards; None: any.

    Source: arXiv 2005.12729 (Engstrom et al. 2020), section 3; baselines/ppo2/model.py, `vf_loss`.
    """
    free = (values - returns).square() / 2
    if clip is None:
        return free, torch.zeros_like(returns)
    near = old_values + (values - old_values).clamp(-clip, clip)
    bounded = (near - returns).square() / 2
    return torch.maximum(free, bounded), (bounded > free).to(returns.dtype)


def explained_variance(values: Float64Array, returns: Float64Array) -> float:
    """Return `1 - Var(returns - values) / Var(returns)`, NaN where all returns are equal.

    1 is a perfect critic, 0 one that is no better than a constant, below 0 a worse one.

    Source: stable_baselines3/common/utils.py, explained_variance.
    """
    variance = float(np.var(returns)) if len(returns) else 0.0
    return 1 - float(np.var(returns - values)) / variance if variance else float("nan")


def _is_last(trajectory: Int64Array) -> BoolArray:
    """Return which tokens are the last of their trajectory, `[n]`."""
    last: BoolArray = np.append(trajectory[1:] != trajectory[:-1], np.ones(min(len(trajectory), 1), np.bool_))
    return last
