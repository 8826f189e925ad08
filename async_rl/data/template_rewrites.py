"""Where a chat template is not append-only: it writes an earlier turn otherwise once something follows it.

A session never renders a conversation again: the tokens of a turn stay as the policy wrote them, and only
what comes after them is rendered (`async_rl.data.chat_format`). Servers that are sent the messages render all
of it anew with every call, and there the template has the last word: Qwen3's drops the thoughts of a turn as
soon as the user speaks again, Llama's trims white space. Training on such a rendering is training on tokens
that nobody sampled. Here both are compared:

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
"""Characters of a quotation."""


class Rewrite(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of a conversation that the template writes anew."""

    turn: int
    """Of the policy, from 1; what is said between two belongs to the one before it, a prompt to turn 0."""
    wrote: Literal["policy", "context"]
    before_turn: int
    """The turn whose prompt shows it."""
    kept: str
    """What the session has there."""
    rendered: str
    """What the template makes of it; the same where only the tokens differ."""
    kept_ids: tuple[int, ...]
    rendered_ids: tuple[int, ...]
    """The tokens of both, without those at the beginning and the end that are the same."""


class _Piece(msgspec.Struct, frozen=True):
    turn: int
    wrote: Literal["policy", "context"]
    text: str


def rewrites(
    chat: ChatFormat, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
) -> list[Rewrite]:
    """Compare a conversation as a session builds it with the template's rendering, before each turn.

    Args:
        chat: The template and its tokenizer.
        messages: What the policy wrote stands in the content of the assistant's messages, as text and whole:
            thoughts and tool calls included. They begin with another message.
        tools: JSON schemas of the tools on offer.

    Returns:
        Each piece once, where it differs first; none when the template is append-only for this conversation.
    """
    found: dict[tuple[int, str], Rewrite] = {}
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    pieces = [_Piece(0, "context", chat.prompt_text(messages[: turns[0]], tools))] if turns else []
    for number, (index, end) in enumerate(zip(turns, [*turns[1:], len(messages)], strict=True), start=1):
        pieces.append(_Piece(number, "policy", str(messages[index]["content"])))
        pieces.append(_Piece(number, "context", chat.append_text(messages[index + 1 : end])))
        rendered = chat.prompt_text(messages[:end], tools)
        for piece, instead in _otherwise(chat, pieces, rendered):
            kept, made = (chat.encode(text).tolist() for text in (piece.text, instead))
            rewrite = Rewrite(
                turn=piece.turn,
                wrote=piece.wrote,
                before_turn=number + 1,
                kept=piece.text,
                rendered=instead,
                kept_ids=tuple(_inner(kept, made)),
                rendered_ids=tuple(_inner(made, kept)),
            )
            found.setdefault((piece.turn, piece.wrote), rewrite)
    return list(found.values())


def _otherwise(chat: ChatFormat, pieces: Sequence[_Piece], rendered: str) -> Iterator[tuple[_Piece, str]]:
    """The pieces that a rendering has otherwise, and how."""
    position, alike = 0, True
    for index, piece in enumerate(pieces):
        # What the policy wrote ends where the next piece begins, with the end of its turn.
        by_policy = piece.wrote == "policy"
        end = rendered.find(pieces[index + 1].text, position) if by_policy else position + len(piece.text)
        if end >= 0 and rendered[position:end] == piece.text:
            position = end
            continue
        alike = False
        if end < 0 or not by_policy:
            yield piece, rendered[position:]
            return  # nothing tells where the next piece begins
        yield piece, rendered[position:end]
        position = end
    if position < len(rendered):
        yield pieces[-1], pieces[-1].text + rendered[position:]
    elif alike:
        yield from _retokenised(chat, pieces, rendered)


def _retokenised(chat: ChatFormat, pieces: Sequence[_Piece], rendered: str) -> Iterator[tuple[_Piece, str]]:
    """The first piece whose tokens are others when all of the text is tokenised at once."""
    whole, position = chat.encode(rendered).tolist(), 0
    for piece in pieces:
        token_ids = chat.encode(piece.text).tolist()
        if whole[position : position + len(token_ids)] != token_ids:
            yield piece, piece.text
            return
        position += len(token_ids)


def _inner(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    """One without what both begin and end with."""
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


def findings(chat: ChatFormat) -> list[str]:
    """What a template does to turns of the past, in sentences; empty when it lets them be."""
    sentences = []
    for what, (answer, following) in _PROBES.items():
        asked = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": answer}, *following]
        try:
            found = rewrites(chat, asked)
        except ConfigError as error:
            sentences.append(f"{what}: {error}")
            continue
        sentences += [f"{what}: {_told(rewrite)}" for rewrite in found]
    return sentences


def _told(rewrite: Rewrite) -> str:
    if rewrite.kept == rewrite.rendered:
        return f"{_quoted(rewrite.kept)} is tokenised otherwise beside its neighbours"
    who = "what the policy wrote as" if rewrite.wrote == "policy" else "what it read as"
    return f"the template makes {_quoted(rewrite.rendered)} of {who} {_quoted(rewrite.kept)}"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…")
