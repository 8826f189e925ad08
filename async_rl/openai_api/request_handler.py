"""One trajectory's calls: where each belongs, and the turns of the policy that answer them.

```
 connection ──ask()──► Exchange ──bounded queue──► serve(): a task of the trajectory ──► start | add_messages,
     ▲                    │                                                              generate
     └──── changed ◄──────┘ text grows; an answer, or an error
```

The turns run in the trajectory's own task: in its name, ended with it, and whatever becomes of connections.
A client that tries again finds the exchange that it left. A request that continues no conversation begins
one, with a session of its own; all are rewarded for the answer that came last.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Final

from async_rl.errors import ConfigError, OutOfTurns, PromptTooLong
from async_rl.openai_api.answers import Form, Reader, Shown, show
from async_rl.openai_api.chat_completions import ApiError, ChatAnswer, ChatRequest, FunctionCall, TokenLogProb
from async_rl.openai_api.history import (
    Exchange,
    RequestConversation,
    find_continued,
    find_repeated,
    message_keys,
)
from async_rl.rollout.session.api import Session, Turn
from async_rl.runtime.supervision import Nursery

_MAX_WAITING: Final = 64
"""Requests of one trajectory that have not begun."""

_Job = tuple[RequestConversation, Exchange, list[dict[str, Any]]]
"""A request, where it belongs, and its messages that are new there."""


class RequestHandler:
    """Answers the requests of one trajectory.

    Args:
        session: The trajectory.
        reader: Of the policy's format of tool calls; None where it is not known.
        opens_thought: See `answers.Form`.
        noticed: Told of parameters that are asked for in vain.
    """

    def __init__(
        self,
        session: Session,
        *,
        reader: Reader | None,
        opens_thought: bool,
        noticed: Callable[[dict[str, Any]], None],
    ) -> None:
        self._session = session
        self._reader = reader
        self._opens_thought = opens_thought
        self._noticed = noticed
        self._conversations = [RequestConversation(session)]
        self._waiting: asyncio.Queue[_Job | None] = asyncio.Queue()  # `ask` keeps it short
        self._num_exchanges = 0
        self._closed = False
        self._context_tokens = session.remaining_tokens
        self.over: PromptTooLong | OutOfTurns | None = None
        """The budget that the newest request was refused for."""

    @property
    def has_answered(self) -> bool:
        """Whether there was a turn of the policy."""
        return any(conversation.known for conversation in self._conversations)

    def ask(self, request: ChatRequest, *, retry_count: int | None) -> Exchange:
        """Find the exchange that a request is, or begin one.

        Args:
            request: As it came.
            retry_count: How often its client has sent it before, where it says so.

        Raises:
            ApiError: It cannot be answered.
        """
        if self._closed:
            raise closed()
        if request.tools and self._reader is None:
            raise ApiError(
                400,
                "tools are not served: the chat template teaches no format of calls that is known; set "
                "parser in rollout.agent_loop_args",
                param="tools",
            )
        sampling = self._session.sampling
        ignored = {name: value for name, value in request.asked.items() if sampling.get(name) != value}
        self._noticed(ignored)
        keys = message_keys(request.messages)
        repeated = find_repeated(self._conversations, request, keys, retry_count=retry_count)
        if repeated is not None:
            self._session.record_request("repeated", [*ignored])
            return repeated
        conversation = find_continued(self._conversations, request, keys)
        if self._waiting.qsize() >= _MAX_WAITING:
            raise ApiError(429, f"{_MAX_WAITING} requests of this trajectory wait already", retry=True)
        result = "answered"
        if conversation is None:
            conversation, result = self._another(), "another"
        self._session.record_request(result, [*ignored])
        self._num_exchanges += 1
        exchange = Exchange(request, keys, self._num_exchanges)
        self._waiting.put_nowait((conversation, exchange, conversation.begin(exchange)))
        return exchange

    def refused(self) -> None:
        """Count a request that was turned down."""
        self._session.record_request("refused")

    def _another(self) -> RequestConversation:
        """One more conversation of this trajectory.

        Raises:
            ApiError: There may be no more.
        """
        if self._session.remaining_branches < 1:
            raise ApiError(
                400,
                "the messages do not continue a conversation of this trajectory (its history was edited, or "
                "this is another one), and it may have no more of them: append to the messages, answers "
                "included, as they were, or raise rollout.max_branches",
                param="messages",
                code="too_many_conversations",
            )
        conversation = RequestConversation(self._session.conversation())
        self._conversations.append(conversation)
        return conversation

    def shown(self, exchange: Exchange) -> Shown:
        """What is certain of an answer that is being made."""
        return show(exchange.text, self._form(exchange.request), whole=False)

    async def serve(self) -> None:
        """Answer requests until closed."""
        alive = {self._session}
        async with AsyncExitStack() as blocks, Nursery() as turns:
            while (job := await self._waiting.get()) is not None:
                session = job[0].session
                if session not in alive:
                    await blocks.enter_async_context(session)
                    alive.add(session)
                turns.start_task(f"request {job[1].number}", self._turn(*job))
            turns.cancel_tasks()  # nobody waits for them any more

    def close(self) -> None:
        """The trajectory is over: whoever waits is told so."""
        self._closed = True
        self._waiting.put_nowait(None)
        for conversation in self._conversations:
            for exchange in conversation.exchanges:
                if not exchange.ended:
                    _fail(exchange, closed())

    async def _turn(
        self, conversation: RequestConversation, exchange: Exchange, new: list[dict[str, Any]]
    ) -> None:
        """Let the policy answer a request, and put the answer where connections find it."""
        session, request = conversation.session, exchange.request

        def hear(text: str) -> None:
            exchange.text += text
            _changed(exchange)

        try:
            if conversation.known:
                session.add_messages(new)
            else:
                session.start(new, request.tools)
            prompt_tokens = self._context_tokens - session.remaining_tokens
            turn = await session.generate(
                max_new_tokens=request.max_new_tokens,
                stop=request.stop,
                on_text=hear if request.stream else None,
            )
        except (PromptTooLong, OutOfTurns) as error:
            self.over = error
            code = "context_length_exceeded" if isinstance(error, PromptTooLong) else "too_many_turns"
            _fail(exchange, ApiError(400, str(error), param="messages", code=code))
        except ConfigError as error:  # the chat template refuses such messages
            _fail(exchange, ApiError(400, str(error), param="messages"))
        except Exception:
            _fail(exchange, ApiError(500, "the policy cannot answer: this trajectory has failed"))
            raise
        else:
            offered = {tool["function"]["name"] for tool in request.tools}
            for name in (message.get("name") for message in new if message["role"] == "tool"):
                # How it went and how long it took, its agent alone knows.
                session.record_tool_call(error=False, tool=str(name) if name in offered else "unknown")
            session.share_reward()
            conversation.end(exchange, self._answer(session, exchange, turn, prompt_tokens))
            _changed(exchange)

    def _answer(self, session: Session, exchange: Exchange, turn: Turn, prompt_tokens: int) -> ChatAnswer:
        exchange.text = turn.text
        pieces = session.pieces(turn.token_ids.tolist()) if exchange.request.logprobs else []
        shown = show(turn.text, self._form(exchange.request), whole=True)
        calls = tuple(
            FunctionCall(id=f"call_{exchange.number}_{i}", name=name, arguments=json.dumps(arguments))
            for i, (name, arguments) in enumerate(shown.calls)
        )
        return ChatAnswer(
            content=shown.content or (None if calls or shown.reasoning else ""),
            reasoning=shown.reasoning,
            calls=calls,
            finish_reason="tool_calls" if calls and turn.finish_reason == "stop" else turn.finish_reason,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(turn.token_ids),
            logprobs=tuple(
                TokenLogProb(token=piece, logprob=float(value))
                for piece, value in zip(pieces, turn.rollout_log_probs, strict=False)
            ),
        )

    def _form(self, request: ChatRequest) -> Form:
        may_call = bool(request.tools) and request.may_call
        return Form(
            stop=request.stop,
            reader=self._reader if may_call else None,
            tools=request.tools,
            opens_thought=self._opens_thought,
        )


def closed() -> ApiError:
    """For whoever asks in the name of a trajectory that is over."""
    return ApiError(410, "the trajectory of this key is over", code="trajectory_over")


def _fail(exchange: Exchange, error: ApiError) -> None:
    exchange.error = error
    _changed(exchange)


def _changed(exchange: Exchange) -> None:
    """Wake all connections that wait for an exchange."""
    exchange.changed.set()
    exchange.changed = asyncio.Event()
