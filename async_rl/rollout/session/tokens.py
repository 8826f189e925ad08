"""What there is of one trajectory: its tokens in order, who wrote them, how often writing was cut short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import numpy as np

from async_rl.config import RolloutConfig
from async_rl.data.chat_format import ChatFormat
from async_rl.observability.metrics import Metrics
from async_rl.rollout.session.growing_text import Listener
from async_rl.types import Segment


class TokenLog:
    """What a conversation is written into, and what a transcript comes to.

    Invariant: `segments` and the token buffer always describe the same sequence, also after a cancellation at
    any await.
    """

    def __init__(
        self,
        trajectory_id: str,
        *,
        chat: ChatFormat,
        rollout: RolloutConfig,
        metrics: Metrics,
        clock: Callable[[], float],
        segments: list[Segment],
    ) -> None:
        """Begin with `segments` that a branch inherits, whose tokens `_inherit` brings; else with none."""
        self.trajectory_id = trajectory_id
        self._chat = chat
        self._config = rollout
        self._metrics = metrics
        self._clock = clock
        self._segments = segments
        self._buffer = np.empty(min(1024, rollout.max_context_tokens), np.int32)
        self._length = 0
        self._num_interruptions = 0
        self._num_resumes = 0
        self._num_failovers = 0
        self._engine_s = 0.0
        self._growing: Listener | None = None
        """Told of the turn that is being written."""

    def _inherit(self, parent: Self) -> None:
        """Begin with the tokens of another; its segments are there already."""
        self._buffer, self._length = parent._buffer[: parent._length].copy(), parent._length

    def _append(self, segment: Segment) -> None:
        end = self._length + len(segment.token_ids)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), np.int32)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : end] = segment.token_ids
        self._length = end
        self._segments.append(segment)
