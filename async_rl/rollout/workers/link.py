"""A link over TCP: each side proves that it has the worker's key, then messages go as frames.

```
 driver listens          worker connects
 32 random bytes        ──────►
                        ◄────── HMAC of them by the key, 32 random bytes
 HMAC of those          ──────►
 length, number, frame  ◄─────► length, number, frame
```

TCP neither loses, repeats nor reorders bytes of a connection, and a link is one connection: it is never made
again. The numbers check that, at 8 bytes per message. A mistake of ours, or a proxy between the hosts, ends
the link as a lost connection does, and never leaves the driver waiting for an answer.

The key is made for one incarnation of one worker. It travels with the request that starts the worker, never
over the link. As with engines, messages are not encrypted: use a private network between hosts.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from async_rl.errors import EnvironmentNotReady, WorkerLost
from async_rl.rollout.workers.messages import Link, Message, MessageNumbers, decode, encode
from async_rl.runtime.listeners import ConnectionLimit, RepeatFilter

log = logging.getLogger(__name__)
log.addFilter(RepeatFilter())

_HEADER: Final = struct.Struct("<QQ")
"""The length of the frame that follows, and the number of the message."""

_NONCE_BYTES: Final = 32
_HANDSHAKE_S: Final = 10.0

_MAX_CONNECTIONS: Final = 64
"""Only one worker connects; a new connection closes the oldest one that has not shown the key."""

_MAX_FRAME_BYTES: Final = 1 << 30
"""The size of a group of the longest trajectories with all their text; a larger frame is invalid."""

_MAX_UNSENT_BYTES: Final = 1 << 30
"""A link is closed when it has this much unsent data: its other end no longer reads."""

_BUFFER_BYTES: Final = 1 << 20


class StreamLink(Link):
    """One end of a link over a stream of bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Wrap a connection whose ends have authenticated each other."""
        self.reader = reader
        self.writer = writer
        self.numbers = MessageNumbers()
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0

    def post(self, message: Message) -> None:
        """Implements `Link.post`."""
        transport = self.writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() + self._unsent_bytes > _MAX_UNSENT_BYTES:
            log.error(
                "a rollout worker's link is closed: it has more than %d unread bytes", _MAX_UNSENT_BYTES
            )
            transport.abort()
            return
        frame = encode(message)
        if not self._unsent:  # one system call for all messages of a turn of the event loop
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent += (_HEADER.pack(len(frame), self.numbers.next_number()), frame)
        self._unsent_bytes += len(frame)

    async def receive(self) -> Message:
        """Implements `Link.receive`."""
        try:
            while True:
                length, number = _HEADER.unpack(await self.reader.readexactly(_HEADER.size))
                if length > _MAX_FRAME_BYTES:
                    raise WorkerLost(
                        f"its link delivered a message of {length} bytes, expected at most {_MAX_FRAME_BYTES}"
                    )
                frame = await self.reader.readexactly(length)
                if self.numbers.is_next(number):
                    return decode(frame)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerLost("its process has ended, or is no longer reachable") from error

    def close(self) -> None:
        """Implements `Link.close`."""
        self._send()
        self.writer.close()

    def _send(self) -> None:
        if self._unsent and not self.writer.transport.is_closing():
            self.writer.write(b"".join(self._unsent))
        self._unsent.clear()
        self._unsent_bytes = 0


class LinkListener:
    """Accepts the connection of one worker, which has the key, and refuses all others.

    Example:
        >>> async with listen("127.0.0.1") as listener:
        ...     start_a_process(listener.port, listener.key)
        ...     link = await listener.accept_link()
    """

    def __init__(self) -> None:
        self.key = secrets.token_bytes(_NONCE_BYTES)
        self.port = 0
        self.limit = ConnectionLimit("the port for a rollout worker", max_connections=_MAX_CONNECTIONS)
        self._link: asyncio.Future[StreamLink] = asyncio.get_running_loop().create_future()

    @property
    def is_connected(self) -> bool:
        """Whether the worker has connected."""
        return self._link.done()

    async def accept_link(self) -> StreamLink:
        """Wait for the worker, and return the driver's end of the link."""
        return await self._link

    async def handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Authenticate a connection, and refuse it if the key is wrong or the worker is connected already."""
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                nonce = secrets.token_bytes(_NONCE_BYTES)
                writer.write(nonce)
                proof, challenge = await _read_nonce(reader), await _read_nonce(reader)
                if not hmac.compare_digest(proof, _proof(self.key, b"worker", nonce)):
                    raise PermissionError("the key is wrong")
                writer.write(_proof(self.key, b"driver", challenge))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.warning(
                "a connection to the driver's port for a rollout worker was refused: %s: %s",
                type(error).__name__,
                error,
            )
            writer.close()
            return
        if self.is_connected:
            writer.close()
        else:
            self.limit.admit(writer.transport, "worker")
            self._link.set_result(StreamLink(reader, writer))


@asynccontextmanager
async def listen(host: str) -> AsyncIterator[LinkListener]:
    """Listen on a free port of an address inside the block; an accepted link outlives it."""
    listener, loop = LinkListener(), asyncio.get_running_loop()

    def make_protocol() -> asyncio.StreamReaderProtocol:
        reader = asyncio.StreamReader(limit=_BUFFER_BYTES, loop=loop)
        return asyncio.StreamReaderProtocol(reader, listener.handle_connection, loop=loop)

    server = await loop.create_server(listener.limit.limited(make_protocol), host, 0)
    listener.port = server.sockets[0].getsockname()[1]
    try:
        yield listener
    finally:
        server.close()


async def connect_link(host: str, port: int, key: bytes) -> StreamLink:
    """Connect to the driver, and return the worker's end of the link.

    Raises:
        EnvironmentNotReady: The driver is unreachable, or another program listens there.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        async with asyncio.timeout(_HANDSHAKE_S), AsyncExitStack() as unless_authenticated:
            reader, writer = await asyncio.open_connection(host, port, limit=_BUFFER_BYTES)
            unless_authenticated.callback(writer.close)
            writer.write(_proof(key, b"worker", await _read_nonce(reader)) + nonce)
            if not hmac.compare_digest(await _read_nonce(reader), _proof(key, b"driver", nonce)):
                raise PermissionError("it does not have the key")
            unless_authenticated.pop_all()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise EnvironmentNotReady(f"the driver at {host}:{port} refused the connection: {error!r}") from error
    return StreamLink(reader, writer)


async def _read_nonce(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(_NONCE_BYTES)


def _proof(key: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, role + nonce, "sha256")
