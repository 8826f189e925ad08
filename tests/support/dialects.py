"""The same agent in each dialect: what it sends, and what it has received, in one form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Protocol

import anthropic
import httpx
import httpx2
import msgspec
import openai

from async_rl.openai_api.endpoint import EndpointAccess


class Heard(msgspec.Struct, kw_only=True):
    """An answer of the policy."""

    text: str = ""
    thought: str = ""
    calls: list[tuple[str, str, dict[str, Any]]] = []
    """Id, name and arguments of each."""
    reason: str = ""
    tokens: tuple[int, int] = (0, 0)
    """Of the prompt, of the turn."""
    items: list[Any] = []
    """What the client puts into its history."""
    id: str = ""


class Client(Protocol):
    """Keeps a history in its dialect, as programs do."""

    history: list[Any]

    async def ask(
        self, *new: str | tuple[str, str], tools: Sequence[dict[str, Any]] = (), **request: Any
    ) -> Heard:
        """Send the history with new messages: a text of the user, or the id and result of a call."""
        ...

    async def hear(self, *new: str | tuple[str, str], tools: Any = (), **request: Any) -> Heard:
        """The same, streamed."""
        ...


class ResponsesClient:
    """OpenAI's client, which sends the whole history, or only what is new."""

    terms: ClassVar = {"max_tokens": "max_output_tokens", "system": "instructions"}

    def __init__(self, client: openai.AsyncOpenAI, *, chained: bool = False) -> None:
        self.client = client
        self.chained = chained
        self.history: list[Any] = []
        self.last: str | None = None

    def _request(self, new: Any, tools: Any, request: dict[str, Any]) -> dict[str, Any]:
        items = [
            {"role": "user", "content": each}
            if isinstance(each, str)
            else {"type": "function_call_output", "call_id": each[0], "output": each[1]}
            for each in new
        ]
        self.history += items
        named = {self.terms.get(name, name): value for name, value in request.items()}
        if tools:
            named["tools"] = [{"type": "function", "strict": True, **tool} for tool in tools]
        if self.chained and self.last is not None:
            return {"model": "policy", "input": items, "previous_response_id": self.last, **named}
        return {"model": "policy", "input": self.history, **named}

    def _heard(self, response: Any) -> Heard:
        heard = Heard(reason=response.status, id=response.id)
        for item in response.output:
            if item.type == "message":
                heard.text += item.content[0].text
            elif item.type == "reasoning":
                heard.thought += item.content[0].text
            else:
                heard.calls.append((item.call_id, item.name, json.loads(item.arguments)))
        heard.tokens = response.usage.input_tokens, response.usage.output_tokens
        heard.items = [item.model_dump(exclude_none=True) for item in response.output]
        self.history += heard.items
        self.last = response.id
        return heard

    async def ask(self, *new: Any, tools: Any = (), **request: Any) -> Heard:
        return self._heard(await self.client.responses.create(**self._request(new, tools, request)))

    async def hear(self, *new: Any, tools: Any = (), **request: Any) -> Heard:
        said = {"response.output_text.delta": "", "response.reasoning_text.delta": ""}
        arguments, numbers, ended = [], [], None
        async for event in await self.client.responses.create(
            **self._request(new, tools, request), stream=True
        ):
            numbers.append(event.sequence_number)
            if event.type in said:
                said[event.type] += event.delta
            elif event.type == "response.function_call_arguments.done":
                arguments.append(json.loads(event.arguments))
            elif event.type in ("response.completed", "response.incomplete"):
                ended = event.response
        assert ended is not None
        assert numbers == [*range(len(numbers))]
        heard = self._heard(ended)
        assert said == {
            "response.output_text.delta": heard.text,
            "response.reasoning_text.delta": heard.thought,
        }
        assert arguments == [call[2] for call in heard.calls]
        return heard


class MessagesClient:
    """Anthropic's client, which sends the whole history, or only what is new to a thread."""

    def __init__(self, client: anthropic.AsyncAnthropic, *, threaded: bool = False) -> None:
        self.client = client
        self.threaded = threaded
        self.history: list[Any] = []
        self.last: str | None = None

    def _request(self, new: Any, tools: Any, request: dict[str, Any]) -> dict[str, Any]:
        blocks = [
            {"type": "text", "text": each}
            if isinstance(each, str)
            else {"type": "tool_result", "tool_use_id": each[0], "content": each[1]}
            for each in new
        ]
        self.history.append({"role": "user", "content": blocks})
        if self.threaded and self.last is not None:
            thread = {"type": "continue", "previous_message_id": self.last}
            kept = {name: value for name, value in request.items() if name != "system"}
            return {
                "model": "policy",
                "max_tokens": 256,
                "messages": self.history[-1:],
                "extra_body": {"thread": thread},
                **kept,
            }
        offered = [
            {"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
            for t in tools
        ]
        named = {"max_tokens": 256, **({"tools": offered} if offered else {}), **request}
        return {"model": "policy", "messages": self.history, **named}

    def _heard(self, message: Any) -> Heard:
        heard = Heard(reason=message.stop_reason, id=message.id)
        self.last = message.id
        for block in message.content:
            if block.type == "text":
                heard.text += block.text
            elif block.type == "thinking":
                assert block.signature
                heard.thought += block.thinking
            else:
                heard.calls.append((block.id, block.name, block.input))
        heard.tokens = message.usage.input_tokens, message.usage.output_tokens
        heard.items = [block.model_dump(exclude_none=True) for block in message.content]
        self.history.append({"role": "assistant", "content": heard.items})
        return heard

    async def ask(self, *new: Any, tools: Any = (), **request: Any) -> Heard:
        return self._heard(await self.client.messages.create(**self._request(new, tools, request)))

    async def hear(self, *new: Any, tools: Any = (), **request: Any) -> Heard:
        async with self.client.messages.stream(**self._request(new, tools, request)) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            heard = self._heard(await stream.get_final_message())
        assert text == heard.text
        return heard


class ChatClient:
    """OpenAI's client for chat completions."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self.client = client
        self.history: list[Any] = []

    def _request(self, new: Any, tools: Any, request: dict[str, Any]) -> dict[str, Any]:
        if (system := request.pop("system", None)) is not None and not self.history:
            self.history.append({"role": "system", "content": system})
        self.history += [
            {"role": "user", "content": each}
            if isinstance(each, str)
            else {"role": "tool", "tool_call_id": each[0], "content": each[1]}
            for each in new
        ]
        if tools:
            request["tools"] = [{"type": "function", "function": tool} for tool in tools]
        return {"model": "policy", "messages": self.history, **request}

    async def ask(self, *new: Any, tools: Any = (), **request: Any) -> Heard:
        response = await self.client.chat.completions.create(**self._request(new, tools, request))
        choice = response.choices[0]
        message = choice.message
        self.history.append(message.model_dump(exclude_none=True))
        return Heard(
            text=message.content or "",
            thought=getattr(message, "reasoning_content", None) or "",
            calls=[
                (c.id, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()
            ],
            reason=choice.finish_reason,
            tokens=(response.usage.prompt_tokens, response.usage.completion_tokens),
            id=response.id,
        )

    async def hear(self, *new: Any, tools: Any = (), **request: Any) -> Heard:
        async with self.client.chat.completions.stream(**self._request(new, tools, request)) as stream:
            async for _ in stream:
                pass
            message = (await stream.get_final_completion()).choices[0].message
        self.history.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        return Heard(text=message.content or "")


@asynccontextmanager
async def client_in(dialect: str, access: EndpointAccess, *, max_retries: int = 0) -> AsyncIterator[Any]:
    """The official client of a dialect, with a trajectory's key.

    `chained` are Responses that name the one before, `threaded` are Messages that do.
    """
    if dialect in ("messages", "threaded"):
        async with (
            httpx2.AsyncClient(trust_env=False) as http2,
            anthropic.AsyncAnthropic(
                base_url=access.root_url, api_key=access.api_key, http_client=http2, max_retries=max_retries
            ) as theirs,
        ):
            yield MessagesClient(theirs, threaded=dialect == "threaded")
        return
    async with (
        httpx.AsyncClient(trust_env=False) as http,
        openai.AsyncOpenAI(
            base_url=access.base_url, api_key=access.api_key, http_client=http, max_retries=max_retries
        ) as ours,
    ):
        yield ChatClient(ours) if dialect == "chat" else ResponsesClient(ours, chained=dialect == "chained")
