"""Advantage estimators against cases computed by hand and plain loops; DAPO's penalty for length."""

import numpy as np
import pytest

from async_rl.errors import DataError
from trainer.losses.advantages import estimate_advantages, longest_answers, overlong_penalty

REWARDS = np.array([1, 0, 0, 0, 5, 3], np.float32)
GROUPS = np.array([0, 0, 0, 0, 1, 1], np.int32)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("grpo", [3**0.5, *[-(3**-0.5)] * 3, 1, -1]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25, 1, -1]),
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3, 2, -2]),  # reward minus the mean of the siblings
        ("reinforce++", (REWARDS - 1.5) / REWARDS.std()),
        ("reinforce++_baseline", np.array([0.75, -0.25, -0.25, -0.25, 1, -1]) / (2.75 / 6) ** 0.5),
    ],
)
def test_advantages_match_the_hand_computed_case(estimator, expected):
    advantages = estimate_advantages(estimator, REWARDS, GROUPS)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)
    assert advantages.dtype == np.float32


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce++_baseline"])
def test_advantages_are_zero_when_a_group_agrees(estimator):
    advantages = estimate_advantages(estimator, np.full(4, 0.3, np.float32), np.zeros(4, np.int32))
    np.testing.assert_allclose(advantages, 0, atol=1e-6)


def test_advantages_name_the_trajectory_when_a_reward_is_nan():
    with pytest.raises(DataError, match="trajectory 1 of the batch is nan"):
        estimate_advantages("grpo", np.array([0, np.nan], np.float32), np.zeros(2, np.int32))


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="expected one of grpo"):
        estimate_advantages("gae", np.zeros(1, np.float32), np.zeros(1, np.int32))


def test_an_answer_loses_more_the_nearer_it_comes_to_the_longest():
    lengths = np.array([0, 80, 90, 100, 130])
    np.testing.assert_allclose(overlong_penalty(lengths, 100, 20), [0, 0, -0.5, -1, -1])


def test_the_longest_answer_counts_when_a_trajectory_has_several():
    """Turns of 2 and 4 tokens, by two versions; nothing sampled; one token; a turn up to either end."""
    versions = [[-1, 5, 5, -1, 4, 4, 5, 5, -1], [-1, -1], [3], [7, 7, -1, 7]]
    offsets = np.cumsum([0, *map(len, versions)])
    assert longest_answers(np.concatenate(versions), offsets).tolist() == [4, 0, 1, 2]
