"""Bodies of chat completion requests as agent frameworks send them in the middle of a conversation."""

from __future__ import annotations

from typing import Any, Final

_PARAMETERS: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A city."}, "days": {"type": "integer"}},
    "required": ["city"],
}
_ARGUMENTS: Final = '{"city": "Oslo", "days": 2}'


def _called(**more: Any) -> dict[str, Any]:
    call = {"id": "call_1_0", "type": "function", "function": {"name": "weather", "arguments": _ARGUMENTS}}
    return {"role": "assistant", "tool_calls": [call], **more}


def _tool(**more: Any) -> dict[str, Any]:
    function = {"name": "weather", "description": "Tell the weather.", "parameters": _PARAMETERS, **more}
    return {"type": "function", "function": function}


REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "openai": {
        "model": "policy",
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            _called(content=None, refusal=None),
            {"role": "tool", "tool_call_id": "call_1_0", "content": [{"type": "text", "text": "rain"}]},
        ],
        "tools": [_tool(strict=True, parameters={**_PARAMETERS, "enum": None})],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_completion_tokens": 64,
        "seed": 7,
        "n": 1,
    },
    "langchain": {
        "messages": [
            {"content": "You are helpful.", "role": "system"},
            {"content": "Weather?", "role": "user"},
            _called(content=None),
            {"content": "rain", "role": "tool", "tool_call_id": "call_1_0"},
        ],
        "model": "policy",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "tools": [_tool()],
        "stop": ["Observation:"],
    },
    "litellm": {
        "model": "policy",
        "messages": [
            {"role": "user", "content": "Weather?"},
            _called(content="", function_call=None, reasoning_content="Hm.", provider_specific_fields={}),
            {"role": "tool", "tool_call_id": "call_1_0", "name": "weather", "content": "rain"},
        ],
        "tools": [_tool()],
        "max_tokens": 64,
        "top_p": 1,
        "top_k": -1,
        "logprobs": True,
        "response_format": {"type": "text"},
        "logit_bias": {},
        "user": "someone",
        "extra_body": {"metadata": {"tags": ["a"]}},
    },
    "smolagents": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Write code."}]},
            {"role": "user", "content": [{"type": "text", "text": "New task:\nWeather?"}]},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "Thought: I look.\n<code>f()</code>"}],
            },
            {"role": "user", "content": [{"type": "text", "text": "Observation:\nrain"}]},
        ],
        "model": "policy",
        "stop": ["Observation:", "Calling tools:"],
    },
}
"""By the framework that sends them."""
