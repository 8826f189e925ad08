"""Estimators and objectives of the user's: the example against its papers, and the trial before a run."""

import itertools
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.cli.main import main
from async_rl.config import LossConfig, trainer_settings
from async_rl.errors import ConfigError, DataError
from examples.custom_loss.losses import soft_gate
from tests.support.run_config import config_with, write_run
from tests.unit.test_objectives import tokens
from trainer.losses.advantages import (
    ESTIMATORS,
    batch_baseline,
    estimate_advantages,
    load_estimator,
)
from trainer.losses.objectives import OBJECTIVES, Objective
from trainer.losses.trial import describe_penalty, try_loss

HERE = "tests.unit.test_custom_losses"


def test_the_config_knows_the_functions_of_the_trainer():
    assert tuple(ESTIMATORS) == trainer_settings.ADVANTAGES
    assert tuple(OBJECTIVES) == trainer_settings.OBJECTIVES


# -- the example


@pytest.mark.parametrize("k", [1, 2, 3])
def test_pass_at_k_is_the_mean_over_all_sets_of_k_attempts(k):
    rewards = np.array([1, 0, 0, 1, 0, 0, 0, 0, 1, 1], np.float32)
    groups = np.repeat(np.array([0, 1], np.int32), [6, 4])
    expected = np.zeros(10)
    for group in (range(6), range(6, 10)):
        sets = [(each, max(rewards[list(each)])) for each in itertools.combinations(group, k)]
        mean, deviation = statistics.fmean(r for _, r in sets), statistics.pstdev(float(r) for _, r in sets)
        for i in group:
            mine = [r - mean for each, r in sets if i in each]
            expected[i] = statistics.fmean(mine) / (deviation or 1.0)  # every set may succeed
    actual = estimate_advantages(
        load_estimator(
            LossConfig(advantages="examples.custom_loss.losses:pass_at_k", advantages_args={"k": k})
        ),
        rewards,
        groups,
        np.arange(10, dtype=np.int32),
    )
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_the_soft_gate_has_the_gradient_of_its_source():
    """4 p (1 - p) r w A, with p = sigmoid(t (r - 1)): REINFORCE's at ratio 1, less farther away."""
    each = tokens(4, 6)
    found = soft_gate(each, LossConfig(), good=1.0, bad=2.0)
    (gradient,) = torch.autograd.grad(found.loss.sum(), each.log_probs)
    ratio = (each.log_probs - each.old_log_probs).exp().detach()
    p = torch.sigmoid(torch.where(each.advantages > 0, 1.0, 2.0) * (ratio - 1))
    torch.testing.assert_close(gradient, -4 * p * (1 - p) * ratio * each.weights * each.advantages)
    at_once = each._replace(log_probs=each.old_log_probs.clone().requires_grad_())
    (gradient,) = torch.autograd.grad(soft_gate(at_once, LossConfig()).loss.sum(), at_once.log_probs)
    torch.testing.assert_close(gradient, -each.weights * each.advantages)


# -- what the trial finds


def of_groups(compared):
    return np.zeros(4)


def by_deviation(compared):
    centred = compared.rewards - compared.group_mean(compared.rewards)
    with np.errstate(all="ignore"):
        return centred / np.sqrt(compared.group_mean(centred**2))


another_name = ESTIMATORS["grpo"]
another_objective = OBJECTIVES["gspo"]


def in_place(compared):
    compared.rewards[:] -= 1
    return compared.rewards


def centred(compared):
    return compared.rewards - compared.group_mean(compared.rewards)


def own_grpo(compared):
    centred = compared.rewards - compared.group_mean(compared.rewards)
    return centred / (np.sqrt(compared.group_mean(centred**2)) + 1e-6)


@batch_baseline
def of_the_batch(compared, scale=1.0):
    return scale * (compared.rewards - compared.batch_mean(compared.rewards))


def mean_loss(tokens, loss):
    return Objective(-tokens.log_probs.mean(), torch.zeros(()))


def over_the_micro_batch(tokens, loss):
    scaled = tokens.advantages / tokens.advantages.std(correction=0).clamp(min=0.1)
    return Objective(-tokens.log_probs * scaled, torch.zeros_like(scaled))


def without_gradient(tokens, loss):
    return Objective(-tokens.log_probs.detach(), torch.zeros_like(tokens.advantages))


def in_place_objective(tokens, loss):
    tokens.advantages.mul_(2)
    return Objective(-tokens.log_probs * tokens.advantages, torch.zeros_like(tokens.advantages))


def needs_tokens(tokens, loss):
    tokens.advantages[0].item()
    return Objective(-tokens.log_probs * tokens.advantages, torch.zeros_like(tokens.advantages))


def infinite(tokens, loss):
    return Objective(-tokens.log_probs / 0, torch.zeros_like(tokens.advantages))


def config_of(group_size=4, **loss):
    return config_with(rollout={"group_size": group_size}, trainer={"loss": loss})


@pytest.mark.parametrize(
    ("key", "name", "words"),
    [
        ("advantages", "of_groups", r"an array of shape \[4\], expected \[8\]"),
        ("advantages", "by_deviation", "nan for an item that counts"),  # where rewards are equal
        ("objective", "needs_tokens", "raised IndexError on a trial input"),  # an empty micro-batch
        ("advantages", "in_place", "changed its inputs, expected a pure function"),
        ("advantages", "missing", "has no attribute 'missing'"),
        ("objective", "mean_loss", r"returned loss of \[\], expected a tensor of \[6\]"),
        ("objective", "over_the_micro_batch", "another loss when the other answers are left out"),
        ("objective", "without_gradient", "a loss without a gradient"),
        ("objective", "in_place_objective", "changed its inputs"),
        ("objective", "infinite", "expected finite numbers"),
    ],
)
def test_a_wrong_function_is_refused_before_a_run(key, name, words):
    with pytest.raises(ConfigError, match=words) as found:
        try_loss(config_of(**{key: f"{HERE}:{name}"}))
    assert f"trainer.loss.{key}" in str(found.value)


@pytest.mark.parametrize(
    ("key", "path", "name"),
    [
        ("advantages", f"{HERE}:another_name", "grpo"),
        ("advantages", "trainer.losses.advantages:reinforce_plus_plus", r"reinforce\+\+"),
        ("objective", f"{HERE}:another_objective", "gspo"),
    ],
)
def test_a_built_in_function_has_one_name_so_that_no_check_of_it_is_missed(key, path, name):
    with pytest.raises(
        ConfigError, match=rf"is the built-in {name}, whose settings are .*: set trainer.loss.{key}={name}$"
    ):
        try_loss(config_of(**{key: path}))


@pytest.mark.parametrize(
    "loss",
    [
        {"advantages": f"{HERE}:of_the_batch", "advantages_args": {"size": 2}},
        {"objective": "examples.custom_loss.losses:soft_gate", "objective_args": {"low": 2.0}},
    ],
)
def test_arguments_that_a_function_does_not_have_are_refused(loss):
    with pytest.raises(ConfigError, match=r"unexpected keyword argument"):
        try_loss(config_of(**loss))


@pytest.mark.parametrize(
    ("name", "warned"),
    [
        ("dr_grpo", False),
        ("reinforce++", True),
        (f"{HERE}:centred", False),
        (f"{HERE}:own_grpo", True),
    ],
)
def test_check_warns_where_the_coefficient_of_a_kl_in_the_reward_can_cancel(name, warned):
    kl = {"coefficient": 0.1, "where": "reward"}
    said = describe_penalty(config_of(advantages=name, kl=kl))
    assert len(said) == warned
    assert all(
        f"cancels with advantages={name} in batches whose task rewards are all equal" in each for each in said
    )
    assert not describe_penalty(config_of(advantages=name, kl=kl | {"where": "loss"}))
    assert not describe_penalty(config_of(advantages=name, kl={"where": "reward"}))


def test_the_warning_reaches_async_rl_check(tmp_path, capsys):
    path = write_run(tmp_path)
    settings = ["trainer.loss.kl={coefficient: 0.1, where: reward}", "trainer.loss.advantages=reinforce++"]
    assert main(["check", str(path), *settings, "trainer.worker=trainer.worker:TrainerWorker"]) == 0
    assert "trainer.loss.kl: the coefficient of the penalty" in capsys.readouterr().out


def test_right_functions_are_taken_but_one_that_compares_siblings_needs_groups():
    with pytest.raises(ConfigError, match=r"rollout.group_size is 1: use at least 2"):
        try_loss(config_of(group_size=1, advantages=f"{HERE}:centred"))
    batch = {"advantages": f"{HERE}:of_the_batch", "advantages_args": {"scale": 2}}
    soft = {"objective": "examples.custom_loss.losses:soft_gate", "objective_args": {"good": 2.0}}
    try_loss(config_of(group_size=1, **batch, **soft))


def test_a_wrong_result_in_a_run_names_the_setting():
    with pytest.raises(DataError, match=r"trainer.loss.advantages: the estimator returned an array of shape"):
        estimate_advantages(
            of_groups, np.zeros(3, np.float32), np.zeros(3, np.int32), np.arange(3, dtype=np.int32)
        )


# -- the config


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"advantages": "ppo"}, "expected one of grpo, dr_grpo, rloo"),
        ({"advantages_args": {"k": 1}}, "trainer.loss.advantages=grpo takes no arguments"),
    ],
)
def test_an_unknown_name_or_argument_is_refused(loss, words):
    with pytest.raises(ConfigError, match=words):
        config_of(**loss)


def test_check_tries_the_function_beside_the_config(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_run(tmp_path)
    (tmp_path / "own_losses.py").write_text("def advantages(compared):\n    return compared.rewards[:1]\n")
    assert main(["check", str(path), "trainer.loss.advantages=own_losses:advantages"]) == 2
    assert "own_losses:advantages returned an array of shape [1], expected [8]" in capsys.readouterr().err
