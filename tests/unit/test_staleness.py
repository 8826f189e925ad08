"""Admission and age: the arithmetic, and every small world to its end."""

from __future__ import annotations

from collections import Counter

import pytest

from async_rl.staleness import Backlog, StalenessPolicy, batch_is_safe, may_admit, staleness


def test_staleness_is_the_age_of_the_oldest_token_at_consumption() -> None:
    assert staleness(7, 4) == 3


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
        ({5: 3}, {}, True),  # one will be late, which cannot be avoided
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
        ({6: 2}, {6: 3}, "drop", False),  # but no capacity is used that others could still use
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
    assert (backlog.in_flight_until(0), backlog.in_flight_until(1)) == ([], ["slow"])
    assert backlog.select_batch(version=1) is None
    backlog.renew_deadline("slow", 1)
    assert backlog.in_flight_until(1) == []
    assert backlog.select_batch(version=1) == ["quick"]
    backlog.renew_deadline("slow", 0)  # it cannot have become older
    assert backlog.in_flight_until(2) == ["slow"]
    assert backlog.in_flight_until(1) == []


def test_late_groups_go_first_when_their_old_tokens_are_masked() -> None:
    backlog = Backlog(groups_per_batch=1, max_staleness=1, staleness_policy="mask_tokens")
    for name, oldest in (("fresh", 3), ("late", 0)):
        backlog.add_group(name, oldest)
        backlog.finish_group(name)
    assert backlog.overdue(version=3) == []
    assert backlog.select_batch(version=3) == ["late"]


def test_a_group_is_gone_when_it_was_removed() -> None:
    backlog = Backlog(groups_per_batch=1, max_staleness=1, staleness_policy="wait")
    backlog.add_group("a", 0)
    backlog.add_group("b", 0)
    with pytest.raises(ValueError, match="outstanding already"):
        backlog.add_group("a", 0)
    backlog.finish_group("a")
    backlog.remove_group("a")
    backlog.remove_group("b")
    assert (backlog.outstanding, "a" in backlog, backlog.select_batch(0)) == (0, False, None)
    with pytest.raises(KeyError):
        backlog.remove_group("a")


World = tuple[int, bool, int, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]
"""How far engines lag behind the next version, whether a batch is being trained, how many groups in flight
have nothing to lose yet (`mask_tokens`), and the numbers of ready and of other unfinished groups by deadline,
relative to the next version to be consumed."""


def successors(world: World, batch: int, bound: int, staleness_policy: StalenessPolicy) -> list[World]:
    """Every next world, by one dispatch, finish, drop, take, settle or sync."""
    lag, training, free, ready_items, flying_items = world
    ready, flying = Counter(dict(ready_items)), Counter(dict(flying_items))
    following: list[World] = []
    newest = bound - lag  # the deadline of what is sampled by the weights served now

    def add(lag: int, training: bool, free: int, ready: Counter[int], flying: Counter[int]) -> None:
        items = tuple(sorted((+ready).items())), tuple(sorted((+flying).items()))
        following.append((lag, training, free, *items))

    if may_admit(free + ready.total() + flying.total(), batch, bound, lag):
        if staleness_policy == "mask_tokens":
            add(lag, training, free + 1, ready, flying)
        else:
            add(lag, training, free, ready, flying + Counter([newest]))
    if free:
        add(lag, training, free - 1, ready, flying + Counter([newest]))  # its first answer has ended
        add(lag, training, free - 1, ready + Counter([newest]), flying)  # all have
        add(lag, training, free - 1, ready, flying)
    for deadline in flying:
        add(lag, training, free, ready + Counter([deadline]), flying - Counter([deadline]))
        if staleness_policy != "mask_tokens":
            add(lag, training, free, ready + Counter([deadline + 1]), flying - Counter([deadline]))
        add(lag, training, free, ready, flying - Counter([deadline]))
    if not training and batch_is_safe(ready, flying + Counter({newest: free}), 0, batch, staleness_policy):
        left, taken = sorted(ready.elements())[batch:], sorted(ready.elements())[:batch]
        assert taken[0] >= 0, f"a group past its deadline is consumed: {world}"
        if staleness_policy == "drop":
            flying = Counter({deadline: n for deadline, n in flying.items() if deadline > 0})
        aged = Counter({d - 1: n for d, n in flying.items()})
        add(lag + 1, True, free, Counter(d - 1 for d in left), aged)
        flying = Counter(dict(flying_items))
    if training:
        add(lag, False, free, ready, flying)  # settled; engines still serve the old version
    if lag and not training:
        add(lag - 1, False, free, ready, flying)  # synced
    return following


@pytest.mark.parametrize("staleness_policy", ["wait", "drop", "mask_tokens"])
@pytest.mark.parametrize(("batch", "bound"), [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (3, 1)])
def test_nothing_is_late_and_nothing_stands_still_in_any_world_that_can_be_reached(
    batch: int, bound: int, staleness_policy: StalenessPolicy
) -> None:
    """Under `drop`, too, no finished group is ever late."""
    start: World = (0, False, 0, (), ())
    seen, open_worlds = {start}, [start]
    while open_worlds:
        world = open_worlds.pop()
        lag, training, free, ready, flying = world
        assert all(deadline >= 0 for deadline, _ in (*ready, *flying)), f"somebody is late: {world}"
        assert not free or bound - lag >= 0 or training, f"somebody will be: {world}"
        following = successors(world, batch, bound, staleness_policy)
        if not flying and not free and not training and not lag and sum(n for _, n in ready) >= batch:
            assert batch_is_safe(dict(ready), {}, 0, batch, staleness_policy), f"a batch is stuck: {world}"
        assert following, f"nothing can happen any more: {world}"
        for other in following:
            if other not in seen and other[0] <= bound + 1:
                seen.add(other)
                open_worlds.append(other)
    assert len(seen) > 3
