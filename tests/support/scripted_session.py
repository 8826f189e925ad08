"""A session whose policy says what a test tells it to."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from async_rl.rollout.api import Turn
from async_rl.types import Task


def make_task(**fields: Any) -> Task:
    return Task(**{"task_id": "t", "messages": [{"role": "user", "content": "What is 2 + 2?"}], **fields})


class ScriptedSession:
    """Says the given turns in order; a `(text, "length")` pair is a turn that ran out of budget."""

    def __init__(self, *turns: str | tuple[str, str], tool_timeout_s: float = 5.0) -> None:
        self.task = make_task()
        self.messages: list[dict[str, Any]] = []
        self.tool_timeout_s = tool_timeout_s
        self.remaining_tokens = 1000
        self.tools: list[dict[str, Any]] = []
        self.tool_calls: list[str] = []
        self.stops: list[Sequence[str]] = []
        self.tokens_per_message = 0
        self.notes: list[dict[str, Any]] = []
        self._turns = list(turns)

    def start(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> None:
        self.messages = list(messages)
        self.tools = list(tools)

    async def generate(self, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        turn = self._turns.pop(0)
        text, reason = turn if isinstance(turn, tuple) else (turn, "stop")
        self.stops.append(stop)
        self.messages.append({"role": "assistant", "content": text})
        return Turn(text=text, token_ids=np.arange(3, dtype=np.int32), finish_reason=reason)

    def add_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        self.messages += messages
        self.remaining_tokens -= self.tokens_per_message * len(messages)

    def add_tool_result(
        self, content: Any, *, name: str | None = None, tool_call_id: str | None = None, error: bool = False
    ) -> None:
        self.record_tool_call(error=error)
        self.add_messages([{"role": "tool", "content": content, **({"name": name} if name else {})}])

    def annotate(self, **values: Any) -> None:
        self.notes.append(values)

    def record_tool_call(self, *, error: bool) -> None:
        self.tool_calls.append("error" if error else "ok")

    @property
    def tool_results(self) -> list[str]:
        return [message["content"] for message in self.messages if message["role"] == "tool"]

    @property
    def turns_left(self) -> int:
        return len(self._turns)
