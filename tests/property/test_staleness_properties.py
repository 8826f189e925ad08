"""A small random world around the backlog: the bound holds, and it never stalls."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from async_rl.staleness import Backlog, StalenessPolicy, batch_is_safe

counts = st.dictionaries(st.integers(0, 6), st.integers(1, 4), max_size=5)


def run(
    seed: int, batch: int, bound: int, staleness_policy: StalenessPolicy, lying: float, every: int = 1
) -> tuple[int, int, int]:
    """400 random events; returns (batches, groups dropped as overdue, largest staleness).

    `lying` is the share of groups that were sampled by older weights than the engines said. With
    `mask_tokens` a group ages from the end of its first answer; `drop` gives up what is due. Engines take
    each version, one after the other, or the newest one once it is `every` ahead.
    """
    random_ = random.Random(seed)
    backlog = Backlog(batch, bound, staleness_policy)
    version = served = 0
    training = False
    oldest: dict[str, int] = {}
    dispatched: dict[str, int] = {}
    flying: list[str] = []
    pinned: set[str] = set()
    batches = dropped = given_up = largest = names = 0
    for _ in range(400):
        upcoming = version + training
        if staleness_policy == "mask_tokens":
            for name in set(flying) - pinned:
                backlog.renew_deadline(name, served)
        late = backlog.overdue(upcoming)
        if staleness_policy == "drop":
            gone = backlog.in_flight(upcoming - 1)
            for name in gone:
                backlog.remove_group(name)
                flying.remove(name)
            given_up += len(gone)
        for name in late:
            backlog.remove_group(name)
        dropped += len(late)
        may = []
        backlog.served_version, backlog.next_version = served, upcoming
        if backlog.may_admit():
            may.append("dispatch")
        if flying:
            may += ["finish", "finish", "drop"] if random_.random() < 0.2 else ["finish"]
        if staleness_policy == "mask_tokens" and set(flying) - pinned:
            may.append("pin")
        chosen = None if training else backlog.select_batch(version)
        if chosen is not None:
            may += ["take"] * 3
        if training:
            may.append("settle")
        if version - served >= every:
            may += ["sync"] * 2
        assert may, f"nothing can happen: {backlog.num_ready} ready at version {version}, served {served}"
        match random_.choice(may):
            case "dispatch":
                name, names = f"g{names}", names + 1
                backlog.add_group(name, served)
                dispatched[name] = served
                oldest[name] = served + (random_.randint(-3, -1) if random_.random() < lying else 0)
                flying.append(name)
            case "finish":
                name = flying.pop(random_.randrange(len(flying)))
                if staleness_policy == "mask_tokens" and name not in pinned:
                    oldest[name] += served - dispatched[name]
                elif random_.random() < 0.3 and staleness_policy != "mask_tokens":
                    oldest[name] = max(oldest[name], served)
                backlog.finish_group(name, oldest[name])
            case "pin":
                name = random_.choice(sorted(set(flying) - pinned))
                pinned.add(name)
                oldest[name] += served - dispatched[name]
            case "drop":
                backlog.remove_group(flying.pop(random_.randrange(len(flying))))
            case "take":
                assert chosen is not None
                assert len(set(chosen)) == batch
                for name in chosen:
                    backlog.remove_group(name)
                    largest = max(largest, version - oldest[name])
                training, batches = True, batches + 1
            case "settle":
                training, version = False, version + 1
            case "sync":
                served = version if every > 1 else served + 1
    assert not given_up or staleness_policy == "drop"
    return batches, dropped, largest


worlds = (st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 5))


@given(*worlds, st.sampled_from(["wait", "mask_tokens"]))
def test_nothing_is_late_or_dropped_when_batches_wait(
    seed: int, batch: int, bound: int, staleness_policy: StalenessPolicy
) -> None:
    batches, dropped, largest = run(seed, batch, bound, staleness_policy, lying=0)
    assert dropped == 0
    assert largest <= bound
    assert batches > 0


@given(*worlds, st.sampled_from(["wait", "mask_tokens", "drop"]), st.data())
def test_the_bound_holds_and_nothing_stands_still_when_engines_take_every_so_manyth_version(
    seed: int, batch: int, bound: int, staleness_policy: StalenessPolicy, data: st.DataObject
) -> None:
    every = data.draw(st.integers(1, bound + 1))
    batches, dropped, largest = run(seed, batch, bound, staleness_policy, lying=0, every=every)
    assert dropped == 0
    assert largest <= bound
    assert batches > 0


@given(*worlds)
def test_only_work_in_flight_is_lost_when_late_groups_are_dropped(seed: int, batch: int, bound: int) -> None:
    batches, dropped, largest = run(seed, batch, bound, "drop", lying=0)
    assert dropped == 0  # of those that were ready
    assert largest <= bound
    assert batches > 0


@given(*worlds, st.sampled_from(["wait", "drop"]))
def test_the_bound_holds_and_nothing_stands_still_when_engines_lie_about_their_version(
    seed: int, batch: int, bound: int, staleness_policy: StalenessPolicy
) -> None:
    _, _, largest = run(seed, batch, bound, staleness_policy, lying=0.3)
    assert largest <= bound


@given(counts, counts, st.integers(1, 4))
def test_a_batch_waits_only_for_what_can_still_come(
    ready: dict[int, int], in_flight: dict[int, int], batch: int
) -> None:
    if sum(ready.values()) >= batch and not batch_is_safe(ready, in_flight, 0, batch):
        finished = {d: ready.get(d, 0) + in_flight.get(d, 0) for d in ready.keys() | in_flight.keys()}
        assert batch_is_safe(finished, {}, 0, batch)
