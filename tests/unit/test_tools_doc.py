"""What docs/guide/tools.md shows works as it is shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent_loops.parsing import PARSERS, ToolCall, load_parser
from agent_loops.sandbox import Limits
from agent_loops.tools import StatefulTool, Tool

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "tools.md").read_text()
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"properties": {"a": {"type": "integer"}, "text": {"type": "string"}}},
    },
}


def module(name: str) -> dict[str, Any]:
    """The names that the block with this definition makes."""
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if name in block)
    names: dict[str, Any] = {"__name__": "shown"}
    exec(compile(code, "tools.md", "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("parser", PARSERS)
def test_the_example_of_each_format_is_read_by_its_parser(parser: str):
    example = re.search(rf"\n`{parser}`[^\n]*:\n\n(`{{3,4}})text\n(.*?)\n\1\n", PAGE, re.DOTALL)
    assert example is not None
    assert load_parser(parser).parse(example[2], [SCHEMA]).calls == [
        ToolCall(name="add", arguments={"a": 1, "text": "x"})
    ]


async def test_the_tools_of_the_page_can_be_called():
    forecast = Tool(module("def forecast")["forecast"])
    assert '"unit":"C"' in await forecast.call({"city": "Oslo"}, timeout_s=60)
    notebook = StatefulTool(module("class Notebook")["Notebook"](max_notes=5))
    state = await notebook.create(None)
    assert await notebook.call({"text": "a"}, timeout_s=60, state=state) == "1 notes"
    await notebook.release(state)
    assert state == []


def test_the_parser_of_the_page_reads():
    parser = module("class BangParser")["BangParser"]()
    assert parser.parse("Well\n!now").calls == [ToolCall(name="now", arguments={})]


def test_the_table_of_limits_is_whole_and_right():
    rows = dict(re.findall(r"^\| `(\w+)` \| `?(\w+)`? \|", PAGE, re.MULTILINE))
    shown = {name: rows.get(name) for name in Limits.__struct_fields__}
    assert {name: value for name, value in shown.items() if value is None} == {}
    numbers = {name: float(value) for name, value in shown.items() if value and value.isdigit()}
    assert numbers == {name: getattr(Limits(), name) for name in numbers}
    assert len(numbers) >= 6


def test_the_config_of_the_page_is_a_list_of_known_kinds():
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    tools = yaml.safe_load(text)["rollout"]["agent_loop_args"]["tools"]
    assert [sorted(tool) if isinstance(tool, dict) else "path" for tool in tools] == [
        "path",
        ["args", "name", "tool"],
        ["args", "max_concurrent", "tool"],
        ["mcp", "only"],
        ["mcp"],
    ]
