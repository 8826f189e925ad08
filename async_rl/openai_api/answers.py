"""Splits the text of a turn, complete or growing, into OpenAI's reasoning, content and tool calls.

```
 <think> reasoning </think> content <tool_call> …
                                    └ calls, once the turn is complete
```

Invariant, on which streaming relies: what is shown for a prefix of a text is a prefix of what is shown for
all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"


class ToolCallReader(Protocol):
    """Reads one format of tool calls."""

    def content_so_far(self, text: str) -> int:
        """Return how many characters of a growing text are certainly content."""
        ...

    def read(
        self, text: str, tools: Sequence[dict[str, Any]]
    ) -> tuple[str, Sequence[tuple[str, dict[str, Any]]]]:
        """Return the content before the calls, and the name and arguments of each call.

        A text with an unreadable call is content as a whole, because the API cannot express such a call.
        """
        ...


class TurnFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How to split one turn."""

    stop: tuple[str, ...] = ()
    """The answer ends before the first of these strings."""
    reader: ToolCallReader | None = None
    """Reads the tool calls; None if no tools are available, or none may be called."""
    tools: Sequence[dict[str, Any]] = ()
    opens_thought: bool = False
    """Whether the prompt ends inside a thought, because the chat template opens it."""


class SplitTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a turn."""

    reasoning: str | None = None
    content: str = ""
    calls: Sequence[tuple[str, dict[str, Any]]] = ()


def split_turn(text: str, turn_format: TurnFormat, *, complete: bool) -> SplitTurn:
    """Split a turn into its parts.

    Args:
        text: The turn, or its beginning.
        turn_format: How to split it.
        complete: Whether the text is the whole turn; otherwise only certain parts are returned.
    """
    found = [at for stop in turn_format.stop if (at := text.find(stop)) >= 0]
    if found:
        text = text[: min(found)]
    elif not complete:
        text = text[: len(text) - _partial_match(text, turn_format.stop)]
    body = text.lstrip()
    if not complete and _OPEN.startswith(body):
        return SplitTurn()  # it may become a thought
    if not (turn_format.opens_thought or body.startswith(_OPEN)):
        return _split_answer(text, None, turn_format, complete=complete)
    body = body.removeprefix(_OPEN)
    thought, closed, answer = body.partition(_CLOSE)
    if not closed and not complete:
        thought = thought[: len(thought) - _partial_match(thought, (_CLOSE,))]
    return _split_answer(answer.lstrip(), thought.strip(), turn_format, complete=complete)


def _split_answer(text: str, reasoning: str | None, turn_format: TurnFormat, *, complete: bool) -> SplitTurn:
    """Split the text after the thought."""
    if not complete:
        end = len(text) if turn_format.reader is None else turn_format.reader.content_so_far(text)
        return SplitTurn(reasoning=reasoning, content=text[:end].rstrip())
    if turn_format.reader is None:
        return SplitTurn(reasoning=reasoning, content=text)
    content, calls = turn_format.reader.read(text, turn_format.tools)
    return SplitTurn(reasoning=reasoning, content=content.rstrip() if calls else content, calls=calls)


def _partial_match(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of a text that begins one of the marks."""
    return max(
        (n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n])),
        default=0,
    )
