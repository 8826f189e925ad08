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

    def split(
        self, text: str, tools: Sequence[dict[str, Any]]
    ) -> tuple[str, Sequence[tuple[str, dict[str, Any]]]]:
        """Return the content before the calls, and the name and arguments of each call.

        A text with an unreadable call is content as a whole, because the API cannot express such a call.
        """
        ...

    def around_arguments(self, name: str) -> tuple[str, str] | None:
        """Return what a call of a tool has before and after its arguments, if these are JSON; else None."""
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


def split_turn(text: str, turn_format: TurnFormat) -> SplitTurn:
    """Split a complete turn into its parts."""
    found = [at for stop in turn_format.stop if (at := text.find(stop)) >= 0]
    if found:
        text = text[: min(found)]
    body = text.lstrip()
    if not (turn_format.opens_thought or body.startswith(_OPEN)):
        return _split_answer(text, None, turn_format)
    thought, _, answer = body.removeprefix(_OPEN).partition(_CLOSE)
    return _split_answer(answer.lstrip(), thought.strip(), turn_format)


def _split_answer(text: str, reasoning: str | None, turn_format: TurnFormat) -> SplitTurn:
    """Split the text after the thought."""
    if turn_format.reader is None:
        return SplitTurn(reasoning=reasoning, content=text)
    content, calls = turn_format.reader.split(text, turn_format.tools)
    return SplitTurn(reasoning=reasoning, content=content.rstrip() if calls else content, calls=calls)


class GrowingTurn:
    """Splits a turn that is being written. Each piece of a thought is read once.

    Example:
        >>> turn = GrowingTurn(TurnFormat())
        >>> turn.add_text("<think>I wonder</th"), turn.add_text("ink>Yes")
        (('I wonder', ''), ('', 'Yes'))
    """

    def __init__(self, turn_format: TurnFormat) -> None:
        self._format = turn_format
        self._unread = ""
        """Text that may be the beginning of a stop string."""
        self._stopped = False
        self._opening = self._thinking = True
        """Whether the thought may still open, and whether it is open."""
        self._held = ""
        """Read text that is not certain yet: white space, or the beginning of a mark."""
        self._begun = False
        """Whether the present part has begun: white space before it is left out."""
        self._answer = ""
        self._num_shown = 0

    def add_text(self, text: str) -> tuple[str, str]:
        """Add text, and return what is certain now, beyond what was returned before: reasoning, content."""
        text = self._cut_stop(text)
        if self._opening:
            self._held += text
            body = self._held.lstrip()
            if _OPEN.startswith(body):
                return "", ""  # it may become a thought
            self._opening = False
            self._thinking = self._format.opens_thought or body.startswith(_OPEN)
            text, self._held = body.removeprefix(_OPEN) if self._thinking else self._held, ""
            self._begun = not self._thinking
        reasoning = ""
        if self._thinking:
            reasoning, text = self._read_thought(text)
        return reasoning, "" if self._thinking else self._read_answer(text)

    def _cut_stop(self, text: str) -> str:
        """Return the text before a stop string that is certain not to belong to one."""
        if self._stopped or not self._format.stop:
            return "" if self._stopped else text
        text = self._unread + text
        found = [at for stop in self._format.stop if (at := text.find(stop)) >= 0]
        self._stopped = bool(found)
        end = min(found) if found else len(text) - _partial_match(text, self._format.stop)
        self._unread = text[end:]
        return text[:end]

    def _read_thought(self, text: str) -> tuple[str, str]:
        """Return the certain part of the thought, and the text after it once it is closed."""
        thought, closed, answer = (self._held + text).partition(_CLOSE)
        self._held = ""
        if not self._begun:
            thought = thought.lstrip()
            self._begun = bool(thought)
        if closed:
            self._thinking = self._begun = False
            return thought.rstrip(), answer
        certain = thought[: len(thought) - _partial_match(thought, (_CLOSE,))].rstrip()
        self._held = thought[len(certain) :]
        return certain, ""

    def _read_answer(self, text: str) -> str:
        """Return the certain content beyond what was returned before."""
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        if self._format.reader is None:
            text = self._held + text
            certain = text.rstrip()
            self._held = text[len(certain) :]
            return certain
        self._answer += text
        end = self._format.reader.content_so_far(self._answer)
        begin, self._num_shown = self._num_shown, max(self._num_shown, len(self._answer[:end].rstrip()))
        return self._answer[begin : self._num_shown]


def _partial_match(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of a text that begins one of the marks."""
    return max(
        (n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n])),
        default=0,
    )
