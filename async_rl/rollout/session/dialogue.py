"""What a session has said and read so far. A branch begins with a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from async_rl.rollout.session.api import Turn
from async_rl.rollout.session.tokenising import size_of, tokenise
from async_rl.types import Int32Array, TurnRecord


class UnreadMessages:
    """Messages that the next turn reads: the prompt, or those after the last turn."""

    def __init__(
        self,
        encode: Callable[[list[dict[str, Any]]], Int32Array],
        parts: Sequence[list[dict[str, Any]]],
        num_bytes: int,
    ) -> None:
        """Hold messages, in the parts in which they were added; their tokens are made when they are needed.

        The parts belong to it: a loop may change what it has passed before that.
        """
        self.parts = parts
        self.num_bytes = num_bytes
        self.token_ids: Int32Array | None = None
        self._encode = encode

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of all parts."""
        return [message for part in self.parts for message in part]

    def first(self, num_parts: int) -> UnreadMessages:
        """Return the first parts."""
        parts = self.parts[:num_parts]
        return UnreadMessages(self._encode, parts, size_of(parts))

    def encode(self) -> Int32Array:
        """Tokenise the messages."""
        return self._encode(self.messages)

    async def encode_in_thread(self) -> Int32Array:
        """Tokenise the messages if they are not, long ones in a thread."""
        if self.token_ids is None:
            self.token_ids = await tokenise(self.encode, self.num_bytes)
        return self.token_ids


@dataclass(kw_only=True)
class Dialogue:
    """The messages and turns of one session, with those that it has inherited."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation so far, as text."""
    turns: list[TurnRecord] = field(default_factory=list)
    num_inherited_turns: int = 0
    unread: UnreadMessages | None = None
    """Messages that the policy has not read yet."""
    last_turn: Turn | None = None
    last_text: str = ""
    """The text of the last turn, with the pieces that it continues."""
    is_in_thought: bool = False
    """Whether the prompt of the last turn ends inside a thought."""
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    reported: dict[str, float] = field(default_factory=dict)
    """What the loop said of the outcome."""

    def copy(self) -> Dialogue:
        """Return a copy for a branch, which inherits all turns so far."""
        turns = list(self.turns)
        return replace(
            self,
            messages=list(self.messages),
            turns=turns,
            num_inherited_turns=len(turns),
            reported=dict(self.reported),
        )
