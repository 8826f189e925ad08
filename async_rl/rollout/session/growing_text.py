"""The text of tokens while they come, for those who show a turn before it is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

_NOT_WHOLE: Final = "\N{REPLACEMENT CHARACTER}"
"""How tokenizers decode bytes of a character that is not whole yet."""


class Listener(Protocol):
    """Who is told of a turn's tokens while they come."""

    def take(self, token_ids: Sequence[int]) -> None:
        """More tokens have come."""
        ...


class GrowingText:
    """Tells the text of tokens as it grows, in whole characters.

    Only a few tokens are decoded at a time: those told last, on which some tokenizers' white space depends,
    and the new ones.

    Source: incremental detokenisation of vLLM, `vllm/transformers_utils/detokenizer_utils.py`.

    Example:
        >>> text = GrowingText(chat.decode, print)
        >>> text.take([104, 105])
        hi
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], tell: Callable[[str], None]) -> None:
        self._decode = decode
        self._tell = tell
        self._told: list[int] = []
        """The tokens told last."""
        self._new: list[int] = []

    def take(self, token_ids: Sequence[int]) -> None:
        """More tokens have come."""
        self._new += (int(token_id) for token_id in token_ids)
        text = self._decode(self._told + self._new)
        if text.endswith(_NOT_WHOLE):
            return
        known = self._decode(self._told)
        self._told, self._new = self._new, []
        if len(text) > len(known):
            self._tell(text[len(known) :])
