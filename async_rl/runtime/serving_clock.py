"""The serving clock, which stops while no engine serves, measures the limits of loops, tools, trajectories.

```
 engines     serve ─────────┤ all are held, lent or lost ├───── serve
 the clock   runs           │ stands                     │      runs on
 a limit     600 s left     │ 600 s left                 │      600 s left
```

A trajectory cannot continue while all engines are held (a weight update, the trainer's phase on shared
devices, an evaluation that borrows all of them, an outage), so that time counts against no limit of it. The
engine pool drives the clock of its calls; a rollout worker follows the driver's clock by messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar


class ServingClock:
    """Seconds during which some engine served."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start running; `clock` returns monotonic seconds."""
        self._clock = clock
        self._held_s = 0.0
        """Length of all pauses that have ended."""
        self._paused_at_s: float | None = None
        self.limits: dict[_Limit, None] = {}
        """Limits that would have been reached during this pause."""
        self.listeners: dict[Callable[[bool], None], None] = {}
        """Called with whether the clock is paused, when that changes."""

    @property
    def is_paused(self) -> bool:
        """Whether no engine serves."""
        return self._paused_at_s is not None

    @property
    def held_s(self) -> float:
        """Seconds during which the clock stood."""
        return self._held_s + (0.0 if self._paused_at_s is None else self._clock() - self._paused_at_s)

    def now(self) -> float:
        """Return the time on this clock."""
        return self._clock() - self.held_s

    def set_paused(self, paused: bool) -> None:
        """Pause or resume the clock; nothing happens if it is in that state."""
        if paused is self.is_paused:
            return
        if paused:
            self._paused_at_s = self._clock()
        else:
            self._held_s, self._paused_at_s = self.held_s, None
            limits, self.limits = self.limits, {}
            for limit in limits:
                limit.check()
        for listener in list(self.listeners):
            listener(paused)

    @asynccontextmanager
    async def timeout(self, limit_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Bound a block, as `asyncio.timeout` does, by time on this clock.

        Raises:
            TimeoutError: The block took longer.
        """
        async with asyncio.timeout(None) as scope:
            limit = _Limit(self, scope, limit_s)
            try:
                yield scope
            finally:
                limit.timer.cancel()
                self.limits.pop(limit, None)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make `serving_timeout` use this clock in the block and in the tasks and threads that it starts."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


class _Limit:
    """The limit of one block.

    A pause costs nothing until the limit would have been reached: only then is it extended by the pauses
    since it began. With 8192 running agent loops, a pause does not touch their timers.
    """

    def __init__(self, clock: ServingClock, scope: asyncio.Timeout, limit_s: float) -> None:
        self._clock = clock
        self._scope = scope
        self._loop = asyncio.get_running_loop()
        self._end_s = self._loop.time() + limit_s - clock.held_s
        """On the loop's clock, without the pauses."""
        self.timer = self._loop.call_later(limit_s, self.check)

    def check(self) -> None:
        """Let the block expire, or go on by the pauses since it began."""
        if self._clock.is_paused:
            self._clock.limits[self] = None
            return
        end_s = self._end_s + self._clock.held_s
        if end_s > self._loop.time():
            self.timer = self._loop.call_at(end_s, self.check)
        elif not self._scope.expired():  # the stall doctor may have ended it
            self._scope.reschedule(self._loop.time())


def serving_timeout(limit_s: float) -> AbstractAsyncContextManager[asyncio.Timeout]:
    """Bound a block by the serving clock of the agent loop that it belongs to: see `ServingClock.timeout`."""
    return _current.get().timeout(limit_s)


_current: ContextVar[ServingClock] = ContextVar("serving_clock", default=ServingClock())  # noqa: B039 - never paused
