"""Tries the estimator and the objective of a config on a few tokens, before a wrong one can end a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np

from async_rl.config import ADVANTAGES, OBJECTIVES, Config, LossConfig
from async_rl.errors import ConfigError
from async_rl.runtime.loading import call_problem
from trainer.losses.advantages import (
    ComparedRewards,
    advantages_problem,
    has_batch_baseline,
    load_estimator,
)

_REWARDS: Final = ComparedRewards(
    rewards=np.array([1.0, 0, 0.5, 1, 1, 1, 2, -1]),
    group=np.array([0, 0, 0, 1, 1, 2, 3, 3]),
    attempt=np.array([0, 1, 1, 2, 3, 4, 5, 6]),
    share=np.array([1.0, 0.5, 0.5, 1, 1, 0, 1, 1]),
)
"""Four groups: an attempt of the first has two conversations, the rewards of the second are equal, and the
third does not count."""

_PENALTIES: Final = np.array([0.1, 0.3, 0.2, 0.5, 0.4, 0.0, 0.05, 0.2])
_COEFFICIENTS: Final = (1e-2, 1.0)

R = TypeVar("R")


def try_loss(config: Config) -> None:
    """Call the user's estimator and objective on small inputs, if the config names any.

    An objective is called with all tokens, with each answer alone and with none, as a rank may have an empty
    micro-batch; on the CPU. Torch is loaded only then.

    Raises:
        ConfigError: A function cannot be loaded, raises, returns something else than is documented, changes
            its inputs, or lets the loss of an answer depend on the other answers of its micro-batch; or it
            needs siblings, and groups have one attempt.
    """
    loss = config.trainer.loss
    if loss.advantages not in ADVANTAGES:
        _try_estimator(config)
    if loss.objective not in OBJECTIVES:
        _try_objective(loss)


def _try_estimator(config: Config) -> None:
    key, loss, rollout = "advantages", config.trainer.loss, config.rollout
    estimator = load_estimator(loss)
    inputs = ComparedRewards(*(part.copy() for part in _REWARDS))
    found = _call(key, loss.advantages, estimator, inputs)
    if not isinstance(found, np.ndarray):
        raise _wrong(
            key, loss.advantages, f"returned {type(found).__name__}, expected a numpy array of shape [N]"
        )
    if problem := advantages_problem(found, inputs.share > 0):
        raise _wrong(key, loss.advantages, f"returned {problem}")
    if not all(np.array_equal(now, before) for now, before in zip(inputs, _REWARDS, strict=True)):
        raise _wrong(key, loss.advantages, "changed its inputs, expected a pure function: return a new array")
    has_siblings = rollout.group_size > 1 or rollout.max_branches
    if not (has_siblings or loss.teacher.only or has_batch_baseline(estimator)):
        raise _wrong(
            key,
            loss.advantages,
            "compares the attempts of a group, and rollout.group_size is 1: use at least 2, or mark it with "
            "trainer.losses.advantages.batch_baseline if its baseline is the batch",
        )


def describe_penalty(config: Config) -> list[str]:
    """Return a warning, in one line or none, where the coefficient of a KL in the reward can cancel.

    The estimator gets equal task rewards minus a small and a large penalty: one that divides by their
    deviation returns the same advantages for both.
    """
    loss = config.trainer.loss
    if not loss.kl.coefficient or loss.kl.where == "loss":
        return []
    estimator, counted = load_estimator(loss), _REWARDS.share > 0
    small, large = (
        estimator(_REWARDS._replace(rewards=1 - coefficient * _PENALTIES))[counted]
        for coefficient in _COEFFICIENTS
    )
    if not small.any() or not np.allclose(small, large, rtol=1e-2):
        return []
    return [
        f"trainer.loss.kl: the coefficient of the penalty in the reward cancels with advantages="
        f"{loss.advantages} in batches whose task rewards are all equal; dr_grpo and rloo keep it"
    ]


def _try_objective(loss: LossConfig) -> None:
    import torch  # here, as the driver needs it for nothing else

    from trainer.losses.objectives import Objective, PolicyTokens, load_objective
    from trainer.losses.sequences import Sequences

    key, name, objective = "objective", loss.objective, load_objective(loss)
    index = torch.tensor([0, 0, 0, 1, 1, 2])
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(5, len(index), generator=generator)
    old, rollout = -columns[0].abs() - 0.5, -columns[1].abs() - 0.5

    def tokens_of(answers: list[int]) -> PolicyTokens:
        mine = torch.isin(index, torch.tensor(answers))
        _, own = torch.unique(index[mine], return_inverse=True)
        return PolicyTokens(
            log_probs=(old + 0.2 * columns[2])[mine].requires_grad_(),
            old_log_probs=old[mine],
            rollout_log_probs=rollout[mine],
            advantages=columns[3][mine],
            weights=columns[4][mine].abs(),
            sequences=Sequences(own, torch.bincount(own)),
        )

    def check(answers: list[int]) -> torch.Tensor:
        tokens, untouched = tokens_of(answers), tokens_of(answers)
        found = _call(key, name, objective, tokens, loss)
        if not (isinstance(found, tuple) and len(found) == len(Objective._fields)):
            raise _wrong(
                key, name, f"returned {type(found).__name__}, expected trainer.losses.objectives.Objective"
            )
        for part, value in zip(Objective._fields, found, strict=True):
            if not (isinstance(value, torch.Tensor) and value.shape == tokens.log_probs.shape):
                shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise _wrong(
                    key, name, f"returned {part} of {shape}, expected a tensor of [{len(tokens.log_probs)}]"
                )
            if not torch.isfinite(value).all():
                raise _wrong(key, name, f"returned {part} = {value.tolist()}, expected finite numbers")
        per_token = found[0]
        if not per_token.requires_grad:
            raise _wrong(key, name, "returned a loss without a gradient, expected one of tokens.log_probs")
        (gradient,) = torch.autograd.grad(per_token.sum(), tokens.log_probs, allow_unused=True)
        if gradient is None or not torch.isfinite(gradient).all():
            found_gradient = "no gradient" if gradient is None else f"the gradient {gradient.tolist()}"
            raise _wrong(key, name, f"has {found_gradient} of tokens.log_probs, expected finite numbers")
        if found[1].requires_grad:
            raise _wrong(key, name, "returned `clipped` with a gradient: detach it")
        pairs = list(zip(tokens[:5], untouched[:5], strict=True))
        if not all(torch.equal(now.detach(), before.detach()) for now, before in pairs):
            raise _wrong(key, name, "changed its inputs, expected a pure function: return new tensors")
        return torch.cat([per_token.detach(), gradient])

    whole = check([0, 1, 2])
    alone = [check([answer]).view(2, -1) for answer in range(3)]
    if not torch.allclose(whole, torch.cat(alone, dim=1).flatten(), atol=1e-6, rtol=1e-5):
        raise _wrong(
            key,
            name,
            "gives the tokens of an answer another loss when the other answers are left out. A batch is cut "
            "into micro-batches: let a token's loss depend on its own answer only, and average with "
            "trainer.loss.aggregate",
        )
    check([])


def _call(key: str, name: str, function: Callable[..., R], *args: object) -> R:
    if problem := call_problem(function, *args):
        raise _wrong(key, name, f"cannot be called with trainer.loss.{key}_args: {problem}")
    try:
        return function(*args)
    except Exception as error:  # the user's function may raise anything
        raise _wrong(key, name, f"raised {type(error).__name__} on a trial input: {error}") from error


def _wrong(key: str, name: str, problem: str) -> ConfigError:
    return ConfigError(f"trainer.loss.{key}: {name} {problem}")
