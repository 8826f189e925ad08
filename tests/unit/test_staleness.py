"""Admission and age: the arithmetic."""

from __future__ import annotations

import pytest

from async_rl.staleness import Backlog, StalenessPolicy, batch_is_safe, may_admit


@pytest.mark.parametrize(
    ("outstanding", "bound", "lag", "admitted"),
    [(0, 0, 0, True), (1, 0, 0, True), (2, 0, 0, False), (5, 2, 0, True), (6, 2, 0, False), (4, 2, 1, False)],
)
def test_a_slot_is_free_when_fewer_are_outstanding_than_versions_can_consume(
    outstanding: int, bound: int, lag: int, admitted: bool
) -> None:
    assert may_admit(outstanding, groups_per_batch=2, max_staleness=bound, lag=lag) is admitted


@pytest.mark.parametrize(
    ("ready", "in_flight", "safe"),
    [
        ({5: 2}, {}, True),
        ({5: 1}, {5: 1}, False),  # too few
        ({6: 2}, {5: 1}, False),  # one in flight must go now
        ({6: 2}, {6: 2}, True),  # the rest fills the next batch
        ({6: 2}, {6: 3}, False),  # one too many for it
        ({6: 3}, {6: 2, 7: 2}, False),
        ({6: 3}, {6: 1, 7: 2}, True),
        ({9: 2}, {4: 3}, True),  # late already: waiting would not help
        ({5: 3}, {}, True),  # one will be late, which waiting cannot change
    ],
)
def test_a_batch_goes_when_the_rest_can_still_be_in_time(
    ready: dict[int, int], in_flight: dict[int, int], safe: bool
) -> None:
    assert batch_is_safe(ready, in_flight, version=5, groups_per_batch=2) is safe


def test_the_earliest_deadlines_go_first_and_within_one_the_first_that_finished() -> None:
    backlog = Backlog(groups_per_batch=3, max_staleness=2, staleness_policy="wait")
    for name, oldest in (("a", 1), ("b", 0), ("c", 0), ("d", 1)):
        backlog.add_group(name, oldest)
    for name in "dcab":
        backlog.finish_group(name)
    assert backlog.select_batch(version=1) == ["c", "b", "d"]


def test_a_group_gets_time_when_it_was_sampled_by_newer_weights_than_feared() -> None:
    backlog = Backlog(groups_per_batch=1, max_staleness=0, staleness_policy="wait")
    backlog.add_group("a", 3)
    backlog.finish_group("a", 4)
    assert backlog.overdue(version=4) == []
    assert backlog.select_batch(version=4) == ["a"]


@pytest.mark.parametrize("oldest", [0, 1])
def test_only_groups_in_time_are_taken_when_late_ones_are_dropped(oldest: int) -> None:
    backlog = Backlog(groups_per_batch=1, max_staleness=1, staleness_policy="drop")
    backlog.add_group("late", oldest)
    backlog.add_group("slow", 0)
    backlog.add_group("fresh", 3)
    backlog.finish_group("late")
    backlog.finish_group("fresh")
    assert backlog.overdue(version=3) == ["late"]
    assert backlog.select_batch(version=3) == ["fresh"]


@pytest.mark.parametrize(
    ("ready", "in_flight", "staleness_policy", "safe"),
    [
        ({6: 2}, {5: 1}, "drop", True),  # the one that is due is given up
        ({6: 2}, {6: 3}, "drop", False),  # but no capacity is taken that others could still use
        ({6: 2}, {5: 1}, "mask_tokens", False),
        ({4: 2}, {6: 2}, "mask_tokens", True),  # late ones are trained as far as they can
        ({4: 2}, {6: 2}, "wait", False),
        ({4: 2}, {6: 2}, "drop", False),
        ({4: 3}, {6: 2}, "mask_tokens", False),  # one late one is left, and takes a place of the next batch
        ({4: 3}, {3: 2}, "mask_tokens", True),
    ],
)
def test_a_batch_waits_by_what_is_done_about_late_groups(
    ready: dict[int, int], in_flight: dict[int, int], staleness_policy: StalenessPolicy, safe: bool
) -> None:
    assert (
        batch_is_safe(ready, in_flight, version=5, groups_per_batch=2, staleness_policy=staleness_policy)
        is safe
    )


def test_a_batch_need_not_wait_when_the_group_in_flight_is_younger_than_feared() -> None:
    backlog = Backlog(groups_per_batch=1, max_staleness=1, staleness_policy="wait")
    backlog.add_group("slow", 0)
    backlog.add_group("quick", 1)
    backlog.finish_group("quick")
    assert (backlog.in_flight(0), backlog.in_flight(1)) == ([], ["slow"])
    assert backlog.select_batch(version=1) is None
    backlog.renew_deadline("slow", 1)
    assert backlog.in_flight(1) == []
    assert backlog.select_batch(version=1) == ["quick"]
    backlog.renew_deadline("slow", 0)  # it cannot have become older
    assert backlog.in_flight(2) == ["slow"]
    assert backlog.in_flight(1) == []
