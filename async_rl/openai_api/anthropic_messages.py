"""Anthropic's Messages API, checked as strictly as chat completions.

```
 blocks of a message                      messages
 assistant: thinking, text, tool_use      one assistant message: content and tool calls
 user: tool_result, tool_result, text     a tool message for each result, then a user message
```

Thinking blocks come with a signature that only says that they are ours; they may be left out of the history.

Source: Anthropic's API reference, "Messages", "Count tokens" and "Streaming messages".
"""

from __future__ import annotations

from collections.abc import Sequence
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
from async_rl.openai_api.requests import ApiError, ChatAnswer, ChatRequest, ReplyHead, server_sent

_ERRORS: Final = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Types of errors by status; others are invalid requests, or the server's."""
_SIGNATURE: Final = "cG9saWN5"
_BILLING: Final = "x-anthropic-billing-header:"
"""Claude Code begins its system prompt with such a block, which differs in each request."""


class _ContentBlock(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = ABSENT
    tool_use_id: str | None = None
    content: str | list[Part] | None = None


class _AnthropicMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_ContentBlock]


class _ToolChoice(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct, frozen=True):
    type: str


class _OutputFormat(msgspec.Struct, frozen=True):
    type: str
    schema: Raw = ABSENT


class _OutputConfig(msgspec.Struct, frozen=True):
    effort: str | None = None
    format: _OutputFormat | None = None


class _Thread(msgspec.Struct, frozen=True):
    """`create`, or `continue` with the id of the answer that the request continues."""

    type: str
    previous_message_id: str | None = None


class _MessagesSampling(msgspec.Struct, frozen=True):
    """Parameters that change what is sampled: log-probs would not be those of the trained policy."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class _MessagesBody(_MessagesSampling, frozen=True):
    """The fields of a request that are read; others are ignored."""

    model: str | None = None
    messages: Annotated[list[_AnthropicMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    system: str | list[Part] | None = None
    max_tokens: int | None = None
    tools: list[Raw] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _OutputFormat | None = None
    mcp_servers: list[Raw] | None = None
    thread: _Thread | None = None


_BODY: Final = msgspec.json.Decoder(_MessagesBody)


class AnthropicMessages:
    """Implements `Dialect`."""

    path = "/v1/messages"

    def read(self, body: bytes, model: str) -> ChatRequest:
        """Implements `Dialect.read`."""
        raw = decode(_BODY, body)
        if not raw.messages:
            raise ApiError(400, "messages must be a list with at least one message", param="messages")
        if raw.mcp_servers:
            raise ApiError(400, "mcp_servers is not supported: offer the tools", param="mcp_servers")
        free = FreeJson()
        max_new_tokens = None if raw.max_tokens is None else at_least_one(raw.max_tokens, "max_tokens")
        stop = read_stop(raw.stop_sequences, "stop_sequences")
        tools, hosted = _read_tools(raw.tools or (), free)
        unsupported = _unsupported(raw, hosted, free, model)
        may_call = raw.tool_choice is None or raw.tool_choice.type != "none"
        messages = _read_messages(raw.messages, free)
        previous = raw.thread.previous_message_id if raw.thread is not None else None
        if messages[-1]["role"] == "assistant":
            raise ApiError(
                400,
                "the last message is the assistant's: the policy writes whole turns, so end with the user's",
                param="messages",
            )
        return ChatRequest(
            model=raw.model or model,
            messages=messages,
            tools=tools,
            tools_digest=digest(tools),
            may_call=may_call,
            max_new_tokens=max_new_tokens,
            stop=stop,
            stream=bool(raw.stream),
            logprobs=False,
            forced=(forced := _forced(raw, free)),
            unsupported=unsupported,
            parameters_digest=digest((max_new_tokens, stop, may_call, forced, unsupported)),
            instructions=_read_system(raw.system),
            previous=previous,
            keeps_setup=previous is not None,
        )

    def answer(self, answer: ChatAnswer, head: ReplyHead, request: ChatRequest) -> dict[str, Any]:
        """Implements `Dialect.answer`."""
        blocks: list[dict[str, Any]] = []
        if answer.reasoning is not None:
            blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": _SIGNATURE})
        if answer.content or not (answer.calls or answer.reasoning):
            blocks.append({"type": "text", "text": answer.content or "", "citations": None})
        for call in answer.calls:
            arguments = msgspec.json.decode(call.arguments)
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
        return {**_message(head), "content": blocks, **_stop(answer), "usage": _usage(answer)}

    def stream(self, head: ReplyHead, request: ChatRequest) -> MessageEvents:
        """Implements `Dialect.stream`."""
        return MessageEvents(head)

    def error(self, error: ApiError) -> dict[str, Any]:
        """Implements `Dialect.error`."""
        message = error.message
        if error.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # so clients recognise it, and compact
        kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        fields: dict[str, Any] = {"type": kind, "message": message}
        if error.code == "previous_response_not_found":
            fields["details"] = {"error_code": "thread_not_found"}  # so clients send the whole history
        return {"type": "error", "error": fields, "request_id": None}


class MessageEvents:
    """Implements `AnswerStream`: thinking, text and calls are blocks, one after the other."""

    keep_alive = server_sent({"type": "ping"}, "ping")

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._num_blocks = 0
        """Blocks that have ended."""
        self._open: str | None = None
        """The type of the block that grows."""

    def begin(self) -> bytes:
        """Implements `AnswerStream.begin`."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        begun = {**_message(self._head), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**begun, "usage": usage})

    def add_reasoning(self, text: str) -> bytes:
        """Implements `AnswerStream.add_reasoning`."""
        return self._add("thinking", {"type": "thinking_delta", "thinking": text})

    def add_content(self, text: str) -> bytes:
        """Implements `AnswerStream.add_content`."""
        return self._add("text", {"type": "text_delta", "text": text})

    def end(self, answer: ChatAnswer) -> bytes:
        """Implements `AnswerStream.end`."""
        events = self._close()
        if not self._num_blocks and not answer.calls:
            events += self._begin({"type": "text", "text": ""}) + self._close()
        for call in answer.calls:
            events += self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            events += self._delta({"type": "input_json_delta", "partial_json": call.arguments})
            events += self._close()
        return (
            events
            + _event("message_delta", delta=_stop(answer), usage=_usage(answer))
            + _event("message_stop")
        )

    def fail(self, error: ApiError) -> bytes:
        """Implements `AnswerStream.fail`."""
        return server_sent(AnthropicMessages().error(error), "error")

    def _add(self, kind: str, delta: dict[str, Any]) -> bytes:
        """Add to a block, which begins now if another one is open."""
        events = b""
        if self._open != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            events += self._close() + self._begin({"type": kind, kind: "", **signature})
        return events + self._delta(delta)

    def _begin(self, block: dict[str, Any]) -> bytes:
        self._open = block["type"]
        return _event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        events = b""
        if self._open == "thinking":
            events = self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        events += _event("content_block_stop", index=self._num_blocks)
        self._open, self._num_blocks = None, self._num_blocks + 1
        return events


def _event(event: str, **fields: Any) -> bytes:
    return server_sent({"type": event, **fields}, event)


def _message(head: ReplyHead) -> dict[str, Any]:
    return {"id": message_id(head.id), "type": "message", "role": "assistant", "model": head.model}


def message_id(answer_id: str) -> str:
    """Return the id of the message with an answer, which `previous_message_id` names."""
    return f"msg_{answer_id}"


def _stop(answer: ChatAnswer) -> dict[str, Any]:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    reason = reasons.get(answer.finish_reason, "stop_sequence" if answer.stopped_by else "end_turn")
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by if reason == "stop_sequence" else None}


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": answer.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _unsupported(raw: _MessagesBody, hosted: Sequence[str], free: FreeJson, model: str) -> dict[str, Any]:
    """Return the parameters that have no effect here, without those that would have none anywhere."""
    found = sampling_parameters(raw, _MessagesSampling.__struct_fields__, free, {})
    if raw.thinking is not None:
        found["thinking"] = raw.thinking.type
    choice = raw.tool_choice
    if choice is not None and choice.disable_parallel_tool_use and choice.type not in ("any", "tool"):
        found["parallel_tool_calls"] = False
    if raw.output_config is not None and raw.output_config.effort is not None:
        found["reasoning_effort"] = raw.output_config.effort
    if hosted:
        found["hosted_tools"] = ", ".join(hosted)
    if raw.model not in (None, model):
        found["model"] = raw.model
    return found


def _forced(raw: _MessagesBody, free: FreeJson) -> Forced | None:
    schema, output = None, raw.output_config or _OutputConfig()
    if (wanted := output.format or raw.output_format) is not None:
        schema = read_schema(wanted.type, wanted.schema, "output_config.format", free)
    choice = raw.tool_choice or _ToolChoice("auto")
    tool = {"any": ANY_TOOL, "tool": choice.name}.get(choice.type)
    if schema is None and tool is None:
        return None
    return Forced(schema=schema, tool=tool, one_call=bool(choice.disable_parallel_tool_use))


def _read_system(raw: str | Sequence[Part] | None) -> str:
    if raw is None or isinstance(raw, str):
        return raw or ""
    parts = [part for part in raw if not (part.text or "").startswith(_BILLING)]
    return "\n\n".join(read_text([part], "system") for part in parts)


def _read_tools(raw: Sequence[Raw], free: FreeJson) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tools that clients run, and the types of those that Anthropic's servers would run."""
    tools, hosted = [], []
    for i, each in enumerate(raw):
        place = f"tools[{i}]"
        tool = free.decode_valid(each, place)
        if isinstance(tool, dict) and isinstance(kind := tool.get("type"), str) and kind != "custom":
            hosted.append(kind)
            continue
        schema = tool.get("input_schema") if isinstance(tool, dict) else None
        if not isinstance(schema, dict):
            raise ApiError(400, f"{place}: expected a tool with an input_schema", param=place)
        shown = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
        tools.append(read_function(shown, place))
    return tools, hosted


def _read_messages(raw: Sequence[_AnthropicMessage], free: FreeJson) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for i, message in enumerate(raw):
        place = f"messages[{i}]"
        if message.role not in ("user", "assistant", "system"):
            raise ApiError(
                400,
                f"{place}: role is {message.role!r}, expected user, assistant or system",
                param=place,
            )
        blocks = message.content
        if isinstance(blocks, str):
            messages.append({"role": message.role, "content": blocks})
        elif message.role == "assistant":
            messages.append(_read_turn(blocks, place, names, free))
        else:
            messages += _read_blocks(message.role, blocks, place, names)
    return messages


def _read_turn(
    blocks: Sequence[_ContentBlock], place: str, names: dict[str, str], free: FreeJson
) -> dict[str, Any]:
    """Return a turn of the policy; `names` receives the tools of its calls, by id."""
    texts, calls = [], []
    for i, block in enumerate(blocks):
        at = f"{place}.content[{i}]"
        if block.type == "tool_use":
            calls.append(read_call(block.name or "", block.input, block.id, at, free))
            names[block.id or ""] = block.name or ""
        elif block.type == "text" and block.text is not None:
            texts.append(block.text)
        elif block.type not in ("thinking", "redacted_thinking"):
            raise _unreadable(block, at)
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return {**turn, "tool_calls": calls} if calls else turn


def _read_blocks(
    role: str, blocks: Sequence[_ContentBlock], place: str, names: dict[str, str]
) -> list[dict[str, Any]]:
    """Return the results of tools, and what the user says beside them."""
    results, texts = [], []
    for i, block in enumerate(blocks):
        at = f"{place}.content[{i}]"
        if block.type == "tool_result" and block.tool_use_id is not None:
            result = {"role": "tool", "content": read_text(block.content, f"{at}.content")}
            known = {"name": names[block.tool_use_id]} if block.tool_use_id in names else {}
            results.append({**result, "tool_call_id": block.tool_use_id, **known})
        elif block.type == "text" and block.text is not None:
            texts.append(block.text)
        else:
            raise _unreadable(block, at)
    said = [{"role": role, "content": "\n\n".join(texts)}] if texts or not results else []
    return [*results, *said]


def _unreadable(block: _ContentBlock, place: str) -> ApiError:
    return ApiError(
        400,
        f"{place}: blocks of the type {block.type!r} are not supported here: send text, tool_use, "
        "tool_result and thinking blocks, whole",
        param=place,
    )
