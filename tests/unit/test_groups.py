"""Decisions on groups: each rule by itself."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from msgspec.structs import replace

from async_rl.config import LossConfig, RolloutConfig
from async_rl.config.trainer_settings import TeacherConfig
from async_rl.errors import AgentLoopError, AsyncRLError
from async_rl.rollout.groups import (
    GroupDecision,
    GroupInFlight,
    UnscoredTrajectory,
    UntrainedGroups,
    can_drop_stragglers,
    count_groups_without_signal,
    decide_group,
    has_signal,
)
from async_rl.staleness import StalenessPolicy
from async_rl.store.journal import JournalEntry
from async_rl.types import StoredCompletion, StoredTrajectory, TakenBatch, Task, TurnReward, VersionSpan
from tests.support.trajectories import make_trajectory

REST = RolloutConfig(failed_siblings="train_rest")
DROP = RolloutConfig(failed_siblings="drop")
RETRY = RolloutConfig(failed_siblings="retry")
FILTER = RolloutConfig(dynamic_filtering=True)
TRAIN = GroupDecision(train=True)
NO_SIGNAL = GroupDecision(train=False, reason="no_signal")
TOO_FEW = GroupDecision(train=False, reason="too_few_siblings")
FAILED = GroupDecision(train=False, reason="sibling_failed")
AGAIN = GroupDecision(train=False, reason="sibling_failed", retry=True)


@pytest.mark.parametrize(
    ("rewards", "reasons", "policy", "may_retry", "decision"),
    [
        ([1.0, 0.0, 1.0], [], DROP, False, TRAIN),
        ([1.0, 0.0], ["reward_error"], REST, True, TRAIN),
        ([1.0], ["reward_error", "straggler"], REST, True, TOO_FEW),
        ([], ["reward_error"] * 2, REST, True, TOO_FEW),
        ([1.0, 0.0], ["reward_error"], DROP, True, FAILED),
        ([1.0, 0.0], ["straggler"], DROP, True, TRAIN),  # dropped as a straggler, not failed
        ([1.0, 0.0], ["reward_error"], RETRY, True, AGAIN),
        ([1.0, 0.0], ["reward_error"], RETRY, False, TRAIN),  # no retries left
        ([1.0, 0.0], ["straggler"], RETRY, True, TRAIN),
        ([], ["prompt_too_long"] * 2, RETRY, True, TOO_FEW),
        ([1.0, 1.0], [], REST, False, TRAIN),
        ([1.0, 1.0], [], FILTER, False, NO_SIGNAL),
        ([1.0, 0.5], [], FILTER, False, TRAIN),
    ],
)
def test_a_group_is_decided_by_its_policy(
    rewards: list[float], reasons: list[str], policy: RolloutConfig, may_retry: bool, decision: GroupDecision
) -> None:
    dropped = {f"t{i}": reason for i, reason in enumerate(reasons)}
    finished = {f"f{i}": reward for i, reward in enumerate(rewards)}
    assert decide_group(finished, dropped, policy, may_retry=may_retry) == decision


def test_a_group_of_one_attempt_is_too_small_when_it_has_branches() -> None:
    tree = {"a": 1.0, "a.1": 0.0, "a.1.1": 0.5}
    assert decide_group(tree, {"b": "reward_error"}, REST).reason == "too_few_siblings"
    assert decide_group(tree | {"b": 1.0}, {}, REST) == TRAIN


def test_a_group_has_signal_when_equal_sums_came_by_other_turns() -> None:
    early, late = (1.0, 2, (TurnReward(end=5, reward=1.0),)), (1.0, 2, (TurnReward(end=9, reward=1.0),))
    assert has_signal([early, late])
    assert not has_signal([early, (1.0, 2, (TurnReward(end=5, reward=1.0),))])


@pytest.mark.parametrize(
    ("finished", "size", "may"), [(1, 2, False), (2, 4, True), (2, 5, False), (3, 5, True)]
)
def test_stragglers_are_dropped_when_half_of_the_group_has_finished(
    finished: int, size: int, may: bool
) -> None:
    assert can_drop_stragglers(finished, size, REST) is may


class Call:
    """A running engine call."""

    engine_id = "engine-0"
    lag_unknown = False

    def __init__(self, *versions: int, since: int) -> None:
        self.since_version = since
        self.token_ids = list(range(len(versions)))
        self.log_probs = [0.0] * len(versions)
        self.versions = [VersionSpan(start=i, end=i + 1, weight_version=v) for i, v in enumerate(versions)]


def group_of(*names: str, staleness_policy: StalenessPolicy = "wait") -> GroupInFlight:
    return GroupInFlight("g", Task(task_id="task", messages=[]), 0, names, staleness_policy)


def entry_of(name: str, *spans: tuple[int, int]) -> JournalEntry:
    """An entry with these (tokens, version) segments."""
    entry = JournalEntry(name)
    entry.segments += make_trajectory(name, sampled=spans, routing=False).segments
    return entry


def test_the_run_ends_with_the_last_cause_when_failures_and_filters_leave_no_group() -> None:
    untrained = UntrainedGroups(limit=3)
    cause = AgentLoopError("the cat is on the keyboard")
    for decision in (NO_SIGNAL, TOO_FEW, TOO_FEW):
        untrained.record_group(decision, {"a": "agent_loop_error"}, cause)
    for _ in range(9):  # these lost stragglers only
        untrained.record_group(TOO_FEW, {"a": "straggler"}, cause)
    with pytest.raises(AsyncRLError, match=r"4 groups .*too_few_siblings: 3, no_signal: 1.*the cat is on"):
        untrained.record_group(TOO_FEW, {"a": "agent_loop_error", "b": "straggler"}, cause)


def test_a_group_is_as_old_as_its_oldest_token_the_running_call_included() -> None:
    """Not as its newest: what fresh weights resumed began under old ones (verl issue 7569)."""
    group = group_of("young", "running")
    assert group.oldest_version() is None
    young, running = entry_of("young", (4, 6), (2, 7)), JournalEntry("running")
    group.begin_attempt(young.trajectory_id, {young.trajectory_id: young})
    group.begin_attempt(running.trajectory_id, {running.trajectory_id: running})
    assert group.oldest_version() == 6
    running.call = Call(5, 5, 8, since=5)
    assert group.oldest_version() == 5
    running.call.since_version = 4  # tokens may be in transit
    assert group.oldest_version() == 4
    assert group.sampled_lengths() == {"young": 6, "running": 3}
    group.end_sibling("running", "reward_error")
    assert group.oldest_version() == 6
    assert not group.all_ended.is_set()
    group.end_sibling(
        "young", [StoredTrajectory.of(make_trajectory("young", sampled=((4, 6), (2, 7)), routing=False))]
    )
    assert group.oldest_version() == 6
    assert group.all_ended.is_set()
    assert group.sampled_lengths() == {"young": 6, "running": 3}


def test_only_answers_that_sample_no_more_age_when_tokens_are_masked() -> None:
    group = group_of("talking", "calling", "done", staleness_policy="mask_tokens")
    talking, calling = entry_of("talking", (4, 2)), entry_of("calling", (4, 3), (1, 4))
    talking.begin_turn(3, 16, ())
    group.begin_attempt(talking.trajectory_id, {talking.trajectory_id: talking})
    assert group.oldest_version() is None  # it will have a token of the weights served now
    group.begin_attempt(calling.trajectory_id, {calling.trajectory_id: calling})
    assert group.oldest_version() == 4  # it is in a tool, and may end there
    calling.begin_turn(8, 16, ())
    assert group.oldest_version() is None
    group.end_sibling(
        "done", [StoredTrajectory.of(make_trajectory("done", sampled=((4, 1), (2, 5)), routing=False))]
    )
    assert group.oldest_version() == 5


def test_an_attempt_that_failed_does_not_age_its_group() -> None:
    group = group_of("t")
    group.begin_attempt("t", {"t": entry_of("t", (4, 2))})
    group.begin_attempt("t", {"t": entry_of("t", (1, 7))})
    assert (group.oldest_version(), group.sampled_lengths()) == (7, {"t": 1})


def test_siblings_are_stopped_when_their_group_is_cancelled() -> None:
    group, stopped = group_of("t", staleness_policy="drop"), []
    group.cancel()  # before they start
    assert group.cancelled
    group.stop = lambda: stopped.append(True)
    group.cancel()
    assert stopped == [True]


def test_a_group_is_dropped_and_retried_when_one_call_cannot_score_it_any_more() -> None:
    """Both were scored by one call; then the frame of one was lost, and it was sampled again."""
    group = group_of("a", "b")
    stored = {name: StoredTrajectory.of(make_trajectory(name, reward=None)) for name in "ab"}
    unscored = UnscoredTrajectory(
        trajectory_id="a",
        attempt=1,
        completion=StoredCompletion(path="a", nbytes=1, checksum=0),
        reward_source="a",
    )
    group.end_sibling("a", [stored["a"]])
    group.unscored["a"] = unscored
    assert group.can_be_scored
    group.end_sibling("b", [stored["b"].with_reward({"reward": 1.0})])
    assert not group.can_be_scored
    decision = decide_group({"b": 1.0}, {}, RolloutConfig(min_group_size=1), is_scored=False)
    assert (decision.train, decision.reason, decision.retry) == (False, "node_lost", True)


def test_a_person_is_warned_when_many_groups_were_filtered_out() -> None:
    warnings: list[str] = []
    untrained = UntrainedGroups(limit=100, warn=warnings.append)
    for decision in [TRAIN, *[NO_SIGNAL] * 19, TRAIN, *[NO_SIGNAL] * 40]:
        untrained.record_group(decision, {}, None)
    (warning,) = warnings
    assert warning.startswith("all rewards equal for 20 groups: nothing is learned")


def stored(group: int, reward: float, *turns: TurnReward) -> StoredTrajectory:
    trajectory = make_trajectory("t", group_id=str(group), reward=reward)
    return replace(StoredTrajectory.of(trajectory), turn_rewards=turns)


@pytest.mark.parametrize(
    ("settings", "rewards", "without"),
    [
        ({}, [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0]], 2),
        ({"advantages": "rloo"}, [[1.0, 1.0], [0.0, 0.0]], 2),
        ({"advantages": "reinforce++"}, [[1.0, 1.0], [0.0, 0.0]], 0),  # the batch is the baseline
        ({"advantages": "reinforce++"}, [[1.0, 1.0], [1.0, 1.0]], 2),
        ({"advantages": "gae"}, [[1.0, 1.0]], 0),
        ({"teacher": TeacherConfig(model="t")}, [[1.0, 1.0]], 0),
        ({"overlong_buffer_tokens": 8}, [[1.0, 1.0]], 0),
    ],
)
def test_groups_without_a_signal_are_counted_by_what_the_advantages_compare(
    settings: dict[str, Any], rewards: list[list[float]], without: int
) -> None:
    loss = LossConfig(**settings)
    batch = taken([[stored(number, each) for each in group] for number, group in enumerate(rewards)])
    assert count_groups_without_signal(batch, loss) == without


def test_turn_rewards_are_a_signal_when_turns_have_returns_of_their_own() -> None:
    group = [stored(0, 1.0, TurnReward(end=1, reward=0.5)), stored(0, 1.0, TurnReward(end=1, reward=0.1))]
    assert count_groups_without_signal(taken([group]), LossConfig()) == 1
    by_turn = LossConfig(turn_discount=0.5)
    assert count_groups_without_signal(taken([group]), by_turn) == 0


def taken(groups: list[list[StoredTrajectory]]) -> TakenBatch:
    return TakenBatch(
        batch_id="batch",
        trainer_version=0,
        group_ids=tuple(str(number) for number in range(len(groups))),
        group_index=tuple(number for number, group in enumerate(groups) for _ in group),
        trajectories=tuple(chain.from_iterable(groups)),
    )
