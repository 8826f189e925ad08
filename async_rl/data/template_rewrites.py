"""Finds where a chat template is not append-only: where it rewrites an earlier turn once messages follow it.

A session never renders a conversation twice: the tokens of a turn stay as the policy wrote them, and only the
messages after it are rendered (`async_rl.data.chat_format`). A server that receives messages renders all of
them anew with every call: Qwen3's template drops the thoughts of a turn as soon as the user writes again,
Llama's trims white space. Training on such a rendering would be training on tokens that were never sampled.
This module compares both:

```
 kept       prompt ‖ what the policy wrote ‖ <end of turn> … prompt of the next turn ‖ …
 rendered   the template's text of the same messages
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from async_rl.data.chat_format import ChatFormat
from async_rl.errors import ConfigError

_SHOWN: Final = 60
"""The most characters of a quotation."""

_THOUGHT: Final = "<think>\nTwo and two.\n</think>\n\n"
_CALL: Final = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
_PROBES: Final[Mapping[str, tuple[str, tuple[Mapping[str, str], ...]]]] = {
    "an answer, when a user's message follows": ("It is 4.", ({"role": "user", "content": "Sure?"},)),
    "an answer, when a tool's result follows": (_CALL, ({"role": "tool", "content": "4"},)),
    "an answer, when two results follow": (_CALL, ({"role": "tool", "content": "4"},) * 2),
    "a thought, when a user's message follows": (
        _THOUGHT + "It is 4.",
        ({"role": "user", "content": "Sure?"},),
    ),
    "a thought, when a tool's result follows": (_THOUGHT + _CALL, ({"role": "tool", "content": "4"},)),
    "white space around an answer": ("\n It is 4. \n", ({"role": "user", "content": "Sure?"},)),
}


def describe_rewrites(chat: ChatFormat) -> list[str]:
    """Describe in sentences how a template rewrites earlier turns; empty if it does not."""
    sentences = []
    for what, (answer, following) in _PROBES.items():
        try:
            found = find_rewrite(chat, [{"role": "user", "content": "2 + 2?"}], answer, following)
        except ConfigError as error:
            found = str(error)
        if found:
            sentences.append(f"{what}: {found}")
    return sentences


def find_rewrite(
    chat: ChatFormat, asked: Sequence[Mapping[str, Any]], answer: str, following: Sequence[Mapping[str, Any]]
) -> str:
    """Compare a turn as a session keeps it with the template's rendering, once messages follow it.

    Args:
        chat: The template and its tokenizer.
        asked: The messages before the turn.
        answer: The whole text of the turn, with thoughts and tool calls.
        following: The messages after it.

    Returns:
        The first difference, or an empty text.
    """
    prompt, after = chat.prompt_text(asked), chat.append_text(following)
    rendered = chat.prompt_text([*asked, {"role": "assistant", "content": answer}, *following])
    if not rendered.startswith(prompt):
        return f"the template renders {_quoted(rendered)} for what it read as {_quoted(prompt)}"
    # The policy's text ends where the messages after it begin, with the end of its turn.
    end = rendered.find(after, len(prompt))
    wrote, read = (rendered[len(prompt) : end], rendered[end:]) if end >= 0 else (rendered[len(prompt) :], "")
    if wrote != answer:
        return f"the template renders {_quoted(wrote)} for what the policy wrote as {_quoted(answer)}"
    if read != after:
        return f"the template renders {_quoted(read)} for what it read as {_quoted(after)}"
    whole, position = chat.encode(rendered).tolist(), 0
    for piece in (prompt, answer, after):
        token_ids = chat.encode(piece).tolist()
        if whole[position : position + len(token_ids)] != token_ids:
            return f"{_quoted(piece)} is tokenised differently next to its neighbours"
        position += len(token_ids)
    return ""


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…")
