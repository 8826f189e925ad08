"""Answers the requests of one trajectory with turns of the policy.

```
 connection ──submit_request()──► Exchange ──bounded queue──► serve_requests(), in the trajectory's task
     ▲                               │                          └─► start | add_messages, generate
     └────────── changed ◄───────────┘ text grows; an answer, or an error
```

The turns run in the trajectory's own task, so that they end with it and survive lost connections. A client
that retries finds its earlier exchange. A request that continues no conversation begins one, with its own
session; all sessions are rewarded for the last answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

import msgspec

from async_rl.errors import ConfigError, OutOfTurns, PromptTooLong
from async_rl.openai_api.answers import GrowingTurn, ToolCallReader, TurnFormat, split_turn
from async_rl.openai_api.anthropic_messages import message_id
from async_rl.openai_api.constraints import forced_text
from async_rl.openai_api.history import (
    Exchange,
    RequestConversation,
    calls_digest,
    find_continued,
    find_repeated,
    message_digests,
)
from async_rl.openai_api.reading import with_instructions, with_tool_names, without_instructions
from async_rl.openai_api.requests import ApiError, ChatAnswer, ChatRequest, FunctionCall, TokenLogProb
from async_rl.openai_api.responses import response_id, with_references
from async_rl.rollout.session.api import Session, Turn
from async_rl.rollout.session.tokenising import can_fit
from async_rl.runtime.printable import without_surrogates
from async_rl.runtime.supervision import Nursery

_MAX_WAITING: Final = 64
"""The most requests of one trajectory that have not begun."""

_QueuedRequest = tuple[RequestConversation, Exchange, list[dict[str, Any]]]
"""A request with its conversation, and its new messages."""


class RequestHandler:
    """Answers the requests of one trajectory.

    Args:
        session: The trajectory.
        reader: Reads the policy's tool calls; None if their format is not known.
        opens_thought: Whether the prompt of each turn ends inside a thought.
        ignores_constraints: Whether a request that forces what the policy writes is answered without that,
            where it cannot be exact; else it is refused.
        on_ignored: Called with the ignored parameters of each request.
    """

    def __init__(
        self,
        session: Session,
        *,
        reader: ToolCallReader | None,
        opens_thought: bool,
        ignores_constraints: bool,
        on_ignored: Callable[[dict[str, Any]], None],
    ) -> None:
        self._session = session
        self._reader = reader
        self._opens_thought = opens_thought
        self._ignores_constraints = ignores_constraints
        self._on_ignored = on_ignored
        self._conversations = [RequestConversation(session)]
        self._texts: dict[bytes, str] = {}
        """What the policy said beside calls, by the digest of the calls."""
        self._waiting: asyncio.Queue[_QueuedRequest | None] = asyncio.Queue()  # `submit_request` bounds it
        self._num_exchanges = 0
        self._closed = False
        self._context_tokens = session.remaining_tokens
        self.exceeded: PromptTooLong | OutOfTurns | None = None
        """The error of the budget for which a request was refused, if no later one has been answered."""
        self._exceeded_number = 0
        self._unread: PromptTooLong | None = None
        self.agent_number = 1
        """Counts the agents that have had the trajectory: connections of former ones do not matter."""
        self.last_error: ApiError | None = None
        """The last error that was sent to the agent."""

    @property
    def has_answered(self) -> bool:
        """Whether the policy has answered a request."""
        return any(conversation.num_known for conversation in self._conversations)

    @property
    def is_cut(self) -> bool:
        """Whether the agent has ended with a request that could not fit and never reached a session."""
        return self.exceeded is not None and self.exceeded is self._unread

    def submit_request(
        self, request: ChatRequest, digests: Sequence[bytes], *, retry_count: int | None
    ) -> Exchange:
        """Return the earlier exchange that a request repeats, or begin a new one.

        Args:
            request: The request.
            digests: The digests of its messages.
            retry_count: How often its client has sent it before, if the client reports that.

        Raises:
            ApiError: The request cannot be answered.
        """
        if self._closed:
            raise trajectory_over()
        if request.tools and self._reader is None:
            raise ApiError(
                400,
                "tools are not supported: the chat template teaches no known format of tool calls; set "
                "parser in rollout.agent_loop_args",
                param="tools",
            )
        constraint, forced = self._constraint_of(request)
        sampling = self._session.sampling
        ignored = {name: value for name, value in request.unsupported.items() if sampling.get(name) != value}
        ignored |= forced
        self._on_ignored(ignored)
        repeated = find_repeated(self._conversations, request, digests, retry_count=retry_count)
        if repeated is not None:
            self._session.record_request("repeated", [*ignored])
            return repeated
        conversation = find_continued(self._conversations, request, digests)
        if self._waiting.qsize() >= _MAX_WAITING:
            raise ApiError(429, f"{_MAX_WAITING} requests of this trajectory are already waiting", retry=True)
        result = "answered"
        if conversation is None:
            conversation, result = self._open_conversation(digests), "another"
        self._session.record_request(result, [*ignored])
        self._num_exchanges += 1
        exchange = Exchange(request, digests, self._num_exchanges, constraint)
        new = conversation.begin_exchange(exchange, request)
        self._waiting.put_nowait((conversation, exchange, new))
        return exchange

    def _constraint_of(self, request: ChatRequest) -> tuple[str | None, dict[str, Any]]:
        """Return the grammar of a request's turn, and what is ignored of what it forces.

        Raises:
            ApiError: 400: it forces what cannot be exact in this run.
        """
        if (forced := request.forced) is None:
            return None, {}
        what = "response_format" if forced.tool is None else "tool_choice"
        if (obstacle := self._session.constraint_obstacle) is None:
            try:
                tools = request.tools if request.may_call else []
                written = forced_text(forced, tools, self._reader, opens_thought=self._opens_thought)
                return written, {}
            except ValueError as error:
                obstacle = str(error)
        if self._ignores_constraints:
            return None, {what: forced.tool or "forced"}
        raise ApiError(
            400,
            f"{what} forces what the policy writes, which cannot be trained on exactly here: {obstacle}; or "
            "set constraints: ignore in rollout.agent_loop_args, to answer without it",
            param=what,
        )

    def with_history(self, request: ChatRequest) -> ChatRequest:
        """Return a request that names an earlier answer, or items of one, with the messages themselves.

        Raises:
            ApiError: 400 or 404: there is no such answer. Clients then send the whole history.
        """
        if request.has_references:
            exchanges = (exchange for each in self._conversations for exchange in each.exchanges)
            answers = {exchange.id: exchange.answer for exchange in exchanges if exchange.answer is not None}
            found = [
                with_references(message, answers) if message["role"] == "assistant" else message
                for message in request.messages
            ]
            named = with_tool_names(found, found)
            request = msgspec.structs.replace(request, messages=named, has_references=False)
        if request.previous is None:
            return request
        id_of = message_id if request.keeps_setup else response_id
        for conversation in self._conversations:
            for exchange in conversation.exchanges:
                if exchange.answer is None or id_of(exchange.id) != request.previous:
                    continue
                messages = conversation.messages_until(exchange)
                new = with_tool_names(request.messages, messages)
                if request.keeps_setup:
                    whole = [*messages, *new]
                    tools, digest = conversation.offered, conversation.tools
                    return msgspec.structs.replace(
                        request, messages=whole, tools=tools, tools_digest=digest, previous=None
                    )
                known = without_instructions(exchange.num_instruction_chars, messages)
                whole = with_instructions(request.instructions, [*known, *new])
                return msgspec.structs.replace(request, messages=whole, previous=None)
        status, kind = (404, "message") if request.keeps_setup else (400, "response")
        raise ApiError(
            status,
            f"Previous {kind} with id {request.previous!r} not found: it belongs to another trajectory, or "
            "to an attempt that was lost; send the whole history",
            param=f"previous_{kind}_id",
            code="previous_response_not_found",
        )

    def digests_of(self, messages: Sequence[dict[str, Any]]) -> list[bytes]:
        """Return for each message of a request the digest of the messages up to it."""
        return message_digests(messages, texts=self._texts)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens that the policy would read for a request.

        Raises:
            ApiError: 400: the chat template cannot render its messages.
        """
        conversation = find_continued(self._conversations, request, self.digests_of(request.messages))
        try:
            if conversation is None or not conversation.num_known:
                return await self._session.count_tokens(request.messages, request.tools, after=False)
            new = request.messages[conversation.num_known :]
            return await conversation.session.count_tokens(new, after=True)
        except ConfigError as error:
            raise ApiError(400, str(error), param="messages") from error

    def too_large(self, num_bytes: int, max_bytes: int) -> ApiError:
        """Return the error for a request that is too large to be read.

        A request that cannot fit gets the error of a full context, as shorter ones do: otherwise its size
        would decide whether the attempt counts.
        """
        if can_fit(num_bytes, self._context_tokens):
            text = f"the request has more than {max_bytes} bytes: raise agent_loop_args.max_body_bytes"
            return ApiError(413, text)
        text = (
            f"a request of {num_bytes} bytes cannot fit: rollout.max_context_tokens is {self._context_tokens}"
        )
        self.exceeded = self._unread = PromptTooLong(text)
        self._exceeded_number = self._num_exchanges
        return ApiError(400, text, param="messages", code="context_length_exceeded")

    def forget_deliveries(self) -> None:
        """Treat all answers as undelivered and unawaited, so that an agent that begins anew receives them."""
        self.agent_number += 1
        for conversation in self._conversations:
            for exchange in conversation.exchanges:
                exchange.delivered, exchange.listeners = False, 0

    def count_refused(self) -> None:
        """Count a request that was refused."""
        self._session.record_request("refused")

    def _open_conversation(self, digests: Sequence[bytes]) -> RequestConversation:
        """Open one more conversation of this trajectory, for messages with these digests.

        Raises:
            ApiError: The trajectory has as many as it may have.
        """
        if self._session.remaining_branches < 1:
            why = "its history was edited, or this is another one"
            if any(each.has_begun(digests) and not each.is_busy for each in self._conversations):
                why = "its tools differ from those of the conversation"
            raise ApiError(
                400,
                f"the request does not continue a conversation of this trajectory ({why}), and no further "
                "one is allowed: append to the messages and answers without changing them or the tools, or "
                "raise rollout.max_branches",
                param="messages",
                code="too_many_conversations",
            )
        conversation = RequestConversation(self._session.conversation())
        self._conversations.append(conversation)
        return conversation

    def new_growing_turn(self, exchange: Exchange) -> GrowingTurn:
        """Return what splits the pieces of an answer that is being made."""
        return GrowingTurn(self._format_of(exchange.request))

    async def serve_requests(self) -> None:
        """Answer requests until the handler is closed."""
        entered = {self._session}
        async with AsyncExitStack() as blocks, Nursery() as turns:
            while (queued := await self._waiting.get()) is not None:
                session = queued[0].session
                if session not in entered:
                    await blocks.enter_async_context(session)
                    entered.add(session)
                turns.start_task(f"request {queued[1].number}", self._answer_request(*queued))
            turns.cancel_tasks()  # no connection waits for them

    def close(self) -> None:
        """End the trajectory; waiting requests get an error."""
        self._closed = True
        self._waiting.put_nowait(None)
        for conversation in self._conversations:
            for exchange in conversation.exchanges:
                if not exchange.ended:
                    _fail(exchange, trajectory_over())

    async def _answer_request(
        self, conversation: RequestConversation, exchange: Exchange, new: list[dict[str, Any]]
    ) -> None:
        """Let the policy answer a request, and store the answer in its exchange."""
        session, request = conversation.session, exchange.request

        def on_text(text: str) -> None:
            exchange.pieces.append(text)
            _notify_listeners(exchange)

        try:
            if conversation.num_known:
                session.add_messages(new)
            else:
                session.start(new, request.tools)
            turn = await session.generate(
                max_new_tokens=request.max_new_tokens,
                stop=request.stop,
                constraint=exchange.constraint,
                on_text=on_text if request.stream else None,
            )
        except (PromptTooLong, OutOfTurns) as error:
            self.exceeded, self._exceeded_number = error, exchange.number
            code = "context_length_exceeded" if isinstance(error, PromptTooLong) else "too_many_turns"
            _fail(exchange, ApiError(400, str(error), param="messages", code=code))
        except ConfigError as error:  # the chat template cannot render such messages
            _fail(exchange, ApiError(400, str(error), param="messages"))
        except Exception:
            _fail(exchange, ApiError(500, "the policy cannot answer: this trajectory has failed"))
            raise
        else:
            offered = {tool["function"]["name"] for tool in request.tools}
            for name in (str(message.get("name")) for message in new if message["role"] == "tool"):
                # Only the agent knows whether the call failed and how long it took.
                session.record_tool_call(error=False, tool=name if name in offered else "unknown")
            session.share_reward()
            used = self._context_tokens - session.remaining_tokens
            answer = self._make_answer(session, exchange, turn, used - len(turn.token_ids))
            if answer.calls and answer.content:
                self._texts[calls_digest(answer.message, exchange.digest)] = answer.content.strip()
            conversation.end_exchange(exchange, answer)
            if exchange.number > self._exceeded_number:
                self.exceeded = None  # the agent has gone on, in another conversation or with fewer messages
            _notify_listeners(exchange)

    def _make_answer(
        self, session: Session, exchange: Exchange, turn: Turn, prompt_tokens: int
    ) -> ChatAnswer:
        pieces = session.pieces(turn.token_ids.tolist()) if exchange.request.logprobs else []
        parts = split_turn(turn.text, self._format_of(exchange.request))
        calls = tuple(
            FunctionCall(
                id=f"call_{exchange.number}_{i}",
                name=without_surrogates(name),
                arguments=json.dumps(arguments),
            )
            for i, (name, arguments) in enumerate(parts.calls)
        )
        return ChatAnswer(
            content=parts.content or (None if calls or parts.reasoning else ""),
            reasoning=parts.reasoning,
            calls=calls,
            stopped_by=next((stop for stop in exchange.request.stop if stop in turn.text), None),
            finish_reason="tool_calls" if calls and turn.finish_reason == "stop" else turn.finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(turn.token_ids),
            logprobs=tuple(
                TokenLogProb(token=piece, logprob=float(value))
                for piece, value in zip(pieces, turn.rollout_log_probs, strict=False)
            ),
        )

    def _format_of(self, request: ChatRequest) -> TurnFormat:
        may_call = bool(request.tools) and request.may_call
        return TurnFormat(
            stop=request.stop,
            reader=self._reader if may_call else None,
            tools=request.tools,
            opens_thought=self._opens_thought,
        )


def trajectory_over() -> ApiError:
    """Return the error for requests with the key of a trajectory that is over."""
    return ApiError(410, "the trajectory of this key is over", code="trajectory_over")


def _fail(exchange: Exchange, error: ApiError) -> None:
    exchange.error = error
    exchange.end()
    _notify_listeners(exchange)


def _notify_listeners(exchange: Exchange) -> None:
    """Wake all connections that wait for an exchange."""
    exchange.changed.set()
    exchange.changed = asyncio.Event()
