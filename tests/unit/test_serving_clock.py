"""Limits count only the time in which some engine serves."""

import asyncio

import pytest

from async_rl.engines.pool import EnginePool
from async_rl.observability.metrics import Metrics
from async_rl.runtime.serving_clock import ServingClock, serving_timeout
from async_rl.runtime.waits import Waits, acting, waiting
from tests.support.manual_engines import ManualEngine


async def ends_after(clock: ServingClock, limit_s: float) -> float:
    """Return after how long a block that never ends is ended."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    with pytest.raises(TimeoutError):
        async with clock.timeout(limit_s) as scope, waiting("tool", "search", scope=scope):
            await asyncio.Event().wait()
    return loop.time() - begin


async def test_a_limit_is_extended_by_the_pauses_when_there_are_several() -> None:
    loop = asyncio.get_running_loop()
    clock = ServingClock(loop.time)
    for at_s, paused in ((2, True), (1002, False), (1003, True), (1500, False), (1503, True)):
        loop.call_at(loop.time() + at_s, clock.set_paused, paused)
    loop.call_at(loop.time() + 2000, clock.set_paused, False)
    assert await ends_after(clock, 5.0) == pytest.approx(1000 + 497 + 5)
    assert clock.held_s == pytest.approx(1497)


async def test_a_limit_that_begins_in_a_pause_counts_from_its_end() -> None:
    loop = asyncio.get_running_loop()
    clock = ServingClock(loop.time)
    clock.set_paused(True)
    before_s = clock.now()
    loop.call_later(100, clock.set_paused, False)
    assert await ends_after(clock, 5.0) == pytest.approx(105)
    assert clock.now() - before_s == pytest.approx(5)


async def test_the_stall_doctor_ends_a_wait_although_the_clock_stands() -> None:
    clock = ServingClock(asyncio.get_running_loop().time)
    clock.set_paused(True)
    waits = Waits()
    with acting("run", waits=waits):
        asyncio.get_running_loop().call_later(1.0, lambda: next(iter(waits.open)).expire())
        assert await ends_after(clock, 5.0) == pytest.approx(1)
    clock.set_paused(False)


async def test_a_tool_has_the_clock_of_its_agent_loop() -> None:
    loop = asyncio.get_running_loop()
    clock = ServingClock(loop.time)

    async def tool() -> float:
        begin = loop.time()
        with pytest.raises(TimeoutError):
            async with serving_timeout(3.0):
                await asyncio.Event().wait()
        return loop.time() - begin

    clock.set_paused(True)
    loop.call_later(60, clock.set_paused, False)
    assert await tool() == pytest.approx(3)  # outside of any loop
    with clock.in_use():
        called = asyncio.ensure_future(tool())
    assert await called == pytest.approx(57 + 3)


async def test_the_clock_stands_while_the_pool_has_no_serving_engine() -> None:
    pool = EnginePool(Metrics(), asyncio.get_running_loop().time)
    seen = []
    pool.serving_clock.listeners[seen.append] = None
    for name in ("engine-0", "engine-1"):
        pool.add_engine(ManualEngine(name))
        pool.serve_engine(name, 0)
    assert not pool.serving_clock.is_paused
    pool.hold_engine("engine-0")
    assert not pool.serving_clock.is_paused
    pool.lend_engine("engine-1")
    assert pool.serving_clock.is_paused
    pool.quarantine_engine("engine-1", RuntimeError("gone"))
    pool.serve_engine("engine-0", 1)
    assert not pool.serving_clock.is_paused
    pool.remove_engine("engine-0")
    assert pool.serving_clock.is_paused
    assert seen == [True, False, True, False, True]
