"""Finds the conversation of a request: it continues one, repeats an earlier request, or begins another.

```
 known:    system user ANSWER tool ANSWER
 request:  system user ANSWER tool ANSWER user         continues it: `user` is new
           system user ANSWER tool                     repeats the second request
           system user ANSWER edited                   another conversation, from the first answer on
           other                                       another conversation
```

Messages are compared by meaning, not literally. The policy's messages are compared by the content and tool
calls that were returned. Many agents leave out thoughts, and some the text beside calls. The order of keys,
ids and surrounding white space are ignored. Nothing here waits or samples.

Each request repeats the whole conversation, so messages are kept as digests: the memory of a conversation
grows with its answers, not with the square of its turns.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from async_rl.openai_api.requests import ApiError, ChatAnswer, ChatRequest
from async_rl.rollout.session.api import Session

_THOUGHT = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)

_MAX_FAILED: Final = 32
"""How many failed exchanges a conversation keeps for clients that ask for their errors again."""

_NOTHING = b""
"""The digest of no messages."""


class Exchange:
    """One request of a conversation, and its answer."""

    def __init__(
        self, request: ChatRequest, digests: Sequence[bytes], number: int, constraint: str | None = None
    ) -> None:
        self.request = msgspec.structs.replace(
            request, messages=[], unsupported={}, instructions="", reply={}, forced=None
        )
        """The request without its messages, and without its tools and stop strings once it has ended."""
        self.constraint = constraint
        """The grammar of its turn, until it has ended."""
        self.id = secrets.token_hex(12)
        """Names its answer; a repeated request receives the same."""
        self.num_instruction_chars = len(request.instructions)
        self.number = number
        """The number of this exchange in its trajectory, from 1."""
        self.num_messages = len(digests)
        self.digest = digests[-1]
        """The digest of its messages."""
        self.tools = request.tools_digest
        self.parameters = request.parameters_digest
        self.pieces: list[str] = []
        """The text of the turn so far, as it arrived."""
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

    def end(self) -> None:
        """Release what is needed only while the answer is being made."""
        self.request = msgspec.structs.replace(self.request, tools=[], stop=())
        self.pieces, self.constraint = [], None

    def is_repeated_by(self, request: ChatRequest, digests: Sequence[bytes]) -> bool:
        """Return whether a request is the same as this one."""
        own = self.digest, self.tools, self.parameters
        return own == (digests[-1], request.tools_digest, request.parameters_digest)


class RequestConversation:
    """One session's conversation as messages: the agent's as received, the policy's as returned."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.tools = b""
        """The digest of its tools."""
        self.offered: list[dict[str, Any]] = []
        """Its tools, for requests that leave them out."""
        self.num_known = 0
        """The number of messages that the agent and the policy have exchanged."""
        self.known = _NOTHING
        """Their digest."""
        self.exchanges: list[Exchange] = []

    @property
    def is_busy(self) -> bool:
        """Whether an answer is being made."""
        return bool(self.exchanges) and not self.exchanges[-1].ended

    def is_continued_by(self, request: ChatRequest, digests: Sequence[bytes]) -> bool:
        """Return whether a request repeats everything known and adds to it."""
        if not self.num_known:
            return not self.exchanges or not self.is_busy
        return not self.is_busy and self.tools == request.tools_digest and self.has_begun(digests)

    def has_begun(self, digests: Sequence[bytes]) -> bool:
        """Return whether messages repeat everything known and add to it."""
        return 0 < self.num_known < len(digests) and self.known == digests[self.num_known - 1]

    def begin_exchange(self, exchange: Exchange, request: ChatRequest) -> list[dict[str, Any]]:
        """Add an exchange that continues this conversation, and return its new messages."""
        failed = [e for e in self.exchanges if e.error is not None and not e.listeners]
        if len(failed) >= _MAX_FAILED:  # only answers are bounded by the budgets of the trajectory
            self.exchanges.remove(failed[0])
        self.exchanges.append(exchange)
        self.offered = request.tools
        return request.messages[self.num_known :]

    def messages_until(self, exchange: Exchange) -> list[dict[str, Any]]:
        """Return the messages up to an answer of this conversation; the policy's as they were returned."""
        messages = [*self.session.messages[: exchange.num_messages]]
        for each in self.exchanges:
            if each.answer is not None and each.num_messages <= exchange.num_messages:
                messages[each.num_messages : each.num_messages + 1] = [each.answer.message]
        return messages

    def end_exchange(self, exchange: Exchange, answer: ChatAnswer) -> None:
        """Add the answer of an exchange. A failed exchange leaves the known messages unchanged."""
        exchange.answer = answer
        self.tools = exchange.tools
        self.num_known = exchange.num_messages + 1
        (self.known,) = message_digests([answer.message], after=exchange.digest)
        exchange.end()


def find_repeated(
    conversations: Iterable[RequestConversation],
    request: ChatRequest,
    digests: Sequence[bytes],
    *,
    retry_count: int | None,
) -> Exchange | None:
    """Return the earlier exchange that a request repeats, or None if it asks for another sample.

    OpenAI's clients send how often they have tried (`x-stainless-retry-count`). A first try (0) that equals
    an earlier request asks for a second sample, unless the first answer was never delivered. A client that
    sends no count may be retrying, and receives the same answer.
    """
    same = [e for c in conversations for e in c.exchanges if e.is_repeated_by(request, digests)]
    if retry_count == 0:
        same = [e for e in same if not e.delivered and not e.listeners]
    # A retry asks for the newest answer that its client did not receive.
    return next((e for e in reversed(same) if not e.delivered), same[-1] if same else None)


def find_continued(
    conversations: Iterable[RequestConversation], request: ChatRequest, digests: Sequence[bytes]
) -> RequestConversation | None:
    """Return the conversation that a request continues; of several, the longest."""
    fitting = [c for c in conversations if c.is_continued_by(request, digests)]
    return max(fitting, key=lambda conversation: conversation.num_known, default=None)


def message_digests(
    messages: Iterable[dict[str, Any]],
    *,
    after: bytes = _NOTHING,
    texts: Mapping[bytes, str] = MappingProxyType({}),
) -> list[bytes]:
    """Return for each message a digest of the messages up to it, in a comparable form.

    Args:
        messages: The messages.
        after: The digest of the messages before them.
        texts: What the policy said beside calls, by `calls_digest`; histories may leave it out.
    """
    digests = []
    for message in messages:
        role, content, calls = _key(message)
        if calls and not content:
            content = texts.get(calls_digest(message, after), "")
        after = _digest((after, role, content, calls))
        digests.append(after)
    return digests


def calls_digest(message: dict[str, Any], after: bytes) -> bytes:
    """Return a digest of a message's calls, behind messages with a digest."""
    return _digest((after, _key(message)[2]))


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(msgspec.msgpack.encode(value), digest_size=16).digest()


def _key(message: dict[str, Any]) -> tuple[str, str, str]:
    """Return a message in comparable form: role, content, tool calls."""
    content = message["content"] or ""
    if message["role"] == "assistant":
        content = _THOUGHT.sub("", content)
    calls = [_call_key(call["function"]) for call in message.get("tool_calls", ())]
    return message["role"], content.strip(), json.dumps(calls) if calls else ""


def _call_key(function: dict[str, Any]) -> list[str]:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        values = json.loads(text, parse_int=_number, parse_float=_number)
        text = json.dumps(values, sort_keys=True)
    except (ValueError, RecursionError):
        text = text.strip()
    return [function["name"], text]


def _number(digits: str) -> float:
    """Return a JSON number as clients in JavaScript have it: they write `1.0` as `1`, and `-0.0` as `0`."""
    return float(digits) + 0.0
