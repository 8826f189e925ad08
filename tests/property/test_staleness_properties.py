"""A small random world around the backlog: the bound holds, and it never stands still."""

from __future__ import annotations

import random
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from async_rl.staleness import Backlog, batch_is_safe, staleness

counts = st.dictionaries(st.integers(0, 6), st.integers(1, 4), max_size=5)


def run(
    seed: int, batch: int, bound: int, overage: Literal["wait", "drop"], lying: float
) -> tuple[int, int, int]:
    """400 random events; returns (batches, groups dropped as overdue, largest staleness).

    `lying` is the share of groups that were sampled by older weights than the engines said.
    """
    random_ = random.Random(seed)
    backlog = Backlog(batch, bound, overage)
    version = served = 0
    training = False
    oldest: dict[str, int] = {}
    flying: list[str] = []
    batches = dropped = largest = names = 0
    for _ in range(400):
        upcoming = version + training
        late = backlog.overdue(upcoming)
        for name in late:
            backlog.remove(name)
        dropped += len(late)
        may = []
        if backlog.may_admit(lag=upcoming - served):
            may.append("dispatch")
        if flying:
            may += ["finish", "finish", "drop"] if random_.random() < 0.2 else ["finish"]
        chosen = None if training else backlog.select(version)
        if chosen is not None:
            may += ["take"] * 3
        if training:
            may.append("settle")
        if served < version:
            may += ["sync"] * 2
        assert may, f"nothing can happen: {backlog.num_ready} ready at version {version}, served {served}"
        match random_.choice(may):
            case "dispatch":
                name, names = f"g{names}", names + 1
                backlog.dispatch(name, served)
                oldest[name] = served + (random_.randint(-3, -1) if random_.random() < lying else 0)
                flying.append(name)
            case "finish":
                name = flying.pop(random_.randrange(len(flying)))
                if random_.random() < 0.3:
                    oldest[name] = max(oldest[name], served)
                backlog.finish(name, oldest[name])
            case "drop":
                backlog.remove(flying.pop(random_.randrange(len(flying))))
            case "take":
                assert chosen is not None
                assert len(set(chosen)) == batch
                for name in chosen:
                    backlog.remove(name)
                    largest = max(largest, staleness(version, oldest[name]))
                training, batches = True, batches + 1
            case "settle":
                training, version = False, version + 1
            case "sync":
                served += 1
    return batches, dropped, largest


worlds = (st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 5))


@given(*worlds)
def test_nothing_is_late_or_dropped_when_batches_wait(seed: int, batch: int, bound: int) -> None:
    batches, dropped, largest = run(seed, batch, bound, "wait", lying=0)
    assert dropped == 0
    assert largest <= bound
    assert batches > 0


@given(*worlds)
def test_the_bound_holds_when_late_groups_are_dropped(seed: int, batch: int, bound: int) -> None:
    batches, _, largest = run(seed, batch, bound, "drop", lying=0)
    assert largest <= bound
    assert batches > 0


@given(*worlds, st.sampled_from(["wait", "drop"]))
def test_the_bound_holds_and_nothing_stands_still_when_engines_lie_about_their_version(
    seed: int, batch: int, bound: int, overage: Literal["wait", "drop"]
) -> None:
    _, _, largest = run(seed, batch, bound, overage, lying=0.3)
    assert largest <= bound


@given(counts, counts, st.integers(1, 4))
def test_a_batch_waits_only_for_what_can_still_come(
    ready: dict[int, int], in_flight: dict[int, int], batch: int
) -> None:
    if sum(ready.values()) >= batch and not batch_is_safe(ready, in_flight, 0, batch):
        finished = {d: ready.get(d, 0) + in_flight.get(d, 0) for d in ready.keys() | in_flight.keys()}
        assert batch_is_safe(finished, {}, 0, batch)
