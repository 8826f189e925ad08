"""What stale tokens are worth, by hand: shares, directions, errors, bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from async_rl.planning.planned_job import JobPlan
from async_rl.planning.staleness_price import price_bounds, price_lags, propose_bound
from async_rl.trainer_protocol import LagFigures, LagMeasurement

FRESH = ((3.0, 0.0), (1.0, 0.0), (2.0, 0.0), (2.0, 0.0))
"""Gradients of four parts."""

TURNED = ((3.0, 3.0), (1.0, 1.0), (2.0, 2.0), (2.0, 2.0))
"""Those 45 degrees away from them."""

Vectors = Sequence[Sequence[float]] | np.ndarray


def lag_of(
    lag: int,
    vectors: Vectors,
    exact: Vectors,
    fresh: Vectors = FRESH,
    *,
    tokens: Sequence[int] = (10, 10, 10, 10),
    share: float = 1.0,
) -> LagFigures:
    """Figures of tokens with one sample share: in each part, that share of the tokens has weight 1."""
    return LagFigures(
        lag=lag,
        tokens=tuple(tokens),
        weights=tuple(share * n for n in tokens),
        squares=tuple(share * n for n in tokens),
        kl=tuple(0.5 * n for n in tokens),
        with_fresh=products(vectors, fresh),
        with_itself=products(vectors, vectors),
        with_exact=products(vectors, exact),
        exact_with_itself=products(exact, exact),
    )


def products(left: Vectors, right: Vectors) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, (np.array(left) @ np.array(right).T).tolist()))


def measured(*lags: tuple[int, Vectors, float]) -> LagMeasurement:
    """Lags whose gradients should be those of `FRESH`, and are these."""
    freshest = lags[0][1]
    return LagMeasurement(
        lags=tuple(lag_of(lag, vectors, FRESH, freshest, share=share) for lag, vectors, share in lags)
    )


def plan(tokens_per_s: float, lags: Sequence[float], masked: float = 0.0) -> JobPlan:
    values = dict.fromkeys(JobPlan.__struct_fields__, 0)
    return JobPlan(**(values | {"tokens_per_s": tokens_per_s, "token_lags": list(lags), "masked": masked}))  # type: ignore[arg-type]


def test_the_sample_share_is_kongs() -> None:
    """Weights 1, 2 and 3 in one part: 36 / (3 · 14)."""
    lag = LagFigures(
        lag=0,
        tokens=(3,),
        weights=(6.0,),
        squares=(14.0,),
        kl=(0.3,),
        with_fresh=((4.0,),),
        with_itself=((4.0,),),
        with_exact=((4.0,),),
        exact_with_itself=((4.0,),),
    )
    (price,) = price_lags(LagMeasurement(lags=(lag,)))
    assert price.sample_share == pytest.approx(36 / 42)
    assert price.kl_nats == pytest.approx(0.1)
    assert (price.norm, price.cosine, price.halves) == (2.0, 1.0, None)
    assert price.worth == price.sample_share


def test_a_turned_gradient_costs_the_square_of_its_cosine() -> None:
    fresh, stale = price_lags(measured((0, FRESH, 1.0), (2, TURNED, 0.8)))
    assert (fresh.direction, fresh.cosine, fresh.worth) == (1.0, pytest.approx(1.0), 1.0)
    assert stale.cosine == pytest.approx(math.sqrt(0.5))
    assert stale.direction == pytest.approx(math.sqrt(0.5))
    assert stale.direction_error == pytest.approx(0.0, abs=1e-9)
    assert stale.worth == pytest.approx(0.8 * 0.5)
    assert stale.norm == pytest.approx(8 * math.sqrt(2))


def test_the_cosine_to_other_tokens_has_their_noise_and_costs_nothing() -> None:
    """Each part has noise of its own, in a dimension of its own, which is the same with exact weights."""
    quiet, noise = np.array([[2.0, 0.0]] * 4), 3 * np.eye(4)
    fresh, stale = np.hstack([quiet, noise, 0 * noise]), np.hstack([quiet, 0 * noise, noise])
    lags = (lag_of(0, fresh, fresh, fresh), lag_of(1, stale, stale, fresh))
    first, second = price_lags(LagMeasurement(lags=lags))
    assert second.cosine == pytest.approx(64 / (64 + 36))
    assert first.halves == pytest.approx(16 / (16 + 18))
    assert (second.direction, second.worth) == (pytest.approx(1.0), 1.0)


def test_a_direction_that_noise_may_explain_is_not_charged() -> None:
    rough = ((3.0, 1.0), (1.0, 1.0), (2.0, 1.0), (2.0, -0.5))
    _, stale = price_lags(measured((0, FRESH, 1.0), (1, rough, 0.9)))
    assert stale.direction is not None
    assert stale.direction_error is not None
    assert 0 < 1 - stale.direction < 2 * stale.direction_error
    assert stale.worth == pytest.approx(0.9)


def test_the_error_is_the_jackknifes() -> None:
    rough = ((3.0, 1.0), (1.0, -0.9), (2.0, 1.4), (2.0, 2.0))
    _, stale = price_lags(measured((0, FRESH, 1.0), (1, rough, 1.0)))
    a, b = np.array(rough), np.array(FRESH)

    def direction(parts: list[int]) -> float:
        def total(x: np.ndarray, y: np.ndarray) -> float:
            return sum(float(x[i] @ y[j]) for i in parts for j in parts)

        return total(a, b) / math.sqrt(total(a, a) * total(b, b))

    left = np.array([direction([part for part in range(4) if part != out]) for out in range(4)])
    assert stale.direction_error == pytest.approx(math.sqrt(3 / 4 * ((left - left.mean()) ** 2).sum()))


def test_tokens_without_a_gradient_have_no_direction() -> None:
    """Their groups have equal rewards."""
    _, stale = price_lags(measured((0, FRESH, 1.0), (1, ((0.0, 0.0),) * 4, 0.7)))
    assert (stale.direction, stale.direction_error, stale.cosine) == (None, None, None)
    assert stale.worth == pytest.approx(0.7)


def test_a_bound_gives_its_tokens_times_their_worth() -> None:
    step = measured((0, FRESH, 1.0), (2, TURNED, 0.8))
    plans = {0: plan(100, [1.0]), 2: plan(200, [0.5, 0, 0.5]), 4: plan(400, [0, 0, 0, 0, 1.0], masked=0.25)}
    prices = {each.bound: each for each in price_bounds(step, plans)}
    assert prices[0].effective_tokens_per_s == pytest.approx(100)
    assert prices[2].worth == pytest.approx((1 + 0.4) / 2)
    assert prices[2].effective_tokens_per_s == pytest.approx(140)
    assert (prices[0].extrapolated, prices[2].extrapolated, prices[4].extrapolated) == (0, 0, 1)
    # 0.4 at lag 2: 0.16 at lag 4.
    assert prices[4].worth == pytest.approx(0.16)
    assert prices[4].effective_tokens_per_s == pytest.approx(400 * 0.75 * 0.16)
    assert prices[2].mean_lag == pytest.approx(1.0)
    proposal = propose_bound(step, plans)
    assert (proposal.bound, proposal.without_a_part, proposal.is_sure) == (2, (2, 2, 2, 2), True)


def test_lags_below_the_freshest_are_worth_more_but_at_most_one() -> None:
    step = measured((1, FRESH, 0.9), (2, FRESH, 0.6))
    (price,) = price_bounds(step, {0: plan(100, [1.0])})
    assert price.worth == pytest.approx(1.0)  # 0.9 · 0.9 / 0.6 is more
    step = measured((1, FRESH, 0.6), (2, FRESH, 0.5))
    (price,) = price_bounds(step, {0: plan(100, [1.0])})
    assert price.worth == pytest.approx(0.6 * 0.6 / 0.5)


def test_the_smallest_of_bounds_that_are_alike_is_proposed() -> None:
    step = measured((0, FRESH, 1.0), (1, FRESH, 1.0))
    alike = {1: plan(99.5, [1.0]), 2: plan(100, [1.0]), 4: plan(99.9, [1.0])}
    assert propose_bound(step, alike).bound == 1
    assert propose_bound(step, alike | {2: plan(102, [1.0])}).bound == 2


def test_a_proposal_that_depends_on_a_part_is_not_sure() -> None:
    tokens = (10, 10, 10, 10)
    fresh = lag_of(0, FRESH, FRESH)
    stale = lag_of(2, FRESH, FRESH, tokens=tokens)
    # The first part has one token of all the weight: 10 effective tokens without it are 9 of 40 with it.
    stale = LagFigures(
        lag=2,
        tokens=tokens,
        weights=(40.0, 10.0, 10.0, 10.0),
        squares=(1200.0, 10.0, 10.0, 10.0),
        kl=stale.kl,
        with_fresh=stale.with_fresh,
        with_itself=stale.with_itself,
        with_exact=stale.with_exact,
        exact_with_itself=stale.exact_with_itself,
    )
    step = LagMeasurement(lags=(fresh, stale))
    plans = {0: plan(100, [1.0]), 2: plan(200, [0.0, 0.0, 1.0])}
    proposal = propose_bound(step, plans)
    assert (proposal.bound, proposal.is_sure) == (0, False)
    assert proposal.without_a_part == (2, 0, 0, 0)
    assert price_bounds(step, plans)[1].error is not None


def test_a_single_group_says_nothing_about_how_sure_it_is() -> None:
    lags = tuple(lag_of(lag, FRESH[:1], FRESH[:1], FRESH[:1], tokens=(10,)) for lag in (0, 1))
    proposal = propose_bound(LagMeasurement(lags=lags), {0: plan(100, [1.0])})
    assert (proposal.without_a_part, proposal.is_sure) == ((), False)
