"""Advantages from a critic and its loss, against cases computed by hand, sums and autograd."""

import math

import numpy as np
import pytest
import torch

from trainer.losses.gae import explained_variance, gae, token_rewards, value_losses

# Two trajectories of 3 and 2 trained tokens.
TRAJECTORY = np.array([0, 0, 0, 1, 1])
REWARDS = np.array([0.0, 1, 2, 0, -1])
VALUES = np.array([0.5, 1, 1.5, 2, 1])


@pytest.mark.parametrize(
    ("gamma", "gae_lambda", "expected"),
    [
        # Sums of rewards minus values.
        (1.0, 1.0, [3 - 0.5, 3 - 1, 2 - 1.5, -1 - 2, -1 - 1]),
        # One-step differences.
        (1.0, 0.0, [1 - 0.5, 1 + 1.5 - 1, 2 - 1.5, 1 - 2, -1 - 1]),
        # deltas: 0, 1 + 0.75 - 1 = 0.75, 0.5; -1.5, -2; each counts a quarter of the next one.
        (0.5, 0.5, [0.25 * 0.875, 0.75 + 0.25 * 0.5, 0.5, -1.5 - 0.25 * 2, -2]),
    ],
)
def test_gae_matches_the_hand_computed_case(gamma, gae_lambda, expected):
    advantages, returns = gae(REWARDS, VALUES, TRAJECTORY, gamma, gae_lambda)
    np.testing.assert_allclose(advantages, expected, rtol=1e-12)
    np.testing.assert_allclose(returns, np.array(expected) + VALUES, rtol=1e-12)


def test_nothing_trained_has_no_advantages():
    none = np.zeros(0)
    assert [len(found) for found in gae(none, none, none.astype(np.int64), 1.0, 1.0)] == [0, 0]
    one = np.ones(1, np.float32)
    rewards = token_rewards(one, np.array([1]), one, np.zeros(3, np.bool_), np.zeros(3, np.int64))
    assert rewards.tolist() == [0, 0, 0]


# Trajectory 0: prompt, a turn of 2, a tool's output, a turn of 2. Trajectory 1: a branch, whose first turn
# the trunk trains, and whose second turn (tokens 9, 10) is too stale from its last token on. Trajectory 2:
# nothing is trained. At the predicting positions, one before the tokens.
OF_TOKENS = np.repeat([0, 1, 2], [6, 6, 2])
MASK = np.zeros(14, np.bool_)
MASK[[0, 1, 3, 4, 8]] = True


def test_rewards_are_of_the_last_trained_token_of_their_turn():
    positions = np.array([2, 7, 10, 13])
    values = np.array([0.5, 4, 0.25, 8], np.float32)
    rewards = token_rewards(np.array([2, 5, 9], np.float32), positions, values, MASK, OF_TOKENS)
    expected = np.zeros(14)
    expected[1], expected[4] = 0.5, 1.5  # the first turn's, and the rest at the end
    expected[8] = 0.25 + (5 - 4 - 0.25)  # the inherited turn's reward (4) is not of this branch's tokens
    np.testing.assert_allclose(rewards, expected)


def test_the_value_after_a_tools_output_follows_the_value_before_it():
    """As if the turns were one: nothing is discounted over tokens that the policy did not write."""
    tokens = np.flatnonzero(MASK)
    values = np.arange(14) / 10
    rewards = token_rewards(
        np.array([1, 0, 0], np.float32), np.zeros(0, np.int64), np.zeros(0, np.float32), MASK, OF_TOKENS
    )
    advantages, _ = gae(rewards[tokens], values[tokens], OF_TOKENS[tokens], 0.5, 0.0)
    np.testing.assert_allclose(
        advantages, [0.5 * 0.1 - 0, 0.5 * 0.3 - 0.1, 0.5 * 0.4 - 0.3, 1 - 0.4, 0 - 0.8], atol=1e-15
    )


def test_the_value_loss_matches_the_hand_computed_case():
    values = torch.tensor([1.1, 1.5, 0.5, 0.5, 1.5], requires_grad=True)
    old, returns = torch.ones(5), torch.tensor([2.0, 2.0, 2.0, 0.0, 0.0])
    losses, clipped = value_losses(values, old, returns, 0.2)
    # Within the bound; too far towards the return (twice: each way); away from it, which stays free.
    expected = [0.9**2 / 2, 0.8**2 / 2, 1.5**2 / 2, 0.8**2 / 2, 1.5**2 / 2]
    np.testing.assert_allclose(losses.detach(), expected, rtol=1e-6)
    assert clipped.tolist() == [0, 1, 0, 1, 0]
    losses.sum().backward()
    np.testing.assert_allclose(values.grad, [-0.9, 0, -1.5, 0, 1.5], rtol=1e-6)


def test_the_value_loss_is_half_the_square_without_a_clip():
    values = torch.tensor([3.0, 0.0], requires_grad=True)
    losses, clipped = value_losses(values, torch.zeros(2), torch.ones(2), None)
    assert losses.tolist() == [2, 0.5]
    assert clipped.tolist() == [0, 0]
    losses.sum().backward()
    assert values.grad.tolist() == [2, -1]


def test_explained_variance_tells_a_critic_from_a_constant():
    returns = np.array([0.0, 1, 2, 5])
    assert explained_variance(returns, returns) == 1
    assert explained_variance(np.full(4, 7.0), returns) == 0
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert math.isnan(explained_variance(returns, np.ones(4)))
    assert math.isnan(explained_variance(np.zeros(0), np.zeros(0)))
