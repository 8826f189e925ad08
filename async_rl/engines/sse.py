"""Cuts a stream of server-sent events out of network reads, and takes the routing payload out in passing.

The last event of a long call carries megabytes of base64 among a kilobyte of JSON. Searching it for the next
quote is all that is ever done to it here: it is moved into a buffer of its own read by read, so no JSON
parser walks over it, nothing is joined at the end, and the event loop is never held up.
"""

from __future__ import annotations

_PAYLOAD = b'"routed_experts":"'

_LARGE = 1 << 16
"""Bytes of an unfinished event from which on a payload is taken out; below, it is not worth looking."""

Event = tuple[bytes, bytearray | None]
"""A JSON document, and the payload that was taken out of it (an empty string is left in its place)."""


class EventReader:
    r"""Feed it what the network gives; it gives back whole events.

    Example:
        >>> reader = EventReader()
        >>> [document for document, _ in reader.feed(b'data: {"a":1}' + b"\n\n" + b'data: {"b"')]
        [b'{"a":1}']
    """

    def __init__(self) -> None:
        self._rest = b""
        self._filling: bytearray | None = None
        self._taken: bytearray | None = None

    def feed(self, data: bytes) -> list[Event]:
        """Take one read; return the events that it completes."""
        if self._filling is not None:
            end = data.find(b'"')
            if end < 0:
                self._filling += data
                return []
            self._filling += memoryview(data)[:end]
            self._taken, self._filling = self._filling, None
            data = data[end:]
        if self._rest:
            data = self._rest + data
        events: list[Event] = []
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
        if end < 0:
            self._filling = bytearray(memoryview(self._rest)[begin:])
            self._rest = self._rest[:begin]
        else:
            self._taken = bytearray(memoryview(self._rest)[begin:end])
            self._rest = self._rest[:begin] + self._rest[end:]
