"""The tokens of one trajectory, and their text while a turn grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from async_rl.types import Int32Array, SamplingMask, Segment

Scalar = TypeVar("Scalar", np.int32, np.int64, np.uint32, np.float32)

_INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"

_MAX_INCOMPLETE: Final = 8
"""The most tokens that are held back for the end of a character, which has at most four bytes."""
"""How tokenizers decode the bytes of an incomplete character."""


class GrowingArray(Generic[Scalar]):
    """A one-dimensional array that grows, with at most half of its size to spare.

    Invariant: elements never change, so that a view of `values` stays what it was, for any thread.

    Example:
        >>> log_probs = GrowingArray(np.float32)
        >>> log_probs.extend([-0.5, -0.25])
        >>> log_probs.values.tolist()
        [-0.5, -0.25]
    """

    def __init__(self, dtype: type[Scalar], capacity: int = 16) -> None:
        """Start empty, with memory for `capacity` elements."""
        self._buffer: npt.NDArray[Scalar] = np.empty(capacity, dtype)
        self._length = 0

    def __len__(self) -> int:
        """Return the number of elements."""
        return self._length

    @property
    def values(self) -> npt.NDArray[Scalar]:
        """A view of all elements."""
        return self._buffer[: self._length]

    def extend(self, values: Sequence[Any] | np.ndarray) -> None:
        """Append elements."""
        end = self._length + len(values)
        if end > len(self._buffer):
            grown = np.empty(max(end, len(self._buffer) * 3 // 2), self._buffer.dtype)
            grown[: self._length] = self.values
            self._buffer = grown
        self._buffer[self._length : end] = values
        self._length = end

    def truncate(self, length: int) -> None:
        """Remove all elements from `length` on."""
        self._buffer, self._length = self._buffer[:length].copy(), length  # views of the others stay


class GrowingMask:
    """The sampling mask of a running call, which grows with its tokens.

    Invariant: as `GrowingArray`; a part is cut out in time that depends on its own size only.
    """

    def __init__(self) -> None:
        self._token_ids = GrowingArray(np.uint32)
        self._ends = GrowingArray(np.int64)
        """Where the ids of each position end."""

    def extend(self, mask: SamplingMask) -> None:
        """Append the mask of further positions."""
        self._ends.extend(len(self._token_ids) + np.cumsum(mask.counts, dtype=np.int64))
        self._token_ids.extend(mask.token_ids)

    def truncate(self, length: int) -> None:
        """Remove all positions from `length` on."""
        self._token_ids.truncate(self._end(length))
        self._ends.truncate(length)

    def part(self, start: int, end: int) -> SamplingMask:
        """Return the mask of positions."""
        ends, first = self._ends.values[start:end], self._end(start)
        token_ids = self._token_ids.values[first : self._end(end)]
        narrow = token_ids.max(initial=0) < 1 << 16
        return SamplingMask(
            counts=np.diff(ends, prepend=first).astype(np.uint16),
            token_ids=token_ids.astype(np.uint16 if narrow else np.uint32),
        )

    def _end(self, length: int) -> int:
        return int(self._ends.values[length - 1]) if length else 0


class TokenLog:
    """The segments of one trajectory, and the same tokens in one buffer.

    Invariant: `segments` and `token_ids` always describe the same sequence, also after a cancellation at any
    await.
    """

    def __init__(self, segments: list[Segment], max_tokens: int) -> None:
        """Start empty, or with the segments that a branch inherits, whose tokens `inherit_tokens` copies.

        Args:
            segments: The list to which segments are appended; the journal reads it as well.
            max_tokens: The most tokens of a trajectory, which bounds the first allocation.
        """
        self.segments = segments
        self._token_ids = GrowingArray(np.int32, min(1024, max_tokens))
        self.num_interruptions = 0
        self.num_resumes = 0
        self.num_failovers = 0
        self.engine_s = 0.0
        """Seconds in engine calls."""
        self.first_token_s = 0.0
        """The part of them before the first token of each call."""
        self.prefilled_tokens = 0
        """Tokens that engines prefilled for these calls."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> Int32Array:
        """A view of all tokens so far, `[T] int32`."""
        return self._token_ids.values

    def append_segment(self, segment: Segment) -> None:
        """Append a segment and its tokens."""
        self._token_ids.extend(segment.token_ids)
        self.segments.append(segment)

    def inherit_tokens(self, parent: TokenLog) -> None:
        """Copy the tokens of a parent, whose segments this log has already."""
        self._token_ids.extend(parent.token_ids)


class GrowingText:
    """Passes on the text of tokens as it grows, in whole characters.

    Only a few tokens are decoded at a time: the new ones, and those passed on last, on which the white space
    of some tokenizers depends.

    Source: incremental detokenisation of vLLM, `vllm/transformers_utils/detokenizer_utils.py`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], on_text: Callable[[str], None]) -> None:
        self._decode = decode
        self._on_text = on_text
        self._reported: list[int] = []
        """The tokens whose text was passed on last."""
        self._new: list[int] = []

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Add tokens, and pass on the text of those whose last character is complete."""
        self._new += (int(token_id) for token_id in token_ids)
        for end in range(len(self._new), max(0, len(self._new) - _MAX_INCOMPLETE), -1):
            text = self._decode(self._reported + self._new[:end])
            if not text.endswith(_INCOMPLETE):
                break
        else:
            if len(self._new) <= _MAX_INCOMPLETE:
                return
            # The policy has sampled bytes that are no characters; before the last three none becomes one.
            end = len(self._new) - 3
            text = self._decode(self._reported + self._new[:end])
        known = self._decode(self._reported)
        self._reported, self._new = self._new[:end], self._new[end:]
        if len(text) > len(known):
            self._on_text(text[len(known) :])
