"""Packing: every token at its place, nothing padded, nothing guessed."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from async_rl.errors import AlignmentError, DataError
from async_rl.queue.batching import assemble
from async_rl.routing import fit
from async_rl.types import Group, Trajectory
from tests.support.trajectories import FACTS, make_group, make_trajectory


def group_of(*trajectories: Trajectory) -> Group:
    return Group(group_id="group", task_id="task", trajectories=trajectories)


def test_each_token_lies_at_its_place() -> None:
    groups = [make_group("a", size=2, version=3), make_group("b", size=1, version=4, tokens=6)]
    batch = assemble(groups, 5, "batch", FACTS)
    trajectories = [t for group in groups for t in group.trajectories]
    assert batch.offsets.tolist() == [0, 7, 15, 24]
    assert batch.group_index.tolist() == [0, 0, 1]
    assert batch.trajectory_ids == ("a-0", "a-1", "b-0")
    assert (batch.num_tokens, batch.trainer_version, batch.num_experts) == (24, 5, 8)
    assert batch.routed_experts is not None
    assert batch.routing_valid is not None
    for j, trajectory in enumerate(trajectories):
        begin, end = batch.offsets[j], batch.offsets[j + 1]
        assert np.array_equal(batch.token_ids[begin:end], trajectory.token_ids)
        assert np.array_equal(batch.loss_mask[begin:end], trajectory.response_mask)
        assert np.array_equal(batch.rollout_log_probs[begin:end], trajectory.rollout_log_probs)
        assert np.array_equal(batch.weight_versions[begin:end], trajectory.weight_versions)
        assert trajectory.trace is not None
        assert np.array_equal(batch.routed_experts[begin : end - 1], trajectory.trace.rows)
        assert batch.routing_valid[begin:end].tolist() == [True] * (end - begin - 1) + [False]


def test_versions_are_per_token_when_a_trajectory_was_interrupted() -> None:
    trajectory = make_trajectory("t", prompt=2, sampled=((2, 3), (3, 5)))
    batch = assemble([group_of(trajectory)], 6, "batch", FACTS)
    assert batch.weight_versions.tolist() == [-1, -1, 3, 3, 5, 5, 5]
    assert batch.loss_mask.tolist() == [False] * 2 + [True] * 5


def test_there_is_no_routing_when_it_is_not_replayed() -> None:
    batch = assemble([make_group("a")], 0, "batch")
    assert (batch.routed_experts, batch.routing_valid, batch.num_experts) == (None, None, 0)


def test_rows_are_invalid_when_none_were_reported() -> None:
    whole = make_trajectory("whole")
    partial = make_trajectory("partial")
    assert partial.trace is not None
    kept = msgspec.structs.replace(partial.trace, rows=partial.trace.rows[:2], valid=partial.trace.valid[:2])
    partial = msgspec.structs.replace(partial, trace=fit(kept, partial.num_tokens))
    absent = make_trajectory("absent", routing=False)
    batch = assemble([group_of(whole, partial, absent)], 0, "batch", FACTS)
    assert batch.routing_valid is not None
    valid = [batch.routing_valid[i : i + 7].tolist() for i in (0, 7, 14)]
    assert valid == [[True] * 6 + [False], [True] * 2 + [False] * 5, [False] * 7]


def test_a_trajectory_is_refused_when_its_rows_do_not_fit() -> None:
    trajectory = make_trajectory("t")
    assert trajectory.trace is not None
    short = msgspec.structs.replace(trajectory.trace, rows=trajectory.trace.rows[:-1])
    wide = msgspec.structs.replace(trajectory.trace, num_experts=16)
    for trace in (short, wide):
        with pytest.raises(AlignmentError, match="trajectory t: routing of shape"):
            assemble([group_of(msgspec.structs.replace(trajectory, trace=trace))], 0, "batch", FACTS)


def test_a_batch_is_refused_when_there_is_nothing_to_train_on() -> None:
    with pytest.raises(DataError, match="0 trajectories"):
        assemble([], 0, "batch")
    with pytest.raises(DataError, match="no reward"):
        assemble([group_of(make_trajectory("t", reward=None))], 0, "batch")
    with pytest.raises(DataError, match=r"of \[0\] tokens"):
        assemble([group_of(make_trajectory("t", prompt=0, sampled=((0, 0),), routing=False))], 0, "batch")
