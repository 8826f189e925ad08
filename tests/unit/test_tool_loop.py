import asyncio
import threading
from typing import Any

import pytest

from agent_loops import tools
from agent_loops.single_turn import SingleTurnLoop
from agent_loops.tool_loop import ToolLoop
from async_rl.errors import ConfigError, PromptTooLong, SandboxLost, ToolBroken
from async_rl.observability.failures import kind_of_error
from async_rl.runtime.supervision import first_error
from async_rl.runtime.waits import Waits, acting
from async_rl.types import StopReason, Task
from tests.support.scripted_session import ScriptedSession

HERE = __name__
_meeting: list[asyncio.Event] = []


async def meet(number: int) -> str:
    """Return when all have come.

    Args:
        number: Which of them.
    """
    _meeting[number].set()
    for event in _meeting:
        await event.wait()
    return f"met {number}"


async def hang() -> str:
    """Never return."""
    await asyncio.Event().wait()
    return ""


def echo(text: str, times: int = 1) -> str:
    """Say it again.

    Args:
        text: What.
        times: How often.
    """
    return text * times


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def make_loop(*tools: str, **arguments: Any) -> ToolLoop:
    return ToolLoop([f"{HERE}:{tool}" for tool in tools or ("echo",)], **arguments)


async def run(loop: ToolLoop, session: ScriptedSession) -> StopReason | None:
    return await loop.run(session.task, session)


async def test_policy_reads_the_result_when_it_calls_a_tool():
    session = ScriptedSession("Wait. " + call("echo", '{"text": "4"}'), "4")
    assert await run(make_loop(), session) == "completed"
    assert [message["role"] for message in session.messages] == ["user", "assistant", "tool", "assistant"]
    assert session.messages[2] == {"role": "tool", "name": "echo", "content": "4"}
    assert session.tool_calls == ["ok"]
    assert [tool["function"]["name"] for tool in session.tools] == ["echo"]


async def test_calls_run_side_by_side_and_answer_in_order_when_a_turn_has_several(monkeypatch):
    monkeypatch.setattr("tests.unit.test_tool_loop._meeting", [asyncio.Event(), asyncio.Event()])
    session = ScriptedSession(call("meet", '{"number": 1}') + call("meet", '{"number": 0}'), "done")
    await run(make_loop("meet"), session)
    assert session.tool_results == ["met 1", "met 0"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>\nnonsense\n</tool_call>", "Error: the tool call cannot be read: not valid JSON"),
        (call("ecco"), "Error: there is no tool 'ecco'; there are echo"),
        (call("echo", '{"text": 4}'), "Error: echo: wrong arguments: Expected `str`, got `int`"),
    ],
)
async def test_policy_reads_the_error_when_a_call_cannot_be_answered(text: str, error: str):
    session = ScriptedSession(text + call("echo", '{"text": "fine"}'), "done")
    assert await run(make_loop(), session) == "completed"
    assert session.tool_results[0].startswith(error)
    assert session.tool_results[1] == "fine"
    assert sorted(session.tool_calls) == ["error", "ok"]


async def test_result_is_cut_when_it_is_too_long():
    session = ScriptedSession(call("echo", '{"text": "ab", "times": 50}'), "done")
    await run(make_loop(max_result_chars=10), session)
    assert session.tool_results == ["ababababab\n[90 more characters were cut]"]


async def test_loop_ends_without_running_tools_when_no_turn_is_left():
    session = ScriptedSession(call("echo", '{"text": "4"}'), call("echo", '{"text": "5"}'), "unsaid")
    assert await run(make_loop(max_turns=2), session) == "max_turns"
    assert session.tool_results == ["4"]
    assert session.turns_left == 1


async def test_loop_ends_when_a_turn_ran_out_of_budget():
    session = ScriptedSession((call("echo", '{"text": "4"}'), "length"), "unsaid")
    assert await run(make_loop(), session) == "length"
    assert session.tool_calls == []


async def test_loop_ends_when_tool_results_fill_the_context():
    session = ScriptedSession(call("echo", '{"text": "4"}'), "unsaid")
    session.tokens_per_message = 1000
    with pytest.raises(PromptTooLong):  # with which an attempt ends for its length
        await run(make_loop(), session)
    assert session.turns_left == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"tools": []}, "expected a list of dotted paths"),
        ({"tools": [{"tol": "a:b"}]}, r"tools\[0\]: Object contains unknown field `tol`"),
        ({"tools": [{"mcp": {}}]}, "either a `command` or a `url`"),
        ({"tools": [f"{HERE}:echo"], "max_calls": 0}, "max_calls is 0"),
        ({"tools": f"{HERE}:echo"}, "expected a list of dotted paths"),
        ({"tools": [f"{HERE}:echo"] * 2}, "two tools are called 'echo'"),
        ({"tools": [f"{HERE}:ecco"]}, "did you mean 'echo'"),
        ({"tools": [f"{HERE}:echo"], "max_turns": 0}, "max_turns is 0"),
    ],
)
def test_config_error_when_the_loops_arguments_cannot_work(arguments: dict[str, Any], error: str):
    with pytest.raises(ConfigError, match=error):
        ToolLoop(**arguments)


async def test_single_turn_asks_once_and_passes_its_stop_strings():
    session = ScriptedSession("4", "unsaid")
    assert await SingleTurnLoop(stop=["\n\n"]).run(session.task, session) is None
    assert session.messages == [*session.task.messages, {"role": "assistant", "content": "4"}]
    assert session.stops == [("\n\n",)]


async def test_calls_beyond_the_limit_are_refused_when_a_turn_has_too_many():
    session = ScriptedSession(call("echo", '{"text": "a"}') * 3, "done")
    await run(make_loop(max_calls=2), session)
    assert session.tool_results == ["a", "a", "Error: not called: at most 2 calls a turn are allowed"]
    assert session.tool_calls == ["ok", "ok", "error"]
    assert session.tools_called == ["echo", "echo", "unknown"]


async def test_metrics_never_take_the_policys_words_for_a_tools_name():
    session = ScriptedSession(call("made up") + "<tool_call>?</tool_call>" + call("echo"), "done")
    await run(make_loop(), session)
    assert sorted(session.tools_called) == ["echo", "unknown", "unknown"]


async def test_format_is_that_of_the_chat_template_when_the_config_names_none():
    session = ScriptedSession("<function=echo>\n<parameter=text>\n4\n</parameter>\n</function>", "done")
    session.chat_template = "<tool_call>\n<function=example>\n<parameter=a>"
    await run(make_loop(), session)
    assert session.tool_results == ["4"]


def test_check_says_tools_and_format():
    assert make_loop("echo", "hang").check("<tool_call>") == [
        "tools: echo, hang",
        "tool-call parser: hermes, recognised from the chat template",
    ]
    assert make_loop(parser="glm45").check("")[1] == "tool-call parser: glm45"
    with pytest.raises(ConfigError, match="leaves tools out"):
        make_loop().check("{{ messages }}")


class Counter:
    """Counts per trajectory; what happens is noted by the test."""

    def create(self, task: Task) -> dict[str, int]:
        _noted.append("create")
        return {"count": 0}

    async def execute(self, state: dict[str, int], by: int = 1, hang: bool = False) -> int:
        """Add to the count."""
        before = state["count"]
        await asyncio.sleep(0)
        if hang:
            _hanging.set()
            await asyncio.Event().wait()
        state["count"] = before + by
        return state["count"]

    async def release(self, state: dict[str, int]) -> None:
        await asyncio.sleep(0)
        _noted.append(f"release {state['count']}")


_noted: list[str] = []
_hanging = asyncio.Event()


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    fresh: list[str] = []
    monkeypatch.setattr(f"{HERE}._noted", fresh)
    monkeypatch.setattr(f"{HERE}._hanging", asyncio.Event())
    monkeypatch.setattr(f"{HERE}._let_go", threading.Event())
    monkeypatch.setattr(f"{HERE}._creating", threading.Event())
    return fresh


async def test_state_lasts_for_the_trajectory_and_no_longer(noted: list[str]):
    loop = make_loop("Counter")
    for _ in range(2):
        session = ScriptedSession(call("counter") * 3, call("counter", '{"by": 10}'), "done")
        await run(loop, session)
        assert session.tool_results == ["1", "2", "3", "13"]
    assert noted == ["create", "release 13"] * 2


async def test_no_state_is_made_when_the_tool_is_not_called(noted: list[str]):
    await run(make_loop("Counter", "echo"), ScriptedSession(call("echo", '{"text": "a"}'), "done"))
    assert noted == []


async def test_state_is_released_when_the_trajectory_is_cancelled_again_and_again(noted: list[str]):
    session = ScriptedSession(call("counter") + call("counter", '{"hang": true}'), tool_timeout_s=600)
    trajectory = asyncio.ensure_future(run(make_loop("Counter"), session))
    await _hanging.wait()
    for _ in range(6):
        trajectory.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await trajectory
    assert noted == ["create", "release 1"]


async def test_state_is_released_when_a_call_ran_past_its_time(noted: list[str]):
    session = ScriptedSession(call("counter", '{"hang": true}'), call("counter"), "done", tool_timeout_s=0.05)
    await run(make_loop("Counter"), session)
    assert session.tool_results == ["Error: counter: no result within 0.05 s", "1"]
    assert noted == ["create", "release 1"]


class Slow(Counter):
    name = "slow"

    def create(self, task: Task) -> dict[str, int]:
        _creating.set()
        assert _let_go.wait(30)
        return super().create(task)

    async def release(self, state: dict[str, int]) -> None:
        await super().release(state)
        _hanging.set()


_let_go = threading.Event()
_creating = threading.Event()


@pytest.mark.real_time
@pytest.mark.parametrize("patience_s", [10.0, 0.05])
@pytest.mark.parametrize("ended_by", ["cancellation", "time limit"])
async def test_state_is_released_when_it_is_made_after_the_end_of_the_trajectory(
    noted: list[str], monkeypatch: pytest.MonkeyPatch, patience_s: float, ended_by: str
):
    monkeypatch.setattr(tools, "_RELEASE_S", patience_s)
    limit_s = 600.0 if ended_by == "cancellation" else 0.05
    session = ScriptedSession(call("slow"), "done", tool_timeout_s=limit_s)
    trajectory = asyncio.ensure_future(run(make_loop("Slow"), session))
    assert await asyncio.to_thread(_creating.wait, 30)
    if ended_by == "cancellation":
        trajectory.cancel()
    await asyncio.wait([trajectory], timeout=30 if patience_s < 1 else 0.3)
    assert trajectory.done() == (patience_s < 1), "it waits for the release while it can"
    _let_go.set()
    if ended_by == "cancellation":
        with pytest.raises(asyncio.CancelledError):
            await trajectory
    else:
        with pytest.raises(ExceptionGroup) as raised:
            await trajectory
        assert isinstance(first_error(raised.value), ToolBroken)
    async with asyncio.timeout(60):
        await _hanging.wait()
    assert noted == ["create", "release 0"]


class Swift(Counter):
    name = "swift"

    async def create(self, task: Task) -> dict[str, int]:
        await _hanging.wait()
        return super().create(task)


async def test_state_is_released_when_the_trajectory_is_cancelled_as_it_is_made(noted: list[str]):
    trajectory = asyncio.ensure_future(run(make_loop("Swift"), ScriptedSession(call("swift"))))
    await asyncio.sleep(0.05)
    _hanging.set()
    await asyncio.sleep(0)
    assert noted == ["create"]
    trajectory.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trajectory
    assert noted == ["create", "release 0"]


class Broken(Counter):
    name = "broken"

    def create(self, task: Task) -> dict[str, int]:
        raise OSError("no disk")


class Stuck(Counter):
    name = "stuck"

    async def release(self, state: dict[str, int]) -> None:
        raise OSError("cannot let go")


async def test_attempt_fails_when_a_state_cannot_be_made(noted: list[str]):
    session = ScriptedSession(call("counter") + call("broken"), "done")
    with pytest.raises(ExceptionGroup) as raised:
        await run(make_loop("Counter", "Broken"), session)
    cause = first_error(raised.value)
    assert isinstance(cause, ToolBroken)
    assert str(cause) == "broken: cannot be set up: no disk"
    assert noted[-1] == "release 1"
    assert session.tool_results == []


async def fails(how: str) -> str:
    """Fail.

    Args:
        how: In which way.
    """
    raise {
        "call": ValueError("no such city"),
        "bug": AttributeError("'NoneType' object has no attribute 'city'"),
        "broken": ToolBroken("the index is gone"),
        "sandbox": SandboxLost("no container left"),
    }[how]


@pytest.mark.parametrize(
    ("how", "told", "fault"),
    [
        ("call", "Error: fails: ValueError: no such city", ""),
        (
            "bug",
            "Error: fails: AttributeError: 'NoneType' object has no attribute 'city'",
            "fails: AttributeError: 'NoneType' object has no attribute 'city'",
        ),
    ],
)
async def test_policy_reads_what_a_tool_raised_and_its_faults_are_recorded(how: str, told: str, fault: str):
    session = ScriptedSession(call("fails", f'{{"how": "{how}"}}'), "done")
    await run(make_loop("fails"), session)
    assert session.tool_results == [told]
    assert session.tool_faults == [fault]


@pytest.mark.parametrize("how", ["broken", "sandbox"])
async def test_attempt_fails_when_a_tool_says_that_it_does_not_work(how: str):
    session = ScriptedSession(call("fails", f'{{"how": "{how}"}}'), "done")
    with pytest.raises(ExceptionGroup) as raised:
        await run(make_loop("fails"), session)
    cause = first_error(raised.value)
    assert kind_of_error(cause) == {"broken": "tool_broken", "sandbox": "sandbox_lost"}[how]
    assert session.tool_calls == ["error"]


async def test_other_states_are_released_when_one_cannot_be(
    noted: list[str], caplog: pytest.LogCaptureFixture
):
    session = ScriptedSession(call("counter") + call("stuck"), "done")
    await run(make_loop("Counter", "Stuck"), session)
    assert noted == ["create", "create", "release 1"]
    assert "tool stuck: release failed: OSError: cannot let go" in caplog.text


async def busy() -> str:
    """Be busy until the test lets go."""
    _noted.append("begin")
    await _hanging.wait()
    return "free"


async def test_calls_wait_by_name_when_a_tool_has_all_it_may_have(noted: list[str]):
    loop = ToolLoop([{"tool": f"{HERE}:busy", "max_concurrent": 2}])
    sessions = [ScriptedSession(call("busy"), "done", tool_timeout_s=600) for _ in range(5)]
    waits = Waits()
    with acting("run", waits=waits):
        trajectories = [asyncio.ensure_future(run(loop, session)) for session in sessions]
        for _ in range(20):
            await asyncio.sleep(0)
    assert noted == ["begin"] * 2
    why = sorted(str(wait.why) for wait in waits.open_waits())
    assert why == ["None"] * 2 + ["all 2 concurrent calls are running"] * 3
    assert {(wait.on, wait.target) for wait in waits.open_waits()} == {("tool", "busy")}
    _hanging.set()
    await asyncio.gather(*trajectories)
    assert [session.tool_results for session in sessions] == [["free"]] * 5


async def test_time_of_a_call_is_the_tools_own_when_the_config_says_so():
    session = ScriptedSession(call("hang"), "done", tool_timeout_s=600)
    await run(ToolLoop([{"tool": f"{HERE}:hang", "timeout_s": 0.02, "name": "hang"}]), session)
    assert session.tool_results == ["Error: hang: no result within 0.02 s"]
