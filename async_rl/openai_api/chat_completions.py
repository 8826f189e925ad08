"""OpenAI's chat completions format, checked strictly where it matters for training.

A request is accepted as it is, or refused with a message that states the remedy. Sampling parameters are the
exception: the config decides how the policy is sampled, and those of the request are only counted.

msgspec checks the types of all fields that are read, and builds no objects for the others. What may have any
form (schemas of tools, arguments of calls) is bounded in size and depth before it is built.

Source: OpenAI's API reference, "Chat completions"; their clients define `x-should-retry`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from async_rl.runtime.untrusted_json import UNREADABLE

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
_MAX_MESSAGES: Final = 10_000
_MAX_STOPS: Final = 64
_MAX_STOP_CHARS: Final = 1024
"""Stop strings are searched at each piece of a turn."""
_MAX_VALUES: Final = 200_000
"""The most objects and lists of a request, and the most values of any form. A value of three bytes takes 64
bytes of memory, and decoding cannot be interrupted."""
_MAX_DEPTH: Final = 64
"""The deepest nesting of such JSON: schemas of tools have fewer than 20 levels."""
_MAX_ERROR_CHARS: Final = 1000
"""Errors quote what was received, which may be long."""
_ABSENT: Final = Raw(b"null")


class _Part(msgspec.Struct, frozen=True):
    type: str | None = None
    text: str | None = None


class _CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: Raw = _ABSENT


class _ToolCall(msgspec.Struct, frozen=True):
    function: _CalledFunction
    id: str | None = None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Tool(msgspec.Struct, frozen=True):
    type: str
    function: Raw = _ABSENT


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class _ResponseFormat(msgspec.Struct, frozen=True):
    type: str


class _NamedTool(msgspec.Struct, frozen=True):
    """A `tool_choice` that is an object."""


class _Sampling(msgspec.Struct, frozen=True):
    """Parameters that change what is sampled: log-probs would not be those of the trained policy."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Raw = _ABSENT
    seed: int | None = None
    reasoning_effort: str | None = None


class _RequestBody(_Sampling, frozen=True):
    """The fields of a request that are read; others are ignored."""

    model: str | None = None
    messages: Annotated[list[_Message], Meta(max_length=_MAX_MESSAGES)] | None = None
    tools: list[_Tool] | None = None
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
    audio: Raw = _ABSENT
    functions: Raw = _ABSENT
    function_call: Raw = _ABSENT


_BODY: Final = msgspec.json.Decoder(_RequestBody)


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
        if len(message) > _MAX_ERROR_CHARS:
            message = f"{message[:_MAX_ERROR_CHARS]}..."
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

    model: str
    """The requested name, under which the policy answers: agents name models of other services."""
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    tools_digest: bytes
    """Tells whether two requests have the same tools, which are part of the prompt."""
    may_call: bool
    """False if `tool_choice` is `none`: calls that the policy writes stay text."""
    max_new_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    unsupported: dict[str, Any]
    """Parameters without effect: sampling parameters, forced tool calls, a format, another model."""
    parameters_digest: bytes
    """Tells whether two requests have the same limits and parameters, those without effect included."""


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
        model: The name of the policy.

    Raises:
        ApiError: 400, with the problem and the remedy.
    """
    try:
        raw = _BODY.decode(_limited(body))
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        param = place.removesuffix("`") or None
        raise ApiError(400, f"{param or 'the body'}: {problem}", param=param) from error
    except UNREADABLE as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    _refuse_unsupported(raw)
    if not raw.messages:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    max_new = [
        _at_least_one(value, name)
        for name in ("max_tokens", "max_completion_tokens")
        if (value := getattr(raw, name)) is not None
    ]
    free = _FreeJson()
    tools = _read_tools(raw.tools or (), free)
    may_call = raw.tool_choice != "none"
    max_new_tokens, stop = min(max_new, default=None), _read_stop(raw.stop)
    unsupported = _unsupported(raw, free, model)
    return ChatRequest(
        model=raw.model or model,
        messages=_read_messages(raw.messages, free),
        tools=tools,
        tools_digest=_digest(tools),
        may_call=may_call,
        max_new_tokens=max_new_tokens,
        stop=stop,
        stream=bool(raw.stream),
        include_usage=raw.stream_options is not None and bool(raw.stream_options.include_usage),
        logprobs=bool(raw.logprobs),
        unsupported=unsupported,
        parameters_digest=_digest((max_new_tokens, stop, may_call, unsupported)),
    )


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).digest()


class _FreeJson:
    """Decodes the parts of one request that may have any form, within a common limit."""

    def __init__(self) -> None:
        self._num_left = _MAX_VALUES

    def decode(self, data: Raw | str, place: str) -> Any:
        """Return the value of JSON.

        Raises:
            ApiError: The request has too much of it.
            msgspec.DecodeError: It is nested too deep, has values that JSON cannot hold, or is no JSON.
        """
        encoded = data.encode() if isinstance(data, str) else bytes(data)
        self._num_left -= sum(encoded.count(mark) for mark in (b",", b"[", b"{"))
        if self._num_left < 0:
            raise ApiError(
                400,
                f"{place}: tools and arguments of calls have more than {_MAX_VALUES} values together",
                param=place,
            )
        value = msgspec.json.decode(encoded)
        if _is_deep(value, _MAX_DEPTH):
            raise msgspec.DecodeError(f"nested deeper than {_MAX_DEPTH} levels")
        return value

    def decode_valid(self, data: Raw, place: str) -> Any:
        """Return the value of JSON that is part of a body; one that cannot be held is refused."""
        try:
            return self.decode(data, place)
        except UNREADABLE as error:
            raise ApiError(400, f"{place}: {error}", param=place) from error


def _limited(body: bytes) -> bytes:
    """Return a body if the number of its objects and lists, also of those in strings, is within the limit."""
    if (number := body.count(b"{") + body.count(b"[")) > _MAX_VALUES:
        raise ApiError(400, f"the body has {number} objects and lists, expected at most {_MAX_VALUES}")
    return body


def _is_deep(value: Any, max_depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not max_depth or any(_is_deep(each, max_depth - 1) for each in inner)


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
        {"token": t.token, "logprob": t.logprob, "bytes": _bytes(t.token), "top_logprobs": []}
        for t in answer.logprobs
    ]
    return {"content": content, "refusal": None}


def _bytes(token: str) -> list[int] | None:
    """Return the UTF-8 of a token, or None for a part of a character, whose own bytes are unknown."""
    return None if "\ufffd" in token else list(token.encode())


def _refuse_unsupported(raw: _RequestBody) -> None:
    if raw.n not in (None, 1):
        raise ApiError(
            400, f"n is {raw.n}, expected 1: send several requests, each returns a sample", param="n"
        )
    if raw.top_logprobs:
        raise ApiError(
            400, "top_logprobs is not supported: only sampled tokens have log-probs", param="top_logprobs"
        )
    if raw.functions != _ABSENT or raw.function_call != _ABSENT:
        raise ApiError(400, "functions are not supported: use tools", param="functions")
    if raw.modalities not in (None, ["text"]) or raw.audio != _ABSENT:
        raise ApiError(400, "only text is supported", param="modalities")


def _unsupported(raw: _RequestBody, free: _FreeJson, model: str) -> dict[str, Any]:
    """Return the parameters that have no effect here, without those that would have none anywhere."""
    given = {name: getattr(raw, name) for name in _Sampling.__struct_fields__}
    given["logit_bias"] = free.decode_valid(raw.logit_bias, "logit_bias")
    found = {n: v for n, v in given.items() if v is not None and v not in _NEUTRAL.get(n, ())}
    if raw.tool_choice not in (None, "auto", "none"):
        found["tool_choice"] = raw.tool_choice if isinstance(raw.tool_choice, str) else "a named tool"
    if raw.parallel_tool_calls is False:
        found["parallel_tool_calls"] = False
    if raw.response_format is not None and raw.response_format.type != "text":
        # Constrained decoding would falsify the log-probs.
        found["response_format"] = raw.response_format.type
    if raw.model not in (None, model):
        found["model"] = raw.model
    return found


def _read_messages(raw: Sequence[_Message], free: _FreeJson) -> list[dict[str, Any]]:
    names: dict[str, str] = {}
    return [_read_message(message, f"messages[{i}]", names, free) for i, message in enumerate(raw)]


def _read_message(raw: _Message, place: str, names: dict[str, str], free: _FreeJson) -> dict[str, Any]:
    """Return a message in the form of chat templates; `names` has the tools of earlier calls, by call id."""
    if (role := _ROLES.get(raw.role)) is None:
        raise ApiError(
            400, f"{place}: role is {raw.role!r}, expected one of {', '.join(_ROLES)}", param=place
        )
    message: dict[str, Any] = {"role": role, "content": _read_content(raw, f"{place}.content")}
    if raw.tool_calls:
        message["tool_calls"] = [
            _read_call(call, f"{place}.tool_calls[{i}]", free) for i, call in enumerate(raw.tool_calls)
        ]
        names |= {call.id or "": call.function.name if call.id else "" for call in raw.tool_calls}
    if role == "tool":
        if raw.tool_call_id is None and "" not in names:  # its call had an id
            raise ApiError(400, f"{place}: a tool's result needs its tool_call_id", param=place)
        message["tool_call_id"] = call_id = raw.tool_call_id or ""
        if name := raw.name or names.get(call_id):
            message["name"] = name
    return message


def _read_content(raw: _Message, place: str) -> str:
    if raw.content is None or isinstance(raw.content, str):
        return raw.content or ""
    skipped = _BESIDE_CONTENT if raw.role == "assistant" else ()
    texts = [part.text for part in raw.content if part.type not in skipped]
    if None in texts:
        raise ApiError(
            400, f"{place}: only text is supported, as a string or as parts with text", param=place
        )
    return "".join(text or "" for text in texts)


def _read_call(raw: _ToolCall, place: str, free: _FreeJson) -> dict[str, Any]:
    arguments = free.decode_valid(raw.function.arguments, place)
    if isinstance(arguments, str):
        with suppress(*UNREADABLE):  # what is not JSON, or nested too deep, stays text
            arguments = free.decode(arguments.strip() or "null", place)
    # Clients write no arguments in many ways.
    function = {"name": raw.function.name, "arguments": {} if arguments is None else arguments}
    return {"id": raw.id or "", "type": "function", "function": function}


def _read_tools(raw: Sequence[_Tool], free: _FreeJson) -> list[dict[str, Any]]:
    """Return tools as chat templates show them to the policy, without fields that are for servers only."""
    tools = []
    for i, tool in enumerate(raw):
        place = f"tools[{i}]"
        function = free.decode_valid(tool.function, place) if tool.type == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"{place}: expected a function with a name", param=place)
        kept = {key: value for key, value in function.items() if value is not None and key != "strict"}
        tools.append({"type": "function", "function": kept})
    return tools


def _read_stop(raw: str | list[str] | None) -> tuple[str, ...]:
    stops = [raw] if isinstance(raw, str) else raw or ()
    if not all(0 < len(stop) <= _MAX_STOP_CHARS for stop in stops) or len(stops) > _MAX_STOPS:
        raise ApiError(
            400,
            f"stop must be a string or a list of strings: at most {_MAX_STOPS}, of 1 to {_MAX_STOP_CHARS} "
            "characters",
            param="stop",
        )
    return tuple(stops)


def _at_least_one(value: int, name: str) -> int:
    if value < 1:
        raise ApiError(400, f"{name} is {value}, expected a whole number of at least 1", param=name)
    return value
