"""Advantage estimators against cases computed by hand and plain loops; DAPO's penalty for length."""

import numpy as np
import pytest

from trainer.losses.advantages import (
    ESTIMATORS,
    estimate_advantages,
    lacks_baseline,
    overlong_penalty,
)

REWARDS = np.array([1, 0, 0, 0, 5, 3], np.float32)
GROUPS = np.array([0, 0, 0, 0, 1, 1], np.int32)
ATTEMPTS = np.arange(6, dtype=np.int32)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [3**0.5, *[-(3**-0.5)] * 3, 1, -1]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25, 1, -1]),
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3, 2, -2]),  # reward minus the mean of the siblings
        ("reinforce++", (REWARDS - 1.5) / REWARDS.std()),
        ("gae", (REWARDS - 1.5) / REWARDS.std()),  # of tokens' estimates
        ("reinforce++_baseline", np.array([0.75, -0.25, -0.25, -0.25, 1, -1]) / (2.75 / 6) ** 0.5),
    ],
)
def test_advantages_match_the_hand_computed_case(estimator, expected):
    advantages = estimate_advantages(ESTIMATORS[estimator], REWARDS, GROUPS, ATTEMPTS)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)
    assert advantages.dtype == np.float32


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
