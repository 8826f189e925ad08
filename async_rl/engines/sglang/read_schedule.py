"""Reads the event streams of a process in turn, so that one read finds several events.

```
 socket ─► aiohttp ─► EventStream.read ─► events of one call
   ▲ paused after each read, until it is this stream's turn
   └──────── ReadSchedule: some streams every few milliseconds
```

Waking up for an event costs more than the event itself: selector, socket, parser, task. With many streams a
process therefore pauses each one after a read. What arrives meanwhile waits in the socket, and the next read
finds all of it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Final
from weakref import WeakKeyDictionary

import aiohttp

_READS_PER_S: Final = 2000
"""Reads per second that all streams share: about a tenth of a core."""

_LONGEST_DELAY_S: Final = 0.5
"""The longest time between two reads of a stream, at any number of streams."""

_TICK_S: Final = 0.005
"""Time between two turns of the schedule."""

_FEWEST_STREAMS: Final = 64
"""Fewer streams are read as their events arrive."""

_LONG_READ_BYTES: Final = 1 << 15
"""A stream is behind if one read finds more, and is read on at once."""


class ReadSchedule:
    """Gives the event streams of one event loop their turns, the one that was read longest ago first.

    The work of a turn is bounded, so that the event loop has no long pauses.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start without streams."""
        self._loop = loop
        self._paused: deque[EventStream] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self.num_open = 0
        """Open event streams; some may not be paused."""

    @classmethod
    def of_running_loop(cls) -> ReadSchedule:
        """Return the schedule of the running event loop."""
        loop = asyncio.get_running_loop()
        schedule = _schedules.get(loop)
        if schedule is None:
            schedule = _schedules[loop] = cls(loop)
        return schedule

    def streams_per_turn(self) -> int:
        """Return how many streams one turn reads."""
        delay_s = min(max(self.num_open / _READS_PER_S, _TICK_S), _LONGEST_DELAY_S)
        return math.ceil(self.num_open * _TICK_S / delay_s)

    def add(self, stream: EventStream) -> None:
        """Let a paused stream wait for its turn."""
        self._paused.append(stream)
        if self._timer is None:
            self._timer = self._loop.call_later(_TICK_S, self.begin_turn)

    def begin_turn(self) -> None:
        """Let the streams read whose turn it is."""
        for _ in range(min(self.streams_per_turn(), len(self._paused))):
            self._paused.popleft().resume()
        self._timer = self._loop.call_later(_TICK_S, self.begin_turn) if self._paused else None


_schedules: WeakKeyDictionary[asyncio.AbstractEventLoop, ReadSchedule] = WeakKeyDictionary()


class EventStream:
    """The body of one reply, read in turn with those of other calls."""

    def __init__(self, response: aiohttp.ClientResponse, schedule: ReadSchedule) -> None:
        """Read a response whose head has come."""
        self._response = response
        self._content = response.content
        self._schedule = schedule
        self._transport: asyncio.Transport | None = None  # paused by us
        self._in_turn = True
        schedule.num_open += 1

    async def read(self) -> bytes:
        """Return what has come since the last read, at least a byte; b"" at the end.

        Raises:
            aiohttp.ClientError: When the reply is not whole, or no HTTP.
        """
        data = await self._content.readany()
        if self._in_turn and self._schedule.num_open >= _FEWEST_STREAMS and len(data) < _LONG_READ_BYTES:
            self._pause()
        return data

    def read_at_once(self) -> None:
        """Read the rest as it arrives."""
        self._in_turn = False
        self.resume()

    def resume(self) -> None:
        """Read what has come."""
        if self._transport is not None:
            self._transport.resume_reading()
            self._transport = None

    def close(self) -> None:
        """End reading; the caller closes the response."""
        self.read_at_once()
        self._schedule.num_open -= 1

    def _pause(self) -> None:
        connection = self._response.connection
        if self._transport is not None or connection is None or connection.transport is None:
            return  # it waits already, or was read to its end: the connection may serve another call already
        self._transport = connection.transport
        self._transport.pause_reading()
        self._schedule.add(self)
