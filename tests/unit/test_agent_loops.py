"""Agent loops that hold something for as long as the run."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from async_rl.config import RolloutConfig, RoutingConfig, WeightsConfig
from async_rl.errors import AgentLoopError, EnvironmentNotReady
from async_rl.rollout.attempt import run_agent_loop
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.session.transcript import Transcript
from async_rl.runtime.serving_clock import ServingClock
from async_rl.runtime.supervision import first_error
from async_rl.store.journal import JournalEntry
from tests.support.scripted_session import make_task
from tests.support.sessions import Bench
from tests.support.talk import lines, talking

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
        assert isinstance(await made.entered_loop(None), Plain)
        assert noted == []  # nothing is entered until it is needed
        found = await asyncio.gather(*(made.entered_loop("holding") for _ in range(5)))
        assert len({id(loop) for loop in found}) == 1
        assert noted == ["enter b"]
        await made.entered_loop("holding")
    assert noted == ["enter b", "leave b"]


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


class SlowToEnter(Plain):
    async def __aenter__(self) -> SlowToEnter:
        await asyncio.sleep(100)
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def run(self, task: Any, session: Any) -> None:
        _noted.append(f"{session.remaining_s:.0f} s remain")


async def test_the_time_in_which_a_loop_is_entered_does_not_count_against_its_limit(noted: list[str]) -> None:
    config = RolloutConfig(
        agent_loop=f"{__name__}:SlowToEnter", max_context_tokens=64, trajectory_timeout_s=60.0
    )
    clock = ServingClock(asyncio.get_running_loop().time)
    changed: Any = SimpleNamespace(rollout=config, routing=RoutingConfig(), weights=WeightsConfig())
    context = replace(Bench().context, config=changed, serving_clock=clock)
    task, writer = make_task(), Transcript(context, JournalEntry("0" * 32))
    session = RolloutSession(context, task, writer, group_id="g")
    async with AgentLoops(config) as made:
        with pytest.raises(AgentLoopError, match="without a turn"):
            await run_agent_loop(task, session, made, config)
    assert noted == ["60 s remain"]


class Raising(Plain):
    async def run(self, task: Any, session: Any) -> None:
        raise ValueError("the loop failed")


async def test_a_session_is_freed_at_once_when_its_loop_has_failed() -> None:
    """A full collection is rare, and pauses the event loop."""
    config = msgspec.convert({"agent_loop": f"{__name__}:Raising"}, RolloutConfig)

    async def attempt(made: AgentLoops) -> weakref.ref[Any]:
        session = Bench().session
        with pytest.raises(AgentLoopError):
            await run_agent_loop(make_task(), session, made, config)
        return weakref.ref(session)

    gc.collect()
    gc.disable()
    try:
        async with AgentLoops(config) as made:
            session = await attempt(made)
            await asyncio.sleep(0)
            assert session() is None
    finally:
        gc.enable()


class Slow:
    async def run(self, task: Any, session: Any) -> None:
        session.status = "waits for the database"
        await asyncio.Event().wait()


async def test_the_error_of_the_time_limit_shows_the_status() -> None:
    tree = {"agent_loop": f"{__name__}:Slow", "trajectory_timeout_s": 5.0}
    config = msgspec.convert(tree, RolloutConfig)
    async with AgentLoops(config) as made:
        with pytest.raises(AgentLoopError, match=r"trajectory_timeout_s = 5.0: .*: waits for the database$"):
            await run_agent_loop(make_task(), Bench().session, made, config)


class Failing:
    async def run(self, task: Any, session: Any) -> str:
        session.start(task.messages)
        await session.generate()
        async with session.branch() as other:
            await other.generate()
        return "failed"


async def test_the_whole_attempt_failed_when_its_loop_says_so() -> None:
    config = msgspec.convert({"agent_loop": f"{__name__}:Failing", "max_branches": 1}, RolloutConfig)
    bench, _ = talking(lines("4", "5"), max_branches=1)
    async with AgentLoops(config) as made:
        await run_agent_loop(make_task(), bench.session, made, config)
    assert [each.completion.stop_reason for each in bench.session.tree] == ["failed", "failed"]
