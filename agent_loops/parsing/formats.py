"""Tool-call formats of well-known models, as in their chat templates; docs/guide/tools.md has examples."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from agent_loops.parsing.calls import Call, MalformedCall, ToolCall, ToolParser, after_thought
from agent_loops.parsing.scan import Scanner, TaggedParser, Unreadable, as_call, make_call, typed


class HermesParser(TaggedParser):
    """Hermes, Qwen2.5 and Qwen3: one JSON object between tags."""

    opening = ("<tool_call>",)
    tags: ClassVar[Mapping[str, str]] = {"<tool_call>": "</tool_call>"}

    def read_one(self, scan: Scanner, opened: str, tools: Sequence[dict[str, Any]]) -> ToolCall:
        """See `TaggedParser.read_one`."""
        value = scan.json()
        scan.require("</tool_call>", "its JSON")
        return as_call(value)


class Qwen3CoderParser(TaggedParser):
    """Qwen3-Coder: tags for the function and each parameter; the outer tag is often left out."""

    opening = ("<tool_call>", "<function=")
    tags: ClassVar[Mapping[str, str]] = {"<tool_call>": "</tool_call>", "<function=": "</function>"}

    def read_one(self, scan: Scanner, opened: str, tools: Sequence[dict[str, Any]]) -> ToolCall:
        """See `TaggedParser.read_one`."""
        if opened == "<tool_call>":
            scan.require("<function=", "<tool_call>")
        name = scan.until(">", "<function=").strip()
        arguments: dict[str, Any] = {}
        while scan.take("<parameter="):
            key = scan.until(">", "<parameter=").strip()
            # A value stands on lines of its own; only their breaks are not part of it.
            value = scan.until("</parameter>", f"the parameter {key!r}").removeprefix("\n").removesuffix("\n")
            arguments[key] = typed(value, name, key, tools)
        scan.require("</function>", f"the function {name!r}")
        if opened == "<tool_call>":
            scan.require("</tool_call>", "</function>")
        return make_call(name, arguments)


class Glm45Parser(TaggedParser):
    """GLM-4.5 and later: the name, then tags for each key and value."""

    opening = ("<tool_call>",)
    tags: ClassVar[Mapping[str, str]] = {"<tool_call>": "</tool_call>"}

    def read_one(self, scan: Scanner, opened: str, tools: Sequence[dict[str, Any]]) -> ToolCall:
        """See `TaggedParser.read_one`."""
        name = re.compile(r"[^<]*").match(scan.text, scan.position)
        assert name is not None  # it matches the empty string
        scan.position = name.end()
        function, arguments = name.group().strip(), dict[str, Any]()
        while scan.take("<arg_key>"):
            key = scan.until("</arg_key>", "<arg_key>").strip()
            scan.require("<arg_value>", f"the key {key!r}")
            value = scan.until("</arg_value>", f"the value of {key!r}")
            arguments[key] = typed(value, function, key, tools)
        scan.require("</tool_call>", f"the call of {function!r}")
        return make_call(function, arguments)


class DeepSeekV3Parser(TaggedParser):
    """DeepSeek-V3 and R1 (arguments in a fence of JSON), V3.1 (bare)."""

    opening = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    tags: ClassVar[Mapping[str, str]] = {"<｜tool▁call▁begin｜>": "<｜tool▁call▁end｜>"}

    def read_one(self, scan: Scanner, opened: str, tools: Sequence[dict[str, Any]]) -> ToolCall:
        """See `TaggedParser.read_one`."""
        name = scan.until("<｜tool▁sep｜>", opened)
        fenced = not scan.sees("{")
        if fenced:  # what stood before is the kind, `function`
            name = scan.until("```json", "the name")
        arguments = scan.json()
        if fenced:
            scan.require("```", "its JSON")
        scan.require("<｜tool▁call▁end｜>", "its JSON")
        return make_call(name, arguments)


class KimiK2Parser(TaggedParser):
    """Kimi-K2: an id of name and number, then the arguments."""

    opening = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    tags: ClassVar[Mapping[str, str]] = {"<|tool_call_begin|>": "<|tool_call_end|>"}

    def read_one(self, scan: Scanner, opened: str, tools: Sequence[dict[str, Any]]) -> ToolCall:
        """See `TaggedParser.read_one`."""
        call_id = scan.until("<|tool_call_argument_begin|>", opened).strip()
        arguments = scan.json()
        scan.require("<|tool_call_end|>", "its JSON")
        name = re.sub(r":\d+$", "", call_id).removeprefix("functions.")
        return make_call(name, arguments)


class Llama3Parser(ToolParser):
    """Llama 3: JSON objects that are the whole answer, or follow `<|python_tag|>`; `;` may part them.

    An answer that happens to be JSON is no call unless it has a "name" and "parameters".
    """

    opening = ("<|python_tag|>",)

    def read(self, text: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
        """See `ToolParser.read`."""
        scan, calls = Scanner(text), list[Call]()
        tagged = scan.sees(self.opening[0])
        if not (tagged or _LLAMA_CALL.match(text)):
            return []
        while scan.take(self.opening[0]) or scan.sees("{"):
            try:
                value = scan.json()
                if (
                    not tagged
                    and not calls
                    and isinstance(value, dict)
                    and not _LLAMA_ARGUMENTS & value.keys()
                ):
                    return []
                calls.append(as_call(value, arguments=_LLAMA_ARGUMENTS))
            except Unreadable as error:
                # Without tags nothing says where the next one would begin.
                calls.append(MalformedCall(error=f"the tool call cannot be read: {error}"))
                break
            scan.take(";")
        return calls

    def content_end(self, text: str) -> int:
        """See `ToolParser.content_end`."""
        answer = text[after_thought(text) :].lstrip()
        return len(text) - len(answer) if answer.startswith("{") else super().content_end(text)


_LLAMA_ARGUMENTS: Final = {"parameters": None, "arguments": None}.keys()
_LLAMA_CALL: Final = re.compile(r'\s*\{\s*"(?:name"\s*:|type"\s*:\s*"function")')
"""What an untagged call begins with; `type` is written by models that copy the schema of a tool."""
