"""Whose turn it is on shared devices: what may follow what, and who waits for whom."""

from __future__ import annotations

import asyncio
import itertools
from typing import get_args

import pytest

from async_rl.engines.device_phases import DevicePhases, Turn
from async_rl.errors import InvariantError
from async_rl.simulation.virtual_time import in_virtual_time

WAY_TO: dict[Turn, tuple[Turn, ...]] = {
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


@pytest.mark.parametrize(("before", "after"), list(itertools.product(get_args(Turn), repeat=2)))
def test_a_turn_follows_only_where_nobody_is_left_holding_what_another_takes(
    before: Turn, after: Turn
) -> None:
    turns = DevicePhases()
    for turn in WAY_TO[before]:
        turns.move(turn)
    if (before, after) in MAY_FOLLOW:
        turns.move(after)
        assert turns.turn == after
    else:
        with pytest.raises(InvariantError, match=f"'{after}' does not follow '{before}'"):
            turns.move(after)
        assert turns.turn == before


@in_virtual_time
async def test_a_guest_waits_for_the_engines_turn() -> None:
    turns, order = DevicePhases(), list[str]()

    async def start_an_engine() -> None:
        async with turns.guest():
            order.append("engine")

    turns.move("to trainer")
    turns.move("trainer")
    async with asyncio.TaskGroup() as group:
        group.create_task(start_an_engine())
        await asyncio.sleep(100.0)
        order.append("trained")
        turns.move("to engines")
        turns.move("engines")
    assert order == ["trained", "engine"]


@in_virtual_time
@pytest.mark.parametrize("ends", ["well", "by an error"])
async def test_the_trainer_waits_for_the_guests_that_are_there(ends: str) -> None:
    turns, order = DevicePhases(), list[str]()

    async def start_an_engine(seconds: float) -> None:
        async with turns.guest():
            await asyncio.sleep(seconds)
            order.append(f"engine after {seconds:.0f} s")
            if ends == "by an error":
                raise RuntimeError("it does not come up")

    async with asyncio.TaskGroup() as group:
        for seconds in (5.0, 9.0):
            group.create_task(_caught(start_an_engine(seconds)))
        await asyncio.sleep(1.0)
        turns.move("to trainer")
        late = group.create_task(_caught(start_an_engine(0.0)))
        with pytest.raises(InvariantError, match="2 guests"):
            turns.move("trainer")
        await turns.without_guests()
        turns.move("trainer")
        order.append("trainer")
        late.cancel()
    assert order == ["engine after 5 s", "engine after 9 s", "trainer"]


async def _caught(starting: object) -> None:
    try:
        await starting  # type: ignore[misc]
    except RuntimeError:
        return


@in_virtual_time
async def test_the_end_of_the_engines_turn_is_heard_while_guests_are_left() -> None:
    turns, order = DevicePhases(), list[str]()

    async def evaluate() -> None:
        async with turns.guest():
            await turns.end_of_engines()
            order.append("heard")

    async def hand_over() -> None:
        turns.move("to trainer")
        await turns.without_guests()
        order.append("handed over")

    async with asyncio.TaskGroup() as group:
        group.create_task(evaluate())
        await asyncio.sleep(100.0)
        assert order == []
        group.create_task(hand_over())
    assert order == ["heard", "handed over"]
