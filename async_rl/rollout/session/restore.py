"""An agent loop that runs again after a restart is given what was sampled, until it runs ahead of it.

```
 the loop          the journal has              so
 start             the same prompt              nothing: it goes on
 generate          the whole turn               it is given back at once
 generate          the beginning of it          sampling goes on from there
 add_messages      the same tokens              nothing: it goes on
 anything else     another thing, or nothing    the journal is cut there, and the loop goes on live
```

Loops keep no state that could be stored, so they are run again from the beginning. One that does the same
again, which is what loops do whose tools give the same answers, loses nothing. Tools are called again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from async_rl.queue.journal_file import Journalled, TurnNote
from async_rl.types import Context, Int32Array, Sampled


class RestoredTurns:
    """What an earlier process left of one trajectory, in the order in which the loop asks for it."""

    def __init__(self, left: Journalled) -> None:
        self._segments = deque(left.segments)
        self._turns = deque(left.turns)
        self.num_discarded = 0
        """Sampled tokens that the loop had no use for, because it took another course."""

    @property
    def done(self) -> bool:
        """Whether nothing is left: all was given back, or the rest thrown away."""
        return not self._segments and not self._turns

    def context(self, token_ids: Int32Array) -> None:
        """The loop appends these tokens."""
        if self._segments and _is_context(self._segments[0], token_ids):
            self._segments.popleft()
        else:
            self._diverge()

    def turn(
        self, start: int, max_new_tokens: int, stop: Sequence[str]
    ) -> tuple[list[Sampled], TurnNote | None]:
        """The loop asks for a turn.

        Returns:
            What was sampled of it, and how it ended; None for a turn that had not, or was never begun.
        """
        asked = start, max_new_tokens, tuple(stop)
        noted = self._turns.popleft() if self._turns else None
        if noted is None or (noted.start, noted.max_new_tokens, noted.stop) != asked:
            self._diverge()
            return [], None
        sampled: list[Sampled] = []
        position = start
        while self._segments and position != noted.end and isinstance(self._segments[0], Sampled):
            segment = self._segments.popleft()
            assert isinstance(segment, Sampled)
            sampled.append(segment)
            position += len(segment.token_ids)
        return sampled, noted if noted.end == position else None

    def _diverge(self) -> None:
        self.num_discarded += sum(len(s.token_ids) for s in self._segments if isinstance(s, Sampled))
        self._segments.clear()
        self._turns.clear()


def _is_context(segment: Context | Sampled, token_ids: Int32Array) -> bool:
    return isinstance(segment, Context) and np.array_equal(segment.token_ids, token_ids)
