"""The critic on real Megatron-Core: values, targets, gradients, warm-up, checkpoints."""

import math

import msgspec
import numpy as np
import pytest
import torch

from async_rl.errors import CheckpointError, NonFiniteLoss
from tests.support.tiny_model import build_tiny_qwen3
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    critic_gradients,
    differing,
    place,
    started,
    trainer_config,
    training_state,
    trial,
    weights,
)
from trainer import worker as trainer_worker
from trainer.losses.gae import gae, token_rewards
from trainer.megatron.packing import make_targets

pytestmark = [pytest.mark.real, pytest.mark.megatron]

GAE = {"advantages": "gae"}
WITHOUT_CORRECTION = {"importance": {"level": "off"}, "uncorrected": True}


def gae_config(model, *, loss=None, **trainer):
    return trainer_config(model, loss=GAE | (loss or {}), **trainer)


def with_turn_rewards(batch):
    """Two turns of the first trajectory and one of the second have rewards of their own."""
    positions = np.array([6, 10, 16])
    batch.loss_mask[7:9] = False  # a tool's output between the first two
    batch.weight_versions[7:9] = -1
    values = np.array([0.5, -1, 2], np.float32)
    return msgspec.structs.replace(batch, turn_reward_positions=positions, turn_reward_values=values)


def rewards_of(batch, wanted):
    """Of each trained token."""
    turns = batch.turn_reward_positions, batch.turn_reward_values
    return token_rewards(batch.rewards, *turns, wanted.mask, wanted.trajectory)[wanted.mask]


@pytest.mark.parametrize("kind", ["moe", "tied"])
def test_values_and_their_gradients_are_those_of_transformers(two_layers, tmp_path, kind):
    """Also where rows are replayed in the policy: the critic routes natively."""
    from transformers import AutoModelForCausalLM

    tied = kind == "tied"
    path = build_tiny_qwen3(tmp_path / "tied") if tied else two_layers
    batch = with_turn_rewards(random_batch(layers=2, routing=not tied))
    gamma, gae_lambda = 0.9, 0.7
    config = gae_config(
        path,
        replay=not tied,
        optimizer={"clip_grad": 1e9},
        critic={"gamma": gamma, "gae_lambda": gae_lambda, "value_clip": None},
    )
    with started(trainer_config(path, replay=not tied)) as worker, trial(worker, config):
        values = worker.critic.compute_values(place(worker, batch), batch.num_tokens)
        metrics = worker.train_on(batch, 1).metrics
        parts = {key: data for key, _, data in critic_gradients(worker)}
        head = worker.critic.model.chunks[0].module.output_layer.weight.detach().clone()

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    wanted, tokens = make_targets(batch), torch.from_numpy(batch.token_ids).long()
    states = torch.cat(
        [
            model.model(tokens[start:end][None]).last_hidden_state[0]
            for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
        ]
    )
    head.requires_grad_()
    expected = (states @ head[0])[torch.from_numpy(wanted.mask)]
    np.testing.assert_allclose(values[wanted.mask], expected.detach(), atol=1e-5)
    assert not values[~wanted.mask].any()

    _, returns = gae(
        rewards_of(batch, wanted),
        expected.detach().double().numpy(),
        wanted.trajectory[wanted.mask],
        gamma,
        gae_lambda,
    )
    loss = (expected - torch.from_numpy(returns)).square().mean() / 2
    loss.backward()
    assert metrics["value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    explained = 1 - np.var(returns - expected.detach().double().numpy()) / np.var(returns)
    assert metrics["value_explained_variance"] == pytest.approx(explained, rel=1e-5)
    gradients = [p.grad for p in [*model.model.parameters(), head] if p.grad is not None]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    assert metrics["critic_grad_norm"] == pytest.approx(norm, rel=1e-4)
    torch.testing.assert_close(parts["output_layer.weight"], head.grad.float(), atol=1e-6, rtol=1e-4)
    embedding = model.model.embed_tokens.weight.grad
    torch.testing.assert_close(parts["embedding.word_embeddings.weight"], embedding, atol=1e-6, rtol=1e-4)


def test_advantages_are_whitened_estimates(two_layers):
    """The gradient is that of the same estimates, given as rewards of single tokens to `reinforce++`."""
    batch = with_turn_rewards(random_batch(layers=2))
    config = gae_config(two_layers, loss=WITHOUT_CORRECTION, critic={"gamma": 0.9, "gae_lambda": 0.7})
    with started(trainer_config(two_layers)) as worker, trial(worker, config):
        wanted = make_targets(batch)
        values = worker.critic.compute_values(place(worker, batch), batch.num_tokens).astype(np.float64)
        mask, of = wanted.mask, wanted.trajectory[wanted.mask]
        found, _ = gae(rewards_of(batch, wanted), values[mask], of, 0.9, 0.7)
        share = (1 / np.bincount(of))[of] / batch.num_trajectories  # each attempt has one vote
        centred = found - (share * found).sum()
        expected = np.zeros(batch.num_tokens)
        expected[mask] = centred / np.sqrt((share * centred**2).sum())
        # With one update the policy's ratio is 1: the loss is minus the mean advantage.
        metrics = worker.train_on(batch, 1).metrics
        assert metrics["loss"] == pytest.approx(-expected[mask].mean(), rel=1e-4)
        assert abs(expected[mask].mean()) > 0.01


def test_only_the_critic_trains_during_its_warm_up(two_layers):
    config = gae_config(
        two_layers,
        optimizer={"lr": 1e-3, "warmup_steps": 2},
        critic={"warmup_steps": 2, "lr": 1e-2},
    )
    batch = random_batch(layers=2)
    with started(config) as worker:
        before, of_critic = weights(worker), [t.clone() for t in training_state(worker, of_critic=True)]
        found = [worker.train_on(batch, step).metrics for step in (1, 2)]
        assert not differing(weights(worker), before)
        now = training_state(worker, of_critic=True)
        assert not all(map(torch.equal, now[:5], of_critic[:5]))
        assert [(m["updates"], m["updates_skipped"], m["learning_rate"]) for m in found] == [(0, 0, 0)] * 2
        assert found[0]["entropy"] == found[1]["entropy"] > 0  # measured all the same
        assert found[1]["value_loss"] < found[0]["value_loss"]
        rates = [worker.train_on(batch, step).metrics["learning_rate"] for step in (3, 4, 5)]
        assert rates == [5e-4, 1e-3, 1e-3]
        assert not torch.equal(weights(worker)["lm_head.weight"], before["lm_head.weight"])


def test_values_are_clipped_from_the_second_update_on(two_layers):
    batch = random_batch(layers=2)
    for clip, expected in ((1e-6, 0.2), (None, 0.0)):
        config = gae_config(two_layers, epochs_per_batch=2, critic={"value_clip": clip, "lr": 1e-3})
        with started(config) as worker:
            fraction = worker.train_on(batch, 1).metrics["value_clip_fraction"]
        assert (fraction > expected) if clip else fraction == 0


def test_the_critic_moves_by_its_own_learning_rate(two_layers):
    moved = []
    for rate in (1e-3, 2e-3):
        with started(gae_config(two_layers, critic={"lr": rate})) as worker:
            worker.train_on(random_batch(layers=2), 1)
            moved.append(worker.critic.model.chunks[0].module.output_layer.weight.abs().max().item())
    assert moved == pytest.approx([1e-3, 2e-3], rel=1e-2)  # Adam's first step, from zero


def test_answers_that_are_left_out_do_not_train_the_critic(two_layers):
    batch = random_batch(layers=2)
    with started(gae_config(two_layers, loss={"reject": {"token_below": 0.999}})) as worker:
        metrics = worker.train_on(batch, 1).metrics
    assert metrics["importance_rejected_fraction"] == 1
    assert (metrics["value_loss"], metrics["critic_grad_norm"]) == (0, 0)


def test_an_update_of_the_critic_is_skipped_when_it_is_not_finite(two_layers, monkeypatch):
    monkeypatch.setattr(trainer_worker, "MAX_SKIPPED_UPDATES", 1)
    batch = random_batch(layers=2)
    with started(gae_config(two_layers)) as worker:
        (head,) = worker.critic.model.chunks[0].module.output_layer.parameters()
        head.data.fill_(1e25)  # whose square is infinite
        before = [t.clone() for t in training_state(worker, of_critic=True)]
        metrics = worker.train_on(batch, 1).metrics
        assert (metrics["updates"], metrics["updates_skipped"]) == (1, 0)  # of the policy
        assert math.isnan(metrics["critic_grad_norm"])
        assert all(map(torch.equal, training_state(worker, of_critic=True), before))
        with pytest.raises(NonFiniteLoss, match=r"the critic's loss of step 2 .* Lower trainer\.critic\.lr"):
            worker.train_on(batch, 2)
        head.data.fill_(math.nan)
        with pytest.raises(NonFiniteLoss, match=r"the critic's values at step 3 .* are not finite"):
            worker.train_on(batch, 3)


def test_a_resumed_critic_is_the_same_bit_for_bit(two_layers, tmp_path):
    config = gae_config(two_layers, critic={"warmup_steps": 1, "lr": 1e-3}, epochs_per_batch=2)
    batches = [random_batch(seed, layers=2) for seed in range(3)]

    def state(worker):
        return [t.clone() for of in (False, True) for t in training_state(worker, of_critic=of)]

    with started(config) as worker:
        worker.train_on(batches[0], 1)
        worker.save_checkpoint(str(tmp_path / "warm"), {})  # the policy has no moments yet
        worker.train_on(batches[1], 2)
        worker.save_checkpoint(str(tmp_path / "trained"), {})
        worker.train_on(batches[2], 3)
        assert worker.saved_checkpoint(wait=True).failure is None
        expected = state(worker)
    for folder, done in (("warm", 1), ("trained", 2)):
        with started(config, tmp_path / folder) as worker:
            assert worker.num_steps == done
            for step in range(done, 3):
                worker.train_on(batches[step], step + 1)
            found = state(worker)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), folder


def test_a_checkpoint_with_or_without_a_critic_is_refused_by_the_other_run(two_layers, tmp_path):
    configs = {"critic": gae_config(two_layers), "none": trainer_config(two_layers)}
    for name, config in configs.items():
        with started(config) as worker:
            worker.train_on(random_batch(layers=2), 1)
            worker.save_checkpoint(str(tmp_path / name), {})
    for name, message in (("critic", "no critic, and the run has one now"), ("none", "has a critic")):
        other = "none" if name == "critic" else "critic"
        with pytest.raises(CheckpointError, match=message), started(configs[name], tmp_path / other):
            pass


def test_the_critic_is_offloaded_with_the_policy(two_layers):
    with started(gae_config(two_layers)) as worker:
        worker.train_on(random_batch(layers=2), 1)
        expected = [t.clone() for t in training_state(worker, of_critic=True)]
        worker.offload()
        assert all(p.untyped_storage().nbytes() == 0 for p in worker.critic.model.chunks[0].parameters())
        worker.reload()
        assert all(map(torch.equal, training_state(worker, of_critic=True), expected))
        worker.train_on(random_batch(1, layers=2), 2)
