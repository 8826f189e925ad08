"""Tests of agent loops without a model: a session with scripted turns of the policy.

```
play(loop, task, *turns) ──► loop.run(task, ScriptedSession) ──► Completion ──► your asserts, your reward
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from agent_loops.base import AgentLoop
from async_rl.errors import PromptTooLong
from async_rl.rollout.session.api import Turn
from async_rl.types import Completion, StopReason, Task


def make_task(**fields: Any) -> Task:
    """Make a task with default values for fields that the test does not need."""
    return Task(**{"task_id": "t", "messages": [{"role": "user", "content": "What is 2 + 2?"}], **fields})


class ScriptedSession:
    """A `Session` that returns the given turns in order.

    Example:
        >>> session = ScriptedSession("Paris.", ("The capital of Fr", "length"))
        >>> (await session.generate()).text
        'Paris.'

    Args:
        turns: Texts; a pair `(text, "length")` is a turn that ran out of budget. Branches and conversations
            of the session take their turns from the same list.
        task: The task of the trajectory.
        tool_timeout_s: The longest tool call.
    """

    trajectory_id = "scripted"
    status = ""
    remaining_tokens = 1000
    remaining_turns = 100
    remaining_s = 1000.0
    remaining_branches = 100
    num_turns = 0
    tokens_per_message = 0
    """How many `remaining_tokens` each message uses."""
    chat_template = "<tool_call>"
    """A template that teaches the format of Hermes."""
    last_turn: Turn | None = None

    def __init__(
        self, *turns: str | tuple[str, str], task: Task | None = None, tool_timeout_s: float = 5.0
    ) -> None:
        self.task = task or make_task()
        self.messages: list[dict[str, Any]] = []
        self.tool_timeout_s = tool_timeout_s
        self.tools: list[dict[str, Any]] = []
        self.tool_calls: list[str] = []
        """`ok` or `error` for each call."""
        self.tools_called: list[str] = []
        """The tool's name for each call."""
        self.stops: list[Sequence[str]] = []
        self.notes: list[dict[str, Any]] = []
        self.turn_rewards: list[float] = []
        self.reported: dict[str, float] = {}
        self.branches: list[ScriptedSession] = []
        """Other conversations of the attempt, in the order in which they began."""
        self._turns = list(turns)

    def start(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> None:
        """Implements `Session.start`."""
        self.messages = list(messages)
        self.tools = list(tools)

    async def count_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = (), *, after: bool
    ) -> int:
        """Implements `Session.count_tokens` with a token for each character of the messages."""
        before = self.messages if after else []
        return sum(len(message["content"]) for message in [*before, *messages])

    async def generate(
        self,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Turn:
        """See `Session.generate`.

        Raises:
            AssertionError: The loop asked for more turns than there are.
            PromptTooLong: No `remaining_tokens` are left.
        """
        if self.remaining_tokens < 1:
            raise PromptTooLong("the context is full")
        assert self._turns, f"the loop asked for turn {self.num_turns + 1}, but the test has no more"
        turn = self._turns.pop(0)
        text, reason = turn if isinstance(turn, tuple) else (turn, "stop")
        self.stops.append(stop)
        self.num_turns += 1
        self.messages.append({"role": "assistant", "content": text})
        if on_text is not None:
            on_text(text)
        self.last_turn = Turn(
            text=text,
            token_ids=np.arange(3, dtype=np.int32),
            finish_reason="length" if reason == "length" else "stop",
        )
        return self.last_turn

    @property
    def sampling(self) -> dict[str, float]:
        """Implements `Session.sampling`."""
        return {"temperature": 1.0, "top_p": 1.0, "top_k": -1}

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Implements `Session.pieces` with the numbers of the tokens, without a tokenizer."""
        return [f"<{token_id}>" for token_id in token_ids]

    def add_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        """Implements `Session.add_messages`."""
        self.messages += messages
        self.remaining_tokens -= self.tokens_per_message * len(messages)

    def add_tool_result(
        self, content: Any, *, name: str | None = None, tool_call_id: str | None = None, error: bool = False
    ) -> None:
        """Implements `Session.add_tool_result`."""
        self.record_tool_call(error=error)
        self.add_messages([{"role": "tool", "content": content, **({"name": name} if name else {})}])

    def record_tool_call(
        self, *, error: bool, tool: str = "unnamed", seconds: float = 0.0, waited_s: float = 0.0
    ) -> None:
        """Implements `Session.record_tool_call`."""
        self.tool_calls.append("error" if error else "ok")
        self.tools_called.append(tool)

    def record_request(self, result: str, ignored: Sequence[str] = ()) -> None:
        """Implements `Session.record_request`; nothing is counted."""

    def annotate(self, **values: Any) -> None:
        """Implements `Session.annotate`."""
        self.notes.append(values)

    def reward_turn(self, reward: float) -> None:
        """Implements `Session.reward_turn`."""
        self.turn_rewards.append(reward)

    def report(self, **parts: float) -> None:
        """Implements `Session.report`."""
        self.reported |= parts

    def branch(self) -> ScriptedSession:
        """Implements `Session.branch`."""
        other = self.conversation()
        other.messages, other.tools = list(self.messages), list(self.tools)
        return other

    def conversation(self) -> ScriptedSession:
        """Implements `Session.conversation`."""
        other = ScriptedSession(task=self.task, tool_timeout_s=self.tool_timeout_s)
        other.trajectory_id = f"{self.trajectory_id}.{len(self.branches) + 1}"
        other._turns = self._turns
        self.branches.append(other)
        return other

    def share_reward(self) -> None:
        """Implements `Session.share_reward`."""

    async def __aenter__(self) -> ScriptedSession:
        """Implements `Session.branch`."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Implements `Session.branch`."""
        return False

    @property
    def tool_results(self) -> list[str]:
        """The content of all tool messages."""
        return [message["content"] for message in self.messages if message["role"] == "tool"]

    @property
    def turns_left(self) -> int:
        """The number of turns that the loop did not ask for."""
        return len(self._turns)

    def completion(self, ended: StopReason | None) -> Completion:
        """Return the completion that a reward function would receive now."""
        text = self.last_turn.text if self.last_turn is not None else ""
        length = self.last_turn is not None and self.last_turn.finish_reason == "length"
        return Completion(
            messages=list(self.messages),
            text=text,
            stop_reason=ended or ("length" if length else "completed"),
            num_tool_calls=len(self.tool_calls),
            num_tool_errors=self.tool_calls.count("error"),
            reported=dict(self.reported),
        )


async def play(loop: AgentLoop, task: Task, *turns: str | tuple[str, str]) -> Completion:
    """Run a loop on a task with scripted turns of the policy.

    Example:
        >>> from agent_loops.rewards import last_number
        >>> from agent_loops.single_turn import SingleTurnLoop
        >>> task = make_task(answer="4")
        >>> last_number(task, await play(SingleTurnLoop(), task, "It is 4."))
        1.0

    Raises:
        AssertionError: The loop asked for more turns than there are, or for fewer.
    """
    session = ScriptedSession(*turns, task=task)
    ended = await loop.run(task, session)
    assert not session.turns_left, f"the loop did not ask for the last {session.turns_left} turns"
    return session.completion(ended)
