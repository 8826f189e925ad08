"""The session of one trajectory: a conversation as its agent loop has it, over the tokens of a transcript.

```
 agent loop ── start, add_messages ──► context ─┐
            ── generate ─────────────► a turn ──┼─► Transcript ─► tokens and routing rows ──► one Trajectory
            ── branch ───────────────► another session, which begins with everything so far
```

One run of an agent loop makes a session and its branches; they succeed or fail together. If the loop ends
well, each of them becomes a trajectory of the group. A branch reads what it inherits, and the trajectory that
sampled a token is trained on it, so that no token is trained twice.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import TracebackType
from typing import Any, Final

import msgspec
import numpy as np

from async_rl.errors import ConfigError, OutOfTurns, PromptTooLong
from async_rl.rollout.session.api import Turn
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.dialogue import Dialogue, UnreadMessages
from async_rl.rollout.session.tokenising import MAX_BLOCKING_BYTES, can_fit, size_of
from async_rl.rollout.session.tokens import GrowingText
from async_rl.rollout.session.transcript import Transcript
from async_rl.runtime.printable import as_json
from async_rl.runtime.reward_values import MAX_REWARD, reward_value
from async_rl.runtime.serving_clock import ServingClock
from async_rl.runtime.waits import waiting
from async_rl.types import (
    Completion,
    Int32Array,
    Outcome,
    RoutingTrace,
    Sampled,
    StopReason,
    Task,
    Trajectory,
    TurnRecord,
    root_of,
    turn_rewards_of,
    with_turn_rewards,
)

log = logging.getLogger(__name__)

_MAX_METADATA_BYTES: Final = 4096
"""Limit of one turn's metadata as JSON, because a run keeps that of a thousand trajectories for display."""

_LONG_S: Final = 1.0
"""Tokenising that blocks the event loop for longer is reported."""

_MAX_CLEAN_UP_S: Final = 5.0
"""How long `close` waits for tasks of a loop that were cancelled in the middle of a turn."""

_THOUGHT_TOKENS: Final = 8
"""Tokens at the end of a prompt among which a chat template may open a thought by `<think>`."""


class SessionTree:
    """What a session shares with its branches."""

    def __init__(self, max_branches: int) -> None:
        """Start with no session open."""
        self.max_branches = max_branches
        self.deadline_s = math.inf
        """When the agent loop reaches its limit, on the serving clock; the limit begins with the loop."""
        self.num_branches = 0
        self.status = ""
        """What the attempt is doing, in words."""
        self.has_ended = False
        """Whether the attempt has ended, so that no session opens any more."""
        self.open: dict[str, RolloutSession] = {}
        """The root until its loop ends, and branches inside their blocks."""
        self.turn_tasks: set[asyncio.Task[Any]] = set()
        """Tasks that await a turn, in any session of the tree."""
        self.ended: dict[str, RolloutSession] = {}
        """Branches that sampled something, in the order in which their blocks ended."""
        self.reward_source: RolloutSession | None = None
        """The session whose completion all are rewarded for; None if each is rewarded for its own."""


class RolloutSession:
    """Implements `session.api.Session`, and becomes a trajectory; other methods are for the rollout code."""

    def __init__(
        self,
        context: SessionContext,
        task: Task,
        transcript: Transcript,
        *,
        group_id: str,
        tree: SessionTree | None = None,
        inherited: Dialogue | None = None,
    ) -> None:
        """Start the session of a trajectory.

        Args:
            context: The chat format and the limits.
            task: The task of the trajectory.
            transcript: Writes the tokens of this session, and of no other.
            group_id: The group of the trajectory.
            tree: The tree to which a branch belongs; None makes this session the root of a new one.
            inherited: What a branch begins with; None begins without a prompt.
        """
        self.transcript = transcript
        self.task = task
        self.trajectory_id = transcript.trajectory_id
        self.stop_reason: StopReason = "completed"
        """Why the session ended, once it has."""
        self._context = context
        self._group_id = group_id
        self._started_s = context.clock()
        self._tokens = transcript.tokens
        if tree is None:
            tree = SessionTree(context.config.rollout.max_branches)
            tree.open[self.trajectory_id] = self
        self._tree = tree
        self._dialogue = inherited or Dialogue()
        self._num_inherited = len(self._tokens.segments)
        self._num_branches = 0
        self._turn_task: asyncio.Task[Any] | None = None
        """The task that awaits a turn."""
        self._exceeded: PromptTooLong | OutOfTurns | None = None
        """The error of the budget that is used up."""

    # -- for agent loops -------------------------------------------------------------------------------

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far, as text."""
        return self._dialogue.messages

    @property
    def tool_timeout_s(self) -> float:
        """The time limit of one tool call."""
        return self._context.config.rollout.tool_timeout_s

    @property
    def serving_clock(self) -> ServingClock:
        """Measures the limits of the agent loop and its tools."""
        return self._context.serving_clock

    @property
    def remaining_tokens(self) -> int:
        """Tokens left before the trajectory reaches `rollout.max_context_tokens`."""
        num_unread = 0 if self._dialogue.unread is None else len(self._tokenise_now(self._dialogue.unread))
        return max(0, self._tokens_left - num_unread)

    @property
    def num_tokens(self) -> int:
        """Tokens so far, with inherited ones and without those of a running engine call."""
        return len(self._tokens)

    @property
    def num_turns(self) -> int:
        """Turns of the policy so far, with inherited ones."""
        return len(self._dialogue.turns)

    @property
    def remaining_turns(self) -> int:
        """Turns left of `rollout.max_turns`."""
        return self._context.config.rollout.max_turns - len(self._dialogue.turns)

    @property
    def remaining_s(self) -> float:
        """Seconds left of `rollout.trajectory_timeout_s`, on the serving clock; branches share it."""
        return max(0.0, self._tree.deadline_s - self.serving_clock.now())

    @property
    def remaining_branches(self) -> int:
        """Branches left of `rollout.max_branches`."""
        return self._tree.max_branches - self._tree.num_branches

    @property
    def last_turn(self) -> Turn | None:
        """The newest turn of the policy."""
        return self._dialogue.last_turn

    def start(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> None:
        """Implements `api.Session.start`.

        Raises:
            PromptTooLong: The prompt leaves no tokens for a turn.
        """
        self._check_call("start")
        if self._tokens.segments or self._dialogue.unread is not None:
            raise RuntimeError("session.start was called twice; use session.add_messages to go on")
        num_bytes = self._check_size((messages, tools))
        encode = partial(self._context.chat.prompt_ids, tools=deepcopy(tools))
        self._add_unread(UnreadMessages(encode, [deepcopy([*messages])], num_bytes), messages)

    async def count_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), *, after: bool
    ) -> int:
        """Implements `api.Session.count_tokens`."""
        chat, before = self._context.chat, 0
        encode = partial(chat.prompt_ids, tools=tools)
        if after:
            ended = int(self._tokens.token_ids[-1]) in chat.end_of_turn_ids
            encode, before = partial(chat.append_ids, after_length=not ended), len(self._tokens)
        new = UnreadMessages(encode, [[*messages]], size_of(messages))
        return before + len(await new.encode_in_thread())

    async def generate(
        self,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Turn:
        """Implements `api.Session.generate`.

        Args:
            max_new_tokens: The most tokens of this turn; `rollout.max_new_tokens` by default and at most.
            stop: Strings that end the turn, beside the chat template's end of turn.
            on_text: Receives the turn's text as it grows.

        Returns:
            The turn; `finish_reason` is `length` if the budget or the context ran out.

        Raises:
            OutOfTurns: The session has had `rollout.max_turns`; the trajectory ends as it is.
            PromptTooLong: The context is full; the trajectory ends as it is.
            ValueError: `max_new_tokens` is less than 1, or `stop` has an empty string.
        """
        self._check_call("generate")
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(each, str) and each for each in stop):
            raise ValueError(
                f"session.generate: stop is {list(stop)!r:.200}, expected strings, none of them empty"
            )
        tokens, rollout, chat = self._tokens, self._context.config.rollout, self._context.chat
        if not tokens.segments and self._dialogue.unread is None:
            raise RuntimeError("session.generate was called before session.start")
        if self.remaining_turns < 1:
            raise self._exceed(
                OutOfTurns(f"the trajectory has had rollout.max_turns = {rollout.max_turns} turns")
            )
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(
                f"session.generate: max_new_tokens is {max_new_tokens}, expected at least 1: leave it out to "
                "use rollout.max_new_tokens"
            )
        if self._dialogue.unread is None and self._turn_is_closed:
            self._read_next([])
        if self._dialogue.unread is not None:
            await self._take_unread(self._dialogue.unread)
        if self.remaining_tokens < 1:
            raise self._exceed(
                PromptTooLong(
                    "the context is full: the trajectory has rollout.max_context_tokens = "
                    f"{rollout.max_context_tokens} tokens; raise it, or look at session.remaining_tokens "
                    "before a turn"
                )
            )
        self._append_unread()
        wanted = max_new_tokens or rollout.max_new_tokens
        budget = min(wanted, rollout.max_new_tokens, self.remaining_tokens)
        begin, first = len(tokens), len(tokens.segments)
        interruptions, engine_s = tokens.num_interruptions + tokens.num_failovers, tokens.engine_s
        first_token_s, prefilled = tokens.first_token_s, tokens.prefilled_tokens
        listener = GrowingText(chat.decode, on_text) if on_text is not None else None
        began_s = self._context.clock()
        with self._in_turn():
            reason = await self.transcript.write_turn(budget, stop, listener)
        record = TurnRecord(
            start=begin,
            end=len(tokens),
            finish_reason=reason,
            num_interruptions=tokens.num_interruptions + tokens.num_failovers - interruptions,
            engine_s=tokens.engine_s - engine_s,
            first_token_s=tokens.first_token_s - first_token_s,
            prefilled_tokens=tokens.prefilled_tokens - prefilled,
            began_s=began_s - self._started_s,
            duration_s=self._context.clock() - began_s,
        )
        token_ids = tokens.token_ids[begin:].copy()
        sampled = [segment for segment in tokens.segments[first:] if isinstance(segment, Sampled)]
        turn = Turn(
            text=chat.decode(token_ids),
            token_ids=token_ids,
            finish_reason=reason,
            weight_versions=tuple(sorted({segment.weight_version for segment in sampled})),
            num_interruptions=record.num_interruptions,
            engine_s=record.engine_s,
            rollout_log_probs=np.concatenate(
                [np.empty(0, np.float32), *(s.rollout_log_probs for s in sampled)]
            ),
        )
        self._dialogue.last_turn, self._dialogue.last_text = turn, turn.text
        self._exceeded = None  # the loop has gone on with less
        whole = self._turn_begin(begin)
        prompt_end = chat.decode(tokens.token_ids[max(0, whole - _THOUGHT_TOKENS) : whole])
        self._dialogue.is_in_thought = prompt_end.rstrip().endswith("<think>")
        if whole < begin:
            self._dialogue.last_text = chat.decode(tokens.token_ids[whole:])
            del self._dialogue.messages[-1]  # the piece before
        self._dialogue.messages.append({"role": "assistant", "content": self._dialogue.last_text})
        self._dialogue.turns.append(record)
        return turn

    def _turn_begin(self, begin: int) -> int:
        """Return where the turn begins that is continued at a position: pieces of one turn are adjacent."""
        for piece in reversed(self._dialogue.turns):
            if piece.end != begin:
                break
            begin = piece.start
        return begin

    def add_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        """Implements `api.Session.add_messages`.

        Raises:
            PromptTooLong: The messages do not fit; the trajectory ends as it is.
        """
        self._check_call("add_messages")
        self._read_next(messages)

    def add_tool_result(
        self,
        content: Any,
        *,
        name: str | None = None,
        tool_call_id: str | None = None,
        error: bool = False,
    ) -> None:
        """Implements `api.Session.add_tool_result`.

        Args:
            content: Text, or a JSON value.
            name: The tool's name, for templates that print it.
            tool_call_id: The id of the call, for templates that print it.
            error: Whether the call failed.

        Raises:
            PromptTooLong: The result does not fit; the trajectory ends as it is.
        """
        text = content if isinstance(content, str) else as_json(content)
        named = {"name": name, "tool_call_id": tool_call_id}
        given = {key: value for key, value in named.items() if value is not None}
        self.record_tool_call(error=error)
        self.add_messages([{"role": "tool", "content": text, **given}])

    @property
    def status(self) -> str:
        """What the attempt is doing, in words."""
        return self._tree.status

    @status.setter
    def status(self, text: str) -> None:
        self._tree.status = text

    @property
    def sampling(self) -> dict[str, float]:
        """Temperature, top_p, top_k and min_p by which the policy is sampled."""
        rollout = self._context.config.rollout
        return {name: getattr(rollout, name) for name in ("temperature", "top_p", "top_k", "min_p")}

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Implements `api.Session.pieces`; bytes of an incomplete character are replaced.

        Each token is decoded after a letter: some tokenizers strip the space with which a text begins.
        """
        chat = self._context.chat
        letter = chat.encode("a").tolist()[-1:]
        before = chat.raw_text(letter)
        return [chat.raw_text([*letter, token_id]).removeprefix(before) for token_id in token_ids]

    @property
    def chat_template(self) -> str:
        """The text of the model's chat template."""
        return self._context.chat.template

    def record_tool_call(
        self, *, error: bool, tool: str = "unnamed", seconds: float = 0.0, waited_s: float = 0.0
    ) -> None:
        """Implements `api.Session.record_tool_call`."""
        self._dialogue.num_tool_calls += 1
        self._dialogue.num_tool_errors += error
        metrics = self._context.metrics
        tool = metrics.tool_label(tool)
        metrics.tool_calls_total.labels(tool, "error" if error else "ok").inc()
        metrics.tool_seconds.labels(tool).observe(seconds)
        metrics.tool_wait_seconds.labels(tool).observe(waited_s)

    def record_request(self, result: str, ignored: Sequence[str] = ()) -> None:
        """Implements `api.Session.record_request`."""
        self._context.metrics.openai_requests_total.labels(result).inc()
        for parameter in ignored:
            self._context.metrics.openai_ignored_total.labels(parameter).inc()

    def annotate(self, **values: Any) -> None:
        """Add metadata to the newest turn, for display.

        Args:
            values: JSON values, at most 4096 bytes for each turn; they overwrite values of the same name.

        Raises:
            ValueError: The values are not JSON, or too long.
        """
        self._check_call("annotate")
        if len(self._dialogue.turns) == self._dialogue.num_inherited_turns:
            raise RuntimeError(
                "session.annotate was called before a turn of this session: call session.generate first"
            )
        metadata = {**self._dialogue.turns[-1].metadata, **values}
        try:
            data = msgspec.json.encode(metadata)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"session.annotate expects JSON values: {error}") from error
        if len(data) > _MAX_METADATA_BYTES:
            raise ValueError(
                f"session.annotate: a turn's metadata is {len(data)} bytes of JSON, expected at most "
                f"{_MAX_METADATA_BYTES}: annotate less, or write your own file"
            )
        plain = msgspec.json.decode(data)  # a copy, which the loop cannot change later
        self._dialogue.turns[-1] = msgspec.structs.replace(self._dialogue.turns[-1], metadata=plain)

    def reward_turn(self, reward: float) -> None:
        """Add to the reward of the newest turn.

        Raises:
            ValueError: The reward is no number, or the turn's rewards exceed `MAX_REWARD`.
        """
        self._check_call("reward_turn")
        if len(self._dialogue.turns) == self._dialogue.num_inherited_turns:
            raise RuntimeError(
                "session.reward_turn was called before a turn of this session: call session.generate first"
            )
        turn, value = self._dialogue.turns[-1], None if isinstance(reward, bool) else reward_value(reward)
        if value is None or reward_value(turn.reward + value) is None:
            raise ValueError(
                f"session.reward_turn got {reward!r:.100}, expected a finite number; "
                f"the sum of a turn is at most {MAX_REWARD:g}"
            )
        self._dialogue.turns[-1] = msgspec.structs.replace(turn, reward=turn.reward + value)

    def report(self, **parts: float) -> None:
        """Implements `api.Session.report`."""
        self._check_call("report", needs_rest=False)
        values = {name: reward_value(part) for name, part in parts.items()}
        for name, value in values.items():
            if value is None:
                raise ValueError(
                    f"session.report got {name}={parts[name]!r:.100}, expected a finite number of at most "
                    f"{MAX_REWARD:g}"
                )
        self._dialogue.reported |= {name: value for name, value in values.items() if value is not None}

    def branch(self) -> RolloutSession:
        """Implements `api.Session.branch`."""
        self._check_call("branch")
        if not self._tokens.segments:
            if self._dialogue.unread is None:
                raise RuntimeError("session.branch was called before session.start")
            self._check_fits(self._tokenise_now(self._dialogue.unread))
            self._append_unread()
        return self._open_sibling(inherits=True)

    def conversation(self) -> RolloutSession:
        """Implements `api.Session.conversation`."""
        self._check_call("conversation", needs_rest=False)  # it inherits nothing from this session
        return self._open_sibling(inherits=False)

    def share_reward(self) -> None:
        """Implements `api.Session.share_reward`."""
        self._check_call("share_reward")
        self._tree.reward_source = self

    @property
    def reward_source(self) -> RolloutSession:
        """The session for whose completion this one is rewarded."""
        return self._tree.reward_source or self

    def _open_sibling(self, *, inherits: bool) -> RolloutSession:
        """Open one more session of the tree, with all tokens and turns so far or with none."""
        tree = self._tree
        if self.remaining_branches < 1:
            raise RuntimeError(
                f"rollout.max_branches = {tree.max_branches} allows no further branch or conversation: raise "
                "it, or look at session.remaining_branches first"
            )
        tree.num_branches += 1
        self._num_branches += 1
        # A loop that runs again after a restart makes the same names.
        name = f"{self.trajectory_id}.{self._num_branches}"
        return RolloutSession(
            self._context,
            self.task,
            self.transcript.open_branch(name, inherits=inherits),
            group_id=self._group_id,
            tree=tree,
            inherited=self._dialogue.copy() if inherits else None,
        )

    async def __aenter__(self) -> RolloutSession:
        """Begin the block with which the trajectory ends."""
        if self._tree.has_ended:
            raise RuntimeError("a session's block began after the attempt had ended: let cancellations pass")
        self._tree.open[self.trajectory_id] = self
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End the trajectory; suppress the error of its own used-up budget, and no other."""
        was_open = self._tree.open.pop(self.trajectory_id, None) is not None
        exceeded = error is not None and error is self._exceeded
        if error is None and self._turn_task is not None:
            self._discard()
            raise RuntimeError("a session's block ended while a turn was being written: await it first")
        if error is not None and not exceeded:
            self._discard()
        elif was_open:
            self.end_session()
            own = self._tokens.segments[self._num_inherited :]
            is_root = root_of(self.trajectory_id) == self.trajectory_id
            if not is_root and any(isinstance(segment, Sampled) for segment in own):
                self._tree.ended[self.trajectory_id] = self
        return exceeded

    # -- implementation --------------------------------------------------------------------------------

    @property
    def _turn_is_closed(self) -> bool:
        """Whether the last token is the policy's, and the last of its turn."""
        last, chat = int(self._tokens.token_ids[-1]), self._context.chat
        stops = last in chat.end_of_turn_ids or last in chat.stop_token_ids
        return stops and isinstance(self._tokens.segments[-1], Sampled)

    def _read_next(self, messages: Sequence[dict[str, Any]]) -> None:
        """Let the next turn read messages, together with unread ones: templates join adjacent results."""
        if self._dialogue.last_turn is None:
            raise RuntimeError(
                "session.add_messages was called before a turn: pass these messages to session.start"
            )
        former, chat = self._dialogue.unread, self._context.chat
        num_bytes = self._check_size(messages, 0 if former is None else former.num_bytes)
        parts = [*(() if former is None else former.parts), deepcopy([*messages])]
        # A turn that ran out of budget or met a stop string lacks its end-of-turn token.
        ended = int(self._tokens.token_ids[-1]) in chat.end_of_turn_ids
        encode = partial(chat.append_ids, after_length=not ended)
        self._add_unread(UnreadMessages(encode, parts, num_bytes), messages)

    def _add_unread(self, unread: UnreadMessages, added: Sequence[dict[str, Any]]) -> None:
        """Take over messages; long ones are tokenised when the next turn begins, which can wait for it."""
        if unread.num_bytes <= MAX_BLOCKING_BYTES:
            self._check_fits(self._tokenise_now(unread))
        self._dialogue.unread = unread
        self._dialogue.messages.extend(added)
        if not self._tokens.segments and unread.token_ids is not None:
            self._append_unread()

    def _tokenise_now(self, unread: UnreadMessages) -> Int32Array:
        """Return the tokens of messages; long ones block the event loop until then."""
        if unread.token_ids is None:
            began_s = time.perf_counter()
            unread.token_ids = unread.encode()
            if (seconds := time.perf_counter() - began_s) >= _LONG_S:
                log.warning(
                    "trajectory %s: tokenising %.1f MB of messages blocked the event loop for %.1f s: read "
                    "session.remaining_tokens, and branch, before long messages or after the next turn",
                    self.trajectory_id,
                    unread.num_bytes / 1e6,
                    seconds,
                )
        return unread.token_ids

    async def _take_unread(self, unread: UnreadMessages) -> None:
        """Tokenise messages if they are not, in a thread; leave out the first part that cannot be read.

        Parts after it are left out as well.

        Raises:
            PromptTooLong: They do not fit.
        """
        status = self.status
        if unread.token_ids is None:
            self.status = f"tokenising {unread.num_bytes / 1e6:.1f} MB of messages"
        with self._in_turn():
            try:
                self._check_fits(await unread.encode_in_thread())
            except Exception:
                self._dialogue.unread = kept = await self._readable_parts(unread)
                num_left_out = len(unread.messages) - (0 if kept is None else len(kept.messages))
                del self._dialogue.messages[len(self._dialogue.messages) - num_left_out :]
                self.status = status
                raise
        self._check_call("generate")  # the attempt may have ended meanwhile
        self.status = status

    async def _readable_parts(self, unread: UnreadMessages) -> UnreadMessages | None:
        """Return as many of the first parts as a turn can read, found by bisection: tokenising is slow."""
        readable, too_many = None, len(unread.parts)
        while too_many - (low := 0 if readable is None else len(readable.parts)) > 1:
            some = unread.first((low + too_many) // 2)
            try:
                fits = len(await some.encode_in_thread()) < self._tokens_left
            except ConfigError:  # the chat template cannot render them
                fits = False
            if fits:
                readable = some
            else:
                too_many = len(some.parts)
        return readable

    @property
    def _tokens_left(self) -> int:
        """Tokens left of the context before messages that no turn has read."""
        return self._context.config.rollout.max_context_tokens - len(self._tokens)

    def _check_fits(self, token_ids: Int32Array) -> None:
        """Refuse messages that leave no tokens for a turn.

        Raises:
            PromptTooLong: They do.
        """
        limit, left = self._context.config.rollout.max_context_tokens, self._tokens_left
        if len(token_ids) < left:
            return
        if not self._tokens.segments:
            raise PromptTooLong(
                f"the prompt of task {self.task.task_id} has {len(token_ids)} tokens, but "
                f"rollout.max_context_tokens is {limit}: raise it or shorten the prompt"
            )
        raise self._exceed(
            PromptTooLong(
                f"messages of {len(token_ids)} tokens do not fit: {left} tokens are left of "
                f"rollout.max_context_tokens = {limit}"
            )
        )

    def _check_size(self, messages: Any, before: int = 0) -> int:
        """Refuse messages that no tokenizer could fit into the context, and return their size.

        Args:
            messages: The messages.
            before: The size of those that they follow, bytes.

        Raises:
            PromptTooLong: They are too long.
        """
        limit, left = self._context.config.rollout.max_context_tokens, self._tokens_left
        num_bytes = before + size_of(messages)
        if not can_fit(num_bytes, left):
            raise self._exceed(
                PromptTooLong(
                    f"messages of {num_bytes} bytes cannot fit: {left} tokens are left of "
                    f"rollout.max_context_tokens = {limit}; shorten them, or raise it"
                )
            )
        return num_bytes

    def _append_unread(self) -> None:
        """Append the messages that the next turn reads, or at the end those that it could."""
        token_ids = None if self._dialogue.unread is None else self._dialogue.unread.token_ids
        if token_ids is not None and len(token_ids) <= self._tokens_left:
            self.transcript.append_context(token_ids)
        self._dialogue.unread = None

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Refuse other calls while the block awaits something."""
        self._turn_task = turn_task = asyncio.current_task()
        assert turn_task is not None
        self._tree.turn_tasks.add(turn_task)
        try:
            yield
        finally:
            self._turn_task = None
            self._tree.turn_tasks.discard(turn_task)

    def _check_call(self, call: str, *, needs_rest: bool = True) -> None:
        """Reject calls after the end and, if `needs_rest`, during a turn: they would mix up the tokens."""
        if self.trajectory_id not in self._tree.open:
            raise RuntimeError(
                f"session.{call} was called on a closed session: a branch is open inside its block, "
                "`async with session.branch() as other:`"
            )
        if needs_rest and self._turn_task is not None:
            raise RuntimeError(f"session.{call} was called while a turn is being written: await it first")

    def _exceed(self, error: PromptTooLong | OutOfTurns) -> PromptTooLong | OutOfTurns:
        """Record that a budget of this trajectory is used up, not one of a branch or of its parent."""
        self._exceeded = error
        return error

    def _discard(self) -> None:
        """Discard this session and its branches, which begin with what it sampled."""
        below = self.trajectory_id + "."
        for name in [name for name in self._tree.ended if name.startswith(below)]:
            del self._tree.ended[name]
        self._cancel_turn()
        for name, session in list(self._tree.open.items()):
            if name.startswith(below):
                del self._tree.open[name]
                session._cancel_turn()

    def _cancel_turn(self) -> None:
        if self._turn_task is not None and self._turn_task is not asyncio.current_task():
            self._turn_task.cancel()

    # -- for the rollout code --------------------------------------------------------------------------

    def begin_limit(self) -> None:
        """Count `remaining_s` from now, when the agent loop is called."""
        self._tree.deadline_s = self.serving_clock.now() + self._context.config.rollout.trajectory_timeout_s

    def has_exceeded(self, error: BaseException) -> bool:
        """Return whether an error says that a budget of this trajectory is used up."""
        return error is self._exceeded

    def end_session(self, reason: StopReason | None = None) -> None:
        """Set the stop reason: the loop's own `reason`, or what the last turn and the budgets say."""
        cut = self._dialogue.last_turn is not None and self._dialogue.last_turn.finish_reason == "length"
        own: StopReason = "max_turns" if isinstance(self._exceeded, OutOfTurns) else "completed"
        self.stop_reason = reason or ("length" if cut or isinstance(self._exceeded, PromptTooLong) else own)
        if reason == "failed":  # the whole attempt has
            for other in self._tree.ended.values():
                other.stop_reason = reason

    def refuse_calls(self) -> None:
        """Refuse all further calls of the loop, in any session of the tree."""
        self._tree.has_ended = True
        self._tree.open.clear()

    def abandon(self) -> None:
        """Refuse all further calls and free the routing rows: the loop is cancelled, and may not end soon."""
        for session in (self, *self._tree.open.values(), *self._tree.ended.values()):
            session.transcript.discard_rows()
        self.refuse_calls()

    async def close(self) -> int:
        """Close the tree after its loop has ended, and cancel turns that are still being written.

        Returns:
            The number of sessions that were still open, or in the middle of a turn.
        """
        left = [session for session in self._tree.open.values() if session is not self or self._turn_task]
        self.refuse_calls()
        if turn_tasks := set(self._tree.turn_tasks):
            for task in turn_tasks:
                task.cancel()
            with waiting("agent loop"):
                await asyncio.wait(turn_tasks, timeout=_MAX_CLEAN_UP_S)
        return len(left)

    @property
    def tree(self) -> tuple[RolloutSession, ...]:
        """This session and its branches that sampled something; each becomes a trajectory."""
        return (self, *(self._tree.ended[name] for name in sorted(self._tree.ended)))

    @property
    def completion(self) -> Completion:
        """What the reward function receives: the completion of this session's reward source."""
        return self.reward_source._own_completion()

    def _own_completion(self) -> Completion:
        return Completion(
            messages=self._dialogue.messages,
            text=self._dialogue.last_text,
            stop_reason=self.stop_reason,
            is_in_thought=self._dialogue.is_in_thought,
            num_tool_calls=self._dialogue.num_tool_calls,
            num_tool_errors=self._dialogue.num_tool_errors,
            reported=dict(self._dialogue.reported),
            token_ids=self._tokens.token_ids.copy(),
            response_mask=np.concatenate(
                [np.full(len(each.token_ids), isinstance(each, Sampled)) for each in self._tokens.segments]
            ),
        )

    async def finish_trajectory(self, stop_reason: StopReason, reward_parts: dict[str, float]) -> Trajectory:
        """Return the trajectory, with its routing decoded once and checked against its tokens.

        Raises:
            AlignmentError: The routing does not fit the tokens.
        """
        self._append_unread()
        trace = await self.transcript.build_trace()  # may fetch rows from the engine that has them cached
        return self._trajectory(trace, stop_reason, reward_parts, error=None)

    def failed_trajectory(self, error: Exception) -> Trajectory:
        """Return what a failed attempt sampled, for display only: without routing, never trained."""
        return self._trajectory(None, "error", {}, error=f"{type(error).__name__}: {error}")

    def _trajectory(
        self,
        trace: RoutingTrace | None,
        stop_reason: StopReason,
        reward_parts: dict[str, float],
        *,
        error: str | None,
    ) -> Trajectory:
        tokens = self.transcript.tokens
        own_turns = self._dialogue.turns[self._dialogue.num_inherited_turns :]
        reward_parts = with_turn_rewards(reward_parts, turn_rewards_of(own_turns))
        return Trajectory(
            trajectory_id=self.trajectory_id,
            group_id=self._group_id,
            task_id=self.task.task_id,
            segments=tuple(tokens.segments),
            trace=trace,
            outcome=Outcome(
                stop_reason=stop_reason,
                reward=reward_parts.get("reward"),
                reward_parts=reward_parts,
                error=error,
                num_turns=len(self._dialogue.turns),
                num_tool_calls=self._dialogue.num_tool_calls,
                num_tool_errors=self._dialogue.num_tool_errors,
                num_interruptions=tokens.num_interruptions,
                num_resumes=tokens.num_resumes,
                num_failovers=tokens.num_failovers,
                started_s=self._started_s,
                finished_s=self._context.clock(),
            ),
            turns=tuple(self._dialogue.turns),
            num_inherited=self._num_inherited,
        )
