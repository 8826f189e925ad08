"""What engine and trainer differ by: its parts over a run, and the first steps, which end it."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from async_rl.errors import EngineMismatch
from async_rl.run.engine_comparison import EngineComparison
from async_rl.trainer_protocol import StepResult
from async_rl.types import TrainBatch
from tests.support.run_config import config_with
from tests.support.train_batches import random_batch
from trainer import logprob_mismatch
from trainer.megatron.packing import UNKNOWN_LAG, Targets, make_targets

PARTS = ("kl_mismatch", "kl_staleness", "rollout_kl_lag0", "rollout_kl_lag1", "rollout_kl_lag2_up")
RATIOS = ("importance_ratio_p1", "importance_ratio_p50", "importance_ratio_p99", "effective_sample_share")


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    """20 trajectories of 1000 tokens, of lags 0, 1 and 2."""
    return random_batch(lengths=(1000,) * 20, routing=False)


@pytest.fixture(scope="module")
def wanted(batch: TrainBatch) -> Targets:
    return make_targets(batch)


def trainer_of(wanted: Targets, seed: int = 0) -> np.ndarray:
    """Log-probs of a trainer that differs from its engines as two programs do: by 0.02 nats."""
    rng = np.random.default_rng(seed)
    return (wanted.rollout_log_probs + rng.normal(0, 0.02, len(wanted.mask))).astype(np.float32)


def figures(wanted: Targets, start: np.ndarray) -> dict[str, float]:
    return logprob_mismatch.measure_mismatch(wanted, start, importance_cap=2.0)


def moved(before: dict[str, float], after: dict[str, float], names: tuple[str, ...]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in names}


def test_noise_at_lag_0_leaves_the_other_lags_where_they_were(wanted: Targets) -> None:
    start = trainer_of(wanted)
    noise = np.random.default_rng(1).normal(0.1, 0.2, len(start)).astype(np.float32)
    noisy = replace(wanted, rollout_log_probs=wanted.rollout_log_probs + noise * (wanted.lag == 0))
    change = moved(figures(wanted, start), figures(noisy, start), PARTS)
    assert change["rollout_kl_lag0"] == pytest.approx(0.1, rel=0.1)
    assert change["kl_mismatch"] == pytest.approx((0.1**2 + 0.2**2) / 2, rel=0.1)
    assert change["rollout_kl_lag1"] == change["rollout_kl_lag2_up"] == 0


def test_older_weights_move_the_staleness_only(wanted: Targets) -> None:
    start = trainer_of(wanted)
    drift = np.random.default_rng(1).normal(-0.05, 0.3, len(start)) * np.maximum(wanted.lag, 0)
    stale = (start + drift).astype(np.float32)
    change = moved(figures(wanted, start), figures(wanted, stale), PARTS)
    assert change["kl_mismatch"] == change["rollout_kl_lag0"] == 0
    expected = (0.05**2 + 0.3**2) / 2 * (1 + 4) / 2  # lags 1 and 2 are as frequent
    assert change["kl_staleness"] == pytest.approx(expected, rel=0.1)
    assert change["rollout_kl_lag1"] == pytest.approx(0.05, abs=0.015)
    assert change["rollout_kl_lag2_up"] == pytest.approx(0.1, abs=0.03)


def test_an_outlier_moves_the_extremes_only(batch: TrainBatch, wanted: Targets) -> None:
    start = trainer_of(wanted)
    at = int(np.flatnonzero(wanted.mask & (wanted.lag == 1))[123])
    broken = start.copy()
    broken[at] += 3.0
    before, (was, *_) = figures(wanted, start), logprob_mismatch.largest_differences(batch, wanted, start)
    after, (worst, second, *_) = (
        figures(wanted, broken),
        logprob_mismatch.largest_differences(batch, wanted, broken),
    )
    assert abs(was.difference) < 0.15
    assert worst.difference == pytest.approx(3.0, abs=0.1)
    assert second == was
    trajectory = int(np.searchsorted(batch.offsets, at, side="right")) - 1
    assert worst.trajectory_id == batch.trajectory_ids[trajectory]
    assert batch.token_ids[batch.offsets[trajectory] + worst.position] == worst.token_id
    assert worst.position == at + 1 - batch.offsets[trajectory]
    assert (worst.lag, worst.log_prob) == (1, pytest.approx(float(broken[at])))
    tokens = int(wanted.mask.sum())
    for name, change in moved(before, after, PARTS).items():  # one of a third of the tokens
        limit = 3 * (3**2 / 2 if name.startswith("kl") else 3) / tokens
        assert abs(change) <= 1.1 * limit < 1e-3, name
    for name, change in moved(before, after, RATIOS).items():
        assert abs(change) < 1e-3, name


def test_percentiles_and_effective_samples_are_those_of_all_tokens(wanted: Targets) -> None:
    start = trainer_of(wanted)
    ratios = np.sort(np.exp(start.astype(np.float64) - wanted.rollout_log_probs)[wanted.mask])
    measured = figures(wanted, start)
    for name, share in (("p1", 0.01), ("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
        rank = math.ceil(share * len(ratios)) - 1
        assert measured[f"importance_ratio_{name}"] == pytest.approx(ratios[rank], rel=1e-12)
    assert measured["effective_sample_share"] == pytest.approx(
        ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum()), rel=1e-12
    )


def test_routing_part_is_what_replay_takes_away_at_lag_0(wanted: Targets) -> None:
    start = trainer_of(wanted)
    other = np.random.default_rng(1).normal(0, 0.3, len(start)).astype(np.float32)
    probed = np.arange(len(start)) < 8000
    parts = logprob_mismatch.measure_routing(wanted, start, start + other, probed)
    assert parts["kl_routing"] == pytest.approx(0.3**2 / 2, rel=0.1)
    assert parts["routing_native_abs_diff"] > 10 * parts["routing_replayed_abs_diff"]
    assert parts["routing_probe_tokens"] == (wanted.mask & probed & (wanted.lag == 0)).sum()
    swapped = logprob_mismatch.measure_routing(wanted, start + other, start, probed)
    assert swapped["kl_routing"] == pytest.approx(-parts["kl_routing"], rel=1e-5)


def test_figures_are_nan_when_there_are_no_such_tokens(batch: TrainBatch, wanted: Targets) -> None:
    start = trainer_of(wanted)
    stale = replace(wanted, lag=wanted.lag + 1)
    measured = figures(stale, start)
    assert measured["tokens_lag0"] == 0
    assert math.isnan(measured["kl_mismatch"])
    assert math.isnan(measured["kl_staleness"])
    nothing = replace(wanted, mask=np.zeros_like(wanted.mask))
    assert math.isnan(figures(nothing, start)["importance_ratio_p50"])
    assert logprob_mismatch.largest_differences(batch, nothing, start) == ()


def test_tokens_of_weights_that_a_restart_has_undone_count_for_no_lag(batch: TrainBatch) -> None:
    """They are labelled with the checkpoint's version, so that they look like tokens of lag 0."""
    honest = make_targets(batch)
    start = trainer_of(honest)
    undone = np.zeros(batch.num_tokens, bool)
    undone[: batch.offsets[5]] = True  # whole trajectories: positions before and after the shift agree
    labels = np.where(undone & (batch.weight_versions >= 0), batch.trainer_version, batch.weight_versions)
    restored = msgspec.structs.replace(batch, weight_versions=labels.astype(np.int32), lag_unknown=undone)
    wanted = make_targets(restored)
    far = start + np.where(undone, 1.0, 0.0).astype(np.float32)  # what the undone weights had learned
    without = replace(honest, mask=honest.mask & ~undone)
    measured, expected = figures(wanted, far), figures(without, start)
    for name in (*PARTS, "lag0_log_prob_abs_diff", "tokens_lag0", "tokens_lag1", "tokens_lag2_up"):
        assert measured[name] == pytest.approx(expected[name]), name
    assert measured["tokens_lag_unknown"] == (honest.mask & undone).sum()
    assert measured["log_prob_diff"] > expected["log_prob_diff"] + 0.1  # they are trained all the same
    native = far + np.float32(0.1)
    parts = logprob_mismatch.measure_routing(wanted, far, native, np.ones(len(far), bool))
    assert parts["routing_probe_tokens"] == expected["tokens_lag0"]
    worst = logprob_mismatch.largest_differences(restored, wanted, far)
    assert {extreme.lag for extreme in worst} == {None}
    assert (make_targets(batch).lag != UNKNOWN_LAG).all()


# -- the run ends when engines compute another model than the trainer ---------------------------------


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
