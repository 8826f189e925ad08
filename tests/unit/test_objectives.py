"""Objectives, corrections and the policy loss against cases computed by hand."""

import math

import msgspec
import numpy as np
import pytest
import torch

from async_rl.config import ImportanceConfig, KLConfig, LossConfig, RejectConfig
from trainer.losses.corrections import importance_correction, rejected_answers
from trainer.losses.kl import kl_estimate, sums_to_go
from trainer.losses.objectives import (
    OBJECTIVES,
    PolicyTokens,
    cispo,
    gspo,
    load_objective,
    ppo,
    token_weights,
)
from trainer.losses.policy_loss import SUMS, TrainedTokens, policy_sums
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


# -- importance weights -------------------------------------------------------------------------------


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


# -- what an update minimises -------------------------------------------------------------------------


# Two answers, of two tokens and of one, which is rejected; PPO's ratios are 1, 2 and 1.
ROLLOUT_LOG_PROBS = torch.tensor([0.2, 0.5, 0.8]).log()
PROXIMAL = torch.tensor([0.4, 0.2, 0.1]).log()
CURRENT = torch.tensor([0.4, 0.4, 0.1]).log()
REFERENCE = torch.tensor([0.2, 0.2, 0.05]).log()
ENTROPY = torch.tensor([0.5, 1.5, 2.5])
ADVANTAGES = torch.tensor([1.0, 1.0, -2.0])
COUNTS = torch.tensor([0.5, 2.0, 1.0])
LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("where", "of_kl"),
    [("loss", [LOG2**2 / 2, LOG2**2 / 2]), ("reward", [0.0, 0.0])],  # in the reward it is an advantage
)
def test_the_loss_is_its_parts_as_often_as_tokens_count(where, of_kl):
    config = LossConfig(
        importance=ImportanceConfig(high=1.5),
        kl=KLConfig(coefficient=0.5, estimator="k2", where=where),
        entropy_bonus=0.1,
        clip_high=0.25,
    )
    log_probs = CURRENT.clone().requires_grad_()
    sequences = Sequences(torch.tensor([0, 0, 1]), torch.tensor([2, 1]))
    tokens = TrainedTokens(
        old_log_probs=PROXIMAL,
        rollout_log_probs=ROLLOUT_LOG_PROBS,
        advantages=ADVANTAGES,
        rejected=torch.tensor([0.0, 0.0, 1.0]),
        weights=COUNTS,
        sequences=sequences,
        reference_log_probs=REFERENCE,
    )
    loss, sums = policy_sums(config, ppo, log_probs, ENTROPY, tokens)
    # Weights 2, truncated to 1.5, and 0.4; PPO's gains 1 and 1.25, clipped; the third token adds nothing.
    first = -1.5 * 1.0 + 0.5 * of_kl[0] - 0.1 * 0.5
    second = -0.4 * 1.25 + 0.5 * of_kl[1] - 0.1 * 1.5
    assert loss.item() == pytest.approx(0.5 * first + 2.0 * second, rel=1e-5)
    named = dict(zip(SUMS, sums.tolist(), strict=True))
    assert named == pytest.approx(
        {
            "loss": loss.item(),
            "ppo_kl": -LOG2,
            "clip_fraction": 1,
            "entropy": 4.5,
            "importance_ratio_mean": 2 + 0.4 + 0.125,
            "importance_truncated_fraction": 1,
            "importance_rejected_fraction": 1,
            "reference_kl": 3 * LOG2**2 / 2,
            "teacher_kl": 0,
        },
        rel=1e-5,
    )
    loss.backward()
    gradient = [
        0.5 * (-1.5 + (0.5 * LOG2 if where == "loss" else 0)),
        0.5 * 2 * LOG2 if where == "loss" else 0,
        0,
    ]
    torch.testing.assert_close(log_probs.grad, torch.tensor(gradient))


CHANGES = [
    {"objective": "gspo"},
    {"clip_low": 0.05},
    {"clip_high": 0.05},
    {"dual_clip": 1.5},
    {"entropy_bonus": 0.5},
    {"importance": {"level": "off"}},
    {"importance": {"beyond": "mask"}},
    {"importance": {"low": 0.2}},
    {"importance": {"high": 1.5}},
    {"reject": {"geometric_low": 0.5}},
    {"reject": {"geometric_high": 1.1}},
    {"reject": {"token_below": 0.1}},
    {"kl": {"coefficient": 0.1}},
    {"kl": {"coefficient": 0.5, "estimator": "k2"}},
    {"kl": {"coefficient": 0.5, "where": "reward"}},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_the_loss_changes_with_each_setting(change):
    """Two answers of two tokens: ratios on both sides of each bound, with advantages of both signs."""
    rollout = torch.tensor([0.1, 0.4, 0.1, 0.8]).log()
    proximal = rollout + torch.tensor([3.0, 0.5, 1.0, 0.05]).log()
    current = proximal + torch.tensor([2.0, 0.5, 3.0, 1.0]).log()
    advantages, counts = torch.tensor([1.0, -1.0, -1.0, 1.0]), torch.ones(4)
    sequences = Sequences(torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2]))
    losses = []
    for settings in (
        {"kl": {"coefficient": 0.5}},
        change | {"kl": {"coefficient": 0.5} | change.get("kl", {})},
    ):
        config = msgspec.convert(settings, LossConfig)
        tokens = TrainedTokens(
            old_log_probs=proximal,
            rollout_log_probs=rollout,
            advantages=advantages,
            rejected=rejected_answers(config.reject, proximal, rollout, sequences)[sequences.index].float(),
            weights=counts,
            sequences=sequences,
            reference_log_probs=current - 0.7,
        )
        losses.append(
            policy_sums(config, load_objective(config), current, ENTROPY.new_ones(4), tokens)[0].item()
        )
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
