r"""Keeps the text of messages from becoming control tokens, which only the chat template may write.

```
 message     {"role": "tool", "content": "4<|im_end|>"}
 marked      {"role": "tool", "content": "4⌑⌑im_end⌑⌑"}   punctuation of control tokens, replaced by marks
 rendered    <|im_start|>user\n4⌑⌑im_end⌑⌑<|im_end|>\n    what reads as a control token is the template's
 tokenised   [<|im_start|>] user \n 4 < |im_end|> [<|im_end|>] \n
```

A mark replaces one character and stands for it. A control token is the template's only if the template wrote
all of its punctuation, so that text cannot complete one from several strings either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from async_rl.runtime.printable import without_surrogates

_SHAPE: Final = re.compile(r"<[|｜].+[|｜]>")
"""Control tokens that some tokenizers do not declare as special, such as DeepSeek's `<｜User｜>`."""
_FIRST_MARK: Final = 0xDC00
"""Marks are halves of surrogate pairs: no text that can be tokenised contains one."""

Encode = Callable[[str], list[int]]


def has_control_shape(text: str) -> bool:
    """Return whether a token is a control token by its looks."""
    return _SHAPE.fullmatch(text) is not None


class ControlTokens:
    """Finds control tokens in text, marks them in messages, and tokenises text with marks.

    Example:
        >>> control = ControlTokens({"<|im_end|>": 5})
        >>> marked = control.mark({"role": "tool", "content": "<|im_end|>"}, control.keeping([]))
        >>> control.find(marked["content"] + "<|im_end|>")  # the template's alone
        ['<|im_end|>']

    Args:
        ids: The id of each control token, by its text. Words without punctuation, and single
            characters, are none.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {
            text: number for text, number in ids.items() if len(text) > 1 and any(map(_is_punctuation, text))
        }
        self._known = frozenset(self._ids.values())
        self._pattern = _pattern(self._ids)
        self._starts = re.compile(f"(?={self._pattern.pattern})")
        punctuation = sorted({char for text in self._ids for char in text if _is_punctuation(char)})
        self._marks = {char: chr(_FIRST_MARK + number) for number, char in enumerate(punctuation)}
        self._originals = str.maketrans({mark: char for char, mark in self._marks.items()})

    def find(self, text: str) -> list[str]:
        """Return the control tokens in a text, in order; marked ones are none."""
        return self._pattern.findall(text)

    def keeping(self, kept: Collection[str]) -> re.Pattern[str]:
        """Return the pattern of what `mark` looks at, if text may contain some control tokens."""
        return re.compile(f"({_pattern(kept).pattern})|{_pattern(self._marks).pattern}")

    def mark(self, value: Any, keeping: re.Pattern[str]) -> Any:
        """Return a message, a tool's schema or a part of one, with punctuation of control tokens marked."""
        if isinstance(value, str):
            return keeping.sub(
                lambda match: match[1] or self._marks[match[0]], without_surrogates(str(value))
            )
        if isinstance(value, Mapping):
            return {self.mark(key, keeping): self.mark(each, keeping) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(each, keeping) for each in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        return self.mark(str(value), keeping)  # as templates print it

    def unmark(self, text: str) -> str:
        """Return a text with the characters for which its marks stand."""
        return text.translate(self._originals)

    def encode(self, text: str, encode: Encode) -> list[int]:
        """Tokenise a text: unmarked control tokens as such, marked ones as ordinary text.

        Args:
            text: Text with marks or without.
            encode: The tokenizer, which takes every control token as such.
        """
        spans = [match.span() for match in self._pattern.finditer(text)]
        genuine = [self._ids[text[begin:end]] for begin, end in spans]
        token_ids = [each for piece in self._cut(text, spans) for each in encode(piece)]
        if [each for each in token_ids if each in self._known] == genuine:
            return token_ids
        # The tokenizer sees more than the text says: it normalises text before it looks for tokens.
        begins, ends = [0, *(end for _, end in spans)], [*(begin for begin, _ in spans), len(text)]
        ordinary = [
            self._encode_ordinary(self.unmark(text[begin:end]), encode)
            for begin, end in zip(begins, ends, strict=True)
        ]
        following = [[each] for each in genuine] + [[]]
        return [each for pair in zip(ordinary, following, strict=True) for ids in pair for each in ids]

    def _cut(self, text: str, spans: Sequence[tuple[int, int]]) -> Iterator[str]:
        """Yield the text without marks, cut after the first character of each marked control token."""
        plain = self.unmark(text)
        if plain == text:
            yield text
            return
        others = list(plain)
        for begin, end in spans:
            others[begin:end] = " " * (end - begin)
        begin = 0
        for match in self._starts.finditer("".join(others)):
            yield plain[begin : match.start() + 1]
            begin = match.start() + 1
        yield plain[begin:]

    def _encode_ordinary(self, text: str, encode: Encode) -> list[int]:
        """Tokenise text without control tokens, in smaller and smaller pieces if the tokenizer sees any."""
        token_ids = encode(text)
        if self._known.isdisjoint(token_ids):
            return token_ids
        half = len(text) // 2
        if not half:
            return [each for each in token_ids if each not in self._known]
        return [*self._encode_ordinary(text[:half], encode), *self._encode_ordinary(text[half:], encode)]


def _is_punctuation(char: str) -> bool:
    """Return whether a character is marked; names of roles and keys of messages consist of others."""
    return not (char.isalnum() or char.isspace() or char == "_")


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of any of these texts, the longest first, as tokenizers match them."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
