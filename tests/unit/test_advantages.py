"""Advantages, turns and generalised estimates against hand-computed cases; properties test the estimators."""

import math

import numpy as np
import pytest
import torch

from trainer.losses.advantages import (
    ESTIMATORS,
    estimate_advantages,
    lacks_baseline,
    overlong_penalty,
)
from trainer.losses.gae import explained_variance, gae, token_rewards, value_losses
from trainer.losses.turns import find_turns, has_trained_tokens, longest_turns, turn_returns


def test_two_conversations_of_one_attempt_are_no_comparison():
    groups, attempts = np.zeros(2, np.int32), np.zeros(2, np.int32)
    assert lacks_baseline(groups, attempts, np.ones(2, np.bool_)).all()
    advantages = estimate_advantages(ESTIMATORS["grpo"], np.array([1, 0], np.float32), groups, attempts)
    assert advantages.tolist() == [0, 0]


def test_what_is_rejected_is_no_comparison():
    """The first trajectory of either group is rejected, which leaves one in the second group."""
    groups, counted = np.array([0, 0, 0, 1, 1], np.int32), np.array([False, True, True, False, True])
    assert lacks_baseline(groups, np.arange(5, dtype=np.int32), counted).tolist() == [False] * 3 + [True] * 2


def test_an_answer_loses_more_the_nearer_it_comes_to_the_longest():
    lengths = np.array([0, 80, 90, 100, 130])
    np.testing.assert_allclose(overlong_penalty(lengths, 100, 20), [0, 0, -0.5, -1, -1])


# -- turns of a batch and their returns ---------------------------------------------------------------


# Turns of 2 and 4 tokens, by two versions; nothing sampled; one token; a turn up to either end.
VERSIONS = np.concatenate([[-1, 5, 5, -1, 4, 4, 5, 5, -1], [-1, -1], [3], [7, 7, -1, 7]]).astype(np.int32)
OFFSETS = np.array([0, 9, 11, 12, 16])
TURNS = find_turns(VERSIONS, OFFSETS)


def test_a_turn_is_what_was_sampled_between_two_contexts():
    assert TURNS.trajectory.tolist() == [0, 0, 2, 3, 3]
    assert TURNS.start.tolist() == [1, 4, 11, 12, 15]
    assert TURNS.end.tolist() == [3, 8, 12, 14, 16]
    assert longest_turns(TURNS, 4).tolist() == [4, 0, 1, 2]


def test_a_batch_in_which_nothing_was_sampled_has_no_turns():
    turns = find_turns(np.full(3, -1, np.int32), np.array([0, 3]))
    assert longest_turns(turns, 1).tolist() == [0]
    none = np.zeros(0, np.int64)
    assert turn_returns(turns, np.ones(1, np.float32), none, none.astype(np.float32), 0.9).tolist() == []


def test_a_turn_counts_when_one_of_its_tokens_is_trained():
    mask = np.zeros(16, np.bool_)
    mask[[2, 12, 15]] = True
    assert has_trained_tokens(TURNS, mask).tolist() == [True, False, False, True, True]


@pytest.mark.parametrize(
    ("discount", "expected"),
    [
        # Rewards 1 + 0.5 and 2, 0 and 1; those of conversations are 4.5 in all and of the last turn, 1, 0.
        (1.0, [4.5, 3.5, 1.0, 0.0, 0.0]),
        (0.5, [1 + 0.5 * 3.5, 3.5, 1.0, 0.0, 0.0]),
        (0.0, [1.0, 3.5, 1.0, 0.0, 0.0]),
    ],
)
def test_a_turn_has_its_reward_and_the_discounted_rewards_of_later_ones(discount, expected):
    rewards = np.array([4.5, 9, 1, 0], np.float32)
    positions, values = np.array([2, 7]), np.array([1, 0.5], np.float32)
    returns = turn_returns(TURNS, rewards, positions, values, discount)
    np.testing.assert_allclose(returns, expected)
    assert returns.dtype == np.float32


# -- advantages from a critic and its loss ------------------------------------------------------------


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
