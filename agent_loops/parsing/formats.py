"""Tool-call formats of well-known models, with examples in docs/guide/tools.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from agent_loops.parsing.calls import Call, MalformedCall, ToolCall, ToolParser, after_thought
from agent_loops.parsing.scan import (
    Scanner,
    TaggedParser,
    Unreadable,
    add_argument,
    as_call,
    make_call,
    typed,
)


class HermesParser(TaggedParser):
    """Hermes, Qwen2.5 and Qwen3: one JSON object between tags."""

    opening = ("<tool_call>",)
    tags: ClassVar[Mapping[str, str]] = {"<tool_call>": "</tool_call>"}

    def read_one(self, scan: Scanner, opened: str, tools: Sequence[dict[str, Any]]) -> ToolCall:
        """Implements `TaggedParser.read_one`."""
        value = scan.read_json()
        scan.require("</tool_call>", "its JSON")
        return as_call(value)

    def around_arguments(self, name: str) -> tuple[str, str]:
        """Implements `ToolParser.around_arguments`."""
        return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": ', "}\n</tool_call>"


class Qwen3CoderParser(TaggedParser):
    """Qwen3-Coder: tags for the function and each parameter; the outer tag is often left out."""

    opening = ("<tool_call>", "<function=")
    tags: ClassVar[Mapping[str, str]] = {"<tool_call>": "</tool_call>", "<function=": "</function>"}

    def read_one(self, scan: Scanner, opened: str, tools: Sequence[dict[str, Any]]) -> ToolCall:
        """Implements `TaggedParser.read_one`."""
        if opened == "<tool_call>":
            scan.require("<function=", "<tool_call>")
        name = scan.read_until(">", "<function=", without=("<parameter=",)).strip()
        arguments: dict[str, Any] = {}
        while scan.skip("<parameter="):
            key = scan.read_until(">", "<parameter=", without=("<parameter=",)).strip()
            # The value is on its own lines; the line breaks around it do not belong to it.
            value = (
                scan.read_until("</parameter>", f"the parameter {key!r}", without=("<parameter=",))
                .removeprefix("\n")
                .removesuffix("\n")
            )
            add_argument(arguments, key, typed(value, name, key, tools))
        scan.require("</function>", f"the function {name!r}")
        if opened == "<tool_call>":
            scan.require("</tool_call>", "</function>")
        return make_call(name, arguments)


class Glm45Parser(TaggedParser):
    """GLM-4.5 and later: the name, then tags for each key and value."""

    opening = ("<tool_call>",)
    tags: ClassVar[Mapping[str, str]] = {"<tool_call>": "</tool_call>"}

    def read_one(self, scan: Scanner, opened: str, tools: Sequence[dict[str, Any]]) -> ToolCall:
        """Implements `TaggedParser.read_one`."""
        name = re.compile(r"[^<]*").match(scan.text, scan.position)
        assert name is not None  # it matches the empty string
        scan.position = name.end()
        function, arguments = name.group().strip(), dict[str, Any]()
        while scan.skip("<arg_key>"):
            key = scan.read_until("</arg_key>", "<arg_key>", without=("<arg_key>", "<arg_value>")).strip()
            scan.require("<arg_value>", f"the key {key!r}")
            value = scan.read_until(
                "</arg_value>", f"the value of {key!r}", without=("<arg_key>", "<arg_value>")
            )
            add_argument(arguments, key, typed(value, function, key, tools))
        scan.require("</tool_call>", f"the call of {function!r}")
        return make_call(function, arguments)


class DeepSeekV3Parser(TaggedParser):
    """DeepSeek-V3 and R1 (arguments in a fence of JSON), V3.1 (bare)."""

    opening = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    tags: ClassVar[Mapping[str, str]] = {"<｜tool▁call▁begin｜>": "<｜tool▁call▁end｜>"}

    def read_one(self, scan: Scanner, opened: str, tools: Sequence[dict[str, Any]]) -> ToolCall:
        """Implements `TaggedParser.read_one`."""
        name = scan.read_until("<｜tool▁sep｜>", opened, without=("<｜tool▁call",))
        fenced = not scan.starts_with("{")
        if fenced:  # the text before was the kind, `function`
            name = scan.read_until("```json", "the name", without=("<｜tool▁call",))
        arguments = scan.read_json()
        if fenced:
            scan.require("```", "its JSON")
        scan.require("<｜tool▁call▁end｜>", "its JSON")
        return make_call(name, arguments)


class KimiK2Parser(TaggedParser):
    """Kimi-K2: an id of name and number, then the arguments."""

    opening = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    tags: ClassVar[Mapping[str, str]] = {"<|tool_call_begin|>": "<|tool_call_end|>"}

    def read_one(self, scan: Scanner, opened: str, tools: Sequence[dict[str, Any]]) -> ToolCall:
        """Implements `TaggedParser.read_one`."""
        call_id = scan.read_until(
            "<|tool_call_argument_begin|>", opened, without=("<|tool_call_begin|>", "<|tool_call_end|>")
        ).strip()
        arguments = scan.read_json()
        scan.require("<|tool_call_end|>", "its JSON")
        name = re.sub(r":\d+$", "", call_id).removeprefix("functions.")
        return make_call(name, arguments)


class Llama3Parser(ToolParser):
    """Llama 3: JSON objects that are the whole answer, or follow `<|python_tag|>`, with `;` or `,` between.

    An answer in JSON is only a call if it has a "name" and "parameters".
    """

    opening = ("<|python_tag|>",)

    def read(self, text: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
        """Implements `ToolParser.read`."""
        scan, calls = Scanner(text), list[Call]()
        tagged = scan.starts_with(self.opening[0])
        if not (tagged or _LLAMA_CALL.match(text)):
            return []
        while scan.skip(self.opening[0]) or scan.starts_with("{"):
            try:
                value = scan.read_json()
                if (
                    not tagged
                    and not calls
                    and isinstance(value, dict)
                    and not _LLAMA_ARGUMENTS & value.keys()
                ):
                    return []
                calls.append(as_call(value, arguments=_LLAMA_ARGUMENTS))
            except Unreadable as error:
                # Without tags the beginning of the next call is unknown.
                calls.append(MalformedCall(error=f"the tool call cannot be read: {error}"))
                break
            _ = scan.skip(";") or scan.skip(",")
        if calls and not isinstance(calls[-1], MalformedCall) and scan.text[scan.position :].strip():
            rest = MalformedCall(error="the tool call cannot be read: text follows it")
            return [*calls, rest] if tagged else [rest]  # without the tag, calls are the whole answer
        return calls

    def around_arguments(self, name: str) -> tuple[str, str]:
        """Implements `ToolParser.around_arguments`."""
        return f'{{"name": {json.dumps(name)}, "parameters": ', "}"

    def content_end(self, text: str) -> int:
        """Implements `ToolParser.content_end`."""
        answer = text[after_thought(text) :].lstrip()
        return len(text) - len(answer) if answer.startswith("{") else super().content_end(text)


_LLAMA_ARGUMENTS: Final = {"parameters": None, "arguments": None}.keys()
_LLAMA_CALL: Final = re.compile(r'\s*\{\s*"(?:name"\s*:|type"\s*:\s*"function")')
"""The beginning of an untagged call; models that copy the schema of a tool begin with `type`."""
