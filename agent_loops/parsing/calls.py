"""What a parser of tool calls is: text in, an answer and its calls out, never an exception.

```
 text ──► thought </think> │ content │ calls…
                           └ until something opens the calls, or may
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
    """Something that was meant as a call and cannot be read."""

    error: str
    """What is wrong with it, told to the policy."""


Call = ToolCall | MalformedCall


class Parsed(msgspec.Struct, frozen=True, kw_only=True):
    """One assistant turn, taken apart."""

    content: str
    """What stands before the calls, thoughts included; the whole text where there are none."""
    calls: list[Call]
    """In the order in which they stand."""


class ToolParser(ABC):
    """One format of tool calls. Stateless: one parser serves all trajectories of a run.

    A format of your own is a class with `opening` and `read`, in `rollout.agent_loop_args.parser` as
    `module:Class`.

    Example:
        Calls that are lines like `!now`:

        ```python
        class BangParser(ToolParser):
            opening = ("!",)

            def read(self, text, tools):
                names = [line[1:] for line in text.splitlines() if line.startswith("!")]
                return [ToolCall(name=name, arguments={}) for name in names]
        ```
    """

    opening: ClassVar[tuple[str, ...]]
    """Where the first of these stands, content ends and calls begin."""

    @abstractmethod
    def read(self, text: str, tools: Sequence[dict[str, Any]]) -> list[Call]:
        """The calls in the part of a turn that begins with an `opening`.

        Args:
            text: From the `opening` to the end of the turn.
            tools: JSON schemas on offer (`{"type": "function", …}`), for formats that do not say whether a
                value is a number or a string.
        """

    def parse(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Parsed:
        """Take one whole turn apart; calls that are only thought about do not count."""
        end = self.content_end(text)
        calls = self.read(text[end:], tools) if end < len(text) else []
        return Parsed(content=text[:end] if calls else text, calls=calls)

    def content_end(self, text: str) -> int:
        """Where the calls begin, in characters; the length of the text where it has none."""
        start = after_thought(text)
        found = [at for tag in self.opening if (at := text.find(tag, start)) >= 0]
        return min(found, default=len(text))

    def content_so_far(self, text: str) -> int:
        """How much of a turn that is still being written is content for sure, in characters."""
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
    """The same of a turn that comes in pieces: content at once, calls when the turn is whole.

    Invariant: however the text is cut, what `feed` and `finish` return adds up to what `parse` returns.

    Example:
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
        self._given = 0

    def feed(self, piece: str) -> str:
        """Take a piece; give the content that is certain now."""
        self._text += piece
        begin, self._given = self._given, max(self._given, self._parser.content_so_far(self._text))
        return self._text[begin : self._given]

    def finish(self) -> Parsed:
        """The rest of the content, and all calls."""
        parsed = self._parser.parse(self._text, self._tools)
        return Parsed(content=parsed.content[self._given :], calls=parsed.calls)


def after_thought(text: str) -> int:
    """Where a turn's thought has ended, in characters; 0 for a turn without.

    The first end counts: behind it the policy may write about such tags, as in a call's argument. What opens
    a thought tells nothing, for many chat templates do it in the prompt.
    """
    end = text.find(_END_OF_THOUGHT)
    return 0 if end < 0 else end + len(_END_OF_THOUGHT)
