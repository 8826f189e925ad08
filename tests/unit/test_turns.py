"""Turns of a batch and their returns, against cases computed by hand."""

import numpy as np
import pytest

from trainer.losses.turns import find_turns, has_trained_tokens, longest_turns, turn_returns

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
