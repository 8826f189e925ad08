"""Advantages: how much better than its baseline an attempt was.

| estimator | baseline | scale |
|---|---|---|
| `grpo` | the group's mean | the group's standard deviation |
| `dr_grpo` | the group's mean | none |
| `rloo` | the mean of the other attempts | none |
| `reinforce++` | the batch's mean | the batch's standard deviation |
| `reinforce++_baseline` | the group's mean | the batch's standard deviation |
| `gae` | a critic's values (`trainer.losses.gae`), then the batch's mean | the batch's standard deviation |

Each is a pure function of `ComparedRewards`; `trainer.loss.advantages` names one of them, or a function of
the user's by its dotted path.

Papers compare attempts at a task. An attempt may have several conversations, which are not independent
samples: together they have one vote in every mean and deviation, shared equally. So have its turns, where
each has a return of its own (`trainer.losses.turns`). An attempt of one conversation is the papers' case.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

import numpy as np

from async_rl.config import LossConfig
from async_rl.errors import DataError
from async_rl.types import BoolArray, Float32Array, Float64Array, Int32Array, Int64Array
from trainer.losses.named_functions import load_function

EPSILON = 1e-6
"""Prevents a division by zero when all rewards are equal; negligible for rewards of any usual scale."""


class ComparedRewards(NamedTuple):
    """The rewards that an estimator compares, `[N]` each: of conversations or turns, or returns of tokens."""

    rewards: Float64Array
    group: Int64Array
    """The group of each, from 0; its attempts are at the same task."""
    attempt: Int64Array
    """The attempt of each, from 0 over the whole batch."""
    share: Float64Array
    """The part of each in its attempt's vote; 1 in total for an attempt that counts, all 0 for another."""

    def attempts(self) -> Float64Array:
        """Return the number of attempts that count in the group of each, `[N]`, at least 1."""
        return np.maximum(np.bincount(self.group, self.share), 1)[self.group]

    def group_mean(self, values: Float64Array) -> Float64Array:
        """Return the mean of values, `[N]`, over the attempts of the group of each, `[N]`."""
        return np.bincount(self.group, self.share * values)[self.group] / self.attempts()

    def vote(self, values: Float64Array) -> Float64Array:
        """Return the vote of the attempt of each: the mean of its values, `[N]`."""
        return np.bincount(self.attempt, self.share * values)[self.attempt]

    def batch_mean(self, values: Float64Array) -> float:
        """Return the mean of values, `[N]`, over all attempts that count."""
        return float((self.share * values).sum() / max(self.share.sum(), 1.0))


Estimator = Callable[[ComparedRewards], Float64Array]
"""Returns advantages, `[N]`, which are finite; those of items with share 0 are ignored."""

F = TypeVar("F", bound=Callable[..., Float64Array])


def batch_baseline(estimator: F) -> F:
    """Mark an estimator whose baseline is the batch: it needs no second attempt at the same task.

    Attempts without a sibling count, and `rollout.group_size` may be 1. With a KL penalty in the reward it
    gets the return of each token, and for other estimators the penalty of the whole answer is subtracted.
    """
    estimator.has_batch_baseline = True  # type: ignore[attr-defined]
    return estimator


def has_batch_baseline(estimator: Estimator) -> bool:
    """Return whether an estimator is marked by `batch_baseline`."""
    return bool(getattr(getattr(estimator, "func", estimator), "has_batch_baseline", False))


def grpo(compared: ComparedRewards) -> Float64Array:
    """Return rewards centred and scaled by the group's mean and deviation.

    Deviations are the population's; verl and TRL divide the squares of a group by G - 1.

    Source: arXiv 2402.03300 (GRPO), section 4.1.2.
    """
    centred = dr_grpo(compared)
    return centred / (np.sqrt(compared.group_mean(centred**2)) + EPSILON)


def dr_grpo(compared: ComparedRewards) -> Float64Array:
    """Return rewards centred by the group's mean.

    Source: arXiv 2503.20783 (Dr. GRPO), section 3.
    """
    return compared.rewards - compared.group_mean(compared.rewards)


def rloo(compared: ComparedRewards) -> Float64Array:
    """Return rewards minus the mean of the other attempts of the group.

    That mean is the group's without the attempt's own vote.

    Source: arXiv 2402.14740 (RLOO), equation 8.
    """
    centred = dr_grpo(compared)
    return centred + compared.vote(centred) / np.maximum(compared.attempts() - 1, 1)


@batch_baseline
def reinforce_plus_plus(compared: ComparedRewards) -> Float64Array:
    """Return rewards centred and scaled by the batch's mean and deviation, which count every attempt once.

    verl counts every token.

    Source: arXiv 2501.03262 (REINFORCE++), section 3.
    """
    return _whitened(compared, compared.rewards)


def reinforce_plus_plus_baseline(compared: ComparedRewards) -> Float64Array:
    """Return rewards centred by the group's mean, then centred and scaled over the batch.

    Source: arXiv 2501.03262 (REINFORCE++), section 3.
    """
    return _whitened(compared, dr_grpo(compared))


ESTIMATORS: Final[dict[str, Estimator]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce++": reinforce_plus_plus,
    "reinforce++_baseline": reinforce_plus_plus_baseline,
    "gae": reinforce_plus_plus,  # whitens the estimates of trained tokens (`trainer.losses.gae`)
}


def load_estimator(loss: LossConfig) -> Estimator:
    """Return the estimator that the config names, with the keyword arguments of the config.

    Raises:
        ConfigError: The dotted path leads to no function.
    """
    return load_function("trainer.loss.advantages", loss.advantages, ESTIMATORS, loss.advantages_args)


def estimate_advantages(
    estimator: Estimator,
    rewards: Float32Array,
    group_index: Int32Array,
    attempt_index: Int32Array,
    weights: np.ndarray | None = None,
) -> Float32Array:
    """Return the advantages of a batch's trajectories, or of its turns or tokens.

    What has no part in a vote has the advantage 0. So has a group with fewer than two attempts that vote,
    unless the batch is the estimator's baseline.

    Args:
        estimator: Compares the rewards.
        rewards: `[N]`.
        group_index: `[N]`, equal for the trajectories of a group.
        attempt_index: `[N]`, equal for the conversations of an attempt.
        weights: `[N]`, the parts in their attempt's vote, relative to each other; None: equal parts.

    Returns:
        `[N] float32`.

    Raises:
        DataError: The estimator's result is not `[N]` finite numbers.
    """
    weights = np.ones(len(rewards)) if weights is None else weights.astype(np.float64)
    counted = weights > 0
    if not has_batch_baseline(estimator):
        counted = counted & ~lacks_baseline(group_index, attempt_index, counted)
    _, attempt = np.unique(attempt_index, return_inverse=True)
    _, group = np.unique(group_index, return_inverse=True)
    weights = weights * counted
    votes = np.bincount(attempt, weights)[attempt]
    share = np.divide(weights, votes, out=np.zeros_like(weights), where=counted)
    advantages = np.asarray(estimator(ComparedRewards(rewards.astype(np.float64), group, attempt, share)))
    if problem := advantages_problem(advantages, counted):
        raise DataError(f"trainer.loss.advantages: the estimator returned {problem}")
    return np.where(counted, advantages, 0).astype(np.float32)


def advantages_problem(advantages: np.ndarray, counted: BoolArray) -> str | None:
    """Return what is wrong with an estimator's result, or None.

    Args:
        advantages: What it returned.
        counted: `[N]`, which items count.
    """
    if advantages.shape != counted.shape:
        return f"an array of shape {list(advantages.shape)}, expected [{len(counted)}]"
    if advantages.dtype.kind not in "fiu":
        return f"an array of type {advantages.dtype}, expected real numbers"
    if not np.isfinite(advantages[counted]).all():
        wrong = advantages[counted & ~np.isfinite(advantages)][0]
        return f"{wrong} for an item that counts, expected a finite number"
    return None


def lacks_baseline(group_index: Int32Array, attempt_index: Int32Array, counted: BoolArray) -> BoolArray:
    """Return which trajectories have no other attempt of their group to be compared with, `[N]`.

    Args:
        group_index: `[N]`, equal for the trajectories of a group.
        attempt_index: `[N]`, equal for the conversations of an attempt.
        counted: `[N]`, whether a trajectory counts.
    """
    pairs = np.unique(np.stack([group_index, attempt_index])[:, counted], axis=1)
    groups, voting = np.unique(pairs[0], return_counts=True)
    lacks: BoolArray = ~np.isin(group_index, groups[voting > 1])
    return lacks


def overlong_penalty(lengths: Int64Array, longest: int, buffer: int) -> Float32Array:
    """Return the penalty of answers that approach the longest length allowed: 0 at the start of the buffer,
    then to -1.

    `0` up to `longest - buffer` tokens, `((longest - buffer) - length) / buffer` from there on, `-1` beyond
    `longest`.

    Args:
        lengths: `[N]`, tokens of each trajectory's longest answer.
        longest: The longest length allowed, in tokens.
        buffer: The number of tokens before `longest` over which the penalty grows; at least 1.

    Returns:
        `[N] float32`, to be added to rewards.

    Source: arXiv 2503.14476 (DAPO), equation 13.
    """
    return np.clip((longest - buffer - lengths) / buffer, -1.0, 0.0).astype(np.float32)


def _whitened(compared: ComparedRewards, values: Float64Array) -> Float64Array:
    """Return the values, `[N]`, centred and scaled over the attempts of the batch."""
    centred = values - compared.batch_mean(values)
    return centred / (np.sqrt(compared.batch_mean(centred**2)) + EPSILON)
