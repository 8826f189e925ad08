"""Finds the stop strings that an interruption has split between two engine calls of one turn. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from async_rl.types import Int32Array

_MAX_TOKENS_PER_CHARACTER: Final = 4
"""UTF-8 has at most four bytes for a character, and a token has at least one byte."""


class StopStringAtSeam:
    """Looks for a stop string that begins at or before a call's first token and ends in its tokens.

    One that begins later is left to the engine, which ends the call with its finish and its routing rows. At
    the first token an engine may miss white space, which some tokenizers strip there.

    Source: SGLang `Req._check_str_based_finish`: a call ends with the token that completes the stop string.
    """

    def __init__(
        self, raw_text: Callable[[Sequence[int]], str], stop: Sequence[str], token_ids: Int32Array
    ) -> None:
        """Look across the end of the tokens that earlier calls of the turn have sampled, `[n] int32`."""
        self._raw_text = raw_text
        self._stop: Sequence[str] = stop
        self._longest = max(map(len, stop))
        self._before = token_ids[-self._longest * _MAX_TOKENS_PER_CHARACTER :].tolist()
        self._seam = len(raw_text(self._before))
        self._after: list[int] = []

    def find_end(self, token_ids: Sequence[int]) -> int | None:
        """Return how many of the call's next tokens belong to the turn; None if none of them ends it."""
        for count, token_id in enumerate(token_ids, 1):
            if not self._stop:
                return None
            self._after.append(token_id)
            text = self._raw_text(self._before + self._after)
            if any(0 <= text.find(stop) <= self._seam for stop in self._stop):
                return count
            ended = len(text) - self._seam >= self._longest  # whatever begins before the seam
            if ended or len(self._after) >= self._longest * _MAX_TOKENS_PER_CHARACTER:
                self._stop = ()
        return None
