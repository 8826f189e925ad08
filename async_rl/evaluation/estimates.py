"""Statistics of answers: pass@k, means over tasks and their confidence intervals. Without side effects."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from async_rl.observability.evaluation_record import EVERYTHING, Estimate, EvaluationScore
from async_rl.observability.records import mean

_Z: Final = 1.959964
"""Quantile of the normal distribution for a 95 % interval."""


class EvaluatedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One scored answer of a task."""

    dataset: str
    source: str
    """The example's data source; empty if it names none."""
    task_id: str
    """Unique in its dataset."""
    parts: Mapping[str, float]
    """Parts of the reward, `reward` among them."""
    tokens: int
    """Tokens that the policy wrote."""
    truncated: bool


def pass_at_k(answers: int, passed: int, k: int) -> float:
    """Return the probability that at least one of k answers passes, drawn without replacement from the given
    ones.

    It is an unbiased estimate for k fresh answers; `1 - (1 - passed/answers)^k` is biased.

    Args:
        answers: Number of answers of a task, n >= k.
        passed: Number of those that pass, c.
        k: Number of answers drawn.

    Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, section 2.1 and
    figure 3: `1 - C(n-c, k)/C(n, k)`, as a product, so that nothing overflows.
    """
    if not 0 < k <= answers:
        raise ValueError(f"pass@{k} needs at least {k} answers, there are {answers}")
    if answers - passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(answers - passed + 1, answers + 1))


def estimate(values: Sequence[float], *, low: float = -math.inf, high: float = math.inf) -> Estimate:
    """Return the mean of values of independent tasks, and its interval by the normal approximation.

    Answers of one task are not independent, so each task counts as one observation, regardless of its number
    of answers.

    Args:
        values: One per task.
        low: Lower bound of the values.
        high: Upper bound of the values.

    Source: Miller, "Adding Error Bars to Evals", arXiv 2411.00640, sections 2.1 and 2.2 (clustered errors).
    """
    if not values:
        return Estimate(value=None)
    value = float(np.mean(values))
    if len(values) == 1:
        return Estimate(value=value, tasks=1)
    margin = _Z * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(
        value=value, low=max(low, value - margin), high=min(high, value + margin), tasks=len(values)
    )


def estimated_ks(samples: int) -> list[int]:
    """Return for which k pass@k is estimated, with this number of answers per task."""
    doubling = itertools.takewhile(lambda k: k < samples, (2**power for power in itertools.count()))
    return [*doubling, samples]


def scores(
    answers: Iterable[EvaluatedAnswer], *, samples: int, pass_reward: float
) -> dict[str, EvaluationScore]:
    """Score answers together, by dataset, and by data source within it; return nothing without answers.

    pass@k is for k = 1, 2, 4, … and `samples`, the answers of a task.
    """
    sets: dict[str, list[EvaluatedAnswer]] = defaultdict(list)
    for answer in answers:
        names = [EVERYTHING, answer.dataset]
        if answer.source:
            names.append(f"{answer.dataset}/{answer.source}")
        for name in names:
            sets[name].append(answer)
    pass_at = estimated_ks(samples)
    return {name: _score(found, pass_at, pass_reward) for name, found in sorted(sets.items())}


def _score(answers: Sequence[EvaluatedAnswer], pass_at: Sequence[int], pass_reward: float) -> EvaluationScore:
    by_task: dict[tuple[str, str], list[float]] = defaultdict(list)
    others: dict[str, list[float]] = defaultdict(list)
    for answer in answers:
        by_task[answer.dataset, answer.task_id].append(answer.parts["reward"])
        for name, value in answer.parts.items():
            if name != "reward":
                others[name].append(value)
    counted = [
        (len(rewards), sum(reward >= pass_reward for reward in rewards)) for rewards in by_task.values()
    ]
    return EvaluationScore(
        tasks=len(by_task),
        answers=len(answers),
        reward=estimate([float(np.mean(rewards)) for rewards in by_task.values()]),
        pass_at={
            str(k): estimate([pass_at_k(n, c, k) for n, c in counted if n >= k], low=0.0, high=1.0)
            for k in pass_at
        },
        parts={name: float(np.mean(values)) for name, values in sorted(others.items())},
        tokens_mean=mean(answer.tokens for answer in answers),
        truncated_share=mean(float(answer.truncated) for answer in answers),
    )
