"""Splits network reads into server-sent events, and separates the routing payload from the last one.

The last event of a long call has megabytes of base64 in a kilobyte of JSON. The reader only searches it for
the next quote and passes it on read by read: no JSON parser scans it, nothing is copied or joined, and the
event loop is never blocked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_PAYLOAD = b'"routed_experts":"'

_LARGE = 1 << 16
"""Bytes of an unfinished event above which its payload is separated; below, it is not worth searching."""


class PayloadSink(Protocol):
    """Receives a payload piece by piece."""

    def append_text(self, piece: bytes) -> None:
        """Append the next piece."""


S = TypeVar("S", bound=PayloadSink)


class EventReader(Generic[S]):
    r"""Turns network reads into events.

    An event is a JSON document and the payload that was separated from it, with an empty string in its place.
    A small payload stays in the document.

    Example:
        >>> reader = EventReader(Text)
        >>> [document for document, _ in reader.feed(b'data: {"a":1}' + b"\n\n" + b'data: {"b"')]
        [b'{"a":1}']
    """

    def __init__(self, open_sink: Callable[[], S]) -> None:
        """Call `open_sink` at the start of each payload."""
        self._open_sink = open_sink
        self._rest = b""
        self._filling = False
        self.payload: S | None = None
        """The payload of the event that is arriving, or arrived last."""
        self._taken: S | None = None

    @property
    def head(self) -> bytes | None:
        """The document of the event whose payload is arriving, with an empty payload; None if there is none.

        What follows the payload is missing. SGLang writes it last, in `meta_info`.
        """
        if not self._rest or (mark := self._rest.find(_PAYLOAD)) < 0:
            return None
        return self._rest[6 : mark + len(_PAYLOAD)] + b'"}}'

    def feed(self, data: bytes) -> list[tuple[bytes, S | None]]:
        """Returns the events that one read completes."""
        if self._filling and self.payload is not None:
            end = data.find(b'"')
            if end < 0:
                self.payload.append_text(data)
                return []
            self.payload.append_text(data[:end])
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
            self.payload.append_text(self._rest[begin:])
            self._rest = self._rest[:begin]
        else:
            self._taken = self.payload
            self.payload.append_text(self._rest[begin:end])
            self._rest = self._rest[:begin] + self._rest[end:]
