"""Losses and advantages of any batch: how it is cut does not matter, and plain loops agree."""

import statistics

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config import LossConfig
from tests.unit.test_objectives import tokens
from trainer.losses.advantages import ESTIMATORS, estimate_advantages
from trainer.losses.objectives import OBJECTIVES, token_weights
from trainer.losses.sequences import Sequences


@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    objective=st.sampled_from(sorted(OBJECTIVES)),
    aggregate=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_the_loss_does_not_depend_on_how_a_batch_is_cut(lengths, objective, aggregate, seed, data):
    each = tokens(*lengths, seed=seed)
    current, sequences = each.log_probs, each.sequences
    counts = torch.from_numpy(token_weights(aggregate, sequences.index.numpy(), 10))
    config = LossConfig(clip_low=0.1, clip_high=0.1)

    def part(chosen: list[int]) -> torch.Tensor:
        mine = torch.isin(sequences.index, torch.tensor(chosen))
        own = Sequences(
            torch.searchsorted(torch.tensor(chosen), sequences.index[mine]), sequences.lengths[chosen]
        )
        part = each._replace(sequences=own, **{name: getattr(each, name)[mine] for name in each._fields[:5]})
        loss = OBJECTIVES[objective](part, config).loss
        return (loss * counts[mine]).sum()

    whole = part(list(range(len(lengths))))
    split = data.draw(st.integers(1, len(lengths) - 1))
    cut = part(list(range(split))) + part(list(range(split, len(lengths))))
    torch.testing.assert_close(whole, cut, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(whole, current)[0], torch.autograd.grad(cut, current)[0], atol=1e-6, rtol=1e-5
    )


@given(
    attempts=st.lists(
        st.lists(st.tuples(st.floats(-9, 9, width=16), st.booleans()), min_size=1, max_size=3),
        min_size=1,
        max_size=9,
    ),
    sizes=st.lists(st.integers(1, 4), min_size=9, max_size=9),
    estimator=st.sampled_from(sorted(ESTIMATORS)),
)
def test_advantages_match_plain_loops_over_attempts(attempts, sizes, estimator):
    """Attempts of one to three conversations with a reward each, some of which do not count."""
    group_of = np.repeat(np.arange(len(sizes)) * 7, sizes)[: len(attempts)].tolist()
    whitened = estimator in ("reinforce++", "gae")
    votes = {a: [r for r, counted in each if counted] for a, each in enumerate(attempts)}
    votes = {a: each for a, each in votes.items() if each}
    voters = {g: [a for a in votes if group_of[a] == g] for g in set(group_of)}
    if not whitened:
        voters = {g: each if len(each) > 1 else [] for g, each in voters.items()}
        votes = {a: each for a, each in votes.items() if voters[group_of[a]]}

    def mean(chosen, value=lambda a, r: r):
        """Return the mean over attempts, each of which shares its vote among its conversations."""
        return statistics.fmean(statistics.fmean(value(a, r) for r in votes[a]) for a in chosen)

    def deviation(chosen, value=lambda a, r: r):
        centre = mean(chosen, value)
        return mean(chosen, lambda a, r: (value(a, r) - centre) ** 2) ** 0.5

    def centred(a, r):
        return r - mean(voters[group_of[a]])

    expected = []
    for a, conversations in enumerate(attempts):
        for reward, counted in conversations:
            if not counted or a not in votes:
                expected.append(0.0)
                continue
            mine = voters[group_of[a]]
            match estimator:
                case "grpo":
                    value = centred(a, reward) / (deviation(mine) + 1e-6)
                case "dr_grpo":
                    value = centred(a, reward)
                case "rloo":
                    value = reward - mean([other for other in mine if other != a])
                case "reinforce++" | "gae":
                    value = (reward - mean(votes)) / (deviation(votes) + 1e-6)
                case _:
                    value = (centred(a, reward) - mean(votes, centred)) / (deviation(votes, centred) + 1e-6)
            expected.append(value)
    actual = estimate_advantages(
        ESTIMATORS[estimator],
        np.array([r for each in attempts for r, _ in each], np.float32),
        np.repeat(group_of, [len(each) for each in attempts]).astype(np.int32),
        np.repeat(np.arange(len(attempts)), [len(each) for each in attempts]).astype(np.int32),
        np.array([counted for each in attempts for _, counted in each]),
    )
    np.testing.assert_allclose(actual, expected, atol=2e-3, rtol=1e-3)
    assert actual.dtype == np.float32
