"""Turns with tool calls as models write them, one renderer a format, after the models' chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

Calls = Sequence[tuple[str, Mapping[str, Any]]]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def hermes(calls: Calls) -> str:
    return "".join(
        f"<tool_call>\n{_json({'name': name, 'arguments': arguments})}\n</tool_call>\n"
        for name, arguments in calls
    )


def qwen3_coder(calls: Calls) -> str:
    def parameters(arguments: Mapping[str, Any]) -> str:
        return "".join(f"<parameter={k}>\n{_plain(v)}\n</parameter>\n" for k, v in arguments.items())

    return "".join(
        f"<tool_call>\n<function={name}>\n{parameters(arguments)}</function>\n</tool_call>\n"
        for name, arguments in calls
    )


def glm45(calls: Calls) -> str:
    def pairs(arguments: Mapping[str, Any]) -> str:
        return "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n" for k, v in arguments.items()
        )

    return "".join(f"<tool_call>{name}\n{pairs(arguments)}</tool_call>\n" for name, arguments in calls)


def deepseekv3(calls: Calls) -> str:
    body = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def deepseekv31(calls: Calls) -> str:
    body = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def kimi_k2(calls: Calls) -> str:
    body = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{_json(arguments)}"
        "<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def llama3(calls: Calls) -> str:
    return ";".join(_json({"name": name, "parameters": arguments}) for name, arguments in calls)


def llama3_tagged(calls: Calls) -> str:
    return "<|python_tag|>" + llama3(calls)


RENDERERS: Final[dict[str, tuple[str, Callable[[Calls], str]]]] = {
    "hermes": ("hermes", hermes),
    "qwen3_coder": ("qwen3_coder", qwen3_coder),
    "glm45": ("glm45", glm45),
    "deepseekv3": ("deepseekv3", deepseekv3),
    "deepseekv31": ("deepseekv3", deepseekv31),
    "kimi_k2": ("kimi_k2", kimi_k2),
    "llama3": ("llama3", llama3),
    "llama3_tagged": ("llama3", llama3_tagged),
}
"""By what is written: the parser that reads it, and what writes it."""

TAGS: Final = (
    *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", ">"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>", "<think>", "</think>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "```", "<｜tool▁call▁end｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", ";", "{", "}", '"', "\\ud800", "functions.add:0", "add"),
    *("\n", "[" * 50, "```json\n", '{"a": 1}'),
    *('{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": {"a": 1}}'),
)
"""What parsers stumble over, when it is strewn about."""
