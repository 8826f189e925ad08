import asyncio
from typing import Any

import pytest

from agent_loops.single_turn import SingleTurnLoop
from agent_loops.tool_loop import ToolLoop
from async_rl.errors import ConfigError
from async_rl.types import StopReason
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


async def test_policy_reads_the_error_when_a_tool_runs_past_the_sessions_limit():
    session = ScriptedSession(call("hang"), "never mind", tool_timeout_s=0.02)
    assert await run(make_loop("hang"), session) == "completed"
    assert session.tool_results == ["Error: hang: no result within 0.02 s"]
    assert session.tool_calls == ["error"]


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
    assert await run(make_loop(), session) == "length"
    assert session.turns_left == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"tools": []}, "expected a list of dotted paths"),
        ({"tools": f"{HERE}:echo"}, "expected a list of dotted paths"),
        ({"tools": [f"{HERE}:echo"] * 2}, "the same name"),
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
