"""OpenAI's chat completions format, checked strictly where it matters for training.

A request is accepted as it is, or refused with a message that states the remedy. Sampling parameters are the
exception: the config decides how the policy is sampled, and those of the request are only counted.

Source: OpenAI's API reference, "Chat completions"; their clients define `x-should-retry`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from async_rl.runtime.untrusted_json import UNREADABLE

_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "reasoning_effort",
)
"""Parameters that change the sampling distribution; log-probs would not be those of the trained policy."""

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


class ApiError(Exception):
    """An error answer in OpenAI's format. Its headers ask clients to retry only if a retry can help."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry = retry

    @property
    def body(self) -> dict[str, Any]:
        """The JSON body of the answer."""
        kind = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}
        return {
            "error": {
                "message": self.message,
                "type": kind.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers for OpenAI's clients, which retry 408, 409, 429 and everything from 500 by default."""
        return {"x-should-retry": str(self.retry).lower()}


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request, with messages in the form of chat templates."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    may_call: bool
    """False if `tool_choice` is `none`: calls that the policy writes stay text."""
    max_new_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    unsupported: dict[str, Any]
    """Parameters without effect: sampling parameters, forced tool calls."""


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call as it is returned."""

    id: str
    name: str
    arguments: str
    """JSON."""


class TokenLogProb(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled token as text, and its log-prob in nats."""

    token: str
    logprob: float


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the policy in OpenAI's format."""

    content: str | None
    reasoning: str | None
    calls: tuple[FunctionCall, ...]
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[TokenLogProb, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [_call(call) for call in self.calls]
        return message

    @property
    def usage(self) -> dict[str, int]:
        """The tokens of the prompt, which is the whole conversation so far, and of this turn."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def read_request(body: bytes, model: str) -> ChatRequest:
    """Read and check a request.

    Args:
        body: JSON.
        model: The name of the only model.

    Raises:
        ApiError: 400 or 404, with the problem and the remedy.
    """
    try:
        raw = msgspec.json.decode(body)
    except UNREADABLE as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body is a JSON {type(raw).__name__}, expected an object")
    raw = {name: value for name, value in raw.items() if value is not None}
    if raw.get("model") != model:
        raise ApiError(
            404,
            f"model {raw.get('model')!r} does not exist; the policy is served as {model!r}",
            param="model",
            code="model_not_found",
        )
    _refuse_unsupported(raw)
    messages = raw.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    options = raw.get("stream_options", {})
    max_new = [
        _integer(raw, name, least=1) for name in ("max_tokens", "max_completion_tokens") if name in raw
    ]
    unsupported = {
        name: raw[name] for name in _SAMPLING if name in raw and raw[name] not in _NEUTRAL.get(name, ())
    }
    choice = raw.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        unsupported["tool_choice"] = choice if isinstance(choice, str) else "a named tool"
    if raw.get("parallel_tool_calls") is False:
        unsupported["parallel_tool_calls"] = False
    return ChatRequest(
        messages=_read_messages(messages),
        tools=_read_tools(raw.get("tools", [])),
        may_call=choice != "none",
        max_new_tokens=min(max_new, default=None),
        stop=_read_stop(raw.get("stop", [])),
        stream=raw.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        logprobs=raw.get("logprobs") is True,
        unsupported=unsupported,
    )


class ReplyHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that an answer and all its chunks share."""

    id: str
    created: int
    """Unix time, seconds."""
    model: str


def completion_body(answer: ChatAnswer, head: ReplyHead, *, logprobs: bool) -> dict[str, Any]:
    """Return the JSON body of a complete answer."""
    return {
        **msgspec.structs.asdict(head),
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": answer.message,
                "finish_reason": answer.finish_reason,
                "logprobs": _logprobs(answer) if logprobs else None,
            }
        ],
        "usage": answer.usage,
    }


class ChunkEncoder:
    """Encodes the chunks of one streamed answer."""

    def __init__(self, head: ReplyHead, *, include_usage: bool) -> None:
        self._head = msgspec.structs.asdict(head) | {"object": "chat.completion.chunk"}
        self._include_usage = include_usage

    def encode_delta(self, delta: Mapping[str, Any]) -> bytes:
        """Encode a part of the message."""
        return self._event([{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}])

    def encode_calls(self, calls: Sequence[FunctionCall]) -> bytes:
        """Encode all tool calls."""
        return self.encode_delta(
            {"tool_calls": [{"index": i, **_call(call)} for i, call in enumerate(calls)]}
        )

    def encode_end(self, answer: ChatAnswer, *, logprobs: bool) -> bytes:
        """Encode the last chunks."""
        values = _logprobs(answer) if logprobs else None
        last = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason, "logprobs": values}
        usage = self._event([], usage=answer.usage) if self._include_usage else b""
        return self._event([last]) + usage + b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self._include_usage:
            chunk["usage"] = usage
        return _event(chunk)


def error_event(error: ApiError) -> bytes:
    """Encode an error inside a stream, whose status has been sent already."""
    return _event(error.body)


def models_body(model: str, created: int) -> dict[str, Any]:
    """Return the JSON body of `/v1/models`."""
    return {
        "object": "list",
        "data": [{"id": model, "object": "model", "created": created, "owned_by": "async-rl"}],
    }


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _call(call: FunctionCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _logprobs(answer: ChatAnswer) -> dict[str, Any]:
    """Return the log-probs of all tokens of the turn, with tags and thoughts: content tokens are unknown."""
    content = [
        {"token": t.token, "logprob": t.logprob, "bytes": list(t.token.encode()), "top_logprobs": []}
        for t in answer.logprobs
    ]
    return {"content": content, "refusal": None}


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("n", 1) != 1:
        raise ApiError(
            400, f"n is {raw['n']}, expected 1: send several requests, each returns a sample", param="n"
        )
    if raw.get("top_logprobs", 0) != 0:
        raise ApiError(
            400, "top_logprobs is not supported: only sampled tokens have log-probs", param="top_logprobs"
        )
    if "functions" in raw or "function_call" in raw:
        raise ApiError(400, "functions are not supported: use tools", param="functions")
    kind = raw.get("response_format", {"type": "text"})
    if not isinstance(kind, dict) or kind.get("type") != "text":
        raise ApiError(
            400,
            "response_format is not supported: constrained decoding would falsify the log-probs; put the "
            "schema into the prompt, or into a tool's parameters",
            param="response_format",
        )
    if raw.get("modalities", ["text"]) != ["text"] or "audio" in raw:
        raise ApiError(400, "only text is supported", param="modalities")


def _read_messages(raw: Sequence[Any]) -> list[dict[str, Any]]:
    names: dict[str, str] = {}
    messages = [_read_message(message, f"messages[{i}]", names) for i, message in enumerate(raw)]
    return messages


def _read_message(raw: Any, place: str, names: dict[str, str]) -> dict[str, Any]:
    """Return a message in the form of chat templates; `names` has the tools of earlier calls, by call id."""
    if not isinstance(raw, dict) or raw.get("role") not in _ROLES:
        role = raw.get("role") if isinstance(raw, dict) else raw
        raise ApiError(400, f"{place}: role is {role!r}, expected one of {', '.join(_ROLES)}", param=place)
    role = _ROLES[raw["role"]]
    message: dict[str, Any] = {"role": role, "content": _read_content(raw.get("content"), f"{place}.content")}
    if calls := raw.get("tool_calls"):
        message["tool_calls"] = [
            _read_call(c, f"{place}.tool_calls[{i}]", names) for i, c in enumerate(calls)
        ]
    if role == "tool":
        call_id = raw.get("tool_call_id")
        if not isinstance(call_id, str):
            raise ApiError(400, f"{place}: a tool's result needs its tool_call_id", param=place)
        message["tool_call_id"] = call_id
        if name := raw.get("name") or names.get(call_id):
            message["name"] = name
    return message


def _read_content(raw: Any, place: str) -> str:
    if raw is None:
        return ""
    if isinstance(raw, str):
        return raw
    if isinstance(raw, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in raw):
        return "".join(part["text"] for part in raw)
    raise ApiError(400, f"{place}: only text is supported, as a string or as parts with text", param=place)


def _read_call(raw: Any, place: str, names: dict[str, str]) -> dict[str, Any]:
    try:
        name, arguments, call_id = raw["function"]["name"], raw["function"]["arguments"], raw["id"]
    except (KeyError, TypeError) as error:
        raise ApiError(
            400, f"{place}: expected id and function with name and arguments", param=place
        ) from error
    names[str(call_id)] = str(name)
    try:
        decoded = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        decoded = arguments
    function = {"name": str(name), "arguments": decoded}
    return {"id": str(call_id), "type": "function", "function": function}


def _read_tools(raw: Any) -> list[dict[str, Any]]:
    """Return tools as chat templates show them to the policy, without fields that are for servers only."""
    if not isinstance(raw, list):
        raise ApiError(400, "tools must be a list", param="tools")
    tools = []
    for i, tool in enumerate(raw):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"tools[{i}]: expected a function with a name", param=f"tools[{i}]")
        kept = {key: value for key, value in function.items() if value is not None and key != "strict"}
        tools.append({"type": "function", "function": kept})
    return tools


def _read_stop(raw: Any) -> tuple[str, ...]:
    stops = [raw] if isinstance(raw, str) else raw
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ApiError(400, "stop must be a string or a list of strings", param="stop")
    return tuple(stops)


def _integer(raw: Mapping[str, Any], name: str, *, least: int) -> int:
    value = raw[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ApiError(400, f"{name} is {value!r}, expected a whole number of at least {least}", param=name)
    return value
