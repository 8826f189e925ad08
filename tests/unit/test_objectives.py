"""Policy objectives against cases computed by hand and against plain loops over the papers' formulas."""

import math

import numpy as np
import pytest
import torch

from async_rl.config import LossConfig
from trainer.losses.kl import kl_estimate
from trainer.losses.objectives import OBJECTIVES, PolicyTokens, cispo, gspo, ppo, token_weights
from trainer.losses.sequences import Sequences


def policy_tokens(current, old, advantages, weights, sequences=None) -> PolicyTokens:
    """Tokens as an objective sees them; without sequences, each is an answer of its own."""
    alone = Sequences(torch.arange(len(old)), torch.ones(len(old), dtype=torch.int64))
    return PolicyTokens(current, old, old, advantages, weights, sequences or alone)


def tokens(*lengths: int, seed: int = 0) -> PolicyTokens:
    """Tokens of answers of these lengths; the current log-probs have a gradient."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    old = -torch.rand(len(index), generator=generator) * 3
    current = (old + torch.randn(len(index), generator=generator) * 0.3).requires_grad_()
    advantages = torch.randn(len(lengths), generator=generator)[index]
    weights = torch.rand(len(index), generator=generator) + 0.5
    return policy_tokens(current, old, advantages, weights, Sequences(index, torch.tensor(lengths)))


def test_ppo_matches_the_hand_computed_case_when_three_tokens_differ():
    """Ratios 1.5 (clipped, good), 1.5 (not clipped, bad) and 0.5 (clipped, bad)."""
    old = torch.log(torch.tensor([0.2, 0.2, 0.4]))
    current = torch.log(torch.tensor([0.3, 0.3, 0.2])).requires_grad_()
    advantages, weights = torch.tensor([1.0, -1.0, -1.0]), torch.tensor([1.0, 2.0, 1.0])
    result = ppo(policy_tokens(current, old, advantages, weights), LossConfig(clip_low=0.2, clip_high=0.25))
    torch.testing.assert_close(result.loss, torch.tensor([-1.25, 3.0, 0.8]))
    assert result.clipped.tolist() == [1, 0, 1]
    result.loss.sum().backward()
    torch.testing.assert_close(current.grad, torch.tensor([0.0, 3.0, 0.0]))


def test_a_bad_token_counts_no_more_than_the_dual_clip_when_it_has_become_likely():
    """Ratios 8 and 2, both bad, bound 3; a good token with ratio 8 is clipped by 1.2 as ever."""
    old = torch.log(torch.tensor([0.1, 0.1, 0.1]))
    current = torch.log(torch.tensor([0.8, 0.2, 0.8])).requires_grad_()
    bad = policy_tokens(current, old, torch.tensor([-1.0, -1.0, 1.0]), torch.ones(3))
    result = ppo(bad, LossConfig(dual_clip=3.0))
    torch.testing.assert_close(result.loss, torch.tensor([3.0, 2.0, -1.2]))
    assert result.clipped.tolist() == [1, 0, 1]
    result.loss.sum().backward()
    torch.testing.assert_close(current.grad, torch.tensor([0.0, 2.0, 0.0]))


def test_gspo_is_the_sources_objective_when_averaged_by_answers():
    """Equations 5 to 7 as loops over answers: value and gradient."""
    each = tokens(4, 1, 7, 2)
    current, old, _, advantages, _, sequences = each
    low, high = 0.05, 0.08
    answers = []
    for i, length in enumerate(sequences.lengths.tolist()):
        mine = sequences.index == i
        ratio = ((current[mine] - old[mine]).sum() / length).exp()
        advantage = advantages[mine][0]
        answers.append(torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage))
    expected = -torch.stack(answers).mean()
    (gradient,) = torch.autograd.grad(expected, current)

    result = gspo(each._replace(weights=torch.ones(14)), LossConfig(clip_low=low, clip_high=high))
    weights = token_weights("sequence_mean", sequences.index.numpy(), 99)
    loss = (result.loss * torch.from_numpy(weights)).sum()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, current)[0], gradient)
    assert 0 < result.clipped.sum() < 14  # some answers are clipped, and some are not


def test_cispo_gives_every_token_a_gradient_when_ratios_are_clipped():
    each = tokens(5, 3)
    current, old, _, advantages, weights, _ = each
    result = cispo(each, LossConfig(clip_low=1.0, clip_high=0.1))
    (gradient,) = torch.autograd.grad(result.loss.sum(), current)
    for i in range(8):
        ratio = math.exp((current[i] - old[i]).item())
        bounded = min(max(ratio, 0.0), 1.1)
        assert float(gradient[i]) == pytest.approx(-float(weights[i] * advantages[i]) * bounded, rel=1e-5)
        assert result.clipped[i] == (ratio > 1.1)
    assert result.clipped.any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_objective_is_the_policy_gradient_when_nothing_has_changed_yet(objective):
    """At equal policies all of them have REINFORCE's gradient: a first update cannot tell them apart."""
    each = tokens(4, 6)
    each = each._replace(log_probs=each.old_log_probs.clone().requires_grad_())
    loss = OBJECTIVES[objective](each, LossConfig()).loss.sum()
    gradient = torch.autograd.grad(loss, each.log_probs)[0]
    torch.testing.assert_close(gradient, -each.weights * each.advantages)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("change", [100.0, -100.0])
def test_gradients_are_finite_when_a_ratio_is_beyond_float32(objective, advantage, change):
    current = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = current.detach() - torch.tensor([change, 0.0])
    each = policy_tokens(current, old, torch.full((2,), advantage), torch.ones(2))
    loss = OBJECTIVES[objective](each, LossConfig()).loss.sum()
    gradient = torch.autograd.grad(loss, current)[0]
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("objective", [ppo, gspo])
def test_a_ratio_has_no_gradient_beyond_the_bound_of_float32(objective):
    """A bad token is not clipped there without the dual clip; its gradient would be `exp(20)`."""
    current = torch.tensor([-1.0, -1.0], requires_grad=True)
    old = current.detach() - torch.tensor([100.0, 1.0])
    each = policy_tokens(current, old, torch.full((2,), -1.0), torch.ones(2))
    loss = objective(each, LossConfig(dual_clip=None)).loss.sum()
    assert torch.autograd.grad(loss, current)[0].tolist() == [0.0, pytest.approx(math.e)]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("difference", [100.0, -100.0])
def test_gradients_of_a_kl_are_finite_when_policies_differ_by_far(kind, difference):
    current = torch.tensor([-1.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(
        kl_estimate(kind, current, current.detach() - difference).sum(), current
    )
    assert torch.isfinite(gradient).all()


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
