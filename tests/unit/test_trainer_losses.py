import numpy as np
import pytest
import torch

from async_rl.errors import DataError
from trainer.advantages import group_advantages
from trainer.corrections import truncated_importance_weights
from trainer.losses import clipped_policy_loss, vocab_parallel_log_probs
from trainer.schedule import linear_warmup, warmup_then_cosine


def test_advantages_are_centred_and_scaled_when_normalized():
    rewards = np.array([1, 0, 0, 0, 5, 3], np.float32)
    groups = np.array([0, 0, 0, 0, 1, 1], np.int32)
    advantages = group_advantages(rewards, groups, normalize=True)
    deviation = np.sqrt(0.75 * 0.25)
    np.testing.assert_allclose(advantages, [0.75 / deviation, *[-0.25 / deviation] * 3, 1, -1], rtol=1e-5)
    assert advantages.dtype == np.float32


def test_advantages_keep_their_scale_when_not_normalized():
    advantages = group_advantages(
        np.array([4, 0, 7], np.float32), np.array([3, 3, 8], np.int32), normalize=False
    )
    np.testing.assert_array_equal(advantages, [2, -2, 0])


def test_advantages_are_zero_when_a_group_agrees():
    advantages = group_advantages(np.full(4, 0.3, np.float32), np.zeros(4, np.int32), normalize=True)
    np.testing.assert_allclose(advantages, 0, atol=1e-6)


def test_advantages_name_the_trajectory_when_a_reward_is_nan():
    with pytest.raises(DataError, match="trajectory 1 of the batch is nan"):
        group_advantages(np.array([0, np.nan], np.float32), np.zeros(2, np.int32), normalize=True)


def test_importance_weights_are_truncated_when_above_the_cap():
    old = torch.tensor([-1.0, -1.0, -3.0], requires_grad=True)
    weights, ratios = truncated_importance_weights(old, torch.tensor([-1.0, -3.0, -2.0]), 2.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, float(np.exp(-1))]))
    torch.testing.assert_close(ratios, torch.tensor([1.0, float(np.exp(2)), float(np.exp(-1))]))
    assert not weights.requires_grad


def test_importance_weights_are_one_when_the_correction_is_off():
    weights, _ = truncated_importance_weights(torch.zeros(3), torch.full((3,), -4.0), None)
    assert weights.tolist() == [1, 1, 1]


def test_policy_loss_matches_the_hand_computed_case_when_three_tokens_differ():
    """Ratios 1.5 (clipped, good), 1.5 (not clipped, bad) and 0.5 (clipped, bad)."""
    old = torch.log(torch.tensor([0.2, 0.2, 0.4]))
    current = torch.log(torch.tensor([0.3, 0.3, 0.2])).requires_grad_()
    advantages, weights = torch.tensor([1.0, -1.0, -1.0]), torch.tensor([1.0, 2.0, 1.0])
    result = clipped_policy_loss(current, old, advantages, weights, 0.2, 0.25)
    torch.testing.assert_close(result.loss, torch.tensor([-1.25, 3.0, 0.8]))
    assert result.clipped.tolist() == [1, 0, 1]
    result.loss.sum().backward()
    torch.testing.assert_close(current.grad, torch.tensor([0.0, 3.0, 0.0]))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropy_match_log_softmax_when_tempered(temperature):
    torch.manual_seed(0)
    logits = (torch.randn(9, 17) * 5).requires_grad_()
    labels = torch.randint(0, 17, (9,))
    upstream = torch.randn(9)
    log_probs, entropy = vocab_parallel_log_probs(logits, labels, temperature)
    (log_probs * upstream).sum().backward()
    gradient, logits.grad = logits.grad, None

    reference = torch.log_softmax(logits / temperature, -1)
    picked = reference.gather(1, labels[:, None])[:, 0]
    (picked * upstream).sum().backward()
    torch.testing.assert_close(log_probs, picked)
    torch.testing.assert_close(
        entropy, torch.distributions.Categorical(logits=logits / temperature).entropy()
    )
    torch.testing.assert_close(gradient, logits.grad)
    assert not entropy.requires_grad


def test_log_probs_leave_the_logits_alone_when_they_are_float32():
    logits = torch.randn(4, 8)
    before = logits.clone()
    vocab_parallel_log_probs(logits, torch.zeros(4, dtype=torch.long))
    assert torch.equal(logits, before)


def test_log_probs_are_float32_when_logits_are_bfloat16():
    logits = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    log_probs, _ = vocab_parallel_log_probs(logits, torch.zeros(4, dtype=torch.long))
    log_probs.sum().backward()
    assert log_probs.dtype == torch.float32
    assert logits.grad.dtype == torch.bfloat16


def test_learning_rate_rises_linearly_when_warming_up():
    rates = [linear_warmup(step, 8.0, 4) for step in range(6)]
    assert rates == [2, 4, 6, 8, 8, 8]
    assert linear_warmup(0, 8.0, 0) == 8


def test_learning_rate_falls_to_the_floor_when_on_a_cosine():
    rates = [warmup_then_cosine(step, 1.0, 2, 12, 0.1) for step in range(13)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[7] == pytest.approx(0.55)
    assert rates[12] == pytest.approx(0.1)
    assert rates[1:] == sorted(rates[1:], reverse=True)
