"""Requests, answers and errors of all dialects, in the form in which sessions and conversations need them.

```
 body ──Dialect.read──► ChatRequest ──► session, policy ──► ChatAnswer ──Dialect.answer | AnswerStream──► body
```
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import msgspec

from async_rl.openai_api.constraints import Forced

_MAX_ERROR_CHARS: Final = 1000
"""Errors quote what was received, which may be long."""


class ApiError(Exception):
    """An error answer, which each dialect writes in its own format.

    Its headers ask clients to retry only if a retry can help.
    """

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
    def headers(self) -> dict[str, str]:
        """Headers for OpenAI's and Anthropic's clients, which retry 408, 409, 429 and from 500 by default."""
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
    """False if tools may not be called: calls that the policy writes stay text."""
    max_new_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    logprobs: bool
    forced: Forced | None
    """What the policy must write; None leaves it free."""
    unsupported: dict[str, Any]
    """Parameters without effect: sampling parameters, another model."""
    parameters_digest: bytes
    """Tells whether two requests have the same limits and parameters, those without effect included."""
    instructions: str = ""
    """The beginning of the first message that belongs to this request only, not to those that continue it."""
    previous: str | None = None
    """The id of the answer that this request continues; its messages are the new ones, without the
    instructions. None if the request has the whole conversation."""
    has_references: bool = False
    """Whether messages name items of earlier answers, in a list `references`."""
    keeps_setup: bool = False
    """Whether the instructions and tools are those of the conversation that it continues."""
    reply: dict[str, Any] = {}
    """What the dialect needs of the request to write the answer."""


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

    @property
    def body(self) -> dict[str, Any]:
        """The JSON in which OpenAI writes it; the bytes of a part of a character are unknown."""
        data = None if "\ufffd" in self.token else list(self.token.encode())
        return {"token": self.token, "logprob": self.logprob, "bytes": data, "top_logprobs": []}


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the policy."""

    content: str | None
    reasoning: str | None
    calls: tuple[FunctionCall, ...]
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stopped_by: str | None = None
    """The stop string of the request that ended the turn."""
    prompt_tokens: int
    """Tokens of the prompt, which is the whole conversation so far."""
    completion_tokens: int
    logprobs: tuple[TokenLogProb, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message as OpenAI writes it, which histories are compared with."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.calls
            ]
        return message


class ReplyHead(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that an answer and all its chunks share."""

    id: str
    """The same for a repeated request; each dialect puts its prefix before it."""
    created: int
    """Unix time, seconds."""
    model: str


class AnswerStream(Protocol):
    """Encodes one answer as server-sent events, while it grows."""

    keep_alive: bytes
    """Sent while the policy writes nothing."""

    def begin(self) -> bytes:
        """Return what precedes the text."""
        ...

    def add_reasoning(self, text: str) -> bytes:
        """Return the events of more reasoning."""
        ...

    def add_content(self, text: str) -> bytes:
        """Return the events of more content."""
        ...

    def end(self, answer: ChatAnswer) -> bytes:
        """Return the events of tool calls and of the end; reasoning and content have been added."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """Return the events of an error; the status has been sent already."""
        ...


class Dialect(Protocol):
    """One format of requests and answers."""

    path: str
    """Where it is served, from `/v1` on."""

    def read(self, body: bytes, model: str) -> ChatRequest:
        """Read and check a request.

        Args:
            body: JSON.
            model: The name of the policy.

        Raises:
            ApiError: 400, with the problem and the remedy.
        """
        ...

    def answer(self, answer: ChatAnswer, head: ReplyHead, request: ChatRequest) -> dict[str, Any]:
        """Return the JSON body of a complete answer."""
        ...

    def stream(self, head: ReplyHead, request: ChatRequest) -> AnswerStream:
        """Return what encodes a streamed answer."""
        ...

    def error(self, error: ApiError) -> dict[str, Any]:
        """Return the JSON body of an error."""
        ...


def openai_error(error: ApiError) -> dict[str, Any]:
    """Return an error as OpenAI writes it."""
    kind = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}
    return {
        "error": {
            "message": error.message,
            "type": kind.get(error.status, "invalid_request_error"),
            "param": error.param,
            "code": error.code,
        }
    }


def server_sent(value: Any, event: str | None = None) -> bytes:
    """Encode a JSON value as a server-sent event."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + msgspec.json.encode(value) + b"\n\n"
