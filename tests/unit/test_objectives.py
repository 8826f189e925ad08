"""Policy objectives against cases computed by hand and against plain loops over the papers' formulas."""

import math

import numpy as np
import pytest
import torch

from async_rl.config import LossConfig
from trainer.losses.objectives import cispo, gspo, policy_objective, ppo, token_weights
from trainer.losses.sequences import Sequences


def tokens(*lengths: int, seed: int = 0):
    """Current (with gradient) and old log-probs, advantages, weights, and whose tokens they are."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    old = -torch.rand(len(index), generator=generator) * 3
    current = (old + torch.randn(len(index), generator=generator) * 0.3).requires_grad_()
    advantages = torch.randn(len(lengths), generator=generator)[index]
    weights = torch.rand(len(index), generator=generator) + 0.5
    return current, old, advantages, weights, Sequences(index, torch.tensor(lengths))


def test_ppo_matches_the_hand_computed_case_when_three_tokens_differ():
    """Ratios 1.5 (clipped, good), 1.5 (not clipped, bad) and 0.5 (clipped, bad)."""
    old = torch.log(torch.tensor([0.2, 0.2, 0.4]))
    current = torch.log(torch.tensor([0.3, 0.3, 0.2])).requires_grad_()
    advantages, weights = torch.tensor([1.0, -1.0, -1.0]), torch.tensor([1.0, 2.0, 1.0])
    result = ppo(current, old, advantages, weights, 0.2, 0.25)
    torch.testing.assert_close(result.loss, torch.tensor([-1.25, 3.0, 0.8]))
    assert result.clipped.tolist() == [1, 0, 1]
    result.loss.sum().backward()
    torch.testing.assert_close(current.grad, torch.tensor([0.0, 3.0, 0.0]))


def test_a_bad_token_counts_no_more_than_the_dual_clip_when_it_has_become_likely():
    """Ratios 8 and 2, both bad, bound 3; a good token with ratio 8 is clipped by 1.2 as ever."""
    old = torch.log(torch.tensor([0.1, 0.1, 0.1]))
    current = torch.log(torch.tensor([0.8, 0.2, 0.8])).requires_grad_()
    result = ppo(current, old, torch.tensor([-1.0, -1.0, 1.0]), torch.ones(3), 0.2, 0.2, 3.0)
    torch.testing.assert_close(result.loss, torch.tensor([3.0, 2.0, -1.2]))
    assert result.clipped.tolist() == [1, 0, 1]
    result.loss.sum().backward()
    torch.testing.assert_close(current.grad, torch.tensor([0.0, 2.0, 0.0]))


def test_gspo_is_the_sources_objective_when_averaged_by_answers():
    """Equations 5 to 7 as loops over answers: value and gradient."""
    current, old, advantages, _, sequences = tokens(4, 1, 7, 2)
    low, high = 0.05, 0.08
    answers = []
    for i, length in enumerate(sequences.lengths.tolist()):
        mine = sequences.index == i
        ratio = ((current[mine] - old[mine]).sum() / length).exp()
        advantage = advantages[mine][0]
        answers.append(torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage))
    expected = -torch.stack(answers).mean()
    (gradient,) = torch.autograd.grad(expected, current)

    result = gspo(current, old, advantages, torch.ones(14), low, high, sequences)
    weights = token_weights("sequence_mean", sequences.index.numpy(), 99)
    loss = (result.loss * torch.from_numpy(weights)).sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, current)[0], gradient)
    assert 0 < result.clipped.sum() < 14  # some answers are clipped, and some are not


def test_cispo_gives_every_token_a_gradient_when_ratios_are_clipped():
    current, old, advantages, weights, _ = tokens(5, 3)
    result = cispo(current, old, advantages, weights, 1.0, 0.1)
    (gradient,) = torch.autograd.grad(result.loss.sum(), current)
    for i in range(8):
        ratio = math.exp((current[i] - old[i]).item())
        bounded = min(max(ratio, 0.0), 1.1)
        assert float(gradient[i]) == pytest.approx(-float(weights[i] * advantages[i]) * bounded, rel=1e-5)
        assert result.clipped[i] == (ratio > 1.1)
    assert result.clipped.any()


@pytest.mark.parametrize("objective", ["ppo", "gspo", "cispo"])
def test_an_objective_is_the_policy_gradient_when_nothing_has_changed_yet(objective):
    """At equal policies all of them have REINFORCE's gradient: a first update cannot tell them apart."""
    _, old, advantages, weights, sequences = tokens(4, 6)
    current = old.clone().requires_grad_()
    config = LossConfig(objective=objective)
    loss = policy_objective(config, current, old, advantages, weights, sequences).loss.sum()
    torch.testing.assert_close(torch.autograd.grad(loss, current)[0], -weights * advantages)


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [
        ("token_mean", [1 / 5] * 5),
        ("sequence_mean", [1 / 8] * 4 + [1 / 2]),
        ("constant", [1 / 20] * 5),
    ],
)
def test_tokens_count_as_the_aggregate_says_when_answers_differ_in_length(aggregate, expected):
    attempts = np.array([0, 0, 0, 0, 2])  # nothing of attempt 1 is trained
    np.testing.assert_allclose(token_weights(aggregate, attempts, 10), expected, rtol=1e-6)


def test_an_unknown_aggregate_is_refused():
    with pytest.raises(ValueError, match="expected token_mean"):
        token_weights("mean", np.zeros(1, np.int64), 1)
