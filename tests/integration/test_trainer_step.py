"""Whole trainer steps on real Megatron-Core, one rank."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from async_rl.errors import InvariantError
from tests.support.stored_batches import store_batch
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    gradients,
    log_probs_of,
    started,
    trainer_config,
    trial,
)

pytestmark = pytest.mark.megatron


def test_metrics_match_numpy_when_computed_by_hand(two_layers):
    batch = random_batch(layers=2)
    config = trainer_config(two_layers, loss={"importance": {"high": 1.2}})
    with started(config) as worker:
        old = log_probs_of(worker, batch)
        metrics = worker.train_on(batch, 1).metrics
    # `old` is at the predicting position; the batch's own arrays are one later.
    mask, rollout = batch.loss_mask[1:], batch.rollout_log_probs[1:][batch.loss_mask[1:]]
    difference = old[:-1][mask].astype(np.float64) - rollout
    trajectory = np.repeat(np.arange(6), np.diff(batch.offsets))[1:][mask]
    rewards = batch.rewards.reshape(3, 2).astype(np.float64)
    advantages = ((rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)).ravel()
    weight = np.minimum(np.exp(difference), 1.2)
    assert metrics["loss"] == pytest.approx(-(weight * advantages[trajectory]).mean(), abs=1e-5)
    assert metrics["log_prob_diff"] == pytest.approx(difference.mean(), abs=1e-5)
    assert metrics["log_prob_abs_diff"] == pytest.approx(np.abs(difference).mean(), abs=1e-5)
    assert metrics["importance_ratio_mean"] == pytest.approx(np.exp(difference).mean(), abs=1e-4)
    assert metrics["importance_truncated_fraction"] == pytest.approx((np.exp(difference) > 1.2).mean())
    lag = (batch.trainer_version - batch.weight_versions[1:])[mask]
    fresh = lag == 0
    assert metrics["rollout_kl"] == pytest.approx(-difference.mean(), abs=1e-5)
    for name, chosen in (("lag0", fresh), ("lag1", lag == 1), ("lag2_up", lag >= 2)):
        assert metrics[f"rollout_kl_{name}"] == pytest.approx(-difference[chosen].mean(), abs=1e-5)
    assert metrics["lag0_log_prob_abs_diff"] == pytest.approx(np.abs(difference[fresh]).mean(), abs=1e-5)
    assert math.isnan(metrics["ppo_kl"])  # 0 by construction with one update
    assert metrics["tokens"] == batch.num_tokens
    assert metrics["trained_tokens"] == mask.sum()
    assert metrics["routing_rows"] == batch.num_tokens - 6
    assert metrics["routing_rows_invalid"] == 0


@pytest.mark.case(43)
def test_bypass_has_a_name_of_its_own_when_rollout_log_probs_are_the_proximal_ones(two_layers):
    batch = random_batch(layers=2)
    with started(trainer_config(two_layers, loss={"old_log_probs": "rollout"})) as worker:
        current = log_probs_of(worker, batch)[:-1][batch.loss_mask[1:]]
        metrics = worker.train_on(batch, 1).metrics
    difference = current - batch.rollout_log_probs[1:][batch.loss_mask[1:]]
    assert metrics["ppo_kl_bypass"] == pytest.approx(-difference.mean(), abs=1e-5)
    assert math.isnan(metrics["ppo_kl"])
    assert metrics["log_prob_abs_diff"] == pytest.approx(np.abs(difference).mean(), abs=1e-5)
    assert metrics["importance_ratio_mean"] == 1
    assert metrics["clip_fraction"] > 0


@pytest.mark.case(40)
@pytest.mark.parametrize(("replay", "recompute"), [("r2", "full"), ("r3", "none")])
def test_the_update_repeats_the_old_pass(two_layers, monkeypatch, replay, recompute):
    batch = random_batch(layers=2)
    every_step = {"check_old_log_probs_every": 1}
    config = trainer_config(
        two_layers, replay=replay, recompute=recompute, micro_batch_tokens=40, loss=every_step
    )
    with started(config) as worker:
        assert worker.train_on(batch, 1).metrics["old_log_prob_abs_diff"] < 1e-9
        # Control: other rows in the update than in the pass before it.
        honest = worker.compute_old_log_probs

        def then_others(placed, num_tokens):
            old, placed = honest(placed, num_tokens)
            return old, [with_other_rows(p) for p in placed]

        monkeypatch.setattr(worker, "compute_old_log_probs", then_others)
        assert worker.train_on(batch, 2).metrics["old_log_prob_abs_diff"] > 1e-5


SKIPPING = {
    "ppo": {},
    "gspo, sequence weights": {
        "objective": "gspo",
        "importance": {"level": "sequence", "high": 1.2},
        "kl": {"coefficient": 0.1},
    },
    "cispo, masked": {"objective": "cispo", "importance": {"beyond": "mask", "high": 1.2}},
}


@pytest.mark.real
@pytest.mark.parametrize("settings", SKIPPING.values(), ids=SKIPPING)
def test_one_update_takes_the_old_log_probs_from_its_own_pass_bit_for_bit(two_layers, monkeypatch, settings):
    batch = random_batch(layers=2)
    found, passes = {}, 0
    with started(trainer_config(two_layers, micro_batch_tokens=40)) as worker:
        computed = worker.compute_old_log_probs

        def count(*args):
            nonlocal passes
            passes += 1
            return computed(*args)

        monkeypatch.setattr(worker, "compute_old_log_probs", count)
        for every in (3, 0):  # step 3 compares, or does not
            loss = settings | {"check_old_log_probs_every": every}
            with trial(worker, trainer_config(two_layers, micro_batch_tokens=40, loss=loss)):
                found[every] = worker.train_on(batch, 3).metrics, gradients(worker)
                assert worker.train_on(batch, 4).metrics["old_log_prob_abs_diff"] != 0  # NaN
    assert passes == 1
    (metrics, expected), (other, actual) = found[3], found[0]
    assert metrics["old_log_prob_abs_diff"] == 0
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name
    for key in metrics.keys() - {"step_s", "old_log_prob_abs_diff"}:
        assert other[key] == pytest.approx(metrics[key], rel=0, abs=0, nan_ok=True), key


@pytest.mark.real
@pytest.mark.parametrize(
    "needs",
    [
        {"updates_per_batch": 2},
        {"epochs_per_batch": 2},
        {"loss": {"reject": {"token_below": 1e-9}}},
        {"loss": {"kl": {"coefficient": 0.1, "where": "reward"}, "advantages": "dr_grpo"}},
        {"replay": "r2"},
    ],
    ids=str,
)
def test_whatever_needs_old_log_probs_before_the_update_computes_them(two_layers, needs):
    needs = dict(needs)
    loss = needs.pop("loss", {}) | {"check_old_log_probs_every": 0}
    with started(trainer_config(two_layers, loss=loss, **needs)) as worker:
        assert worker.train_on(random_batch(layers=2), 1).metrics["old_log_prob_abs_diff"] < 1e-9


def with_other_rows(placed):
    """A micro-batch with every expert moved on by one."""
    (rows,) = placed.inputs.routing
    moved = rows._replace(ids=(rows.ids + 1) % 8)
    return dataclasses.replace(placed, inputs=placed.inputs._replace(routing=(moved,)))


def test_rewarded_tokens_become_likelier_when_trained(two_layers):
    """One token is rewarded wherever it was written; on-policy log-probs stand for the engine's."""
    wanted = 7
    rng = np.random.default_rng(0)
    with started(trainer_config(two_layers, optimizer={"lr": 3e-3}, micro_batch_tokens=512)) as worker:
        shares = []
        for step in range(1, 9):
            batch = random_batch(step, layers=2, lengths=(8,) * 32, group_size=8, prompt=7)
            tokens = batch.token_ids.copy()
            last = batch.offsets[1:] - 1
            tokens[last] = rng.choice([wanted, 11, 13, 17], len(last))
            rewards = (tokens[last] == wanted).astype(np.float32)
            batch = replace(batch, token_ids=tokens, rewards=rewards)
            log_probs = log_probs_of(worker, batch)
            shares.append(np.exp(log_probs[last - 1])[rewards > 0].mean())
            on_policy = np.zeros(batch.num_tokens, np.float32)
            on_policy[1:] = log_probs[:-1]
            metrics = worker.train_on(replace(batch, rollout_log_probs=on_policy), step).metrics
            assert metrics["log_prob_abs_diff"] < 1e-6
    assert shares[-1] > 2 * shares[0]


def test_batch_is_read_from_its_frames_when_trained(two_layers, tmp_path):
    batch = random_batch(layers=2)
    taken = store_batch(tmp_path, batch)
    with started(trainer_config(two_layers)) as worker:
        with trial(worker, trainer_config(two_layers)):
            direct = worker.train_on(batch, 1)
        assert worker.read_batch(taken) == {}
        stored = worker.train_step(taken, 1)
        assert stored.metrics["loss"] == direct.metrics["loss"]
        assert (stored.step, stored.extremes) == (1, direct.extremes)
        damaged, missing = taken.trajectories[1:3]
        path = Path(damaged.path)
        path.write_bytes(path.read_bytes()[:-64])
        Path(missing.path).unlink()
        flaws = worker.read_batch(taken)
        assert flaws.keys() == {damaged.trajectory_id, missing.trajectory_id}
        assert "cut short" in flaws[damaged.trajectory_id]
        assert "does not exist" in flaws[missing.trajectory_id]
        with pytest.raises(InvariantError, match=r"rank 0 has not read"):
            worker.train_step(taken, 1)
