"""The registry of named waits."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from async_rl.runtime.waits import NamedLock, WaitNode, Waits, acting, progressed, waiting


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
