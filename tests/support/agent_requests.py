"""Bodies of requests as agent frameworks send them in the middle of a conversation."""

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
    "openai responses": {
        "model": "policy",
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text"}]},
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "call_1_0", "name": "weather", "arguments": _ARGUMENTS},
            {"type": "function_call_output", "call_id": "call_1_0", "output": "rain"},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": _PARAMETERS, "strict": True}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "max_output_tokens": 64,
        "store": False,
        "stream": True,
        "prompt_cache_key": "x",
    },
    "anthropic": {
        "model": "policy",
        "max_tokens": 64,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "call_1_0", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_1_0",
                        "content": [{"type": "text", "text": "rain"}],
                        "is_error": False,
                    },
                    {"type": "text", "text": "And tomorrow?"},
                ],
            },
        ],
        "tools": [{"name": "weather", "description": "Tell the weather.", "input_schema": _PARAMETERS}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "stop_sequences": ["Observation:"],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "metadata": {"user_id": "someone"},
        "stream": True,
    },
    "anthropic thread": {
        "model": "policy",
        "max_tokens": 64,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "call_1_0", "content": "rain"}],
            }
        ],
        "stream": True,
        "thread": {"type": "continue", "previous_message_id": "msg_1"},
    },
    "vercel": {
        "model": "policy",
        "input": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "item_reference", "id": "rs_1"},
            {"type": "item_reference", "id": "msg_1"},
            {"type": "item_reference", "id": "fc_1_0"},
            {"type": "function_call_output", "call_id": "call_1_0", "output": "rain"},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": _PARAMETERS}],
        "tool_choice": "auto",
        "stream": True,
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


def path_of(name: str) -> str:
    """Where a framework sends its requests."""
    paths = {
        "openai responses": "/v1/responses",
        "vercel": "/v1/responses",
        "anthropic": "/v1/messages",
        "anthropic thread": "/v1/messages",
    }
    return paths.get(name, "/v1/chat/completions")
