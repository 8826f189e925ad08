"""Cuts a stream of server-sent events out of network reads, and takes the routing payload out in passing.

The last event of a long call carries megabytes of base64 among a kilobyte of JSON. Searching it for the next
quote is all that is ever done to it here: it is handed on read by read, so no JSON parser walks over it,
nothing is copied or joined, and the event loop is never held up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_PAYLOAD = b'"routed_experts":"'

_LARGE = 1 << 16
"""Bytes of an unfinished event from which on a payload is taken out; below, it is not worth looking."""


class Sink(Protocol):
    """Where a payload goes."""

    def write(self, piece: bytes) -> None:
        """Take the next of it."""


S = TypeVar("S", bound=Sink)


class EventReader(Generic[S]):
    r"""Feed it what the network gives; it gives back whole events.

    An event is a JSON document and the payload that was taken out of it; an empty string is left in its
    place. One that came in few reads stays where it was.

    Example:
        >>> reader = EventReader(Text)
        >>> [document for document, _ in reader.feed(b'data: {"a":1}' + b"\n\n" + b'data: {"b"')]
        [b'{"a":1}']
    """

    def __init__(self, open_sink: Callable[[], S]) -> None:
        """Call `open_sink` where a payload begins."""
        self._open_sink = open_sink
        self._rest = b""
        self._filling = False
        self.payload: S | None = None
        """Of the event that is coming in now, or came in last."""
        self._taken: S | None = None

    def feed(self, data: bytes) -> list[tuple[bytes, S | None]]:
        """Take one read; return the events that it completes."""
        if self._filling and self.payload is not None:
            end = data.find(b'"')
            if end < 0:
                self.payload.write(data)
                return []
            self.payload.write(data[:end])
            self._taken, self._filling = self.payload, False
            data = data[end:]
        if self._rest:
            data = self._rest + data
        events: list[tuple[bytes, S | None]] = []
        begin = 0
        while (end := data.find(b"\n\n", begin)) >= 0:
            if data.startswith(b"data: ", begin):
                events.append((data[begin + 6 : end], self._taken))
                self._taken = None
            begin = end + 2
        self._rest = data[begin:]
        if len(self._rest) > _LARGE and self._taken is None:
            self._take_payload()
        return events

    def _take_payload(self) -> None:
        mark = self._rest.find(_PAYLOAD)
        if mark < 0:
            return
        begin = mark + len(_PAYLOAD)
        end = self._rest.find(b'"', begin)
        self.payload = self._open_sink()
        if end < 0:
            self._filling = True
            self.payload.write(self._rest[begin:])
            self._rest = self._rest[:begin]
        else:
            self._taken = self.payload
            self.payload.write(self._rest[begin:end])
            self._rest = self._rest[:begin] + self._rest[end:]
