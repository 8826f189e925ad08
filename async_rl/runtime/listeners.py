"""Bounds what the clients of a listening socket can use up: connections, memory for bodies, lines of the log.

```
 accept ──► ConnectionLimit ──► protocol ──► key checked: admit ──► ByteBudget ──► body
            full: the oldest connection without a key is closed; none: the new one is
```

asyncio and aiohttp have no limit of connections. The server libraries bound header sizes, and how long a
connection may be idle.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, cast

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 8192
"""The most connections of one listener: 4096 agents with two each."""
_MAX_KINDS: Final = 256
"""The most kinds of messages that a `RepeatFilter` tells apart."""


_MAX_RECORDS: Final = 5
_PERIOD_S: Final = 60.0


class RepeatFilter(logging.Filter):
    """Passes each kind of message `_MAX_RECORDS` times in `_PERIOD_S`, then says how many it left out.

    Messages are of one kind if they have the same logger, level and first line before formatting, or, with a
    `prefix`, if they begin with it.
    """

    def __init__(self, *, prefix: str = "") -> None:
        """Limit messages that begin with `prefix`; others pass."""
        super().__init__()
        self._prefix = prefix
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}
        """When the period of each kind began, and its messages since."""

    def forget(self) -> None:
        """Begin anew, as if nothing had been logged."""
        self._kinds.clear()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record passes."""
        first_line = str(record.msg).partition("\n")[0][:200]
        if not first_line.startswith(self._prefix):
            return True
        kind, now = (record.name, record.levelno, self._prefix or first_line), time.monotonic()
        begin_s, count = self._kinds.get(kind, (now, 0))
        if now - begin_s >= _PERIOD_S:
            if (left_out := count - _MAX_RECORDS) > 0:
                record.msg = f"{record.msg} ({left_out} more like it were not logged)"
            begin_s, count = now, 0
        if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
            self._kinds.clear()
        self._kinds[kind] = (begin_s, count + 1)
        return count < _MAX_RECORDS


log.addFilter(RepeatFilter())
# Without descriptors, asyncio of Python 3.11 logs a traceback for each place in the backlog, and a second
# later one more for each if the server has been closed.
for _prefix in (
    "socket.accept() out of system resource",
    "Exception in callback BaseSelectorEventLoop._start_serving(",
):
    logging.getLogger("asyncio").addFilter(RepeatFilter(prefix=_prefix))


class ConnectionLimit:
    """Limits the connections of one listener in total and per key.

    A full listener closes the oldest connection that has shown no key, so that strangers cannot keep out
    those who have one.
    """

    def __init__(self, name: str, *, max_connections: int | None = None, max_per_key: int = 128) -> None:
        """Create the limit of a listener.

        Args:
            name: What listens, for the log.
            max_connections: The most connections; by default half of this process's descriptors, and at most
                `MAX_CONNECTIONS`.
            max_per_key: The most connections with one key.
        """
        most = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self.max_connections = most if max_connections is None else min(most, max_connections)
        self.max_per_key = max_per_key
        self._name = name
        self._keys: dict[asyncio.WriteTransport, str] = {}
        """The connections that have shown a key."""
        self._strangers: dict[asyncio.WriteTransport, None] = {}
        """The others, the oldest first."""
        self._num_per_key: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of open connections."""
        return len(self._keys) + len(self._strangers)

    def limited(
        self,
        make_protocol: Callable[[], asyncio.Protocol],
        secure: Callable[[asyncio.Transport, LimitedProtocol], None] | None = None,
    ) -> Callable[[], asyncio.Protocol]:
        """Return a factory of protocols for connections within the limit.

        Args:
            make_protocol: Creates the protocol of one connection.
            secure: Begins the TLS handshake of a connection, at whose end it calls `LimitedProtocol.begin`.
        """
        return lambda: LimitedProtocol(self, make_protocol, secure)

    def open(self, transport: asyncio.Transport) -> bool:
        """Add a new connection, and return whether it is within the limit."""
        if len(self) >= self.max_connections:
            log.warning(
                "%s has its %d connections: the oldest without a key, or the new one, is closed",
                self._name,
                self.max_connections,
            )
            if (oldest := next(iter(self._strangers), None)) is None:
                return False
            del self._strangers[oldest]
            oldest.abort()
        self._strangers[transport] = None
        return True

    def admit(self, transport: asyncio.WriteTransport, key: str) -> bool:
        """Count a connection for its key, and return whether the key may have it."""
        if self._keys.get(transport) == key:
            return True
        if self._num_per_key[key] >= self.max_per_key:
            return False
        if self._keys.get(transport) is None and transport not in self._strangers:
            return False  # it has been closed
        self.close(transport)
        self._keys[transport] = key
        self._num_per_key[key] += 1
        return True

    def replace(self, transport: asyncio.WriteTransport, secured: asyncio.WriteTransport) -> bool:
        """Count the encrypted transport of a connection instead, and return whether it is still open."""
        if transport not in self._strangers:
            return False
        del self._strangers[transport]
        self._strangers[secured] = None
        return True

    def forget_key(self, key: str) -> None:
        """Treat all connections with a key as if they had shown none."""
        del self._num_per_key[key]
        for transport in [t for t, of in self._keys.items() if of == key]:
            del self._keys[transport]
            self._strangers[transport] = None

    def close(self, transport: asyncio.WriteTransport) -> None:
        """Remove a connection."""
        self._strangers.pop(transport, None)
        if (key := self._keys.pop(transport, None)) is not None:
            self._num_per_key[key] -= 1
            if not self._num_per_key[key]:
                del self._num_per_key[key]


class LimitedProtocol(asyncio.Protocol):
    """Creates the protocol of a connection if the limit allows it, and passes everything on to it."""

    def __init__(
        self,
        limit: ConnectionLimit,
        make_protocol: Callable[[], asyncio.Protocol],
        secure: Callable[[asyncio.Transport, LimitedProtocol], None] | None,
    ) -> None:
        self._limit = limit
        self._make_protocol = make_protocol
        self._secure = secure
        self._protocol: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        """What arrived between the end of the handshake and the start of the protocol."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implements `asyncio.Protocol.connection_made`."""
        accepted = cast(asyncio.Transport, transport)  # uvloop's, as in Ray's actors, is no subclass
        if not self._limit.open(accepted):
            accepted.abort()
            return
        self._transport = accepted
        if self._secure is None:
            self.begin(accepted)
        else:
            self._secure(accepted, self)

    def begin(self, transport: asyncio.Transport) -> None:
        """Start the protocol, over the encrypted transport if there was a handshake."""
        if self._transport is None:
            return  # the connection was lost meanwhile
        if transport is not self._transport and not self._limit.replace(self._transport, transport):
            transport.abort()
            return
        self._transport, self._protocol = transport, self._make_protocol()
        self._protocol.connection_made(transport)
        for data in self._early:
            self._protocol.data_received(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        """Implements `asyncio.Protocol.data_received`."""
        if self._protocol is not None:
            self._protocol.data_received(data)
        elif self._secure is not None:
            self._early.append(data)

    def eof_received(self) -> bool | None:
        """Implements `asyncio.Protocol.eof_received`."""
        return None if self._protocol is None else self._protocol.eof_received()

    def pause_writing(self) -> None:
        """Implements `asyncio.Protocol.pause_writing`."""
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        """Implements `asyncio.Protocol.resume_writing`."""
        if self._protocol is not None:
            self._protocol.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Implements `asyncio.Protocol.connection_lost`."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        self._limit.close(transport)
        if self._protocol is not None:
            self._protocol.connection_lost(exc)


class ByteBudget:
    """Limits the bytes that are held at a time, in total and per key; who exceeds it waits."""

    def __init__(self, max_bytes: int, max_bytes_per_key: int) -> None:
        self.max_bytes = max_bytes
        self.max_bytes_per_key = max_bytes_per_key
        self._held: Counter[str] = Counter()
        self._freed = asyncio.Event()
        """Set and replaced whenever bytes are released."""

    @property
    def held_bytes(self) -> int:
        """The bytes that are held."""
        return self._held.total()

    @asynccontextmanager
    async def hold(self, key: str, num_bytes: int) -> AsyncIterator[None]:
        """Hold bytes inside the block; more than a key may have wait for its other ones to be released."""
        num_bytes = min(num_bytes, self.max_bytes_per_key)
        while not self._has_space(key, num_bytes):
            await self._freed.wait()
        self._held[key] += num_bytes
        try:
            yield
        finally:
            self._held[key] -= num_bytes
            if not self._held[key]:
                del self._held[key]
            self._freed.set()
            self._freed = asyncio.Event()

    def _has_space(self, key: str, num_bytes: int) -> bool:
        per_key, total = self._held[key] + num_bytes, self.held_bytes + num_bytes
        return per_key <= self.max_bytes_per_key and total <= self.max_bytes
