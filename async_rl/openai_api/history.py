"""Which conversation a request belongs to: it continues one, repeats an earlier request, or begins another.

```
 known:    system user ANSWER tool ANSWER
 request:  system user ANSWER tool ANSWER user         continues it: `user` is new
           system user ANSWER tool                     repeats the second request
           system user ANSWER edited                   another conversation, from the first answer on
           other                                       another conversation
```

Messages are compared as an agent means them, not letter by letter: what the policy wrote by content and tool
calls as we returned them (thoughts left out, as many agents leave them out), the order of keys, ids and white
space around texts aside. Nothing here waits or samples.
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

Key = tuple[str, str, str]
"""What a message says: role, content, tool calls."""


class Exchange:
    """One request of a conversation and what becomes of it."""

    def __init__(self, request: ChatRequest, keys: Sequence[Key], number: int) -> None:
        self.request = request
        self.number = number
        """Of this trajectory's exchanges, from 1."""
        self.keys = tuple(keys)
        self.text = ""
        """What the policy has written so far."""
        self.answer: ChatAnswer | None = None
        self.error: ApiError | None = None
        self.listeners = 0
        """Connections that wait for it."""
        self.delivered = False
        """Whether some connection got all of it."""
        self.changed = asyncio.Event()
        """Set, and replaced, when any of this changes."""

    @property
    def ended(self) -> bool:
        """Whether there is an answer, or an error in its place."""
        return self.answer is not None or self.error is not None

    def asks_the_same(self, request: ChatRequest, keys: Sequence[Key]) -> bool:
        """Whether a request is this one once more."""
        return self.keys == tuple(keys) and _parameters(self.request) == _parameters(request)


class RequestConversation:
    """What one session knows, in messages: those of the agent as they came, answers as they went out."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tools = ""
        self.known: tuple[Key, ...] = ()
        self.exchanges: list[Exchange] = []

    @property
    def busy(self) -> bool:
        """Whether an answer is being made."""
        return bool(self.exchanges) and not self.exchanges[-1].ended

    def continued_by(self, request: ChatRequest, keys: Sequence[Key]) -> bool:
        """Whether a request brings something new to all that is known."""
        length = len(self.known)
        if not length:
            return not self.exchanges or not self.busy
        new = not self.busy and len(keys) > length and self.tools == tools_key(request)
        return new and self.known == tuple(keys[:length])

    def begin(self, exchange: Exchange) -> list[dict[str, Any]]:
        """Take up an exchange that continues this conversation; its messages that are new."""
        new = exchange.request.messages[len(self.known) :]
        self.exchanges.append(exchange)
        return new

    def end(self, exchange: Exchange, answer: ChatAnswer) -> None:
        """The answer is part of it now. An exchange that failed leaves what is known as it was."""
        exchange.answer = answer
        self.tools = tools_key(exchange.request)
        self.known = (*exchange.keys, *message_keys([answer.message]))


def find_repeated(
    conversations: Iterable[RequestConversation],
    request: ChatRequest,
    keys: Sequence[Key],
    *,
    retry_count: int | None,
) -> Exchange | None:
    """The earlier exchange that a request asks for once more, or None when it wants a sample of its own.

    OpenAI's clients say how often they have tried (`x-stainless-retry-count`). A first try (0) that is the
    same as an earlier request is a second sample that somebody wants, unless the first answer never arrived;
    whoever says nothing may be trying again, and gets the same answer.
    """
    same = [e for c in conversations for e in c.exchanges if e.asks_the_same(request, keys)]
    if retry_count == 0:
        same = [e for e in same if not e.delivered and not e.listeners]
    # A retry is of the newest that its caller did not get.
    return next((e for e in reversed(same) if not e.delivered), same[-1] if same else None)


def find_continued(
    conversations: Iterable[RequestConversation], request: ChatRequest, keys: Sequence[Key]
) -> RequestConversation | None:
    """The conversation that a request continues: of several, the one that knows most."""
    fitting = [c for c in conversations if c.continued_by(request, keys)]
    return max(fitting, key=lambda conversation: len(conversation.known), default=None)


def message_keys(messages: Iterable[dict[str, Any]]) -> list[Key]:
    """What messages say, in a form that can be compared."""
    return [_key(message) for message in messages]


def tools_key(request: ChatRequest) -> str:
    """What tools are on offer, in a form that can be compared: they are part of the prompt."""
    return json.dumps(request.tools, sort_keys=True)


def _key(message: dict[str, Any]) -> Key:
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
    return (tools_key(request), *limits, msgspec.json.encode(request.asked, order="deterministic"))
