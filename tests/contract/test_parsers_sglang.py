"""Our parsers of tool calls beside SGLang's, on the same texts; SGLang's run in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from agent_loops.parsing import ToolCall, load_parser
from tests.support.tool_formats import RENDERERS

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "number": {"type": "integer"},
                    "flag": {"type": "boolean"},
                    "list": {"type": "array", "items": {}},
                    "nested": {"type": "object"},
                },
            },
        },
    }
    for name in ("search", "add_all")
]
CALLS: list[list[tuple[str, dict[str, Any]]]] = [
    [("search", {"text": "Überraschung 北京 🎉"})],
    [
        ("search", {"text": 'a "quoted" word, a \\ and\na new line'}),
        ("add_all", {"number": -3, "flag": True}),
    ],
    [("add_all", {"list": [1, "two", None], "nested": {"a": {"b": [1.5]}}})],
    [("search", {"text": "if a < b: print({})"})],
]
SERVERS_SIDE = """
import json, sys
import async_rl.engines.sglang.cpu_launcher  # lets SGLang be imported here
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
asked = json.load(sys.stdin)
tools = [Tool(**tool) for tool in asked["tools"]]
found = []
for parser, text in asked["texts"]:
    _, calls = FunctionCallParser(tools, parser).parse_non_stream(text)
    found.append([[call.name, json.loads(call.parameters)] for call in calls])
print("FOUND" + json.dumps(found))
"""
SERVERS_NAMES = {"deepseekv31": "deepseekv31", "llama3_tagged": "llama3"}
"""Where a format is one of two that a parser of ours reads."""


@pytest.mark.long
@pytest.mark.sglang
def test_our_parsers_read_what_sglangs_read():
    cases = [(written, calls) for written in RENDERERS for calls in CALLS]
    texts = [(SERVERS_NAMES.get(written, written), RENDERERS[written][1](calls)) for written, calls in cases]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SERVERS_SIDE],
        input=json.dumps({"tools": TOOLS, "texts": texts}),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert "FOUND" in ran.stdout, ran.stderr[-2000:]
    theirs = json.loads(ran.stdout.rpartition("FOUND")[2])
    differing = []
    for (written, _), (_, text), their in zip(cases, texts, theirs, strict=True):
        parsed = load_parser(RENDERERS[written][0]).parse(text, TOOLS).calls
        ours = [[call.name, call.arguments] if isinstance(call, ToolCall) else call.error for call in parsed]
        if ours != their:
            differing.append((written, text, ours, their))
    assert differing == []
