"""The interface of tool-call parsers: text in, content and calls out, never an exception.

```
 text ──► thought </think> │ content │ calls…
                           └ up to the text that opens the calls
```
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

_END_OF_THOUGHT = "</think>"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call as the policy wrote it; the arguments are not yet checked against the tool."""

    name: str
    arguments: dict[str, Any]


class MalformedCall(msgspec.Struct, frozen=True, kw_only=True):
    """An unreadable call."""

    error: str
    """The problem, as a message for the policy."""


Call = ToolCall | MalformedCall


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """One assistant turn, split into content and calls."""

    content: str
    """The text before the calls, with thoughts; the whole text if there are no calls."""
    calls: list[Call]
    """The calls in the order of the text."""


class ToolParser(ABC):
    """Parses one format of tool calls. It is stateless: one parser serves all trajectories of a run.

    Your own format is a class with `opening` and `read`, in `rollout.agent_loop_args.parser` as
    `module:Class`.

    Example:
        Calls that are lines like `!now`:

        >>> class BangParser(ToolParser):
        ...     opening = ("!",)
        ...
        ...     def read(self, text, tools):
        ...         names = [line[1:] for line in text.splitlines() if line.startswith("!")]
        ...         return [ToolCall(name=name, arguments={}) for name in names]
        >>> [call.name for call in BangParser().parse("What time is it? !now").calls]
        ['now']
    """

    opening: ClassVar[tuple[str, ...]]
    """Content ends and calls begin at the first of these strings."""

    @abstractmethod
    def read(self, text: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
        """Read the calls in the part of a turn that begins with an `opening`.

        Args:
            text: The text from the `opening` to the end of the turn.
            tools: JSON schemas of the available tools (`{"type": "function", …}`), for formats that do not
                distinguish numbers from strings.
        """

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
        """Split one complete turn; calls inside a thought do not count."""
        end = self.content_end(text)
        calls = self.read(text[end:], tools) if end < len(text) else []
        return Parsed(content=text[:end] if calls else text, calls=calls)

    def split(
        self, text: str, tools: Sequence[dict[str, Any]]
    ) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """Split one complete turn, as `parse` does; an unreadable call leaves the whole text as content."""
        parsed = self.parse(text, tools)
        calls = [(call.name, call.arguments) for call in parsed.calls if isinstance(call, ToolCall)]
        return (parsed.content, calls) if len(calls) == len(parsed.calls) else (text, [])

    def around_arguments(self, name: str) -> tuple[str, str] | None:
        """Return what a call of a tool has before and after its arguments, so that calls can be forced.

        None, the default, if the arguments are not JSON.
        """
        return None

    def content_end(self, text: str) -> int:
        """Return the position where the calls begin; the length of the text if it has none."""
        start = after_thought(text)
        found = [at for tag in self.opening if (at := text.find(tag, start)) >= 0]
        return min(found, default=len(text))

    def content_so_far(self, text: str) -> int:
        """Return how many characters of a growing turn are certainly content."""
        end = self.content_end(text)
        if end < len(text):
            return end
        # An opening may have begun at the very end.
        longest = max(map(len, self.opening)) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(tag.startswith(text[start:]) for tag in self.opening):
                return start
        return end


class ParsedStream:
    """Parses a turn that comes in pieces: content at once, calls when the turn is complete.

    Invariant: however the text is split, the results of `feed` and `finish` add up to that of `parse`.

    Example:
        >>> from agent_loops.parsing.formats import HermesParser
        >>> stream = ParsedStream(HermesParser())
        >>> stream.feed("Let me see. <tool"), stream.feed('_call>{"name": "now"}</tool_call>')
        ('Let me see. ', '')
        >>> stream.finish().calls
        [ToolCall(name='now', arguments={})]
    """

    def __init__(self, parser: ToolParser, tools: Sequence[dict[str, Any]] = ()) -> None:
        self._parser = parser
        self._tools = tools
        self._text = ""
        self._num_returned = 0

    def feed(self, piece: str) -> str:
        """Add a piece, and return the content that is now certain."""
        self._text += piece
        begin, self._num_returned = (
            self._num_returned,
            max(self._num_returned, self._parser.content_so_far(self._text)),
        )
        return self._text[begin : self._num_returned]

    def finish(self) -> Parsed:
        """Return the rest of the content, and all calls."""
        parsed = self._parser.parse(self._text, self._tools)
        return Parsed(content=parsed.content[self._num_returned :], calls=parsed.calls)


def after_thought(text: str) -> int:
    """Return the position after a turn's thought; 0 for a turn without one.

    The first closing tag counts: after it the policy may write about such tags, for example in an argument.
    Many chat templates write the opening tag in the prompt; a turn that begins with it and never closes it
    is a thought.
    """
    end = text.find(_END_OF_THOUGHT)
    if end < 0:
        return len(text) if text.lstrip().startswith("<think>") else 0
    return end + len(_END_OF_THOUGHT)
