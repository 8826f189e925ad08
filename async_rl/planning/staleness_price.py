"""What stale tokens are worth to the policy, and the staleness bound that gives the most per second. Pure.

```
 LagMeasurement ─► price of each lag: sample share, direction ─► worth of a token, by lag ─┐
 JobPlan by bound: trained tokens per second, share of them by lag ────────────────────────┴► effective tokens
```

The *sample share* of a lag is the effective sample size of its importance weights over its tokens: how many
tokens of the trainer's own policy tell as much about it. The *direction* is the cosine between the gradient
that the run's loss makes of these tokens, and the one with exact importance weights, which has no bias. Both
are of the same tokens, so that their noise is the same. The cosine with the gradient of fresher tokens is not
used: those are other tokens (ends of long answers, whole short ones) and would differ without any staleness.
With c as the direction, a step along a gradient of n tokens, as noisy as gradients of reinforcement learning
are, improves the policy as much as one of `c² n` tokens that point the right way.

    worth = sample share · direction²

Source: effective sample size: Kong, "A note on importance sampling using standardized weights" (1992).
Improvement in proportion to the tokens while noise dominates: arXiv 1812.06162, section 2.2, where a gradient
off by an angle has c² of the squared signal. Errors: the jackknife, Tukey (1958).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np

from async_rl.planning.planned_job import JobPlan
from async_rl.trainer_protocol import LagFigures, LagMeasurement

_SURE: Final = 2.0
"""A direction lowers a token's worth if it is this many standard errors below 1: noise alone seldom is."""

_ALIKE: Final = 0.01
"""Bounds within this share of the best are alike: simulated rates are no more exact. The smallest counts."""

_LEAST: Final = 1e-3
"""The least worth of a token, which keeps its logarithm finite."""

Parts = Sequence[int]
"""The parts of a batch that figures are computed from."""


class LagPrice(msgspec.Struct, frozen=True, kw_only=True):
    """What the tokens of one lag of one batch are worth."""

    lag: int
    tokens: int
    sample_share: float
    """Effective sample size over tokens."""
    kl_nats: float
    """KL divergence of the sampling from the trainer's policy, per token."""
    norm: float
    """Of the gradient of these tokens, in an update of the whole batch."""
    direction: float | None
    """Cosine between it and the gradient of the same tokens with exact importance weights; None: one is 0."""
    direction_error: float | None
    """Its standard error; None with fewer than three groups."""
    cosine: float | None
    """Between the gradients of these and of the freshest tokens, which are others."""
    halves: float | None
    """Cosine between the gradients of two halves of these tokens, of other groups: what noise alone does."""
    worth: float
    """Tokens of the trainer's own policy that one of these tokens is worth."""


class BoundPrice(msgspec.Struct, frozen=True, kw_only=True):
    """What a job is expected to give with a bound."""

    bound: int
    tokens_per_s: float
    """Trained."""
    mean_lag: float
    worth: float
    """Of a token in the mean."""
    effective_tokens_per_s: float
    error: float | None
    """Standard error of the effective tokens per second, over groups."""
    extrapolated: float
    """Share of the tokens whose lag the batch does not have."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """The bound that gives the most."""

    bound: int
    without_a_part: tuple[int, ...]
    """The bounds that are proposed when a part of the groups is left out, for each part."""

    @property
    def is_sure(self) -> bool:
        """Whether the proposal does not depend on some of the groups."""
        return len(self.without_a_part) > 1 and set(self.without_a_part) == {self.bound}


def price_lags(measured: LagMeasurement) -> list[LagPrice]:
    """Return the price of each lag of a batch; empty if it has no tokens of known lag."""
    if not measured.lags:
        return []
    fresh, parts = measured.lags[0], _all_parts(measured)
    charged = _charged_lags(measured)
    return [
        LagPrice(
            lag=each.lag,
            tokens=sum(each.tokens),
            sample_share=_sample_share(each, parts),
            kl_nats=sum(each.kl) / sum(each.tokens),
            norm=math.sqrt(max(0.0, _among(each.with_itself, parts))),
            cosine=_ratio(
                *(_among(of, parts) for of in (each.with_fresh, each.with_itself, fresh.with_itself))
            ),
            halves=_halves(each),
            direction=_direction(each, parts),
            direction_error=_jackknife(partial(_direction, each), parts),
            worth=_worth(each, parts, charged),
        )
        for each in measured.lags
    ]


def price_bounds(measured: LagMeasurement, plans: Mapping[int, JobPlan]) -> list[BoundPrice]:
    """Return the price of each bound.

    Args:
        measured: A batch with tokens of at least one lag.
        plans: The job with each bound.
    """
    parts, charged = _all_parts(measured), _charged_lags(measured)
    known = {each.lag for each in measured.lags}
    found = []
    for bound, plan in plans.items():
        rate, shares = _trained_per_s(plan), plan.token_lags
        worth = _mean_worth(measured, plan, charged, parts)
        error = _jackknife(partial(_mean_worth, measured, plan, charged), parts)
        found.append(
            BoundPrice(
                bound=bound,
                tokens_per_s=rate,
                mean_lag=sum(lag * share for lag, share in enumerate(shares)),
                worth=worth,
                effective_tokens_per_s=rate * worth,
                error=None if error is None else rate * error,
                extrapolated=sum(share for lag, share in enumerate(shares) if lag not in known),
            )
        )
    return found


def propose_bound(measured: LagMeasurement, plans: Mapping[int, JobPlan]) -> Proposal:
    """Return the smallest bound whose effective tokens per second are within 1% of the most."""
    parts, charged = _all_parts(measured), _charged_lags(measured)

    def best(kept: Parts) -> int:
        rates = {
            bound: _trained_per_s(plan) * _mean_worth(measured, plan, charged, kept)
            for bound, plan in plans.items()
        }
        return min(bound for bound, rate in rates.items() if rate >= (1 - _ALIKE) * max(rates.values()))

    left = [[part for part in parts if part != out] for out in parts] if len(parts) > 1 else []
    return Proposal(bound=best(parts), without_a_part=tuple(best(kept) for kept in left))


def _all_parts(measured: LagMeasurement) -> Parts:
    return range(len(measured.lags[0].tokens))


def _trained_per_s(plan: JobPlan) -> float:
    return plan.tokens_per_s * (1 - plan.masked)


def _charged_lags(measured: LagMeasurement) -> set[int]:
    """Return the lags whose direction is off by more than what differs between groups."""
    parts = _all_parts(measured)
    charged = set()
    for each in measured.lags:
        direction = _direction(each, parts)
        error = _jackknife(partial(_direction, each), parts)
        if direction is not None and error is not None and 1 - direction > _SURE * error:
            charged.add(each.lag)
    return charged


def _sample_share(lag: LagFigures, parts: Parts) -> float:
    tokens = sum(lag.tokens[part] for part in parts)
    squares = sum(lag.squares[part] for part in parts)
    weights = sum(lag.weights[part] for part in parts)
    return weights**2 / (tokens * squares) if tokens else 1.0


def _direction(lag: LagFigures, parts: Parts) -> float | None:
    """Return the cosine between the gradients of the same tokens, by the loss and with exact weights."""
    return _ratio(*(_among(of, parts) for of in (lag.with_exact, lag.with_itself, lag.exact_with_itself)))


def _among(products: Sequence[Sequence[float]], parts: Parts) -> float:
    return sum(products[i][j] for i in parts for j in parts)


def _halves(lag: LagFigures) -> float | None:
    products = np.array(lag.with_itself)
    even, odd = products[::2], products[1::2]
    return _ratio(float(even[:, 1::2].sum()), float(even[:, ::2].sum()), float(odd[:, 1::2].sum()))


def _ratio(product: float, one: float, other: float) -> float | None:
    return product / math.sqrt(one * other) if one > 0 and other > 0 else None


def _worth(lag: LagFigures, parts: Parts, charged: set[int]) -> float:
    direction = _direction(lag, parts) if lag.lag in charged else None
    factor = 1.0 if direction is None else min(1.0, max(0.0, direction))
    return _sample_share(lag, parts) * factor**2


def _mean_worth(measured: LagMeasurement, plan: JobPlan, charged: set[int], parts: Parts) -> float:
    """Return the worth of a token in the mean over the lags of a plan.

    Lags that the batch does not have are worth what an exponential decay from the smallest lag on says, which
    is fitted to the others, each with the weight of its tokens.
    """
    fresh = measured.lags[0]
    worths = {each.lag: _worth(each, parts, charged) for each in measured.lags}
    first = max(_LEAST, worths[fresh.lag])
    above = steep = 0.0
    for each in measured.lags[1:]:
        distance, tokens = each.lag - fresh.lag, sum(each.tokens)
        above += tokens * distance * math.log(first / max(_LEAST, worths[each.lag]))
        steep += tokens * distance**2
    decay = max(0.0, above / steep) if steep else 0.0

    def worth(lag: int) -> float:
        return worths[lag] if lag in worths else min(1.0, first * math.exp(-decay * (lag - fresh.lag)))

    return sum(share * worth(lag) for lag, share in enumerate(plan.token_lags))


def _jackknife(statistic: Callable[[Parts], float | None], parts: Parts) -> float | None:
    """Return the standard error of a statistic from its values without each of the parts.

    None with fewer than three parts, and where one of the values is None.
    """
    values = [statistic([part for part in parts if part != out]) for out in parts]
    known = [value for value in values if value is not None]
    if len(values) < 3 or len(known) < len(values):
        return None
    return math.sqrt((len(known) - 1) * float(np.var(known)))
