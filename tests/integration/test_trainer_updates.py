"""What an update is made of on real Megatron-Core: algorithms, reference policy, guards, parts of the KL."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch

from async_rl.errors import NonFiniteLoss
from async_rl.types import SamplingMask
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    differing,
    gradients,
    log_probs_of,
    native_rows,
    place,
    started,
    trainer_config,
    trial,
    weights,
)
from trainer import logprob_mismatch
from trainer import worker as trainer_worker
from trainer.megatron.packing import make_targets

pytestmark = [pytest.mark.real, pytest.mark.megatron]

SPREAD = {"advantages": "reinforce++", "importance": {"level": "sequence", "high": 1.5}}


def sampled_by(worker, batch):
    """The batch with the log-probs that an engine of these weights, routed by its rows, would report."""
    at_prediction = log_probs_of(worker, batch)
    log_probs = np.zeros(batch.num_tokens, np.float32)
    log_probs[1:] = at_prediction[:-1]
    return msgspec.structs.replace(batch, rollout_log_probs=np.where(batch.loss_mask, log_probs, 0))


def near(worker, batch):
    """The batch as a policy near the trainer's would have sampled it, so that ratios are near 1."""
    noise = np.random.default_rng(1).normal(0, 0.05, batch.num_tokens).astype(np.float32)
    honest = sampled_by(worker, batch).rollout_log_probs
    return msgspec.structs.replace(batch, rollout_log_probs=np.where(batch.loss_mask, honest + noise, 0))


LOSSES = {
    "ppo": {},
    "gspo": {"objective": "gspo", "aggregate": "sequence_mean", "advantages": "dr_grpo"},
    "cispo": {
        "objective": "cispo",
        "advantages": "rloo",
        "importance": {"level": "geometric", "beyond": "mask"},
    },
    "constant": {"aggregate": "constant", "entropy_bonus": 0.1, "reject": {"geometric_low": 0.5}, **SPREAD},
    "kl in loss": {"kl": {"coefficient": 0.5, "estimator": "k2"}, "overlong_buffer_tokens": 20},
    "kl in reward": {
        "kl": {"coefficient": 0.5, "where": "reward"},
        "advantages": "dr_grpo",
        "dual_clip": 2.0,
    },
    "custom": {
        "advantages": "examples.custom_loss.losses:pass_at_k",
        "advantages_args": {"k": 1},
        "objective": "examples.custom_loss.losses:soft_gate",
        "objective_args": {"bad": 2.0},
    },
    "kl to go": {"kl": {"coefficient": 0.5, "where": "reward"}, "advantages": "reinforce++"},
}


def test_gradients_do_not_depend_on_the_cut_into_micro_batches(two_layers):
    with started(trainer_config(two_layers)) as worker:
        batch = near(worker, random_batch(layers=2))
        for loss, settings in LOSSES.items():
            results = []
            for budget in (1, 10_000):  # each trajectory alone, all together
                config = trainer_config(two_layers, micro_batch_tokens=budget, loss=settings)
                config["rollout"] |= {"max_new_tokens": 40}
                with trial(worker, config):
                    results.append((worker.train_on(batch, 1).metrics, gradients(worker)))
            (metrics, expected), (other, actual) = results
            assert metrics["grad_norm"] > 0.01, loss
            for key in metrics.keys() - {"step_s"}:
                wanted = pytest.approx(metrics[key], abs=1e-5, rel=1e-4, nan_ok=True)
                assert other[key] == wanted, f"{loss}: {key}"
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-4)


def test_the_reference_stays_the_models_own_weights_when_the_policy_moves(two_layers):
    config = trainer_config(two_layers, loss={"kl": {"coefficient": 0.1, "estimator": "k3"}})
    in_the_reward = {"coefficient": 0.5, "estimator": "k1", "where": "reward"}
    shaped = trainer_config(
        two_layers, loss={"kl": in_the_reward, "advantages": "dr_grpo", "overlong_buffer_tokens": 20}
    )
    shaped["rollout"] |= {"max_new_tokens": 30}
    to_go = trainer_config(two_layers, loss={"kl": in_the_reward, "advantages": "reinforce++"})
    with started(config) as worker:
        batch = random_batch(layers=2)
        batch = near(worker, msgspec.structs.replace(batch, routed_experts=native_rows(worker, batch)))
        before = weights(worker)
        first = worker.train_on(batch, 1).metrics
        assert first["reference_kl"] == pytest.approx(0, abs=1e-6)  # they are the same at first
        policy = log_probs_of(worker, batch)
        moved = weights(worker)
        assert differing(moved, before)
        with worker.model.as_reference():
            assert not differing(weights(worker), before)
            reference = log_probs_of(worker, batch)
        assert not differing(weights(worker), moved)
        with trial(worker, shaped):
            in_reward = worker.train_on(batch, 2).metrics
        with trial(worker, to_go):
            by_token = worker.train_on(batch, 2).metrics
        second = worker.train_on(batch, 2).metrics
    mask = batch.loss_mask[1:]
    difference = (policy - reference)[:-1][mask].astype(np.float64)
    expected = np.mean(np.expm1(-difference) + difference)
    assert second["reference_kl"] == pytest.approx(expected, rel=1e-3)
    assert second["reference_kl"] > 1e-5

    # In the reward: whole answers of 10, 4, 27, 16, 2 and 19 tokens pay for the distance and for length.
    trajectory = np.repeat(np.arange(6), np.diff(batch.offsets))[1:][mask]
    rewards = batch.rewards - 0.5 * np.bincount(trajectory, difference) - np.array([0, 0, 17, 6, 0, 9]) / 20
    advantages = (rewards.reshape(3, 2) - rewards.reshape(3, 2).mean(1, keepdims=True)).ravel()
    ratio = np.exp(policy[:-1][mask] - batch.rollout_log_probs[1:][mask])
    by_hand = -np.mean(np.minimum(ratio, 2.0) * advantages[trajectory])
    assert in_reward["loss"] == pytest.approx(by_hand, abs=1e-5)

    # Under reinforce++ each token pays for itself and later ones; an attempt's tokens share its vote.
    returns = batch.rewards[trajectory] - 0.5 * np.array(
        [difference[i:][trajectory[i:] == own].sum() for i, own in enumerate(trajectory)]
    )
    share = 1 / np.bincount(trajectory)[trajectory] / 6
    centred = returns - (share * returns).sum()
    advantages = centred / np.sqrt((share * centred**2).sum())
    by_hand = -np.mean(np.minimum(ratio, 2.0) * advantages)
    assert by_token["loss"] == pytest.approx(by_hand, abs=1e-4)


def test_the_kl_to_the_reference_is_between_renormalised_distributions(two_layers):
    """Both models over the kept tokens: 0 before the first update, whatever was kept."""
    config = trainer_config(two_layers, replay=False, loss={"kl": {"coefficient": 0.1, "estimator": "k3"}})
    batch = random_batch(routing=False)
    kept = [
        sorted({int(token), 4, 50}) if trained else []
        for token, trained in zip(batch.token_ids, batch.loss_mask, strict=True)
    ]
    batch = msgspec.structs.replace(batch, sampling_mask=SamplingMask.of(kept))
    with started(config) as worker:
        assert worker.train_on(batch, 1).metrics["reference_kl"] == pytest.approx(0, abs=1e-9)
        policy = log_probs_of(worker, batch)
        with worker.model.as_reference():
            reference = log_probs_of(worker, batch)
        found = worker.train_on(batch, 2).metrics["reference_kl"]
    difference = (policy - reference)[:-1][batch.loss_mask[1:]].astype(np.float64)
    assert found == pytest.approx(np.mean(np.expm1(-difference) + difference), rel=1e-3)
    assert found > 1e-6


def test_a_rejected_answer_is_no_baseline_for_its_group(two_layers):
    loss = {
        "advantages": "dr_grpo",
        "aggregate": "constant",
        "importance": {"level": "off"},
        "reject": {"token_below": 0.1},
        "uncorrected": True,
    }
    rewards, config = np.array([1, 0, 9]), trainer_config(two_layers, loss=loss)
    with started(config) as worker:
        batch = near(worker, random_batch(layers=2, lengths=(13, 7, 30), group_size=3, rewards=rewards))
        certain = batch.rollout_log_probs.copy()
        certain[20:] = np.where(batch.loss_mask[20:], -0.001, 0)  # the third: ratios of about 1/96
        batch = msgspec.structs.replace(batch, rollout_log_probs=certain)
        with trial(worker, config):
            metrics = worker.train_on(batch, 1).metrics
        with trial(worker, trainer_config(two_layers, loss=loss | {"entropy_bonus": 0.1})):
            left = worker.train_on(msgspec.structs.replace(batch, group_index=np.array([0, 1, 1])), 1).metrics
    assert metrics["importance_rejected_fraction"] == pytest.approx(27 / 41)
    assert metrics["groups_without_baseline"] == 0
    assert left["groups_without_baseline"] == 2  # a group of one, and one of which one is left
    assert left["loss"] == left["grad_norm"] == 0


@pytest.mark.parametrize("inherited", [False, True])
def test_turns_have_returns_of_their_own_when_they_are_discounted(two_layers, inherited):
    """Two attempts of two turns each, of 4 and 3 and of 2 and 5 tokens; the loss by hand."""
    loss = {
        "advantages": "rloo",
        "turn_discount": 0.5,
        "aggregate": "constant",
        "importance": {"level": "off"},
        "uncorrected": True,
    }
    config = trainer_config(two_layers, loss=loss)
    config["rollout"] |= {"max_new_tokens": 10}
    mask = np.array([[0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1]], bool)
    trained = mask.copy()
    if inherited:  # a turn that another trajectory trains, of the same return as the attempt's other turns
        trained[1, 3:5] = False
    with started(config) as worker:
        batch = random_batch(layers=2, lengths=(12, 12), rewards=np.array([3, 0]))
        batch = msgspec.structs.replace(
            batch,
            loss_mask=trained.ravel(),
            weight_versions=np.where(mask, 4, -1).astype(np.int32).ravel(),
            rollout_log_probs=np.where(mask, -4.0, 0).astype(np.float32).ravel(),
            turn_reward_positions=np.array([6, 16]),  # of either attempt's first turn: 1 of 3, 4 of 0
            turn_reward_values=np.array([1, 4], np.float32),
        )
        with trial(worker, config):
            found = worker.train_on(batch, 1).metrics["loss"]
    # Returns 1 + 2/2 and 2, and 4 - 4/2 and -4: the attempts' votes are 2 and -1, each other's baseline.
    by_hand = -(4 * 3 + 3 * 3 + 2 * 0 - 5 * 6) / (2 * 10)
    if inherited:  # the second attempt's vote is -4
        by_hand = -(4 * 6 + 3 * 6 - 5 * 6) / (2 * 10)
    assert found == pytest.approx(by_hand, abs=1e-5)


def test_the_proximal_policy_stays_when_a_batch_has_several_updates(two_layers):
    """Two updates of half the groups each, twice: the weights are those of four steps done one by one."""
    batch = random_batch(layers=2, lengths=(13, 7, 30, 19, 5, 22, 11, 9))
    with started(trainer_config(two_layers, updates_per_batch=2, epochs_per_batch=2)) as worker:
        batch = near(worker, batch)
        old = log_probs_of(worker, batch)
        metrics = worker.train_on(batch, 1).metrics
        actual = weights(worker)
        assert (metrics["updates"], metrics["updates_skipped"]) == (4, 0)
        assert abs(metrics["ppo_kl"]) > 1e-6  # later updates start from weights that have moved

    # The same by single updates, each with the first one's log-probs in the place of its own.
    with started(trainer_config(two_layers, loss={"check_old_log_probs_every": 1})) as worker:
        worker.compute_old_log_probs = lambda placed, num_tokens: (only(old, placed, num_tokens), placed)
        for part in (range(4), range(4, 8), range(4), range(4, 8)):
            worker.num_steps = 0  # one batch, one learning rate
            worker.train_on(of(batch, part), 1)
        expected = weights(worker)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def of(batch, trajectories):
    """A batch in which the other trajectories have no trained tokens and no say in the advantages."""
    mask = np.zeros(batch.num_tokens, bool)
    for j in trajectories:
        mask[batch.offsets[j] : batch.offsets[j + 1]] = True
    return msgspec.structs.replace(batch, loss_mask=batch.loss_mask & mask)


def only(values, placed, num_tokens):
    found = np.zeros(num_tokens, np.float32)
    for micro_batch in placed:
        found[micro_batch.token_indices] = values[micro_batch.token_indices]
    return found


def test_an_update_is_skipped_and_counted_when_its_loss_is_not_finite(two_layers, monkeypatch):
    monkeypatch.setattr(trainer_worker, "MAX_SKIPPED_UPDATES", 1)
    batch = random_batch(layers=2)
    broken = batch.rollout_log_probs.copy()
    broken[10] = np.nan
    broken = msgspec.structs.replace(batch, rollout_log_probs=broken)
    with started(trainer_config(two_layers)) as worker:
        before = weights(worker)
        metrics = worker.train_on(broken, 1).metrics
        assert (metrics["updates"], metrics["updates_skipped"]) == (0, 1)
        assert math.isnan(metrics["grad_norm"])
        assert not differing(weights(worker), before)
        assert worker.train_on(batch, 2).metrics["updates_skipped"] == 0  # which begins the count anew
        assert worker.train_on(broken, 3).metrics["updates_skipped"] == 1
        with pytest.raises(NonFiniteLoss, match=r"loss of step 4 .*batch-0.* is nan.*skipped updates: 2"):
            worker.train_on(broken, 4)


def test_an_update_is_skipped_when_its_gradient_is_a_spike(two_layers):
    with started(trainer_config(two_layers, optimizer={"lr": 1e-3, "skip_grad_norm_above": 1e-3})) as worker:
        before = weights(worker)
        metrics = worker.train_on(random_batch(layers=2), 1).metrics
        assert metrics["updates_skipped"] == 1
        assert not differing(weights(worker), before)


def test_weights_stay_when_no_group_has_a_signal(two_layers):
    """Adam's momentum would go on by 0.9 of the step before."""
    equal = random_batch(1, layers=2, rewards=np.ones(6))
    with started(trainer_config(two_layers)) as worker:
        assert worker.train_on(random_batch(layers=2), 1).metrics["grad_norm"] > 0
        before = weights(worker)
        assert worker.train_on(equal, 2).metrics["grad_norm"] == 0
        assert not differing(weights(worker), before)
        worker.train_on(random_batch(2, layers=2), 3)
        assert differing(weights(worker), before)


# -- the parts of the rollout KL on real Megatron-Core ------------------------------------------------


TINY = 1e-9
"""Of half a mean square, nats: float32 log-probs of the same pass in other micro-batches."""


def with_probe(two_layers, every=1, **trainer):
    config = trainer_config(two_layers, **trainer)
    return config | {"routing": config["routing"] | {"probe_every": every}}


def parts(worker, batch):
    """As `train_on` measures them, without its step."""
    wanted = make_targets(batch)
    start, placed = worker.compute_old_log_probs(place(worker, batch), batch.num_tokens)
    found = logprob_mismatch.measure_mismatch(wanted, start, 2.0) | worker.probe_routing(
        placed, wanted, start, 1
    )
    return {name: found[name] for name in ("kl_mismatch", "kl_staleness", "kl_routing")}


def test_each_injection_moves_its_own_part_only(two_layers):
    with started(with_probe(two_layers, micro_batch_tokens=10_000)) as worker:
        plain = random_batch(layers=2, lengths=(60,) * 8)
        own = msgspec.structs.replace(plain, routed_experts=native_rows(worker, plain))
        honest = sampled_by(worker, own)
        assert all(abs(value) < TINY for value in parts(worker, honest).values())

        noise = np.random.default_rng(0).normal(0, 0.1, plain.num_tokens).astype(np.float32)
        noisy = msgspec.structs.replace(honest, rollout_log_probs=honest.rollout_log_probs + noise)
        found = parts(worker, noisy)
        assert found["kl_mismatch"] == pytest.approx(0.005, rel=0.4)
        assert abs(found["kl_staleness"]) < 0.002
        # Both passes are compared with the same noise, which their difference does not have.
        assert abs(found["kl_routing"]) < 1e-5

        # An engine that chooses other experts than the trainer would, and says so.
        elsewhere = sampled_by(worker, plain)
        found = parts(worker, elsewhere)
        assert found["kl_routing"] > 1e-3
        assert abs(found["kl_mismatch"]) < TINY
        assert abs(found["kl_staleness"]) < TINY

        # Rows that are not those of the engine: replay makes it worse, and the mismatch is real.
        found = parts(worker, msgspec.structs.replace(honest, routed_experts=plain.routed_experts))
        assert found["kl_routing"] < -1e-3
        assert found["kl_mismatch"] == pytest.approx(-found["kl_routing"], rel=1e-3)

        # Newer weights than those that sampled tokens of lag 1 and more.
        worker.train_on(honest, 1)
        fresh = sampled_by(worker, msgspec.structs.replace(own, routed_experts=native_rows(worker, own)))
        older = (honest.weight_versions < honest.trainer_version) & honest.loss_mask
        stale = np.where(older, honest.rollout_log_probs, fresh.rollout_log_probs)
        found = parts(worker, msgspec.structs.replace(fresh, rollout_log_probs=stale))
        assert found["kl_staleness"] > 1e-6
        assert abs(found["kl_mismatch"]) < TINY
        assert abs(found["kl_routing"]) < TINY


def test_a_probe_changes_nothing_but_what_is_reported(two_layers):
    results = []
    for every in (0, 2):
        with started(with_probe(two_layers, every, loss={"old_log_probs": "rollout"})) as worker:
            found = [worker.train_on(random_batch(step, layers=2), step).metrics for step in (1, 2)]
            results.append((found, weights(worker)))
    (without, expected), (probed, actual) = results
    assert not differing(actual, expected)
    assert "kl_routing" not in without[1]
    assert "kl_routing" not in probed[0]
    assert 0 < probed[1]["routing_probe_tokens"] < probed[1]["tokens_lag0"]
    assert np.isfinite(probed[1]["kl_routing"])
