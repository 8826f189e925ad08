"""What a request may force the policy to write, as a grammar for the engine's constrained decoding.

```
 response_format        ─► JSON of this schema         ┐ or, where both are possible    ┌ alone
 tool_choice: required  ─► one or more calls of tools  ┘                              ─►└ or after a thought
```

The form is xgrammar's structural tag.
Source: xgrammar's documentation, "Structural Tag"; SGLang passes it on as `sampling_params.structural_tag`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from async_rl.openai_api.answers import ToolCallReader

ANY_TOOL: Final = ""

_THOUGHT: Final = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>\n\n"}
_REST_OF_THOUGHT: Final = {**_THOUGHT, "begin": ""}


class Forced(msgspec.Struct, frozen=True):
    """What a request forces."""

    schema: dict[str, Any] | None = None
    """The JSON schema of the content."""
    tool: str | None = None
    """The tool that must be called, or `ANY_TOOL`."""
    one_call: bool = False
    """Whether there may be one call only."""


def forced_text(
    forced: Forced,
    tools: Sequence[dict[str, Any]],
    reader: ToolCallReader | None,
    *,
    opens_thought: bool,
) -> str:
    """Return the constraint of a turn, JSON.

    Args:
        forced: What the request forces.
        tools: The tools that the policy may call.
        reader: Writes and reads the format of calls; None if it is not known.
        opens_thought: Whether the prompt ends inside a thought.

    Raises:
        ValueError: It cannot be expressed; the message says why.
    """
    named = [each["function"] for each in tools if forced.tool in (None, ANY_TOOL, each["function"]["name"])]
    if forced.tool is not None and not named:
        raise ValueError(f"there is no tool {forced.tool!r}" if forced.tool else "there are no tools")
    tags = []
    for function in named:
        around = None if reader is None else reader.around_arguments(function["name"])
        if around is None:
            raise ValueError("this model's format of tool calls cannot be forced")
        schema = function.get("parameters") or {"type": "object"}
        tags.append({"type": "tag", "begin": around[0], "content": _json(schema), "end": around[1]})
    calls = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": forced.one_call,
    }
    choices = [] if forced.schema is None or forced.tool is not None else [_json(forced.schema)]
    answer = _either([*choices, *([calls] if tags else [])])
    if opens_thought:
        turn = _sequence(_REST_OF_THOUGHT, answer)
    else:
        turn = _either([answer, _sequence(_THOUGHT, answer)])
    return msgspec.json.encode({"type": "structural_tag", "format": turn}).decode()


def _json(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


def _either(elements: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
