"""Agent loops that hold something for as long as the run."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from async_rl.config import RolloutConfig
from async_rl.errors import AgentLoopError, EnvironmentNotReady
from async_rl.queue.journal import JournalEntry
from async_rl.rollout.attempt import run_agent_loop
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.session.api import Session
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.session.transcript import Transcript
from async_rl.runtime.serving_clock import ServingClock
from async_rl.runtime.supervision import first_error
from async_rl.types import Task
from tests.support.sessions import Bench

_noted: list[str] = []


class Holding:
    def __init__(self, name: str = "a", fails: bool = False) -> None:
        self.name, self.fails = name, fails

    async def __aenter__(self) -> Holding:
        self.task = asyncio.current_task()
        await asyncio.sleep(0)
        if self.fails:
            raise EnvironmentNotReady("the server does not come up")
        _noted.append(f"enter {self.name}")
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.sleep(0)
        assert asyncio.current_task() is self.task
        _noted.append(f"leave {self.name}")

    async def run(self, task: Any, session: Any) -> None: ...


class SlowToEnter:
    async def __aenter__(self) -> SlowToEnter:
        await asyncio.sleep(100)
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def run(self, task: Task, session: Session) -> None:
        _noted.append(f"{session.remaining_s:.0f} s remain")


class Plain:
    async def run(self, task: Any, session: Any) -> None: ...


@pytest.fixture(autouse=True)
def noted() -> list[str]:
    _noted.clear()
    return _noted


def loops(**args: Any) -> AgentLoops:
    config = {
        "agent_loop": f"{__name__}:Plain",
        "agent_loops": {"holding": {"loop": f"{__name__}:Holding", "args": args}},
    }
    return AgentLoops(msgspec.convert(config, RolloutConfig))


async def test_loop_is_entered_once_and_left_at_the_end_by_one_task(noted: list[str]) -> None:
    async with loops(name="b") as made:
        found = await asyncio.gather(*(made.entered_loop("holding") for _ in range(5)))
        assert len({id(loop) for loop in found}) == 1
        assert noted == ["enter b"]
        await made.entered_loop("holding")
    assert noted == ["enter b", "leave b"]


async def test_nothing_is_entered_when_no_trajectory_needs_it(noted: list[str]) -> None:
    async with loops() as made:
        assert isinstance(await made.entered_loop(None), Plain)
    assert noted == []


async def test_error_ends_the_block_when_a_loop_cannot_be_entered() -> None:
    with pytest.raises(BaseExceptionGroup) as raised:
        async with loops(fails=True) as made:
            await made.entered_loop("holding")
    assert isinstance(first_error(raised.value), EnvironmentNotReady)


async def test_loop_is_left_when_the_run_is_cancelled(noted: list[str]) -> None:
    running = asyncio.Event()

    async def run() -> None:
        async with loops() as made:
            await made.entered_loop("holding")
            running.set()
            await asyncio.Event().wait()

    task = asyncio.ensure_future(run())
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert noted == ["enter a", "leave a"]


@pytest.mark.real
@pytest.mark.parametrize("error", [AgentLoopError, ValueError])
async def test_a_session_is_freed_at_once_when_its_loop_has_failed(error: type[Exception]) -> None:
    class Failing:
        async def run(self, task: Task, session: Session) -> None:
            raise error("the loop failed")

    rollout = RolloutConfig(max_context_tokens=64, agent_loop=f"{__name__}:Failing")
    globals()["Failing"] = Failing
    context, task = replace(Bench().context, rollout=rollout), Task(task_id="t", messages=[])

    async def attempt(loops: AgentLoops) -> weakref.ref[RolloutSession]:
        entry = JournalEntry("0" * 32)
        session = RolloutSession(context, task, Transcript(context, entry), group_id="g")
        try:
            await run_agent_loop(task, session, loops, rollout)
        except AgentLoopError:
            return weakref.ref(session)
        raise AssertionError("the loop did not fail")

    gc.collect()
    gc.disable()  # a full collection is rare, and pauses the event loop
    try:
        async with AgentLoops(rollout) as loops:
            session = await attempt(loops)
            await asyncio.sleep(0)
            assert session() is None
    finally:
        gc.enable()
        del globals()["Failing"]


async def test_the_time_in_which_a_loop_is_entered_does_not_count_against_its_limit() -> None:
    rollout = RolloutConfig(
        max_context_tokens=64, trajectory_timeout_s=60.0, agent_loop=f"{__name__}:SlowToEnter"
    )
    clock = ServingClock(asyncio.get_running_loop().time)
    context = replace(Bench().context, rollout=rollout, serving_clock=clock)
    task = Task(task_id="t", messages=[])
    session = RolloutSession(context, task, Transcript(context, JournalEntry("0" * 32)), group_id="g")
    async with AgentLoops(rollout) as loops:
        with pytest.raises(AgentLoopError, match="without a turn"):
            await run_agent_loop(task, session, loops, rollout)
    assert _noted == ["60 s remain"]
