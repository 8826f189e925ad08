"""Finds the conversation of a request: it continues one, repeats an earlier request, or begins another.

```
 known:    system user ANSWER tool ANSWER
 request:  system user ANSWER tool ANSWER user         continues it: `user` is new
           system user ANSWER tool                     repeats the second request
           system user ANSWER edited                   another conversation, from the first answer on
           other                                       another conversation
```

Messages are compared by meaning, not literally. The policy's messages are compared by the content and tool
calls that were returned, without thoughts, which many agents leave out. The order of keys, ids and
surrounding white space are ignored. Nothing here waits or samples.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from async_rl.openai_api.chat_completions import ApiError, ChatAnswer, ChatRequest
from async_rl.rollout.session.api import Session

_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)

MessageKey = tuple[str, str, str]
"""A message in comparable form: role, content, tool calls."""


class Exchange:
    """One request of a conversation, and its answer."""

    def __init__(self, request: ChatRequest, keys: Sequence[MessageKey], number: int) -> None:
        self.request = request
        self.number = number
        """The number of this exchange in its trajectory, from 1."""
        self.keys = tuple(keys)
        self.text = ""
        """The text of the turn so far."""
        self.answer: ChatAnswer | None = None
        self.error: ApiError | None = None
        self.listeners = 0
        """The number of connections that wait for the answer."""
        self.delivered = False
        """Whether a connection has received the whole answer."""
        self.changed = asyncio.Event()
        """Set and replaced whenever this exchange changes."""

    @property
    def ended(self) -> bool:
        """Whether there is an answer or an error."""
        return self.answer is not None or self.error is not None

    def is_repeated_by(self, request: ChatRequest, keys: Sequence[MessageKey]) -> bool:
        """Return whether a request is the same as this one."""
        return self.keys == tuple(keys) and _parameters(self.request) == _parameters(request)


class RequestConversation:
    """One session's conversation as messages: the agent's as received, the policy's as returned."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tools = ""
        self.known: tuple[MessageKey, ...] = ()
        self.exchanges: list[Exchange] = []

    @property
    def is_busy(self) -> bool:
        """Whether an answer is being made."""
        return bool(self.exchanges) and not self.exchanges[-1].ended

    def is_continued_by(self, request: ChatRequest, keys: Sequence[MessageKey]) -> bool:
        """Return whether a request repeats everything known and adds to it."""
        length = len(self.known)
        if not length:
            return not self.exchanges or not self.is_busy
        new = not self.is_busy and len(keys) > length and self.tools == tools_key(request)
        return new and self.known == tuple(keys[:length])

    def begin_exchange(self, exchange: Exchange) -> list[dict[str, Any]]:
        """Add an exchange that continues this conversation, and return its new messages."""
        new = exchange.request.messages[len(self.known) :]
        self.exchanges.append(exchange)
        return new

    def end_exchange(self, exchange: Exchange, answer: ChatAnswer) -> None:
        """Add the answer of an exchange. A failed exchange leaves the known messages unchanged."""
        exchange.answer = answer
        self.tools = tools_key(exchange.request)
        self.known = (*exchange.keys, *message_keys([answer.message]))


def find_repeated(
    conversations: Iterable[RequestConversation],
    request: ChatRequest,
    keys: Sequence[MessageKey],
    *,
    retry_count: int | None,
) -> Exchange | None:
    """Return the earlier exchange that a request repeats, or None if it asks for another sample.

    OpenAI's clients send how often they have tried (`x-stainless-retry-count`). A first try (0) that equals
    an earlier request asks for a second sample, unless the first answer was never delivered. A client that
    sends no count may be retrying, and receives the same answer.
    """
    same = [e for c in conversations for e in c.exchanges if e.is_repeated_by(request, keys)]
    if retry_count == 0:
        same = [e for e in same if not e.delivered and not e.listeners]
    # A retry asks for the newest answer that its client did not receive.
    return next((e for e in reversed(same) if not e.delivered), same[-1] if same else None)


def find_continued(
    conversations: Iterable[RequestConversation], request: ChatRequest, keys: Sequence[MessageKey]
) -> RequestConversation | None:
    """Return the conversation that a request continues; of several, the longest."""
    fitting = [c for c in conversations if c.is_continued_by(request, keys)]
    return max(fitting, key=lambda conversation: len(conversation.known), default=None)


def message_keys(messages: Iterable[dict[str, Any]]) -> list[MessageKey]:
    """Return messages in a comparable form."""
    return [_key(message) for message in messages]


def tools_key(request: ChatRequest) -> str:
    """Return the available tools in a comparable form, because they are part of the prompt."""
    return json.dumps(request.tools, sort_keys=True)


def _key(message: dict[str, Any]) -> MessageKey:
    content = message["content"] or ""
    if message["role"] == "assistant":
        content = _THOUGHT.sub("", content)
    calls = [_call_key(call["function"]) for call in message.get("tool_calls", ())]
    return message["role"], content.strip(), json.dumps(calls, sort_keys=True) if calls else ""


def _call_key(function: dict[str, Any]) -> list[Any]:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = arguments.strip()
    return [function["name"], arguments]


def _parameters(request: ChatRequest) -> tuple[Any, ...]:
    limits = (request.max_new_tokens, request.stop, request.may_call)
    return (tools_key(request), *limits, msgspec.json.encode(request.unsupported, order="deterministic"))
