"""What an agent loop talks to: `Session`, and the `Turn` that each call of the policy gives back.

A loop sees a conversation; the session sees tokens. Weight updates, interruptions, resumes and engines that
die happen below this line and never show: `generate` returns when the turn is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec

from async_rl.types import Int32Array, Task


class Turn(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One assistant turn, whole, however often it was interrupted while it was sampled."""

    text: str
    """Decoded; special tokens are left out except what the chat format needs (tool-call tags stay)."""
    token_ids: Int32Array  # [n]
    finish_reason: Literal["stop", "length"]


class Session(Protocol):
    """One trajectory in the making. A loop calls `start` once, then `generate` and `add_messages` in turns.

    Example:
        >>> session.start(task.messages)
        >>> turn = await session.generate()
        >>> session.add_messages([{"role": "user", "content": "Are you sure?"}])
        >>> turn = await session.generate(max_new_tokens=64)
    """

    task: Task
    messages: list[dict[str, Any]]
    """The conversation so far; `generate` appends the assistant's message itself."""
    tool_timeout_s: float
    remaining_tokens: int
    """Tokens left in `rollout.max_context_tokens`."""

    def start(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> None:
        """Render the prompt with the chat template.

        Args:
            messages: Chat messages, the policy's turn next.
            tools: JSON schemas of the tools on offer (`{"type": "function", "function": {...}}`).

        Raises:
            PromptTooLong: The prompt leaves no room to generate.
        """
        ...

    async def generate(self, *, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        """Let the policy write one turn.

        Args:
            max_new_tokens: Most tokens of this turn, over all its resumes; None takes
                `rollout.max_new_tokens`.
            stop: Strings that end the turn as well.
        """
        ...

    def add_messages(self, messages: Sequence[dict[str, Any]]) -> None:
        """Append tool results or user turns; the policy reads them and is not trained on them."""
        ...

    def record_tool_call(self, *, error: bool) -> None:
        """Count one tool call in the outcome, and whether it failed."""
        ...
