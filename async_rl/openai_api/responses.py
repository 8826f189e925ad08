"""OpenAI's Responses API, checked as strictly as chat completions.

```
 input items                                        messages
 reasoning, message, function_call, function_call   one assistant message: content and tool calls
 function_call_output                               tool message
 message                                            system, user or assistant message
```

`previous_response_id` names an answer of the same trajectory; its conversation precedes the input. References
name its items. Answers are kept while the trajectory is open, whatever `store` says.

Source: OpenAI's API reference, "Responses" and "Streaming events".
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

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of the API, with their names in chat templates."""
_REFUSED: Final = {
    "background": "send the request without it, and wait for the answer",
    "conversation": "use previous_response_id, or send the whole history",
    "prompt": "send the prompt's text",
}
"""Parameters that cannot be served, with the remedy."""


class _InputItem(msgspec.Struct, frozen=True):
    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Raw = ABSENT
    output: str | list[Part] | None = None


class _TextFormat(msgspec.Struct, frozen=True):
    type: str
    schema: Raw = ABSENT


class _TextOptions(msgspec.Struct, frozen=True):
    format: _TextFormat | None = None


class _ReasoningOptions(msgspec.Struct, frozen=True):
    effort: str | None = None


class _ResponsesSampling(msgspec.Struct, frozen=True):
    """Parameters that change what is sampled: log-probs would not be those of the trained policy."""

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


class _ResponsesBody(_ResponsesSampling, frozen=True):
    """The fields of a request that are read; others are ignored."""

    model: str | None = None
    input: str | Annotated[list[_InputItem], Meta(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Raw] | None = None
    tool_choice: Raw = ABSENT
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    text: _TextOptions | None = None
    reasoning: _ReasoningOptions | None = None
    truncation: str | None = None
    store: bool | None = None
    metadata: Raw = ABSENT
    background: bool | None = None
    conversation: Raw = ABSENT
    prompt: Raw = ABSENT


_BODY: Final = msgspec.json.Decoder(_ResponsesBody)


class Responses:
    """Implements `Dialect`."""

    path = "/v1/responses"

    def read(self, body: bytes, model: str) -> ChatRequest:
        """Implements `Dialect.read`."""
        raw = decode(_BODY, body)
        _refuse_unsupported(raw)
        free = FreeJson()
        max_new_tokens = None
        if raw.max_output_tokens is not None:
            max_new_tokens = at_least_one(raw.max_output_tokens, "max_output_tokens")
        choice = free.decode_valid(raw.tool_choice, "tool_choice")
        tools, hosted = _read_tools(raw.tools or (), free)
        unsupported = _unsupported(raw, choice, hosted, free, model)
        may_call = choice != "none"
        messages = _read_input(raw.input or "", free)
        return ChatRequest(
            model=raw.model or model,
            messages=messages,
            tools=tools,
            tools_digest=digest(tools),
            may_call=may_call,
            max_new_tokens=max_new_tokens,
            stop=(),
            stream=bool(raw.stream),
            logprobs="message.output_text.logprobs" in (raw.include or ()),
            forced=(forced := _forced(raw, choice, free)),
            unsupported=unsupported,
            parameters_digest=digest((max_new_tokens, may_call, forced, unsupported)),
            instructions=raw.instructions or "",
            previous=raw.previous_response_id,
            has_references=any("references" in message for message in messages),
            reply={
                "instructions": raw.instructions,
                "max_output_tokens": max_new_tokens,
                "metadata": free.decode_valid(raw.metadata, "metadata") or {},
                "parallel_tool_calls": raw.parallel_tool_calls is not False,
                "previous_response_id": raw.previous_response_id,
                "store": raw.store is not False,
                "tool_choice": choice or "auto",
                "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in tools],
            },
        )

    def answer(self, answer: ChatAnswer, head: ReplyHead, request: ChatRequest) -> dict[str, Any]:
        """Implements `Dialect.answer`."""
        return _ended(answer, head, request)

    def stream(self, head: ReplyHead, request: ChatRequest) -> ResponseEvents:
        """Implements `Dialect.stream`."""
        return ResponseEvents(head, request)

    def error(self, error: ApiError) -> dict[str, Any]:
        """Implements `Dialect.error`."""
        return openai_error(error)


class ResponseEvents:
    """Implements `AnswerStream`: reasoning, message and calls are items, one after the other."""

    keep_alive = b": the policy is generating\n\n"

    def __init__(self, head: ReplyHead, request: ChatRequest) -> None:
        self._head = head
        self._request = request
        self._num_events = 0
        self._num_items = 0
        """Items that have ended."""
        self._open: str | None = None
        """The type of the item that grows."""
        self._text: list[str] = []
        """Its text so far."""

    def begin(self) -> bytes:
        """Implements `AnswerStream.begin`."""
        response = _response(self._head, self._request, status="in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def add_reasoning(self, text: str) -> bytes:
        """Implements `AnswerStream.add_reasoning`."""
        return self._add("reasoning", text)

    def add_content(self, text: str) -> bytes:
        """Implements `AnswerStream.add_content`."""
        return self._add("message", text)

    def end(self, answer: ChatAnswer) -> bytes:
        """Implements `AnswerStream.end`."""
        response = _ended(answer, self._head, self._request)
        events = self._close(response["output"])
        for item in response["output"][self._num_items :]:
            events += self._add_whole(item)
        return events + self._event(f"response.{response['status']}", response=response)

    def fail(self, error: ApiError) -> bytes:
        """Implements `AnswerStream.fail`."""
        code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
        failure = {"code": code, "message": error.message}
        response = _response(self._head, self._request, status="failed", error=failure)
        return self._event("response.failed", response=response)

    def _add(self, kind: str, text: str) -> bytes:
        """Add text to an item, which begins now if another one is open."""
        events = b""
        if self._open != kind:
            events += self._close() + self._open_item(_item(kind, self._head, "in_progress"), kind)
        self._text.append(text)
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return events + self._part_event(f"response.{name}.delta", kind, delta=text, **more)

    def _open_item(self, item: dict[str, Any], kind: str) -> bytes:
        self._open, self._text = kind, []
        return self._event(
            "response.output_item.added", output_index=self._num_items, item=item
        ) + self._part_event("response.content_part.added", kind, part=_part(kind, ""))

    def _close(self, output: Sequence[dict[str, Any]] = ()) -> bytes:
        """End the open item, if there is one; it is that of the complete output where that is known."""
        if self._open is None:
            return b""
        kind, text, index = self._open, "".join(self._text), self._num_items
        item = output[index] if output else _item(kind, self._head, "completed", text)
        name = "reasoning_text" if kind == "reasoning" else "output_text"
        part = item["content"][0]
        more = {"logprobs": part["logprobs"]} if kind == "message" else {}
        events = self._part_event(f"response.{name}.done", kind, text=part["text"], **more)
        events += self._part_event("response.content_part.done", kind, part=part)
        events += self._event("response.output_item.done", output_index=index, item=item)
        self._open, self._num_items = None, index + 1
        return events

    def _add_whole(self, item: dict[str, Any]) -> bytes:
        """Add an item that is complete: a call, or a message without text."""
        if item["type"] != "function_call":
            events = self._open_item({**item, "status": "in_progress", "content": []}, item["type"])
            return events + self._close([{}] * self._num_items + [item])
        index = self._num_items
        self._num_items += 1
        place = {"item_id": item["id"], "output_index": index}
        begun = {**item, "arguments": "", "status": "in_progress"}
        name, arguments = "response.function_call_arguments", item["arguments"]
        return b"".join(
            (
                self._event("response.output_item.added", output_index=index, item=begun),
                self._event(f"{name}.delta", **place, delta=arguments),
                self._event(f"{name}.done", **place, name=item["name"], arguments=arguments),
                self._event("response.output_item.done", output_index=index, item=item),
            )
        )

    def _part_event(self, event: str, kind: str, **fields: Any) -> bytes:
        place = {"item_id": _item_id(kind, self._head), "output_index": self._num_items, "content_index": 0}
        return self._event(event, **place, **fields)

    def _event(self, event: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return server_sent({"type": event, "sequence_number": number, **fields}, event)


def _response(
    head: ReplyHead,
    request: ChatRequest,
    *,
    status: str,
    output: Sequence[dict[str, Any]] = (),
    **fields: Any,
) -> dict[str, Any]:
    """Return a response object, finished or not."""
    return {
        "id": response_id(head.id),
        "object": "response",
        "created_at": head.created,
        "model": head.model,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "output": output,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "top_logprobs": 0,
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        **request.reply,
        **fields,
    }


def response_id(answer_id: str) -> str:
    """Return the id of the response with an answer, which `previous_response_id` names."""
    return f"resp_{answer_id}"


def _ended(answer: ChatAnswer, head: ReplyHead, request: ChatRequest) -> dict[str, Any]:
    """Return the response of a complete answer."""
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    output = []
    if answer.reasoning is not None:
        output.append(_item("reasoning", head, "completed", answer.reasoning))
    if answer.content or not (answer.calls or answer.reasoning):
        item = _item("message", head, status, answer.content or "")
        if request.logprobs:
            item["content"][0]["logprobs"] = [token.body for token in answer.logprobs]
        output.append(item)
    for i, call in enumerate(answer.calls):
        output.append(
            {
                "id": _call_id(head.id, i),
                "type": "function_call",
                "status": "completed",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
            }
        )
    usage = {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
    why = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return _response(head, request, status=status, output=output, usage=usage, incomplete_details=why)


def _item_id(kind: str, head: ReplyHead) -> str:
    return f"{'rs' if kind == 'reasoning' else 'msg'}_{head.id}"


def _call_id(answer_id: str, number: int) -> str:
    return f"fc_{answer_id}_{number}"


def with_references(message: dict[str, Any], answers: Mapping[str, ChatAnswer]) -> dict[str, Any]:
    """Return a message of the policy with the items that it names.

    Args:
        message: May name items of answers in `references`.
        answers: The answers of the trajectory, by id.

    Raises:
        ApiError: 404: there is no such item.
    """
    content, calls = message["content"], [*message.get("tool_calls", ())]
    for item_id in message.get("references", ()):
        answer = answers.get(item_id.split("_")[1] if "_" in item_id else "")
        known = [] if answer is None else answer.message.get("tool_calls", [])
        if answer is not None and item_id.startswith("msg_"):
            content = answer.content or ""
        elif found := [call for i, call in enumerate(known) if item_id.endswith(f"_{i}")]:
            calls += found
        else:
            raise ApiError(
                404,
                f"Item with id {item_id!r} not found: it belongs to another trajectory, or an attempt that "
                "was lost; send the item itself, as clients do with store: false",
                param="input",
            )
    whole = {"role": message["role"], "content": content}
    return {**whole, "tool_calls": calls} if calls else whole


def _item(kind: str, head: ReplyHead, status: str, text: str | None = None) -> dict[str, Any]:
    """Return a reasoning or message item; one without text has only begun."""
    content = [] if text is None else [_part(kind, text)]
    own: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
    return {"id": _item_id(kind, head), "type": kind, "status": status, **own, "content": content}


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _refuse_unsupported(raw: _ResponsesBody) -> None:
    for name, remedy in _REFUSED.items():
        if getattr(raw, name) not in (None, False, ABSENT):
            raise ApiError(400, f"{name} is not supported: {remedy}", param=name)
    if not raw.input:
        raise ApiError(400, "input must be text, or a list with at least one item", param="input")
    if raw.top_logprobs:
        raise ApiError(
            400, "top_logprobs is not supported: only sampled tokens have log-probs", param="top_logprobs"
        )


def _unsupported(
    raw: _ResponsesBody, choice: Any, hosted: Sequence[str], free: FreeJson, model: str
) -> dict[str, Any]:
    """Return the parameters that have no effect here, without those that would have none anywhere."""
    found = sampling_parameters(raw, _ResponsesSampling.__struct_fields__, free, {})
    if raw.reasoning is not None and raw.reasoning.effort is not None:
        found["reasoning_effort"] = raw.reasoning.effort
    if raw.parallel_tool_calls is False and choice in (None, "auto", "none"):
        found["parallel_tool_calls"] = False
    if raw.truncation not in (None, "disabled"):
        found["truncation"] = raw.truncation
    if hosted:
        found["hosted_tools"] = ", ".join(hosted)
    if raw.model not in (None, model):
        found["model"] = raw.model
    return found


def _forced(raw: _ResponsesBody, choice: Any, free: FreeJson) -> Forced | None:
    schema = None
    if raw.text is not None and (wanted := raw.text.format) is not None and wanted.type != "text":
        schema = read_schema(wanted.type, wanted.schema, "text.format", free)
    tool = None
    if isinstance(choice, dict):
        tool = choice.get("name") if choice.get("type") == "function" else ANY_TOOL
    elif choice == "required":
        tool = ANY_TOOL
    if schema is None and tool is None:
        return None
    return Forced(schema=schema, tool=tool, one_call=raw.parallel_tool_calls is False)


def _read_tools(raw: Sequence[Raw], free: FreeJson) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the functions, and the types of tools that OpenAI's servers would run: the policy has none."""
    tools, hosted = [], []
    for i, each in enumerate(raw):
        place = f"tools[{i}]"
        tool = free.decode_valid(each, place)
        if not isinstance(tool, dict) or not isinstance(kind := tool.get("type"), str):
            raise ApiError(400, f"{place}: expected an object with a type", param=place)
        if kind == "custom":
            raise ApiError(400, f"{place}: custom tools are not supported: use a function", param=place)
        if kind != "function":
            hosted.append(kind)
            continue
        tools.append(read_function({key: value for key, value in tool.items() if key != "type"}, place))
    return tools, hosted


def _read_input(raw: str | Sequence[_InputItem], free: FreeJson) -> list[dict[str, Any]]:
    """Return the input as messages: the items of one turn of the policy are one message."""
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    turn: dict[str, Any] | None = None
    for i, item in enumerate(raw):
        place, kind = f"input[{i}]", item.type or "message"
        if kind == "reasoning":
            turn = None  # a turn begins with its thoughts, which may be left out
        elif kind == "item_reference" and item.id is not None:
            if item.id.startswith("rs_"):
                turn = None  # thoughts, as above
                continue
            if turn is None:
                messages.append(turn := {"role": "assistant", "content": ""})
            turn.setdefault("references", []).append(item.id)
        elif kind == "function_call":
            call = read_call(item.name or "", item.arguments, item.call_id, place, free)
            if turn is None:
                messages.append(turn := {"role": "assistant", "content": ""})
            turn.setdefault("tool_calls", []).append(call)
            names[call["id"]] = call["function"]["name"]
        elif kind == "function_call_output":
            if item.call_id is None:
                raise ApiError(400, f"{place}: a function's output needs its call_id", param=place)
            message = {"role": "tool", "content": read_text(item.output, f"{place}.output")}
            known = {"name": names[item.call_id]} if item.call_id in names else {}
            messages.append({**message, "tool_call_id": item.call_id, **known})
            turn = None
        elif kind == "message":
            message = _read_message(item, place)
            if message["role"] != "assistant":
                messages.append(message)
                turn = None
            elif turn is not None and not turn["content"]:  # its calls came first
                turn["content"] = message["content"]
            else:
                messages.append(turn := message)
        else:
            raise ApiError(
                400,
                f"{place}: items of the type {kind!r} are not supported: send messages, function_call, "
                "function_call_output and reasoning items themselves",
                param=place,
            )
    return messages


def _read_message(item: _InputItem, place: str) -> dict[str, Any]:
    if (role := _ROLES.get(item.role or "")) is None:
        raise ApiError(
            400, f"{place}: role is {item.role!r}, expected one of {', '.join(_ROLES)}", param=place
        )
    skipped = ("refusal",) if role == "assistant" else ()
    return {"role": role, "content": read_text(item.content, f"{place}.content", skipped=skipped)}
