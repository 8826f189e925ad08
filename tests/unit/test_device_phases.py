"""The time-sharing phases of shared devices: which may follow which, and what waits for what."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import get_args

import pytest

from async_rl.engines.device_phases import DevicePhases, Phase
from async_rl.errors import InvariantError

WAY_TO: dict[Phase, tuple[Phase, ...]] = {
    "engines": (),
    "to trainer": ("to trainer",),
    "trainer": ("to trainer", "trainer"),
    "to engines": ("to trainer", "trainer", "to engines"),
}
MAY_FOLLOW = {
    ("engines", "to trainer"),
    ("to trainer", "to trainer"),
    ("to trainer", "trainer"),
    ("trainer", "to engines"),
    ("to engines", "engines"),
    ("to engines", "to trainer"),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(get_args(Phase), repeat=2)))
def test_a_phase_follows_only_where_no_side_holds_what_the_other_takes(before: Phase, after: Phase) -> None:
    phases = DevicePhases()
    for phase in WAY_TO[before]:
        phases.enter_phase(phase)
    if (before, after) in MAY_FOLLOW:
        phases.enter_phase(after)
        assert phases.phase == after
    else:
        with pytest.raises(InvariantError, match=f"'{after}' does not follow '{before}'"):
            phases.enter_phase(after)
        assert phases.phase == before


async def test_the_trainer_waits_for_the_lease_holders_however_they_end() -> None:
    phases, order = DevicePhases(), list[str]()

    async def start_an_engine(seconds: float) -> None:
        with suppress(RuntimeError):
            async with phases.lease_engines():
                await asyncio.sleep(seconds)
                order.append(f"engine after {seconds:.0f} s")
                if seconds > 5.0:
                    raise RuntimeError("it does not come up")

    async with asyncio.TaskGroup() as group:
        for seconds in (5.0, 9.0):
            group.create_task(start_an_engine(seconds))
        await asyncio.sleep(1.0)
        phases.enter_phase("to trainer")
        late = group.create_task(start_an_engine(0.0))
        with pytest.raises(InvariantError, match="2 lease holders"):
            phases.enter_phase("trainer")
        await phases.wait_for_lease_holders()
        phases.enter_phase("trainer")
        order.append("trainer")
        late.cancel()
    assert order == ["engine after 5 s", "engine after 9 s", "trainer"]


async def test_the_end_of_the_engines_phase_is_seen_while_lease_holders_are_left() -> None:
    phases, order = DevicePhases(), list[str]()

    async def evaluate() -> None:
        async with phases.lease_engines():
            await phases.wait_for_engines_phase_end()
            order.append("heard")

    async def hand_over() -> None:
        phases.enter_phase("to trainer")
        await phases.wait_for_lease_holders()
        order.append("handed over")

    async with asyncio.TaskGroup() as group:
        group.create_task(evaluate())
        await asyncio.sleep(100.0)
        assert order == []
        group.create_task(hand_over())
    assert order == ["heard", "handed over"]
