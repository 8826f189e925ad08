"""A link over TCP: each side proves that it has the worker's key, then messages go as frames.

```
 driver listens          worker connects
 32 random bytes        ──────►
                        ◄────── HMAC of them by the key, 32 random bytes
 HMAC of those          ──────►
 length, number, frame  ◄─────► length, number, frame
```

TCP neither loses, repeats nor reorders bytes of a connection, and a link is one connection: it is never made
again. The numbers check that, at 8 bytes per frame. A mistake of ours, or a proxy between the hosts, ends
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
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, cast

from async_rl.errors import EnvironmentNotReady, WorkerLost
from async_rl.rollout.workers.messages import Link, Message, MessageNumbers, decode, encode_packed, pack
from async_rl.runtime.listeners import ConnectionLimit, RepeatFilter

log = logging.getLogger(__name__)
log.addFilter(RepeatFilter())

_HEADER: Final = struct.Struct("<QQ")
"""The length of the frame that follows, and the number of its first message."""

_NONCE_BYTES: Final = 32
_HANDSHAKE_S: Final = 10.0

_MAX_CONNECTIONS: Final = 64
"""Only one worker connects; a new connection closes the oldest one that has not shown the key."""

_MAX_FRAME_BYTES: Final = 1 << 30
"""More than all messages of a turn, where tasks are the longest; a larger frame is invalid."""

_MAX_UNSENT_BYTES: Final = 1 << 30
"""A link is closed when it has this much unsent data: its other end no longer reads."""


class _Connection(asyncio.Protocol):
    """The bytes of a connection that have arrived and are not used yet."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._arrived = bytearray()
        self._is_lost = False
        self._news: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # that of uvloop is not one by its class

    def data_received(self, data: bytes) -> None:
        self._arrived += data
        self._wake()

    def eof_received(self) -> None:
        self._is_lost = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._wake()

    def take(self, nbytes: int) -> bytes | None:
        """Return exactly `nbytes` bytes if they have arrived."""
        if len(self._arrived) < nbytes:
            return None
        taken = bytes(memoryview(self._arrived)[:nbytes])
        del self._arrived[:nbytes]
        return taken

    async def read(self, nbytes: int) -> bytes:
        """Read exactly `nbytes` bytes.

        Raises:
            EOFError: The connection has ended before.
        """
        while (taken := self.take(nbytes)) is None:
            await self.wait_for_more()
        return taken

    def take_frame(self) -> tuple[int, bytes] | None:
        """Return the next frame, with the number of its first message, if it has arrived as a whole.

        Raises:
            WorkerLost: It is longer than any.
        """
        if len(self._arrived) < _HEADER.size:
            return None
        length, number = _HEADER.unpack_from(self._arrived)
        if length > _MAX_FRAME_BYTES:
            raise WorkerLost(
                f"its link delivered a message of {length} bytes, expected at most {_MAX_FRAME_BYTES}"
            )
        frame = self.take(_HEADER.size + length)
        return None if frame is None else (number, frame[_HEADER.size :])

    async def wait_for_more(self) -> None:
        """Wait until more bytes have arrived.

        Raises:
            EOFError: The connection has ended.
        """
        if self._is_lost:
            raise EOFError("the connection has ended")
        self._news = asyncio.get_running_loop().create_future()
        await self._news

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


class StreamLink(Link):
    """One end of a link over a connection."""

    def __init__(self, connection: _Connection) -> None:
        """Wrap a connection whose ends have authenticated each other."""
        self.transport = connection.transport
        self.numbers = MessageNumbers()
        self._connection = connection
        self._arrived: deque[tuple[int, Message]] = deque()
        self._unsent: list[bytes] = []
        self._first_unsent = 0
        """The number of the first message that is not sent yet."""
        self._sending: asyncio.Handle | None = None
        self._waits = False
        """Whether unsent messages wait for others that share their frame."""

    def post(self, message: Message) -> None:
        """Implements `Link.post`: one frame, and one system call, for all messages of a turn."""
        if self.transport.is_closing():
            return
        packed = pack(message)
        number = self.numbers.next_number()
        if not self._unsent:
            self._first_unsent = number
        self._unsent.append(packed)
        if self._sending is not None and self._waits and not message.may_wait_s:
            self._sending.cancel()
            self._sending = None
        if self._sending is None:
            loop = asyncio.get_running_loop()
            self._waits = message.may_wait_s > 0
            self._sending = (
                loop.call_later(message.may_wait_s, self._send) if self._waits else loop.call_soon(self._send)
            )

    def receive_arrived(self) -> Message | None:
        """Implements `Link.receive_arrived`."""
        while True:
            while self._arrived:
                number, message = self._arrived.popleft()
                if self.numbers.is_next(number):
                    return message
            if (frame := self._connection.take_frame()) is None:
                return None
            self._arrived.extend(enumerate(decode(frame[1]), frame[0]))

    async def receive(self) -> Message:
        """Implements `Link.receive`."""
        try:
            while (message := self.receive_arrived()) is None:
                await self._connection.wait_for_more()
        except EOFError as error:
            raise WorkerLost("its process has ended, or is no longer reachable") from error
        return message

    def close(self) -> None:
        """Implements `Link.close`."""
        self._send()
        self.transport.close()

    def _send(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        if self._unsent and not self.transport.is_closing():
            frame = encode_packed(self._unsent)
            self.transport.write(_HEADER.pack(len(frame), self._first_unsent) + frame)
            if self.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
                log.error(
                    "a rollout worker's link is closed: it has more than %d unread bytes", _MAX_UNSENT_BYTES
                )
                self.transport.abort()
        self._unsent.clear()


class LinkListener:
    """Accepts the connection of one worker, which has the key, and refuses all others."""

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

    def accept_connection(self, connection: _Connection) -> None:
        """Make the link over a connection that has shown the key; close it if the worker is connected."""
        if self.is_connected:
            connection.transport.close()
        else:
            self.limit.admit(connection.transport, "worker")
            self._link.set_result(StreamLink(connection))


class _NewConnection(_Connection):
    """A connection to the driver, until it has shown the key."""

    def __init__(self, listener: LinkListener) -> None:
        super().__init__()
        self._listener = listener
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        late = TimeoutError(f"no key within {_HANDSHAKE_S:.0f} s")
        self._limit = asyncio.get_running_loop().call_later(_HANDSHAKE_S, self._refuse, late)
        self.transport.write(self._nonce)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._limit is None or (answer := self.take(2 * _NONCE_BYTES)) is None:
            return
        proof, challenge = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(self._listener.key, b"worker", self._nonce)):
            self._refuse(PermissionError("the key is wrong"))
            return
        self._end_limit()
        self.transport.write(_proof(self._listener.key, b"driver", challenge))
        self._listener.accept_connection(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._limit is not None:
            self._refuse(exc or EOFError("it ended without the key"))

    def _refuse(self, error: Exception) -> None:
        self._end_limit()
        log.warning(
            "a connection to the driver's port for a rollout worker was refused: %s: %s",
            type(error).__name__,
            error,
        )
        self.transport.close()

    def _end_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None


@asynccontextmanager
async def listen(host: str) -> AsyncIterator[LinkListener]:
    """Listen on a free port of an address inside the block; an accepted link outlives it."""
    listener, loop = LinkListener(), asyncio.get_running_loop()
    make_protocol = listener.limit.limited(lambda: _NewConnection(listener))
    server = await loop.create_server(make_protocol, host, 0)
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
            loop = asyncio.get_running_loop()
            transport, connection = await loop.create_connection(_Connection, host, port)
            unless_authenticated.callback(transport.close)
            transport.write(_proof(key, b"worker", await connection.read(_NONCE_BYTES)) + nonce)
            if not hmac.compare_digest(await connection.read(_NONCE_BYTES), _proof(key, b"driver", nonce)):
                raise PermissionError("it does not have the key")
            unless_authenticated.pop_all()
    except (OSError, TimeoutError, EOFError) as error:
        raise EnvironmentNotReady(f"the driver at {host}:{port} refused the connection: {error!r}") from error
    return StreamLink(connection)


def _proof(key: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, role + nonce, "sha256")
