"""Batches of stored trajectories: what is at which token, and what a trajectory's summary says of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from async_rl.codec import ALIGNMENT
from async_rl.errors import AlignmentError, CorruptFrame
from async_rl.placement.frame_readers import SharedFrames
from async_rl.routing import fit, make_trace
from async_rl.staleness import Backlog
from async_rl.store.frames import read_trajectories, verify_frame
from async_rl.store.trajectory_queue import pack_groups
from async_rl.types import (
    NEVER_COMPUTED,
    Context,
    Group,
    Sampled,
    StoredTrajectory,
    Trajectory,
    TurnRecord,
    VersionSpan,
    cap_versions,
)
from tests.support.stored_batches import assemble_batch, store_trajectory, taken_batch
from tests.support.trajectories import FACTS, make_group, make_rows, make_trajectory


def group_of(*trajectories: Trajectory) -> Group:
    return Group(group_id="group", trajectories=trajectories)


def test_each_token_lies_at_its_place() -> None:
    groups = [make_group("a", size=2, version=3), make_group("b", size=1, version=4, tokens=6)]
    batch = assemble_batch(groups, 5, "batch", FACTS)
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


def test_a_batch_knows_the_attempt_of_each_conversation(tmp_path: Path) -> None:
    rewards = {"a": 1.0, "a.1": 0.0, "b": 0.25, "a.1.2": 0.5}
    group = group_of(*(make_trajectory(name, reward=reward) for name, reward in rewards.items()))
    taken = taken_batch(tmp_path, [group], 6, facts=FACTS)
    assert taken.attempt_rewards == (0.5, 0.25)
    assert read_trajectories(taken).attempt_index.tolist() == [0, 0, 1, 0]


def test_rewards_of_turns_are_at_the_last_token_of_their_turn(tmp_path: Path) -> None:
    plain = make_trajectory("a", prompt=3, sampled=((4, 0),))
    turns = (
        TurnRecord(start=2, end=4, finish_reason="stop", reward=0.5),
        TurnRecord(start=4, end=7, finish_reason="stop"),
        TurnRecord(start=7, end=8, finish_reason="stop", reward=-1.0),
    )
    rewarded = make_trajectory("b", prompt=2, sampled=((2, 0), (3, 0), (1, 0)))
    rewarded = msgspec.structs.replace(rewarded, turns=turns)
    batch = read_trajectories(taken_batch(tmp_path, [group_of(plain, rewarded)], 1, facts=FACTS))
    assert batch.turn_reward_positions.tolist() == [7 + 3, 7 + 7]
    assert batch.turn_reward_values.tolist() == [0.5, -1.0]


def test_tokens_are_left_out_of_the_loss_when_older_weights_than_asked_for_sampled_them() -> None:
    """The bound is of each token: a trajectory's last version says nothing of its first (verl issue 7569)."""
    trajectory = make_trajectory("t", prompt=2, sampled=((2, 3), (3, 5), (1, 6)))
    batch = assemble_batch([group_of(trajectory)], 8, "batch", FACTS, oldest=5)
    assert batch.loss_mask.tolist() == [False] * 4 + [True] * 4
    assert batch.weight_versions.tolist() == [-1, -1, 3, 3, 5, 5, 5, 6]  # what they are stays known
    whole = assemble_batch([group_of(trajectory)], 8, "batch", FACTS)
    assert np.array_equal(batch.rollout_log_probs, whole.rollout_log_probs)
    assert batch.routing_valid is not None
    assert whole.routing_valid is not None
    assert np.array_equal(batch.routing_valid, whole.routing_valid)


def test_there_is_no_routing_when_it_is_not_replayed() -> None:
    batch = assemble_batch([make_group("a")], 0, "batch")
    assert (batch.routed_experts, batch.routing_valid, batch.num_experts) == (None, None, 0)


def test_rows_are_invalid_when_none_were_reported() -> None:
    whole = make_trajectory("whole")
    partial = make_trajectory("partial")
    assert partial.trace is not None
    fed = partial.token_ids[:2]
    kept = make_trace(partial.trace.rows[:2], 8, 1, moe_layers=FACTS.moe_layers, token_ids=fed)
    partial = msgspec.structs.replace(partial, trace=fit(kept, partial.token_ids))
    absent = make_trajectory("absent", routing=False)
    batch = assemble_batch([group_of(whole, partial, absent)], 0, "batch", FACTS)
    assert batch.routing_valid is not None
    valid = [batch.routing_valid[i : i + 7].tolist() for i in (0, 7, 14)]
    assert valid == [[True] * 6 + [False], [True] * 2 + [False] * 5, [False] * 7]


@pytest.mark.case(28)
@pytest.mark.parametrize("change", [{"num_experts": 16}, {"moe_layers": (0, 1)}, {"top_k": 1}], ids=str)
def test_a_batch_is_refused_when_routing_rows_are_of_another_model(change: dict[str, object]) -> None:
    facts = msgspec.structs.replace(FACTS, **change)
    with pytest.raises(AlignmentError, match=r"trajectory .* has routing rows of another model"):
        assemble_batch([make_group("a")], 0, "batch", facts)


@pytest.mark.parametrize(
    ("trajectory", "words"),
    [
        (make_trajectory("t", reward=None), "the reward None"),
        (make_trajectory("t", prompt=0, sampled=((0, 0),), routing=False), "no tokens"),
    ],
    ids=["reward", "tokens"],
)
def test_a_group_is_dropped_when_there_is_nothing_to_train_on(
    tmp_path: Path, trajectory: Trajectory, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    pack = partial(pack_groups, backlog=Backlog(2, 1, "wait"), min_group_size=1, facts=None)
    packed = pack(0, {"group": [store_trajectory(tmp_path, trajectory)]})
    assert (packed.batch, packed.unusable) == (None, {"group": "corrupt"})
    assert words in caplog.text


def test_a_group_is_refused_when_the_trainer_has_not_reached_its_version(tmp_path: Path) -> None:
    pack = partial(pack_groups, backlog=Backlog(2, 1, "wait"), min_group_size=1, facts=None)
    groups = {
        name: [
            store_trajectory(tmp_path, each)
            for each in make_group(name, size=1, version=version).trajectories
        ]
        for name, version in (("fits", 2), ("ahead", 3))
    }
    packed = pack(2, groups)
    assert packed.batch is None
    assert packed.unusable == {"ahead": "corrupt"}
    assert "version 3" in packed.flaw


def test_only_the_frames_of_the_chosen_trajectories_are_opened(tmp_path: Path) -> None:
    """A rank reads its own share; of the others it knows lengths, versions, masks and rewards."""
    taken = taken_batch(tmp_path, [make_group("a", size=3, version=3)], 5, facts=FACTS)
    whole = read_trajectories(taken)
    for index in (0, 2):
        Path(taken.trajectories[index].path).unlink()
    share = read_trajectories(taken, [1])
    part = slice(*whole.offsets[1:3])
    for name in ("token_ids", "rollout_log_probs", "routed_experts", "routing_valid"):
        own, of_all = getattr(share, name), getattr(whole, name)
        assert own.shape == of_all.shape
        assert np.array_equal(own[part], of_all[part])
        assert not own[: part.start].any()
        assert not own[part.stop :].any()
    for name in ("offsets", "loss_mask", "weight_versions", "rewards", "group_index"):
        assert np.array_equal(getattr(share, name), getattr(whole, name))
    with pytest.raises(CorruptFrame, match="does not exist"):
        read_trajectories(taken, [0])


def test_a_frame_of_another_trajectory_is_refused(tmp_path: Path) -> None:
    taken = taken_batch(tmp_path, [make_group("a")], 5, facts=FACTS)
    one, other = (Path(trajectory.path) for trajectory in taken.trajectories)
    frames = one.read_bytes(), other.read_bytes()
    one.write_bytes(frames[1])
    other.write_bytes(frames[0])
    with pytest.raises(CorruptFrame, match="another frame than that of trajectory a-0"):
        read_trajectories(taken)
    # A small frame is read at the length of its reference, at which a longer one is cut short.
    with pytest.raises(CorruptFrame, match=r"another frame than that of trajectory a-0|cut short"):
        verify_frame(taken.trajectories[0])
    with pytest.raises(CorruptFrame, match="another frame than that of trajectory a-1"):
        verify_frame(taken.trajectories[1])


def test_frames_are_read_where_they_begin_in_a_shared_file(tmp_path: Path) -> None:
    """Frames that arrived from another node lie one after the other in one file."""
    taken = taken_batch(tmp_path, [make_group("a")], 5, facts=FACTS)
    expected = read_trajectories(taken)
    shared, moved = SharedFrames(), []
    for trajectory in taken.trajectories:
        offset = shared.append(Path(trajectory.path).read_bytes())
        moved.append(msgspec.structs.replace(trajectory, path=shared.path, offset=offset))
    assert moved[1].offset % ALIGNMENT == 0
    arrived = read_trajectories(msgspec.structs.replace(taken, trajectories=tuple(moved)))
    assert np.array_equal(arrived.token_ids, expected.token_ids)
    assert np.array_equal(arrived.routed_experts, expected.routed_experts)


# -- references to stored trajectories ----------------------------------------------------------------


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
