"""Reading tool calls out of what the policy wrote, in the format of Hermes and Qwen.

```
<tool_call>
{"name": "calculator", "arguments": {"expression": "37 * 45"}}
</tool_call>
```
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import msgspec

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_END_OF_THOUGHT = "</think>"
_TAG = re.compile(f"{_OPEN}|{_CLOSE}")
_SPACE = re.compile(r"\s*")


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call as the policy wrote it; the arguments are not yet checked against the tool."""

    name: str
    arguments: dict[str, Any]


class MalformedCall(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was meant as a call and cannot be read."""

    error: str
    """What is wrong with it, told to the policy."""


def parse_tool_calls(text: str) -> list[ToolCall | MalformedCall]:
    """All tool calls of one assistant turn, in order; calls that are only thought about do not count.

    The JSON itself decides where a call ends, so a closing tag within one of its strings does no harm.
    """
    text = text.rpartition(_END_OF_THOUGHT)[2]
    calls: list[ToolCall | MalformedCall] = []
    position = text.find(_OPEN)
    while position >= 0:
        call, end = _parse_one(text, position + len(_OPEN))
        calls.append(call)
        position = text.find(_OPEN, end)
    return calls


def _parse_one(text: str, start: int) -> tuple[ToolCall | MalformedCall, int]:
    """The call whose opening tag ends at `start`, and the index behind it."""
    try:
        value, end = _DECODER.raw_decode(text, _skip_space(text, start))
    except (ValueError, RecursionError) as error:
        tag = _TAG.search(text, start)
        closed = tag is not None and tag.group() == _CLOSE
        end = len(text) if tag is None else tag.end() if closed else tag.start()
        reason = "it is not closed by " + _CLOSE if not closed else str(error) or "it is nested too deeply"
        return MalformedCall(error=f"the tool call is not valid JSON: {reason}"), end
    end = _skip_space(text, end)
    if not text.startswith(_CLOSE, end):
        return MalformedCall(error=f"the tool call's JSON is not followed by {_CLOSE}"), end
    return _as_call(value), end + len(_CLOSE)


def _as_call(value: Any) -> ToolCall | MalformedCall:
    if not isinstance(value, dict):
        return MalformedCall(error='a tool call is an object with "name" and "arguments"')
    name, arguments = value.get("name"), value.get("arguments", {})
    if not (isinstance(name, str) and name):
        return MalformedCall(error='the tool call has no "name"')
    if isinstance(arguments, str):  # some models encode them twice, as OpenAI's API does
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return MalformedCall(error=f'the tool call\'s "arguments" are not valid JSON: {error}')
    if not isinstance(arguments, dict):
        return MalformedCall(error='the tool call\'s "arguments" are not an object')
    return ToolCall(name=name, arguments=arguments)


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None  # it matches the empty string
    return match.end()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
