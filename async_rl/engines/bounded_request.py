"""A request to an engine that is not a call, and its time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from async_rl.runtime.waits import waiting

_LOOK_AGAIN_S: Final = 0.25
"""Between two looks at whether rollout workers have reported: as often as they do."""


class BoundedRequest:
    """A request to an engine, such as an update, with a limit that is renewed while payloads arrive.

    The engine may have to send routing payloads first, or to end calls. What it has sent to a rollout worker
    is known once that has reported: the limit waits for workers that are silent, until their grants expire.
    """

    def __init__(
        self, is_unobserved: Callable[[], bool], limit: asyncio.Timeout, limit_s: float, wait: waiting
    ) -> None:
        """Begin with a limit that begins now.

        Args:
            is_unobserved: Returns whether a process that may have calls of the engine is silent.
            limit: Ends the request.
            limit_s: How long it may take.
            wait: The wait for it.
        """
        self._is_unobserved = is_unobserved
        self._limit = limit
        self._limit_s = limit_s
        self._wait = wait
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._begin_limit()

    @property
    def due_s(self) -> float | None:
        """When the limit is over, by the event loop's clock; None while it is suspended."""
        return None if self._timer is None else self._timer.when()

    def expire(self) -> None:
        """End the request now, as if it were over its limit."""
        is_over = self._is_over or self._limit.expired()  # the stall doctor may have ended it
        self.close()
        if not is_over:
            self._limit.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """End the limit: the request has ended."""
        self._is_over = True
        self._stop_timer()

    def extend(self) -> None:
        """Let the limit begin again, unless it is suspended or over."""
        if self._timer is not None:
            self._begin_limit()
            self._wait.renew()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the limit, unless it is over, while the request waits for others than the engine."""
        if self._timer is None:
            yield
            return
        self._stop_timer()
        try:
            yield
        finally:
            if not self._is_over:
                self._begin_limit()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin_limit(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._end_limit)

    def _end_limit(self) -> None:
        if self._is_unobserved():
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._end_limit)
            self._wait.renew()
        else:
            self.expire()
