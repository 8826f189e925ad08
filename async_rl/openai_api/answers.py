"""From what the policy wrote to what OpenAI's API calls reasoning, content and tool calls; whole or growing.

```
 <think> reasoning </think> content <tool_call> …
                                    └ calls, when the turn is whole
```

Invariant, on which streams rest: what is shown of the beginning of a text begins what is shown of all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"


class Reader(Protocol):
    """Knows one format of tool calls."""

    def content_so_far(self, text: str) -> int:
        """How much of a text that may grow is content for sure, in characters."""
        ...

    def read(
        self, text: str, tools: Sequence[dict[str, Any]]
    ) -> tuple[str, Sequence[tuple[str, dict[str, Any]]]]:
        """What stands before the calls, and name and arguments of each.

        A text with a call that cannot be read is content as a whole: the API has no form for it.
        """
        ...


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """How to take one turn apart."""

    stop: tuple[str, ...] = ()
    """Where the first of these stands, the answer ends; it is not part of it."""
    reader: Reader | None = None
    """None where no tools are on offer, or none may be called."""
    tools: Sequence[dict[str, Any]] = ()
    opens_thought: bool = False
    """Whether the prompt ends within a thought: some chat templates open it themselves."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A turn taken apart."""

    reasoning: str | None = None
    content: str = ""
    calls: Sequence[tuple[str, dict[str, Any]]] = ()


def show(text: str, form: Form, *, whole: bool) -> Shown:
    """Take a turn apart.

    Args:
        text: The turn, or its beginning.
        form: What to look for.
        whole: Whether nothing comes after it; else only what is certain is shown.
    """
    found = [at for stop in form.stop if (at := text.find(stop)) >= 0]
    if found:
        text = text[: min(found)]
    elif not whole:
        text = text[: len(text) - _begun(text, form.stop)]
    body = text.lstrip()
    if not whole and _OPEN.startswith(body):
        return Shown()  # it may become one
    if not (form.opens_thought or body.startswith(_OPEN)):
        return _show_said(text, None, form, whole=whole)
    body = body.removeprefix(_OPEN)
    thought, closed, said = body.partition(_CLOSE)
    if not closed and not whole:
        thought = thought[: len(thought) - _begun(thought, (_CLOSE,))]
    return _show_said(said.lstrip(), thought.strip(), form, whole=whole)


def _show_said(text: str, reasoning: str | None, form: Form, *, whole: bool) -> Shown:
    """What comes after a thought."""
    if not whole:
        end = len(text) if form.reader is None else form.reader.content_so_far(text)
        return Shown(reasoning=reasoning, content=text[:end].rstrip())
    if form.reader is None:
        return Shown(reasoning=reasoning, content=text)
    content, calls = form.reader.read(text, form.tools)
    return Shown(reasoning=reasoning, content=content.rstrip() if calls else content, calls=calls)


def _begun(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of a text with which one of these may begin."""
    return max(
        (n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n])),
        default=0,
    )
