"""A conversation as an agent loop has it, over tokens that somebody else writes.

```
 agent loop ── start, add_messages ──► context ─┐
            ── generate ─────────────► a turn ──┼─► tokens
            ── branch ───────────────► a conversation of its own, which begins with what there is
```

Who writes the tokens: in the driver the session itself, which calls engines (`rollout.session`); in a rollout
worker the driver (`rollout.remote_session`).

A session and its branches are made by one run of a loop, and come to something together or not at all: when
the loop has ended well each of them is a trajectory of the group. What a branch inherits it reads; it is
trained in the trajectory that sampled it, so that no token is trained twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self, cast

import msgspec
import numpy as np

from async_rl.errors import OutOfTurns, PromptTooLong
from async_rl.rollout.session.api import Turn
from async_rl.rollout.session.growing_text import GrowingText
from async_rl.rollout.session.tokens import TokenLog
from async_rl.runtime.waits import waiting
from async_rl.types import (
    Completion,
    Int32Array,
    Sampled,
    Segment,
    StopReason,
    Task,
    TurnRecord,
    root_of,
)

_MAX_METADATA_BYTES: Final = 4096
"""Of one turn's metadata as JSON: it is for people, and a run keeps a thousand trajectories for them."""

_MAX_CLEAN_UP_S: Final = 5.0
"""So long is waited for a task of a loop that was cancelled in the middle of a turn."""


class _Tree:
    """What a session shares with its branches."""

    def __init__(self, limit: int, deadline_s: float) -> None:
        self.limit = limit
        self.deadline_s = deadline_s
        self.num_branches = 0
        self.open: dict[str, Conversation] = {}
        """Those that live: the root, and branches in their blocks."""
        self.writers: set[asyncio.Task[Any]] = set()
        """Who awaits a turn, in any of them."""
        self.ended: dict[str, Conversation] = {}
        """Branches that sampled something, in the order in which their blocks ended."""
        self.reward_source: Conversation | None = None
        """Whose last words all are rewarded for; None where each is for its own."""


class Conversation(TokenLog):
    """The conversation behind `session.api.Session`; other methods are for the rollout code."""

    def __init__(self, task: Task) -> None:
        """Begin, once the tokens are there."""
        rollout = self._config
        self.task = task
        self.messages: list[dict[str, Any]] = []
        self.tool_timeout_s = rollout.tool_timeout_s
        self.num_tool_calls = 0
        self.num_tool_errors = 0
        self.stop_reason: StopReason = "completed"
        """Why it ended, once it has."""
        self.started_s = self._clock()
        self._tree = _Tree(rollout.max_branches, self.started_s + rollout.trajectory_timeout_s)
        self._tree.open[self.trajectory_id] = self
        self._pending: tuple[list[dict[str, Any]], Int32Array] | None = None
        """Messages that the next turn reads, and their tokens."""
        self._turns: list[TurnRecord] = []
        self._last_turn: Turn | None = None
        self._writer: asyncio.Task[Any] | None = None
        """Who awaits a turn."""
        self._over: PromptTooLong | OutOfTurns | None = None
        """The budget that is used up."""
        self._num_inherited = self._num_inherited_turns = self._num_branches = 0

    # -- for whoever writes the tokens -----------------------------------------------------------------

    def _read(self, token_ids: Int32Array) -> None:
        """Append what the policy did not write."""
        raise NotImplementedError

    async def _write(self, budget: int, stop: Sequence[str]) -> Literal["stop", "length"]:
        """Let the policy write a turn of so many tokens at most; how it ended."""
        raise NotImplementedError

    def _sibling(self, name: str, inherited: tuple[Segment, ...]) -> Self:
        """Another one of the same attempt that begins with these segments; `_inherit` brings their tokens."""
        raise NotImplementedError

    # -- for agent loops -------------------------------------------------------------------------------

    @property
    def remaining_tokens(self) -> int:
        """Tokens left before the trajectory reaches `rollout.max_context_tokens`."""
        pending = 0 if self._pending is None else len(self._pending[1])
        return self._config.max_context_tokens - self._length - pending

    @property
    def num_tokens(self) -> int:
        """Tokens so far, inherited ones included; those of a running engine call are not."""
        return self._length

    @property
    def num_turns(self) -> int:
        """Turns of the policy so far, inherited ones included."""
        return len(self._turns)

    @property
    def remaining_turns(self) -> int:
        """Turns left of `rollout.max_turns`."""
        return self._config.max_turns - len(self._turns)

    @property
    def remaining_s(self) -> float:
        """Seconds left of `rollout.trajectory_timeout_s`; branches share them."""
        return max(0.0, self._tree.deadline_s - self._clock())

    @property
    def remaining_branches(self) -> int:
        """Branches left of `rollout.max_branches`."""
        return self._tree.limit - self._tree.num_branches

    @property
    def last_turn(self) -> Turn | None:
        """The newest turn of the policy."""
        return self._last_turn

    def start(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> None:
        """Render the prompt with the model's chat template. Once per trajectory, before anything else.

        Raises:
            PromptTooLong: When it leaves no room to generate.
        """
        self._check("start")
        if self._segments:
            raise RuntimeError("session.start was called twice; use session.add_messages to go on")
        prompt = self._chat.prompt_ids(messages, tools)
        if len(prompt) >= self._config.max_context_tokens:
            raise PromptTooLong(
                f"the prompt of task {self.task.task_id} has {len(prompt)} tokens, but "
                f"rollout.max_context_tokens is {self._config.max_context_tokens}: raise it or "
                f"shorten the prompt"
            )
        self._read(prompt)
        self.messages.extend(messages)

    async def generate(
        self,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Turn:
        """Let the policy write one turn, over as many engine calls as weight updates and failures make of it.

        Args:
            max_new_tokens: Most tokens of this turn; `rollout.max_new_tokens` by default and at most.
            stop: Strings that end the turn, beside the chat template's end of turn.
            on_text: Told of the turn's text as it grows; see `api.Session.generate`.

        Returns:
            The turn; `finish_reason` is `length` when the budget or the context ran out.

        Raises:
            OutOfTurns: When there were `rollout.max_turns`; the trajectory then ends as it is.
            PromptTooLong: When the context is full.
        """
        self._check("generate")
        if not self._segments:
            raise RuntimeError("session.generate was called before session.start")
        if self.remaining_turns < 1:
            limit = self._config.max_turns
            raise self._out(OutOfTurns(f"the trajectory has had rollout.max_turns = {limit} turns"))
        if self._pending is None and self._turn_is_closed:
            self._append_messages([])
        self._read_pending()
        budget = min(max_new_tokens or self._config.max_new_tokens, self._config.max_new_tokens)
        budget = min(budget, self.remaining_tokens)
        begin, first = self._length, len(self._segments)
        interruptions, engine_s = self._num_interruptions + self._num_failovers, self._engine_s
        self._writer = writer = asyncio.current_task()
        assert writer is not None
        self._tree.writers.add(writer)
        try:
            self._growing = GrowingText(self._chat.decode, on_text) if on_text is not None else None
            reason = await self._write(budget, stop)
        finally:
            self._writer = None
            self._tree.writers.discard(writer)
        record = TurnRecord(
            start=begin,
            end=self._length,
            finish_reason=reason,
            num_interruptions=self._num_interruptions + self._num_failovers - interruptions,
            engine_s=self._engine_s - engine_s,
        )
        self._turns.append(record)
        token_ids = self._buffer[begin : self._length].copy()
        sampled = [segment for segment in self._segments[first:] if isinstance(segment, Sampled)]
        turn = Turn(
            text=self._chat.decode(token_ids),
            token_ids=token_ids,
            finish_reason=reason,
            weight_versions=tuple(sorted({segment.weight_version for segment in sampled})),
            num_interruptions=record.num_interruptions,
            engine_s=record.engine_s,
            rollout_log_probs=np.concatenate(
                [np.empty(0, np.float32), *(s.rollout_log_probs for s in sampled)]
            ),
        )
        self.messages.append({"role": "assistant", "content": turn.text})
        self._last_turn = turn
        return turn

    def add_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        """Append messages the policy did not write: tool results, a user's answer.

        Raises:
            PromptTooLong: When they do not fit; the trajectory then ends as it is.
        """
        self._check("add_messages")
        self._append_messages(messages)

    def add_tool_result(
        self,
        content: Any,
        *,
        name: str | None = None,
        tool_call_id: str | None = None,
        error: bool = False,
    ) -> None:
        """Append what a tool gave back, and count the call.

        Args:
            content: Text, or anything that JSON can say.
            name: Of the tool, for templates that print it.
            tool_call_id: Of the call that it answers, likewise.
            error: Whether the call failed.

        Raises:
            PromptTooLong: As `add_messages`.
        """
        text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
        named = {"name": name, "tool_call_id": tool_call_id}
        given = {key: value for key, value in named.items() if value is not None}
        self.record_tool_call(error=error)
        self.add_messages([{"role": "tool", "content": text, **given}])

    @property
    def sampling(self) -> dict[str, float]:
        """Temperature, top_p and top_k by which the policy is sampled."""
        rollout = self._config
        return {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token; special ones included, bytes of a part of a character replaced."""
        decode = self._chat.tokenizer.decode
        return [
            str(decode([int(i)], skip_special_tokens=False, clean_up_tokenization_spaces=False))
            for i in token_ids
        ]

    @property
    def chat_template(self) -> str:
        """The text of the model's chat template."""
        return self._chat.template

    def record_tool_call(
        self, *, error: bool, tool: str = "unnamed", seconds: float = 0.0, waited_s: float = 0.0
    ) -> None:
        """Count a tool call for the outcome and the metrics; see `api.Session`."""
        self.num_tool_calls += 1
        self.num_tool_errors += error
        self._metrics.tool_calls_total.labels(tool, "error" if error else "ok").inc()
        self._metrics.tool_seconds.labels(tool).observe(seconds)
        self._metrics.tool_wait_seconds.labels(tool).observe(waited_s)

    def record_request(self, result: str, ignored: Sequence[str] = ()) -> None:
        """Count a request over OpenAI's API; see `api.Session`."""
        self._metrics.openai_requests_total.labels(result).inc()
        for parameter in ignored:
            self._metrics.openai_ignored_total.labels(parameter).inc()

    def annotate(self, **values: Any) -> None:
        """Note something of the newest turn, for people who look at the trajectory.

        Args:
            values: JSON, 4096 bytes a turn; a name that is there already is overwritten.
        """
        self._check("annotate")
        if len(self._turns) == self._num_inherited_turns:
            raise RuntimeError("session.annotate needs a turn before it, of this session")
        metadata = {**self._turns[-1].metadata, **values}
        try:
            data = msgspec.json.encode(metadata)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"session.annotate was given what is not JSON: {error}") from error
        if len(data) > _MAX_METADATA_BYTES:
            raise ValueError(
                f"session.annotate: a turn's metadata is {len(data)} bytes of JSON, at most "
                f"{_MAX_METADATA_BYTES} are kept: note less, or write a file of your own"
            )
        plain = msgspec.json.decode(data)  # a copy that the loop cannot change any more
        self._turns[-1] = msgspec.structs.replace(self._turns[-1], metadata=plain)

    def branch(self) -> Self:
        """A trajectory of its own that goes on from here; see `api.Session.branch`."""
        self._check("branch")
        if not self._segments:
            raise RuntimeError("session.branch was called before session.start")
        other = self._grow(tuple(self._segments))
        other._inherit(self)
        other.messages = list(self.messages)
        other._pending = self._pending
        other._turns = list(self._turns)
        other._last_turn = self._last_turn
        other._num_inherited, other._num_inherited_turns = len(self._segments), len(self._turns)
        other.num_tool_calls, other.num_tool_errors = self.num_tool_calls, self.num_tool_errors
        return other

    def conversation(self) -> Self:
        """Another conversation of the same attempt; see `api.Session.conversation`."""
        self._check("conversation", alone=False)  # it takes nothing over from here
        return self._grow(())

    def share_reward(self) -> None:
        """What is said here last is what all are rewarded for; see `api.Session.share_reward`."""
        self._check("share_reward")
        self._tree.reward_source = self

    @property
    def reward_source(self) -> Conversation:
        """Whose last words this one is rewarded for."""
        return self._tree.reward_source or self

    def _grow(self, inherited: tuple[Segment, ...]) -> Self:
        """One more session of the tree, with nothing but its place in it."""
        tree = self._tree
        if self.remaining_branches < 1:
            raise RuntimeError(
                f"rollout.max_branches = {tree.limit} allows no further branch or conversation: raise it, or "
                "look at session.remaining_branches first"
            )
        tree.num_branches += 1
        self._num_branches += 1
        # A loop that runs again after a restart comes to the same names.
        name = f"{self.trajectory_id}.{self._num_branches}"
        other = self._sibling(name, inherited)
        other._tree = tree
        return other

    async def __aenter__(self) -> Self:
        """The trajectory ends with the block."""
        self._tree.open[self.trajectory_id] = self
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Running out of a budget of its own ends it as it is; any other error leaves the block."""
        lived = self._tree.open.pop(self.trajectory_id, None) is not None
        over = error is not None and error is self._over
        if error is None and self._writer is not None:
            self._fail()
            raise RuntimeError("a session's block ended while a turn was being written: await it first")
        if error is not None and not over:
            self._fail()
        elif lived:
            self.end()
            own = self._segments[self._num_inherited :]
            is_root = root_of(self.trajectory_id) == self.trajectory_id
            if not is_root and any(isinstance(segment, Sampled) for segment in own):
                self._tree.ended[self.trajectory_id] = self
        return over

    # -- underneath ------------------------------------------------------------------------------------

    @property
    def _turn_is_closed(self) -> bool:
        """Whether the last token is the policy's, and the last of its turn."""
        last = int(self._buffer[self._length - 1])
        stops = last == self._chat.end_of_turn_id or last in self._chat.stop_token_ids
        return stops and isinstance(self._segments[-1], Sampled)

    def _append_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        """They are rendered with those before them: templates join neighbouring tool results."""
        if self._last_turn is None:
            raise RuntimeError(
                "session.add_messages needs a turn before it; put what comes first into session.start"
            )
        unread = [*(self._pending[0] if self._pending is not None else []), *messages]
        # A turn that ran out of budget or met a stop string lacks its end-of-turn token.
        ended = self._buffer[self._length - 1] == self._chat.end_of_turn_id
        token_ids = self._chat.append_ids(unread, after_length=not ended)
        left = self._config.max_context_tokens - self._length
        if len(token_ids) >= left:
            error = PromptTooLong(
                f"messages of {len(token_ids)} tokens do not fit: {left} tokens are left of "
                f"rollout.max_context_tokens = {self._config.max_context_tokens}"
            )
            raise self._out(error)
        self._pending = unread, token_ids
        self.messages.extend(messages)

    def _read_pending(self) -> None:
        if self._pending is not None:
            self._read(self._pending[1])
            self._pending = None

    def _check(self, call: str, *, alone: bool = True) -> None:
        """Whoever awaits two turns at once, or goes on after the end, would mix up the tokens."""
        if self.trajectory_id not in self._tree.open:
            raise RuntimeError(
                f"session.{call} was called outside of the session's life: a branch lives in its block, "
                "`async with session.branch() as other:`"
            )
        if alone and self._writer is not None:
            raise RuntimeError(f"session.{call} was called while a turn is being written: await it first")

    def _out(self, error: PromptTooLong | OutOfTurns) -> PromptTooLong | OutOfTurns:
        """A budget of this trajectory is used up, not one of its branches' or its parent's."""
        self._over = error
        return error

    def _fail(self) -> None:
        """It comes to nothing, and so do its branches, which begin with what it sampled."""
        below = self.trajectory_id + "."
        for name in [name for name in self._tree.ended if name.startswith(below)]:
            del self._tree.ended[name]
        self._stop_writing()
        for name, session in list(self._tree.open.items()):
            if name.startswith(below):
                del self._tree.open[name]
                session._stop_writing()

    def _stop_writing(self) -> None:
        if self._writer is not None and self._writer is not asyncio.current_task():
            self._writer.cancel()

    # -- for whoever runs the loop ------------------------------------------------------------------------

    def is_over(self, error: BaseException) -> bool:
        """Whether an error says that a budget of this trajectory is used up."""
        return error is self._over

    def end(self, reason: StopReason | None = None) -> None:
        """Nothing more will be written; why, where the loop knows better than the session."""
        cut = self._last_turn is not None and self._last_turn.finish_reason == "length"
        own: StopReason = "max_turns" if isinstance(self._over, OutOfTurns) else "completed"
        self.stop_reason = reason or ("length" if cut or isinstance(self._over, PromptTooLong) else own)

    async def close(self) -> int:
        """The loop has ended: take away whoever still writes; how many sessions had not come to their end."""
        left = [session for session in self._tree.open.values() if session is not self or self._writer]
        self._tree.open.clear()
        if writers := set(self._tree.writers):
            for writer in writers:
                writer.cancel()
            with waiting("agent loop"):
                await asyncio.wait(writers, timeout=_MAX_CLEAN_UP_S)
        return len(left)

    @property
    def tree(self) -> tuple[Self, ...]:
        """It and its branches that sampled something; each becomes a trajectory."""
        ended = (self._tree.ended[name] for name in sorted(self._tree.ended))
        return cast("tuple[Self, ...]", (self, *ended))

    @property
    def completion(self) -> Completion:
        """What the reward sees."""
        reward_source = self.reward_source
        return Completion(
            messages=reward_source.messages,
            text="" if reward_source._last_turn is None else reward_source._last_turn.text,
            stop_reason=reward_source.stop_reason,
            num_tool_calls=reward_source.num_tool_calls,
            num_tool_errors=reward_source.num_tool_errors,
            token_ids=reward_source._buffer[: reward_source._length].copy(),
            response_mask=np.concatenate(
                [np.full(len(each.token_ids), isinstance(each, Sampled)) for each in reward_source._segments]
            ),
        )
