"""Waits by name, and the clock that stands while no engine serves."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from async_rl.engines.pool import EnginePool
from async_rl.observability.metrics import Metrics
from async_rl.runtime.serving_clock import ServingClock, serving_timeout
from async_rl.runtime.waits import NamedLock, WaitNode, Waits, acting, progressed, waiting
from tests.support.manual_engines import ManualEngine


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_wait_is_seen_with_its_age_while_it_lasts() -> None:
    clock = Clock()
    waits = Waits(clock)
    with acting("trajectory", "7", waits=waits):
        with waiting("tool", "calculator", limit_s=30, why=lambda: "busy"):
            clock.now_s = 4.0
            (wait,) = waits.open_waits()
            assert (wait.who, wait.on, wait.target) == (WaitNode("trajectory", "7"), "tool", "calculator")
            assert (wait.age_s, wait.limit_s, wait.why) == (4.0, 30, "busy")
            assert waits.oldest_s() == {"tool": 4.0}
        assert waits.open_waits() == []
        assert waits.longest_s == {"tool": 4.0}
    assert waits.actors() == []


def test_a_wait_ends_when_it_is_cancelled_and_teaches_nothing() -> None:
    waits = Waits()

    async def wait_for_ever() -> None:
        with acting("trajectory", "7", waits=waits), waiting("reward"):
            await asyncio.Future()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await wait_for_ever()

    asyncio.run(main())
    assert waits.open_waits() == []
    assert waits.actors() == []
    assert waits.longest_s == {}


async def test_waits_of_tasks_and_threads_belong_to_the_actor_that_started_them() -> None:
    waits = Waits()

    async def tool() -> None:
        with waiting("tool", "search"):
            seen.append(waits.open_waits()[0].who)

    def in_a_thread() -> None:
        with waiting("disk"):
            seen.append(waits.open_waits()[0].who)

    seen: list[WaitNode] = []
    with acting("group", "g", waits=waits), acting("trajectory", "7"):
        await asyncio.gather(tool())
        await asyncio.to_thread(in_a_thread)
        (child,) = (actor for actor in waits.actors() if actor.who.kind == "trajectory")
    assert seen == [WaitNode("trajectory", "7")] * 2
    assert child.parent == WaitNode("group", "g")


def test_a_renewed_wait_begins_anew_and_the_run_has_moved() -> None:
    clock = Clock()
    waits = Waits(clock)
    with acting("trajectory", "7", waits=waits), waiting("first chunk", "engine-1") as wait:
        clock.now_s = 5.0
        wait.renew("chunk")
        clock.now_s = 7.0
        (seen,) = waits.open_waits()
        assert (seen.on, seen.age_s) == ("chunk", 2.0)
        assert waits.quiet_s == 2.0
        assert waits.heard_s == {"engine-1": 5.0}
        progressed()
        assert waits.quiet_s == 0.0


async def test_a_wait_that_is_ended_ends_as_if_its_time_were_over() -> None:
    async def use() -> None:
        async with asyncio.timeout(3600) as scope:
            with waiting("tool", "search", scope=scope) as wait:
                ends.append(wait.expire())
                ends.append(wait.expire())
                await asyncio.Future()

    ends: list[bool] = []
    with acting("trajectory", "7", waits=Waits()), pytest.raises(TimeoutError):
        await use()
    assert ends == [True, False]


async def test_a_wait_cannot_be_ended_when_its_time_was_over_and_its_task_went_on() -> None:
    async def use() -> None:
        async with asyncio.timeout(0) as scope:
            with waiting("tool", "search", scope=scope) as wait:
                with contextlib.suppress(asyncio.CancelledError):  # as user code does
                    await asyncio.Future()
                ended.append(wait.expire())

    ended: list[bool] = []
    with acting("trajectory", "7", waits=Waits()):
        await use()
    assert ended == [False]


async def test_a_lock_is_waited_for_by_name_only_while_somebody_has_it() -> None:
    waits = Waits()
    lock = NamedLock("sync lock")

    async def second() -> list[str]:
        async with lock:
            return [wait.on for wait in waits.open_waits()]

    with acting("service", "repair", waits=waits):
        async with lock:
            assert waits.open_waits() == []
            other = asyncio.gather(second())
            await asyncio.sleep(0)
            assert [wait.on for wait in waits.open_waits()] == ["sync lock"]
        assert await other == [[]]


# -- limits count only the time in which some engine serves -------------------------------------------


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
    pool.own.serving_clock.listeners[seen.append] = None
    for name in ("engine-0", "engine-1"):
        pool.add_engine(ManualEngine(name))
        pool.serve_engine(name, 0)
    assert not pool.own.serving_clock.is_paused
    pool.hold_engine("engine-0")
    assert not pool.own.serving_clock.is_paused
    pool.lend_engine("engine-1")
    assert pool.own.serving_clock.is_paused
    pool.quarantine_engine("engine-1", RuntimeError("gone"))
    pool.serve_engine("engine-0", 1)
    assert not pool.own.serving_clock.is_paused
    pool.remove_engine("engine-0")
    assert pool.own.serving_clock.is_paused
    assert seen == [True, False, True, False, True]
