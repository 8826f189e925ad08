import asyncio
import dataclasses
import enum
import functools
import threading
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest

from agent_loops.calculator import calculator
from agent_loops.tools import Tool, load_tool
from async_rl.errors import ConfigError, ToolError
from tests.support.scripted_session import make_task

HOURS = [6, 18]


class Place(msgspec.Struct):
    city: str
    country: str = "NO"


def forecast(
    place: Place, days: int = 1, *, unit: Literal["C", "F"] = "C", hours: list[int] = HOURS
) -> dict[str, Any]:
    """Forecast the weather
    of a place.

    Args:
        place: Where,
            and in which country.
        days (int): How far ahead.

    Returns:
        What it will be like.
    """
    return {"city": place.city, "days": days, "unit": unit, "hours": hours}


def test_schema_says_types_defaults_and_descriptions_when_the_function_is_documented():
    function = Tool(forecast).schema["function"]
    assert function["name"] == "forecast"
    assert function["description"] == "Forecast the weather of a place."
    parameters = function["parameters"]
    assert parameters["required"] == ["place"]
    assert parameters["properties"]["place"]["description"] == "Where, and in which country."
    assert parameters["properties"]["days"] == {
        "type": "integer",
        "default": 1,
        "description": "How far ahead.",
    }
    assert parameters["properties"]["unit"]["enum"] == ["C", "F"]
    assert parameters["$defs"]["Place"]["properties"]["city"] == {"type": "string"}


async def test_result_is_json_when_it_is_not_a_string():
    result = await Tool(forecast).call({"place": {"city": "Oslo"}, "days": 3}, timeout_s=5)
    assert msgspec.json.decode(result) == {"city": "Oslo", "days": 3, "unit": "C", "hours": [6, 18]}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "missing required field `place`"),
        ({"place": {"city": "Oslo"}, "days": "3"}, "Expected `int`, got `str`"),
        ({"place": {"city": "Oslo"}, "day": 3}, "unknown field `day`"),
        ({"place": {"city": "Oslo"}, "unit": "K"}, "Invalid enum value 'K'"),
    ],
)
async def test_tool_error_says_what_is_wrong_when_arguments_do_not_fit(arguments: dict[str, Any], error: str):
    with pytest.raises(ToolError, match=error):
        await Tool(forecast).call(arguments, timeout_s=5)


async def test_tool_error_quotes_the_exception_when_the_tool_raises():
    with pytest.raises(ToolError, match="calculator: ZeroDivisionError"):
        await Tool(calculator).call({"expression": "1 / 0"}, timeout_s=5)


async def result_of(outcome: Any) -> str:
    """Call a tool that returns this value, or raises it."""

    def odd() -> object:
        """Return something odd."""
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return await Tool(odd).call({}, timeout_s=5)


@pytest.mark.parametrize(
    ("result", "text"),
    [(float("inf"), "Infinity"), ({"mean": float("nan")}, '{"mean":NaN}'), ("a\ud800", "a?")],
    ids=["infinity", "nan", "half of a surrogate pair"],
)
async def test_numbers_that_json_lacks_are_read_by_name_and_a_result_is_text(result: Any, text: str):
    assert await result_of(result) == text


DEEP = functools.reduce(lambda inner, _: [inner], range(9999), 0)


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (object(), "the result is not JSON"),
        ({"a": b"x"}, "the result is not JSON"),
        (DEEP, "the result is not JSON"),
        (SystemExit(3), "RuntimeError: SystemExit: 3"),
    ],
    ids=["object", "bytes", "deep", "exit"],
)
async def test_tool_error_says_what_is_wrong_when_a_call_has_no_result(outcome: object, error: str):
    with pytest.raises(ToolError, match=f"odd: {error}"):
        await result_of(outcome)


@pytest.mark.real_time
async def test_event_loop_goes_on_when_a_sync_tool_hangs():
    release, returned = threading.Event(), threading.Event()

    def hang() -> str:
        """Wait until released."""
        release.wait(60)
        returned.set()
        return "late"

    with pytest.raises(ToolError, match=r"hang: no result within 0\.05 s"):
        await Tool(hang).call({}, timeout_s=0.05)
    release.set()  # its late result goes nowhere, without a warning
    assert await asyncio.to_thread(returned.wait, 10)


async def test_timeout_of_the_tools_own_is_not_taken_for_ours():
    async def fetch() -> str:
        """Fetch something."""
        raise TimeoutError("the server is slow")

    with pytest.raises(ToolError, match="fetch: TimeoutError: the server is slow"):
        await Tool(fetch).call({}, timeout_s=5)


def untyped(a, b: int):  # type: ignore[no-untyped-def]
    """Add."""


def variadic(*numbers: int):  # type: ignore[no-untyped-def]
    """Add."""


def silent(a: int) -> int:
    return a


def strange(lock: threading.Event) -> str:
    """Take a lock."""
    return ""


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (untyped, "'untyped': parameter 'a' must be"),
        (variadic, r"parameter '\*numbers: int'"),
        (silent, "'silent' has no docstring"),
        (strange, "'strange'"),
    ],
)
def test_config_error_when_a_function_cannot_be_described(function: Any, error: str):
    with pytest.raises(ConfigError, match=error):
        Tool(function)


def test_load_tool_refuses_when_the_path_names_no_function():
    assert load_tool("agent_loops.calculator:calculator").name == "calculator"
    with pytest.raises(ConfigError, match="expected a function, a class with `execute`, or a Tool"):
        load_tool("agent_loops.calculator:_MAX_BITS")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Options(TypedDict, total=False):
    deep: bool


def paint(
    colour: Colour,
    points: list[Point],
    options: Options | None = None,
    times: Annotated[int, "How often."] = 1,
    width: Annotated[float, msgspec.Meta(gt=0, description="In metres.")] = 1.5,
    *,
    ratio: float | None = None,
) -> str:
    """Paint."""
    return f"{colour!r} {points} {options} {times} {ratio}"


async def test_types_of_all_kinds_are_described_and_converted_when_a_tool_has_them():
    tool = Tool(paint)
    parameters = tool.schema["function"]["parameters"]
    shown, definitions = parameters["properties"], parameters["$defs"]
    assert parameters["required"] == ["colour", "points"]
    assert definitions["Colour"]["enum"] == ["blue", "red"]
    assert definitions["Point"]["properties"] == {
        "x": {"type": "integer"},
        "y": {"type": "integer", "default": 0},
    }
    assert definitions["Options"]["properties"] == {"deep": {"type": "boolean"}}
    assert shown["options"]["anyOf"] == [{"$ref": "#/$defs/Options"}, {"type": "null"}]
    assert shown["times"] == {"type": "integer", "description": "How often.", "default": 1}
    assert shown["width"]["description"] == "In metres."
    assert {"type": "null"} in shown["ratio"]["anyOf"]
    arguments = {"colour": "red", "points": [{"x": 1}], "options": {"deep": True}}
    assert await tool.call(arguments, timeout_s=5) == (
        "<Colour.RED: 'red'> [Point(x=1, y=0)] {'deep': True} 1 None"
    )
    with pytest.raises(ToolError, match=r"Expected `int`, got `str` - at `\$.points\[.*\].x`"):
        await tool.call({"colour": "red", "points": [{"x": "1"}]}, timeout_s=5)


class Notebook:
    """One a run; its states are lists."""

    def __init__(self, first: str = "start") -> None:
        self.first = first

    def create(self, task: Any) -> list[str]:
        return [f"{self.first} {task.task_id}"]

    async def execute(self, state: list[str], text: str) -> str:
        """Write a note down.

        Args:
            text: What.
        """
        state.append(text)
        return ", ".join(state)

    def release(self, state: list[str]) -> None:
        state.append("released")


async def test_class_is_a_tool_with_a_state_when_it_has_create_and_execute():
    tool = load_tool(f"{__name__}:Notebook", {"first": "page"})
    assert (tool.name, tool.keeps_state) == ("notebook", True)
    assert tool.schema["function"]["parameters"]["required"] == ["text"]
    assert tool.schema["function"]["description"] == "Write a note down."
    state = await tool.create(make_task())
    assert await tool.call({"text": "x"}, timeout_s=5, state=state) == "page t, x"
    await tool.release(state)
    assert state[-1] == "released"
    assert load_tool(f"{__name__}:Notebook", name="note").schema["function"]["name"] == "note"


class Stateless:
    name = "twice"

    def execute(self, number: int) -> int:
        """Double a number."""
        return 2 * number


async def test_class_is_a_tool_without_a_state_when_it_has_no_create():
    tool = load_tool(f"{__name__}:Stateless")
    assert (tool.name, tool.keeps_state) == ("twice", False)
    assert await tool.call({"number": 2}, timeout_s=5) == "4"


class Forgetful(Stateless):
    def release(self, state: Any) -> None: ...


@pytest.mark.parametrize(
    ("path", "args", "error"),
    [
        ("Notebook", {"frist": 1}, r"cannot be made with args = \{'frist': 1\}"),
        ("paint", {"a": 1}, "not a class with `execute`, so it takes no args"),
        ("Forgetful", {}, "has `release` but no `create`"),
    ],
)
def test_config_error_says_why_when_a_class_cannot_be_a_tool(path: str, args: dict[str, Any], error: str):
    with pytest.raises(ConfigError, match=error):
        load_tool(f"{__name__}:{path}", args)
