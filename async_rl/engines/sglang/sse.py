"""Splits network reads into server-sent events, and separates the routing payload from the last one.

The last event of a long call has megabytes of base64 in a kilobyte of JSON. The reader only searches it for
the next quote and passes it on read by read: no JSON parser scans it, nothing is copied or joined, and the
event loop is never blocked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

_FIELD = b"data: "
_END = b"\n\n"
_PAYLOAD = b'"routed_experts":"'

_LARGE = 1 << 16
"""Bytes of an unfinished event above which its payload is separated; below, it is not worth searching."""


class EventTooLong(Exception):
    """A server sends an event that is longer than any that the request can need."""


class PayloadSink(Protocol):
    """Receives a payload piece by piece."""

    def append_text(self, piece: bytes) -> None:
        """Append the next piece."""


S = TypeVar("S", bound=PayloadSink)


class EventReader(Generic[S]):
    r"""Turns network reads into events.

    An event is a JSON document and the payload that was separated from it, with an empty string in its place.
    A small payload stays in the document.

    Invariant: it holds at most `max_event_bytes` and one read, and searches each byte once, however the
    server cuts its stream.
    """

    def __init__(self, open_sink: Callable[[], S], max_event_bytes: int) -> None:
        """Start before the first event.

        Args:
            open_sink: Called at the start of each payload.
            max_event_bytes: Longest event, without a payload that was separated from it.
        """
        self._open_sink = open_sink
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()  # an event that is not complete
        self._searched = 0  # bytes of it in which no payload begins
        self._mark: int | None = None  # where its payload begins
        self._filling = False
        self.payload: S | None = None
        """The payload of the event that is arriving, or arrived last."""
        self._taken: S | None = None

    @property
    def head(self) -> bytes | None:
        """The document of the event whose payload is arriving, with an empty payload; None if there is none.

        What follows the payload is missing. SGLang writes it last, in `meta_info`.
        """
        if self._mark is None:
            return None
        return bytes(self._rest[len(_FIELD) : self._mark]) + b'"}}'

    def feed(self, data: bytes) -> list[tuple[bytes, S | None]]:
        """Return the events that one read completes.

        Raises:
            EventTooLong: When an event is longer than `max_event_bytes`; the reader is of no more use then.
        """
        if self._filling and self.payload is not None:
            end = data.find(b'"')
            if end < 0:
                self.payload.append_text(data)
                return []
            self.payload.append_text(data[:end])
            self._taken, self._filling = self.payload, False
            data = data[end:]
        if self._rest:
            begin = max(0, len(self._rest) - 1)  # the end may be cut in two
            self._rest += data
            if self._rest.find(_END, begin) < 0:
                self._look_for_payload()
                return []
            data = bytes(self._rest)
            self._rest.clear()
            self._searched, self._mark = 0, None
        *complete, rest = data.split(_END)
        events: list[tuple[bytes, S | None]] = [
            (event[len(_FIELD) :], None) for event in complete if event.startswith(_FIELD)
        ]
        if events and self._taken is not None:
            events[0] = events[0][0], self._taken
            self._taken = None
        if rest:
            self._rest += rest
            self._look_for_payload()
        return events

    def _look_for_payload(self) -> None:
        """Look where the payload of the unfinished event begins, and separate it if the event is long."""
        if self._mark is None:
            found = self._rest.find(_PAYLOAD, self._searched)
            self._searched = max(0, len(self._rest) - len(_PAYLOAD) + 1)
            self._mark = found + len(_PAYLOAD) if found >= 0 else None
        if self._mark is not None and self._taken is None and len(self._rest) > _LARGE:
            self._take_payload(self._mark)
        if len(self._rest) > self._max_event_bytes:
            raise EventTooLong(
                f"an event of more than {self._max_event_bytes} bytes, which is more than the call can need"
            )

    def _take_payload(self, begin: int) -> None:
        end = self._rest.find(b'"', begin)
        self._filling = end < 0
        self.payload = self._open_sink()
        self.payload.append_text(bytes(self._rest[begin:] if self._filling else self._rest[begin:end]))
        if self._filling:
            del self._rest[begin:]
        else:
            self._taken = self.payload
            del self._rest[begin:end]
