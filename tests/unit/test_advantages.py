"""What is no comparison for advantages, and DAPO's penalty for length; properties test the estimators."""

import numpy as np

from trainer.losses.advantages import (
    ESTIMATORS,
    estimate_advantages,
    lacks_baseline,
    overlong_penalty,
)


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
