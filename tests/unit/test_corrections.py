"""Importance weights, rejections and KL estimates against cases computed by hand."""

import math

import numpy as np
import pytest
import torch

from async_rl.config import ImportanceConfig, RejectConfig
from trainer.losses.corrections import importance_correction, rejected_answers
from trainer.losses.kl import kl_estimate, sums_to_go
from trainer.losses.sequences import Sequences

# Two answers, of three tokens and of two; ratios 1, e², 1/e and e, e.
OLD = torch.tensor([-1.0, -1.0, -3.0, -1.0, -1.0], requires_grad=True)
ROLLOUT = torch.tensor([-1.0, -3.0, -2.0, -2.0, -2.0])
SEQUENCES = Sequences(torch.tensor([0, 0, 0, 1, 1]), torch.tensor([3, 2]))
E, NO = math.e, RejectConfig()


def rejected(reject: RejectConfig) -> torch.Tensor:
    """Return 1 for each token of a rejected answer."""
    return rejected_answers(reject, OLD.detach(), ROLLOUT, SEQUENCES)[SEQUENCES.index].float()


def weights(importance: ImportanceConfig, reject: RejectConfig = NO) -> list[float]:
    correction = importance_correction(importance, OLD, ROLLOUT, rejected(reject), SEQUENCES)
    assert not correction.weights.requires_grad
    torch.testing.assert_close(correction.ratios, torch.tensor([1, E**2, 1 / E, E, E]))
    return correction.weights.tolist()


@pytest.mark.parametrize(
    ("importance", "expected"),
    [
        ({"level": "off"}, [1, 1, 1, 1, 1]),
        ({"level": "token", "high": 2.0}, [1, 2, 1 / E, 2, 2]),  # TIS
        ({"level": "token", "high": 2.0, "low": 0.5}, [1, 2, 0.5, 2, 2]),
        ({"level": "token", "high": 5.0, "low": 0.5, "beyond": "mask"}, [1, 0, 0, E, E]),  # IcePop
        ({"level": "sequence", "high": 3.0}, [E, E, E, 3, 3]),  # products e and e²
        ({"level": "sequence", "high": 3.0, "beyond": "mask"}, [E, E, E, 0, 0]),  # MIS
        ({"level": "geometric", "high": 2.0}, [*[E ** (1 / 3)] * 3, 2, 2]),
        ({"level": "geometric", "high": 2.0, "beyond": "mask"}, [*[E ** (1 / 3)] * 3, 0, 0]),
    ],
)
def test_weights_match_the_hand_computed_case(importance, expected):
    assert weights(ImportanceConfig(**importance)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("reject", "kept"),
    [
        ({"geometric_high": 2.0}, [1, 1, 1, 0, 0]),
        ({"geometric_low": 2.0}, [0, 0, 0, 1, 1]),
        ({"geometric_low": 0.5, "geometric_high": 3.0}, [1, 1, 1, 1, 1]),
        ({"token_below": 0.4}, [0, 0, 0, 1, 1]),  # one of its tokens has 1/e
        ({"token_below": 0.3}, [1, 1, 1, 1, 1]),
    ],
)
def test_a_whole_answer_is_left_out_when_it_is_too_far_off(reject, kept):
    assert weights(ImportanceConfig(level="off"), RejectConfig(**reject)) == kept


def test_what_was_bounded_and_rejected_is_told():
    left_out = rejected(RejectConfig(geometric_high=2.0))
    correction = importance_correction(ImportanceConfig(high=2.0), OLD, ROLLOUT, left_out, SEQUENCES)
    assert correction.bounded.tolist() == [0, 1, 0, 1, 1]
    assert correction.rejected.tolist() == [0, 0, 0, 1, 1]


def test_a_product_over_thousands_of_tokens_stays_finite():
    n = 4000
    sequences = Sequences(torch.zeros(n, dtype=torch.int64), torch.tensor([n]))
    importance = ImportanceConfig(level="sequence", high=2.0)
    old, rollout = torch.zeros(n), torch.full((n,), -1.0)
    found = importance_correction(importance, old, rollout, torch.zeros(n), sequences).weights
    assert found.tolist() == [2.0] * n


def test_sums_go_over_all_ranks_when_they_share_an_answer():
    """Context parallelism: this rank has two of the four tokens, the other's sum is 5."""
    sequences = Sequences(torch.zeros(2, dtype=torch.int64), torch.tensor([4]), lambda sums: sums + 5)
    assert sequences.means(torch.tensor([1.0, 2.0])).tolist() == [2.0]


@pytest.mark.parametrize(
    ("kind", "expected", "gradient"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))],
)
def test_kl_estimates_match_schulmans_formulas(kind, expected, gradient):
    log_probs = torch.tensor([-1.0], requires_grad=True)
    estimate = kl_estimate(kind, log_probs, torch.tensor([-1.5]))
    assert estimate.item() == pytest.approx(expected, rel=1e-5)
    estimate.sum().backward()
    assert log_probs.grad.item() == pytest.approx(gradient, rel=1e-5)


def test_a_token_pays_for_itself_and_later_ones_of_its_trajectory():
    values, trajectory = np.array([1.0, 2.0, 4.0, 8.0, 16.0]), np.array([0, 0, 0, 2, 2])
    np.testing.assert_allclose(sums_to_go(values, trajectory), [7, 6, 4, 24, 16])
