"""References to stored trajectories: their summaries say what the trajectories say."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from async_rl.types import (
    NEVER_COMPUTED,
    Context,
    Group,
    Sampled,
    StoredTrajectory,
    Trajectory,
    VersionSpan,
    cap_versions,
)
from tests.support.stored_batches import assemble_batch
from tests.support.trajectories import FACTS, make_rows, make_trajectory


def capped(trajectory: Trajectory, newest: int) -> Trajectory:
    return msgspec.structs.replace(trajectory, segments=cap_versions(trajectory.segments, newest))


def stored(trajectory: Trajectory) -> StoredTrajectory:
    return StoredTrajectory.of(trajectory, path="spool/frame", nbytes=4096, checksum=7)


def test_a_summary_says_what_the_trajectory_says() -> None:
    trajectory = make_trajectory("t", prompt=2, sampled=((2, 3), (0, 1), (3, 5), (1, 6)), reward=0.5)
    summary = stored(trajectory)
    assert (summary.oldest_weight_version, summary.newest_weight_version) == (3, 6)
    for name in ("num_tokens", "num_sampled_tokens"):
        assert getattr(summary, name) == getattr(trajectory, name)
    assert np.array_equal(summary.weight_versions, trajectory.weight_versions)
    assert np.array_equal(summary.loss_mask(), trajectory.response_mask)
    assert (summary.reward, summary.stop_reason, summary.num_interruptions) == (0.5, "completed", 3)
    assert summary.routing is not None
    assert (summary.routing.shape, summary.routing.dtype) == (
        (7, len(FACTS.moe_layers), FACTS.top_k),
        "uint8",
    )


def test_a_summary_masks_old_tokens_like_the_batch() -> None:
    trajectory = make_trajectory("t", prompt=2, sampled=((2, 3), (3, 5), (1, 6)))
    group = Group(group_id="group", trajectories=(trajectory,))
    batch = assemble_batch([group], 8, "batch", FACTS, oldest=5)
    assert np.array_equal(stored(trajectory).loss_mask(masked_below=5), batch.loss_mask)
    assert stored(trajectory).num_trained_tokens(masked_below=5) == 4


def test_inherited_tokens_are_neither_sampled_nor_trained_by_the_branch() -> None:
    trunk = make_trajectory("t", prompt=2, sampled=((3, 5),))
    branch = make_trajectory("t.1", prompt=2, sampled=((3, 5), (2, 6)))
    branch = msgspec.structs.replace(
        branch, segments=(*trunk.segments, *branch.segments[2:]), num_inherited=2
    )
    summary = stored(branch)
    assert summary.loss_mask().tolist() == [False] * 5 + [True] * 2
    assert summary.weight_versions.tolist() == [-1, -1, 5, 5, 5, 6, 6]
    assert (summary.num_sampled_tokens, summary.oldest_weight_version) == (2, 6)


def test_a_restart_lowers_the_versions_that_it_has_undone_and_marks_their_tokens() -> None:
    trajectory = make_trajectory("t", prompt=2, sampled=((2, 3), (3, 5)), routing=False)
    lowered, expected = stored(trajectory).capped(4), capped(trajectory, 4)
    assert np.array_equal(lowered.weight_versions, expected.weight_versions)
    undone = [isinstance(s, Sampled) and s.lag_unknown for s in expected.segments for _ in s.token_ids]
    assert lowered.lag_unknown.tolist() == undone == [False] * 4 + [True] * 3
    assert stored(trajectory).capped(5) == stored(trajectory)


def test_a_restart_marks_all_tokens_of_a_trajectory_that_undone_weights_have_routed() -> None:
    """An update interrupted it after two tokens, and its rows are those of the call that went on."""
    went_on = make_trajectory("t", prompt=2, sampled=((2, 3), (3, 5)))
    recovered = make_trajectory("t", prompt=2, sampled=((2, 3), (0, 5)))  # no tokens, only rows
    for trajectory in (went_on, recovered):
        lowered = stored(trajectory).capped(4)
        assert lowered.weight_versions.tolist() == [-1] * 2 + [3] * 2 + [4] * (trajectory.num_tokens - 4)
        assert lowered.lag_unknown.tolist() == [False] * 2 + [True] * (trajectory.num_tokens - 2)
        assert lowered.capped(4) is lowered
    assert stored(went_on).capped(5) == stored(went_on)


@pytest.mark.parametrize(
    ("reported", "observation", "missing"),
    [(8, 0, 0), (6, 0, 2), (8, 5, 0), (6, 5, 2), (8 + 3, 5, 0), (8 + 5, 5, 0)],
)
def test_rows_are_missing_only_where_a_sampled_token_needs_them(
    reported: int, observation: int, missing: int
) -> None:
    """Five tokens of prompt and four sampled ones need eight rows; no engine has read what follows."""
    trajectory = make_trajectory("t", prompt=5, sampled=((4, 2),))
    if observation:
        read = Context(token_ids=np.arange(observation, dtype=np.int32))
        trajectory = msgspec.structs.replace(trajectory, segments=(*trajectory.segments, read))
    num_rows = trajectory.num_tokens - 1
    spans = tuple(
        VersionSpan(start=start, end=end, weight_version=version)
        for start, end, version in ((0, reported, 2), (reported, num_rows, NEVER_COMPUTED))
        if start < end
    )
    trace = msgspec.structs.replace(trajectory.trace, rows=make_rows(num_rows), spans=spans)
    summary = stored(msgspec.structs.replace(trajectory, trace=trace))
    assert summary.routing is not None
    assert summary.routing.num_invalid == missing
