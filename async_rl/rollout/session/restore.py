"""Restores a trajectory from the journal: the agent loop runs again and receives what was sampled before.

```
 the loop calls    the journal has              so
 start             the same prompt              the loop continues
 generate          the whole turn               it is returned at once
 generate          the beginning of the turn    sampling resumes from there
 add_messages      the same tokens              the loop continues
 anything else     something else, or nothing   the rest of the journal is discarded; the loop continues live
```

Agent loops keep no state that could be stored, so a restart runs them again from the beginning. A loop that
makes the same calls again, as loops do whose tools return the same results, loses nothing. Tools are called
again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from async_rl.store.journal_file import JournalledTrajectory, TurnNote
from async_rl.types import Context, Int32Array, Sampled


class RestoredTurns:
    """What the journal has of one trajectory, in the order in which its agent loop asks for it."""

    def __init__(self, journalled: JournalledTrajectory) -> None:
        self._segments = deque(journalled.segments)
        self._turns = deque(journalled.turns)
        self.num_discarded = 0
        """Sampled tokens that were discarded because the loop made different calls."""

    @property
    def is_exhausted(self) -> bool:
        """Whether everything was returned or discarded."""
        return not self._segments and not self._turns

    def match_context(self, token_ids: Int32Array) -> None:
        """Compare the tokens that the loop appends with the journal's; discard the rest if they differ."""
        if self._segments and _is_context(self._segments[0], token_ids):
            self._segments.popleft()
        else:
            self._discard_rest()

    def next_turn(
        self, start: int, max_new_tokens: int, stop: Sequence[str]
    ) -> tuple[list[Sampled], TurnNote | None]:
        """Return what was sampled of the turn that the loop asks for.

        Returns:
            The segments of the turn, and the note of its end; None if the turn had not ended or not begun.
        """
        asked = start, max_new_tokens, tuple(stop)
        noted = self._turns.popleft() if self._turns else None
        if noted is None or (noted.start, noted.max_new_tokens, noted.stop) != asked:
            self._discard_rest()
            return [], None
        sampled: list[Sampled] = []
        position = start
        while self._segments and position != noted.end and isinstance(self._segments[0], Sampled):
            segment = self._segments.popleft()
            assert isinstance(segment, Sampled)
            sampled.append(segment)
            position += len(segment.token_ids)
        return sampled, noted if noted.end == position else None

    def _discard_rest(self) -> None:
        self.num_discarded += sum(len(s.token_ids) for s in self._segments if isinstance(s, Sampled))
        self._segments.clear()
        self._turns.clear()


def _is_context(segment: Context | Sampled, token_ids: Int32Array) -> bool:
    return isinstance(segment, Context) and np.array_equal(segment.token_ids, token_ids)
