"""Losses and advantages of any batch: how it is cut does not matter, and plain loops agree."""

import statistics

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config import LossConfig
from tests.unit.test_objectives import tokens
from trainer.losses.advantages import estimate_advantages
from trainer.losses.objectives import policy_objective, token_weights
from trainer.losses.sequences import Sequences


@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    objective=st.sampled_from(["ppo", "gspo", "cispo"]),
    aggregate=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_the_loss_does_not_depend_on_how_a_batch_is_cut(lengths, objective, aggregate, seed, data):
    current, old, advantages, weights, sequences = tokens(*lengths, seed=seed)
    counts = torch.from_numpy(
        token_weights(aggregate, sequences.index.numpy(), sequences.lengths.numpy(), 10)
    )
    config = LossConfig(objective=objective, clip_low=0.1, clip_high=0.1)

    def part(chosen: list[int]) -> torch.Tensor:
        mine = torch.isin(sequences.index, torch.tensor(chosen))
        own = Sequences(
            torch.searchsorted(torch.tensor(chosen), sequences.index[mine]), sequences.lengths[chosen]
        )
        loss = policy_objective(config, current[mine], old[mine], advantages[mine], weights[mine], own).loss
        return (loss * counts[mine]).sum()

    whole = part(list(range(len(lengths))))
    split = data.draw(st.integers(1, len(lengths) - 1))
    cut = part(list(range(split))) + part(list(range(split, len(lengths))))
    torch.testing.assert_close(whole, cut, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(whole, current)[0], torch.autograd.grad(cut, current)[0], atol=1e-6, rtol=1e-5
    )


@given(
    rewards=st.lists(st.floats(-9, 9, width=16), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    estimator=st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline"]),
)
def test_advantages_match_plain_loops(rewards, sizes, estimator):
    groups = np.repeat(np.arange(len(sizes)) * 7, sizes)[: len(rewards)].astype(np.int32)
    rewards = rewards[: len(groups)]
    members = {g: [r for r, other in zip(rewards, groups, strict=True) if other == g] for g in set(groups)}
    centred = [r - statistics.fmean(members[g]) for r, g in zip(rewards, groups, strict=True)]
    expected = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        mine = members[group]
        match estimator:
            case "grpo":
                value = centred[i] / (statistics.pstdev(mine) + 1e-6)
            case "dr_grpo":
                value = centred[i]
            case "rloo":
                others = (sum(mine) - reward) / (len(mine) - 1) if len(mine) > 1 else reward
                value = reward - others
            case "reinforce++":
                value = (reward - statistics.fmean(rewards)) / (statistics.pstdev(rewards) + 1e-6)
            case _:
                value = (centred[i] - statistics.fmean(centred)) / (statistics.pstdev(centred) + 1e-6)
        expected.append(value)
    actual = estimate_advantages(estimator, np.array(rewards, np.float32), groups)
    np.testing.assert_allclose(actual, expected, atol=2e-3, rtol=1e-3)
