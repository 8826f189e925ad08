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

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from async_rl.data.chat_format import ChatFormat
from async_rl.errors import ConfigError

_SHOWN: Final = 60
"""The most characters of a quotation."""


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of a conversation that the template rewrites."""

    turn: int
    """The policy's turn, from 1; context belongs to the turn before it, and the prompt to turn 0."""
    wrote: Literal["policy", "context"]
    before_turn: int
    """The turn whose prompt contains the rewritten text."""
    kept: str
    """The session's text."""
    rendered: str
    """The template's text; equal to `kept` if only the tokens differ."""
    kept_ids: tuple[int, ...]
    rendered_ids: tuple[int, ...]
    """The tokens of both texts, without their common beginning and end."""


class _Piece(msgspec.Struct, frozen=True):
    turn: int
    wrote: Literal["policy", "context"]
    text: str


def find_rewrites(
    chat: ChatFormat, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[Rewrite]:
    """Compare a conversation as a session builds it with the template's rendering, before each turn.

    Args:
        chat: The template and its tokenizer.
        messages: The conversation, which starts with the prompt. The content of an assistant message is the
            whole text of the turn, with thoughts and tool calls.
        tools: JSON schemas of the available tools.

    Returns:
        Each rewritten piece once, with its first rewrite; none if the template is append-only here.
    """
    found: dict[tuple[int, str], Rewrite] = {}
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    pieces = [_Piece(0, "context", chat.prompt_text(messages[: turns[0]], tools))] if turns else []
    for number, (index, end) in enumerate(zip(turns, [*turns[1:], len(messages)], strict=True), start=1):
        pieces.append(_Piece(number, "policy", str(messages[index]["content"])))
        pieces.append(_Piece(number, "context", chat.append_text(messages[index + 1 : end])))
        rendered = chat.prompt_text(messages[:end], tools)
        for piece, instead in _rewritten(chat, pieces, rendered):
            kept, made = (chat.encode(text).tolist() for text in (piece.text, instead))
            rewrite = Rewrite(
                turn=piece.turn,
                wrote=piece.wrote,
                before_turn=number + 1,
                kept=piece.text,
                rendered=instead,
                kept_ids=tuple(_differing_part(kept, made)),
                rendered_ids=tuple(_differing_part(made, kept)),
            )
            found.setdefault((piece.turn, piece.wrote), rewrite)
    return list(found.values())


def _rewritten(chat: ChatFormat, pieces: Sequence[_Piece], rendered: str) -> Iterator[tuple[_Piece, str]]:
    """Yield the pieces that a rendering has in another form, with that form."""
    position, alike = 0, True
    for index, piece in enumerate(pieces):
        # The policy's text ends where the next piece begins, with the end of its turn.
        by_policy = piece.wrote == "policy"
        end = rendered.find(pieces[index + 1].text, position) if by_policy else position + len(piece.text)
        if end >= 0 and rendered[position:end] == piece.text:
            position = end
            continue
        alike = False
        if end < 0 or not by_policy:
            yield piece, rendered[position:]
            return  # the beginning of the next piece is unknown
        yield piece, rendered[position:end]
        position = end
    if position < len(rendered):
        yield pieces[-1], pieces[-1].text + rendered[position:]
    elif alike:
        yield from _retokenised(chat, pieces, rendered)


def _retokenised(chat: ChatFormat, pieces: Sequence[_Piece], rendered: str) -> Iterator[tuple[_Piece, str]]:
    """Yield the first piece whose tokens differ if the whole text is tokenised at once."""
    whole, position = chat.encode(rendered).tolist(), 0
    for piece in pieces:
        token_ids = chat.encode(piece.text).tolist()
        if whole[position : position + len(token_ids)] != token_ids:
            yield piece, piece.text
            return
        position += len(token_ids)


def _differing_part(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    """Return `one` without the beginning and end that it shares with `other`."""
    shorter = min(len(one), len(other))
    begin = next((i for i in range(shorter) if one[i] != other[i]), shorter)
    after = next((i for i in range(shorter - begin) if one[-1 - i] != other[-1 - i]), shorter - begin)
    return one[begin : len(one) - after]


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
        asked = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}, *following]
        try:
            found = find_rewrites(chat, asked)
        except ConfigError as error:
            sentences.append(f"{what}: {error}")
            continue
        sentences += [f"{what}: {_describe_rewrite(rewrite)}" for rewrite in found]
    return sentences


def _describe_rewrite(rewrite: Rewrite) -> str:
    if rewrite.kept == rewrite.rendered:
        return f"{_quoted(rewrite.kept)} is tokenised differently next to its neighbours"
    source = "what the policy wrote as" if rewrite.wrote == "policy" else "what it read as"
    return f"the template renders {_quoted(rewrite.rendered)} for {source} {_quoted(rewrite.kept)}"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…")
