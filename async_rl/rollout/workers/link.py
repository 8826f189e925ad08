"""A link over TCP: each side proves that it has the run's key, and after that messages go as frames.

```
 driver listens          worker connects
 32 random bytes ──────►
                 ◄────── HMAC of them by the key, 32 random bytes
 HMAC of those   ──────►
 length, frame   ◄─────► length, frame
```

The key is made for one worker and one life of it, and travels the way in which the worker is started, never
over the link. As with engines, what is said is not encrypted: let the network between hosts be your own.
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
from async_rl.rollout.workers.messages import Link, Message, decode, encode

log = logging.getLogger(__name__)

_LENGTH: Final = struct.Struct("<Q")
_NONCE_BYTES: Final = 32
_HANDSHAKE_S: Final = 10.0

_MAX_FRAME_BYTES: Final = 1 << 30
"""A group of the longest trajectories with all their text; more is no message."""

_MAX_UNSENT_BYTES: Final = 1 << 30
"""Of one link: whoever leaves so much unread does not read any more."""

_BUFFER_BYTES: Final = 1 << 20


class StreamLink(Link):
    """One end of a link over a stream of bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both sides know each other already."""
        self._reader = reader
        self._writer = writer

    def post(self, message: Message) -> None:
        """See `Link.post`."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            log.error("a rollout worker's link is given up: %d bytes of it are unread", _MAX_UNSENT_BYTES)
            transport.abort()
            return
        frame = b"".join(encode(message))
        self._writer.write(_LENGTH.pack(len(frame)))
        self._writer.write(frame)

    async def receive(self) -> Message:
        """See `Link.receive`."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > _MAX_FRAME_BYTES:
                raise WorkerLost(
                    f"a message of {length} bytes came over its link, at most {_MAX_FRAME_BYTES}"
                )
            return decode(await self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerLost("its process has ended, or cannot be reached any more") from error

    def close(self) -> None:
        """See `Link.close`."""
        self._writer.close()


class Door:
    """Waits for one worker, which has the key, and lets nobody else in.

    Example:
        >>> async with door("127.0.0.1") as listening:
        ...     start_a_process(listening.port, listening.key)
        ...     link = await listening.link()
    """

    def __init__(self) -> None:
        self.key = secrets.token_bytes(_NONCE_BYTES)
        self.port = 0
        self._link: asyncio.Future[StreamLink] = asyncio.get_running_loop().create_future()

    async def link(self) -> StreamLink:
        """The driver's end, once the worker is there."""
        return await self._link

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody has connected."""
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                nonce = secrets.token_bytes(_NONCE_BYTES)
                writer.write(nonce)
                proof, asked = await _read(reader), await _read(reader)
                if not hmac.compare_digest(proof, _proof(self.key, b"worker", nonce)):
                    raise PermissionError("the key is wrong")
                writer.write(_proof(self.key, b"driver", asked))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            log.warning("a connection to the driver's port for a rollout worker was refused: %r", error)
            writer.close()
            return
        if self._link.done():
            writer.close()
        else:
            self._link.set_result(StreamLink(reader, writer))


@asynccontextmanager
async def door(host: str) -> AsyncIterator[Door]:
    """Listen on a free port of an address while the block lasts; the link outlives it."""
    opened = Door()
    server = await asyncio.start_server(opened.answer, host, 0, limit=_BUFFER_BYTES)
    opened.port = server.sockets[0].getsockname()[1]
    try:
        yield opened
    finally:
        server.close()


async def connect(host: str, port: int, key: bytes) -> StreamLink:
    """The worker's end of a link.

    Raises:
        EnvironmentNotReady: The driver is not there, or somebody else is.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        async with asyncio.timeout(_HANDSHAKE_S), AsyncExitStack() as unless_known:
            reader, writer = await asyncio.open_connection(host, port, limit=_BUFFER_BYTES)
            unless_known.callback(writer.close)
            writer.write(_proof(key, b"worker", await _read(reader)) + nonce)
            if not hmac.compare_digest(await _read(reader), _proof(key, b"driver", nonce)):
                raise PermissionError("it has not the key")
            unless_known.pop_all()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise EnvironmentNotReady(f"the driver at {host}:{port} does not let us in: {error!r}") from error
    return StreamLink(reader, writer)


async def _read(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(_NONCE_BYTES)


def _proof(key: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, role + nonce, "sha256")
