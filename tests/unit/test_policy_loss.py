"""What an update minimises, put together from its parts, against a case computed by hand."""

import math

import msgspec
import pytest
import torch

from async_rl.config import ImportanceConfig, KLConfig, LossConfig
from trainer.losses.corrections import rejected_answers
from trainer.losses.objectives import load_objective, ppo
from trainer.losses.policy_loss import SUMS, TrainedTokens, policy_sums
from trainer.losses.sequences import Sequences

# Two answers, of two tokens and of one, which is rejected; PPO's ratios are 1, 2 and 1.
ROLLOUT = torch.tensor([0.2, 0.5, 0.8]).log()
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
        rollout_log_probs=ROLLOUT,
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
