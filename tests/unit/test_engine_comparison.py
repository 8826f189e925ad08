"""The run ends when engines compute another model than the trainer."""

from __future__ import annotations

import math

import pytest

from async_rl.errors import EngineMismatch
from async_rl.run.engine_comparison import EngineComparison
from async_rl.trainer_protocol import StepResult
from tests.support.run_config import config_with


def comparison(limit: float | None = 0.5, kind: str = "sglang") -> EngineComparison:
    return EngineComparison(config_with(engine={"kind": kind}, trainer={"max_mismatch_nats": limit}))


def step(number: int, num_tokens: int, difference: float) -> StepResult:
    return StepResult(step=number, metrics={"tokens_lag0": num_tokens, "lag0_log_prob_abs_diff": difference})


def test_the_run_ends_when_the_first_comparable_tokens_differ_too_much() -> None:
    compared = comparison()
    compared.observe_step(step(1, 0, math.nan))  # all tokens are stale
    compared.observe_step(step(2, 60, 9.0))  # too few
    with pytest.raises(EngineMismatch, match=r"step 3: .* differ by 5\.4 nats .* = 0\.5"):
        compared.observe_step(step(3, 40, 0.0))


def test_later_steps_are_not_compared_once_enough_tokens_agreed() -> None:
    compared = comparison()
    compared.observe_step(step(1, 64, 0.05))
    compared.observe_step(step(2, 64, 9.0))


def test_the_limit_is_the_setting() -> None:
    comparison(10.0).observe_step(step(1, 64, 9.0))
    with pytest.raises(EngineMismatch):
        comparison(8.0).observe_step(step(1, 64, 9.0))


@pytest.mark.parametrize(("limit", "kind"), [(None, "sglang"), (0.5, "simulated")])
def test_nothing_is_compared_without_a_limit_or_without_a_model(limit: float | None, kind: str) -> None:
    comparison(limit, kind).observe_step(step(1, 1000, 25.0))
