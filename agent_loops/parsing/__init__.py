"""Parsers of tool calls in the policy's text, in the format that its chat template teaches.

```
calls     the interface ToolParser, its results Parsed, ToolCall, MalformedCall, and ParsedStream
scan      the common parts of formats with tags and JSON
formats   Hermes, Qwen3-Coder, GLM-4.5, DeepSeek-V3, Kimi-K2, Llama 3
```

A parser never raises: an unreadable call becomes an error message for the policy.
"""

from __future__ import annotations

import difflib
from typing import Final

from agent_loops.parsing.calls import Call, MalformedCall, Parsed, ParsedStream, ToolCall, ToolParser
from agent_loops.parsing.formats import (
    DeepSeekV3Parser,
    Glm45Parser,
    HermesParser,
    KimiK2Parser,
    Llama3Parser,
    Qwen3CoderParser,
)
from async_rl.errors import ConfigError
from async_rl.runtime.loading import load_object

__all__ = [
    "PARSERS",
    "Call",
    "MalformedCall",
    "Parsed",
    "ParsedStream",
    "ToolCall",
    "ToolParser",
    "load_parser",
    "recognise",
]

PARSERS: Final[dict[str, type[ToolParser]]] = {
    "qwen3_coder": Qwen3CoderParser,
    "glm45": Glm45Parser,
    "kimi_k2": KimiK2Parser,
    "deepseekv3": DeepSeekV3Parser,
    "hermes": HermesParser,
    "llama3": Llama3Parser,
}
"""Parsers by the format's name in SGLang's `--tool-call-parser`."""

_SIGNS: Final = {
    "qwen3_coder": ("<function=",),
    "glm45": ("<arg_key>",),
    "kimi_k2": ("<|tool_call_argument_begin|>",),
    "deepseekv3": ("<｜tool▁call▁begin｜>",),
    "hermes": ("<tool_call>",),
    "llama3": ("<|python_tag|>", "Environment: ipython"),
}
"""Texts in chat templates that teach each format; the first match is right."""


def load_parser(name: str) -> ToolParser:
    """Load a parser by its name in `PARSERS`, or a user's parser by dotted path.

    Raises:
        ConfigError: The parser does not exist.
    """
    if name in PARSERS:
        return PARSERS[name]()
    if ":" not in name:
        close = difflib.get_close_matches(name, PARSERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"rollout.agent_loop_args: parser is {name!r}; expected one of {', '.join(PARSERS)}, or "
            f"`module:Class`{hint}"
        )
    kind = load_object(name, what="tool-call parser")
    if not (isinstance(kind, type) and issubclass(kind, ToolParser)):
        raise ConfigError(
            f"tool-call parser {name!r} is not a subclass of agent_loops.parsing.ToolParser, which finds "
            "where a turn's calls begin"
        )
    return kind()


def recognise(chat_template: str) -> str:
    """Return the name of the format that a chat template teaches.

    Raises:
        ConfigError: The format is unknown, or the template leaves tools out.
    """
    for name, signs in _SIGNS.items():
        if any(sign in chat_template for sign in signs):
            return name
    why = "has an unknown format of calls" if "tools" in chat_template else "leaves tools out"
    raise ConfigError(
        f"the chat template {why}; expected one of {', '.join(PARSERS)}: set rollout.agent_loop_args.parser "
        "to one of them or to a `module:Class` of your own, or use the template of a model that calls tools"
    )
