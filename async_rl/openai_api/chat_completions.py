"""OpenAI's chat completions, checked strictly where it matters for training.

A request is accepted as it is, or refused with a message that states the remedy. Sampling parameters are the
exception: the config decides how the policy is sampled, and those of the request are only counted.

Source: OpenAI's API reference, "Chat completions".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from async_rl.openai_api.constraints import ANY_TOOL, Forced
from async_rl.openai_api.reading import (
    ABSENT,
    MAX_MESSAGES,
    FreeJson,
    Part,
    at_least_one,
    decode,
    digest,
    read_call,
    read_function,
    read_schema,
    read_stop,
    read_text,
    sampling_parameters,
)
from async_rl.openai_api.requests import (
    ApiError,
    ChatAnswer,
    ChatRequest,
    ReplyHead,
    openai_error,
    server_sent,
)

_NEUTRAL: Final[Mapping[str, Sequence[Any]]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
}
"""Values without effect."""
_ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Roles of the API, with their names in chat templates."""
_BESIDE_CONTENT: Final = ("refusal", "thinking", "redacted_thinking", "reasoning")
"""Parts with which clients write what an answer has beside its content; thoughts may be left out."""


class _CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: Raw = ABSENT


class _ToolCall(msgspec.Struct, frozen=True):
    function: _CalledFunction
    id: str | None = None


class _ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _ChatTool(msgspec.Struct, frozen=True):
    type: str
    function: Raw = ABSENT


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _NamedSchema(msgspec.Struct, frozen=True):
    schema: Raw = ABSENT


class _ResponseFormat(msgspec.Struct, frozen=True):
    type: str
    json_schema: _NamedSchema | None = None


class _NamedTool(msgspec.Struct, frozen=True):
    """A `tool_choice` that is an object."""

    function: _CalledFunction | None = None


class _ChatSampling(msgspec.Struct, frozen=True):
    """Parameters that change what is sampled: log-probs would not be those of the trained policy."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Raw = ABSENT
    seed: int | None = None
    reasoning_effort: str | None = None


class _ChatBody(_ChatSampling, frozen=True):
    """The fields of a request that are read; others are ignored."""

    model: str | None = None
    messages: Annotated[list[_ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: list[_ChatTool] | None = None
    tool_choice: str | _NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: _ResponseFormat | None = None
    modalities: list[str] | None = None
    audio: Raw = ABSENT
    functions: Raw = ABSENT
    function_call: Raw = ABSENT


_BODY: Final = msgspec.json.Decoder(_ChatBody)


class ChatCompletions:
    """Implements `Dialect`."""

    path = "/v1/chat/completions"

    def read(self, body: bytes, model: str) -> ChatRequest:
        """Implements `Dialect.read`."""
        raw = decode(_BODY, body)
        _refuse_unsupported(raw)
        if not raw.messages:
            raise ApiError(400, "messages must be a list with at least one message", param="messages")
        max_new = [
            at_least_one(value, name)
            for name in ("max_tokens", "max_completion_tokens")
            if (value := getattr(raw, name)) is not None
        ]
        free = FreeJson()
        tools = _read_tools(raw.tools or (), free)
        may_call = raw.tool_choice != "none"
        max_new_tokens, stop = min(max_new, default=None), read_stop(raw.stop)
        unsupported = _unsupported(raw, free, model)
        options = raw.stream_options
        return ChatRequest(
            model=raw.model or model,
            messages=_read_messages(raw.messages, free),
            tools=tools,
            tools_digest=digest(tools),
            may_call=may_call,
            max_new_tokens=max_new_tokens,
            stop=stop,
            stream=bool(raw.stream),
            logprobs=bool(raw.logprobs),
            forced=(forced := _forced(raw, free)),
            unsupported=unsupported,
            parameters_digest=digest((max_new_tokens, stop, may_call, forced, unsupported)),
            reply={"include_usage": options is not None and bool(options.include_usage)},
        )

    def answer(self, answer: ChatAnswer, head: ReplyHead, request: ChatRequest) -> dict[str, Any]:
        """Implements `Dialect.answer`."""
        return {
            **_head(head),
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": answer.message,
                    "finish_reason": answer.finish_reason,
                    "logprobs": _logprobs(answer) if request.logprobs else None,
                }
            ],
            "usage": _usage(answer),
        }

    def stream(self, head: ReplyHead, request: ChatRequest) -> ChatChunks:
        """Implements `Dialect.stream`."""
        return ChatChunks(head, request)

    def error(self, error: ApiError) -> dict[str, Any]:
        """Implements `Dialect.error`."""
        return openai_error(error)


class ChatChunks:
    """Implements `AnswerStream`."""

    keep_alive = b": the policy is generating\n\n"

    def __init__(self, head: ReplyHead, request: ChatRequest) -> None:
        self._head = _head(head) | {"object": "chat.completion.chunk"}
        self._include_usage = request.reply["include_usage"]
        self._logprobs = request.logprobs

    def begin(self) -> bytes:
        """Implements `AnswerStream.begin`."""
        return self._delta({"role": "assistant", "content": ""})

    def add_reasoning(self, text: str) -> bytes:
        """Implements `AnswerStream.add_reasoning`."""
        return self._delta({"reasoning_content": text})

    def add_content(self, text: str) -> bytes:
        """Implements `AnswerStream.add_content`."""
        return self._delta({"content": text})

    def end(self, answer: ChatAnswer) -> bytes:
        """Implements `AnswerStream.end`."""
        calls = answer.message.get("tool_calls", ())
        # As OpenAI does: LlamaIndex reads one call of each chunk.
        events = b"".join(self._delta({"tool_calls": [{"index": i, **c}]}) for i, c in enumerate(calls))
        values = _logprobs(answer) if self._logprobs else None
        last = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason, "logprobs": values}
        usage = self._chunk([], usage=_usage(answer)) if self._include_usage else b""
        return events + self._chunk([last]) + usage + b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> bytes:
        """Implements `AnswerStream.fail`."""
        return server_sent(openai_error(error))

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}])

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self._include_usage:
            chunk["usage"] = usage
        return server_sent(chunk)


def _head(head: ReplyHead) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head.id}", "created": head.created, "model": head.model}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


def _logprobs(answer: ChatAnswer) -> dict[str, Any]:
    """Return the log-probs of all tokens of the turn, with tags and thoughts: content tokens are unknown."""
    content = [token.body for token in answer.logprobs]
    return {"content": content, "refusal": None}


def _refuse_unsupported(raw: _ChatBody) -> None:
    if raw.n not in (None, 1):
        raise ApiError(
            400, f"n is {raw.n}, expected 1: send several requests, each returns a sample", param="n"
        )
    if raw.top_logprobs:
        raise ApiError(
            400, "top_logprobs is not supported: only sampled tokens have log-probs", param="top_logprobs"
        )
    if raw.functions != ABSENT or raw.function_call != ABSENT:
        raise ApiError(400, "functions are not supported: use tools", param="functions")
    if raw.modalities not in (None, ["text"]) or raw.audio != ABSENT:
        raise ApiError(400, "only text is supported", param="modalities")


def _unsupported(raw: _ChatBody, free: FreeJson, model: str) -> dict[str, Any]:
    """Return the parameters that have no effect here, without those that would have none anywhere."""
    found = sampling_parameters(raw, _ChatSampling.__struct_fields__, free, _NEUTRAL)
    if raw.parallel_tool_calls is False and raw.tool_choice in (None, "auto", "none"):
        found["parallel_tool_calls"] = False
    if raw.model not in (None, model):
        found["model"] = raw.model
    return found


def _forced(raw: _ChatBody, free: FreeJson) -> Forced | None:
    schema = None
    if (wanted := raw.response_format) is not None and wanted.type != "text":
        given = ABSENT if wanted.json_schema is None else wanted.json_schema.schema
        schema = read_schema(wanted.type, given, "response_format", free)
    tool = None
    if isinstance(raw.tool_choice, _NamedTool):
        tool = ANY_TOOL if raw.tool_choice.function is None else raw.tool_choice.function.name
    elif raw.tool_choice == "required":
        tool = ANY_TOOL
    if schema is None and tool is None:
        return None
    return Forced(schema=schema, tool=tool, one_call=raw.parallel_tool_calls is False)


def _read_messages(raw: Sequence[_ChatMessage], free: FreeJson) -> list[dict[str, Any]]:
    names: dict[str, str] = {}
    return [_read_message(message, f"messages[{i}]", names, free) for i, message in enumerate(raw)]


def _read_message(raw: _ChatMessage, place: str, names: dict[str, str], free: FreeJson) -> dict[str, Any]:
    """Return a message in the form of chat templates; `names` has the tools of earlier calls, by call id."""
    if (role := _ROLES.get(raw.role)) is None:
        raise ApiError(
            400, f"{place}: role is {raw.role!r}, expected one of {', '.join(_ROLES)}", param=place
        )
    skipped = _BESIDE_CONTENT if raw.role == "assistant" else ()
    message: dict[str, Any] = {
        "role": role,
        "content": read_text(raw.content, f"{place}.content", skipped=skipped),
    }
    if raw.tool_calls:
        message["tool_calls"] = [
            read_call(call.function.name, call.function.arguments, call.id, f"{place}.tool_calls[{i}]", free)
            for i, call in enumerate(raw.tool_calls)
        ]
        names |= {call.id or "": call.function.name if call.id else "" for call in raw.tool_calls}
    if role == "tool":
        if raw.tool_call_id is None and "" not in names:  # its call had an id
            raise ApiError(400, f"{place}: a tool's result needs its tool_call_id", param=place)
        message["tool_call_id"] = call_id = raw.tool_call_id or ""
        if name := raw.name or names.get(call_id):
            message["name"] = name
    return message


def _read_tools(raw: Sequence[_ChatTool], free: FreeJson) -> list[dict[str, Any]]:
    tools = []
    for i, tool in enumerate(raw):
        place = f"tools[{i}]"
        function = free.decode_valid(tool.function, place) if tool.type == "function" else None
        tools.append(read_function(function, place))
    return tools
