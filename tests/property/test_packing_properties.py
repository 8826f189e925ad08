from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.train_batches import random_batch
from trainer.megatron.packing import (
    SequenceCost,
    level_packings,
    make_targets,
    pack_micro_batch,
    plan_micro_batches,
    shift_left,
    split_updates,
)

lengths_of_batches = st.lists(st.integers(1, 60), min_size=1, max_size=30)


@given(lengths_of_batches, st.integers(1, 100), st.integers(1, 5), st.sampled_from([1, 2, 8]))
def test_every_trajectory_is_planned_once_when_ranks_keep_step(lengths, budget, ranks, align):
    plan = plan_micro_batches(lengths, budget, ranks, align)
    assert sorted(j for rank in plan for m in rank for j in m) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1
    for rank in plan:
        for micro_batch in rank:
            padded = sum(-(-lengths[j] // align) * align for j in micro_batch)
            assert padded <= budget or len(micro_batch) == 1


@given(lengths_of_batches, st.integers(1, 100), st.integers(1, 3), st.sampled_from([1, 2, 4]))
def test_interleaved_stages_can_take_turns_when_the_plan_has_a_multiple(lengths, budget, ranks, multiple):
    plan = plan_micro_batches(lengths, budget, ranks, multiple=multiple)
    assert sorted(j for rank in plan for m in rank for j in m) == list(range(len(lengths)))
    assert all(len(rank) % multiple == 0 for rank in plan)
    fewest = max(len(rank) for rank in plan_micro_batches(lengths, budget, ranks))
    assert all(0 <= len(rank) - fewest < multiple for rank in plan)


@given(lengths_of_batches, st.integers(1, 100), st.sampled_from([1, 2, 8]))
def test_packings_keep_their_tokens_when_made_equally_long(lengths, budget, align):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    (plan,) = plan_micro_batches(lengths, budget, 1, align, multiple=2)
    packings = [pack_micro_batch(micro_batch, offsets, align) for micro_batch in plan]
    leveled = level_packings(packings)
    assert {len(p.source) for p in leveled} == {max(len(p.source) for p in packings)}
    for before, after in zip(packings, leveled, strict=True):
        np.testing.assert_array_equal(after.source[: len(before.source)], before.source)
        assert not (after.source[len(before.source) :] >= 0).any()
        assert sum(after.lengths) == len(after.source)
        assert after.lengths[: len(before.lengths)] == before.lengths
        assert all(length % align == 0 and length > 0 for length in after.lengths)


@given(lengths_of_batches, st.integers(1, 100), st.integers(1, 40), st.sampled_from([1, 2, 8]))
def test_ranks_differ_by_at_most_one_trajectory_when_balanced_by_cost(lengths, even, ranks, align):
    """Also with more ranks than trajectories; attention may cost more than all the rest."""
    cost = SequenceCost(even)
    costs = [cost(-(-n // align) * align) for n in lengths]
    plan = plan_micro_batches(lengths, 70, ranks, align, cost=cost)
    assert sorted(j for rank in plan for m in rank for j in m) == list(range(len(lengths)))
    loads = [sum(costs[j] for m in rank for j in m) for rank in plan]
    assert max(loads) - min(loads) <= max(costs) * (1 + 1e-9)


def test_micro_batches_are_even_when_a_tight_packing_would_leave_crumbs():
    (plan,) = plan_micro_batches([10] * 6, budget=50, ranks=1)
    assert [len(m) for m in plan] == [3, 3]  # not five and one


def test_groups_stay_whole_when_a_batch_has_several_updates():
    groups = np.array([0, 0, 0, 2, 2, 5, 5, 5, 5], np.int32)
    assert split_updates(groups, 1) == [[*range(9)]]
    assert split_updates(groups, 2) == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]
    assert split_updates(groups, 7) == [[0, 1, 2], [3, 4], [5, 6, 7, 8]]


@given(lengths_of_batches, st.sampled_from([1, 2, 8]), st.data())
def test_packing_is_a_permutation_with_padding_when_aligned(lengths, align, data):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    chosen = tuple(data.draw(st.sets(st.sampled_from(range(len(lengths))), min_size=0)))
    packing = pack_micro_batch(chosen, offsets, align)
    expected = np.concatenate([np.arange(offsets[j], offsets[j + 1]) for j in chosen]) if chosen else []
    np.testing.assert_array_equal(packing.source[packing.source >= 0], expected)
    assert sum(packing.lengths) == len(packing.source)
    assert all(length % align == 0 for length in packing.lengths)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_values_move_to_the_predicting_position_when_shifted(lengths):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = np.arange(1, offsets[-1] + 1)
    moved = shift_left(values, offsets[1:] - 1)
    for start, end in pairwise(offsets):
        assert moved[start:end].tolist() == [*values[start + 1 : end], 0]


def test_targets_belong_to_the_next_token_when_a_batch_is_shifted():
    batch = random_batch(lengths=(5, 4), prompt=2)
    wanted = make_targets(batch)
    assert wanted.labels[:4].tolist() == batch.token_ids[1:5].tolist()
    assert wanted.mask.tolist() == [False, True, True, True, False, False, True, True, False]
    assert wanted.trajectory.tolist() == [0] * 5 + [1] * 4
    assert wanted.lag[1] == batch.trainer_version - batch.weight_versions[2]
    assert int(wanted.mask.sum()) == int(batch.loss_mask.sum())
