"""POST requests whose answers are streamed: the little of HTTP/1.1 that the generate path needs.

A general client spends about 100 µs of CPU on a call before a byte of it is ours, a protocol that knows it
sends one kind of request spends 12 (`benchmarks/generate_path.py`), and the event loop serves hundreds of
calls at a time. Everything else that is asked of an engine goes through aiohttp.

A connection carries one call at a time and is used again when the answer was read to its end. There are as
many as there are calls: the pool of engines bounds those.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

_KEEP_ALIVE_S: Final = 4.0
"""Below the 5 s after which SGLang closes an idle connection, so that no request meets a closing one."""

_READ_BYTES: Final = 1 << 15
"""What is taken off one connection at a time, so that hundreds of them with much to say take turns often."""

_MUCH_BYTES: Final = 1 << 18
"""The same for a connection whose reader wants much; more would not stay in the second-level cache."""

_HIGH_WATER: Final = 8
"""Reads that may wait for their reader before the server is held back."""

_MAX_HEAD: Final = 1 << 16
"""A longer head, or line between chunks, is no HTTP."""


class ConnectionLost(OSError):
    """The other side went away, or does not speak HTTP, before the answer had ended."""


class Unreachable(ConnectionLost):
    """Nobody takes connections there."""


class StreamClient:
    """Sends POST requests to one address.

    Example:
        >>> client = StreamClient("http://127.0.0.1:30000/generate", {"Authorization": "Bearer …"})
        >>> async with await client.post(b"{}", timeout_s=10) as answer:
        ...     while data := await answer.read(timeout_s=60): ...
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Remember where; connects to nothing."""
        parts = urlsplit(url)
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        lines = [f"POST {parts.path or '/'} HTTP/1.1", f"Host: {parts.netloc}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._head = "\r\n".join([*lines, "Content-Length: "]).encode("latin-1")
        self._buffer = bytearray(_MUCH_BYTES)
        self._idle: list[_Connection] = []

    async def post(self, body: bytes, *, timeout_s: float) -> StreamedResponse:
        """Send a request and wait for the head of its answer.

        Raises:
            Unreachable: When nobody is there.
            ConnectionLost: When no HTTP comes back.
            TimeoutError: When the head takes longer than `timeout_s`.
        """
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        while (connection := self._take_idle()) is not None:
            try:
                return await self._send(connection, request, timeout_s)
            except ConnectionLost:
                continue  # it was closed while it was idle: nothing of the request has been answered
        return await self._send(await self._connect(timeout_s), request, timeout_s)

    def close(self) -> None:
        """Close the connections that carry no call."""
        while self._idle:
            self._idle.pop().abort()

    async def _connect(self, timeout_s: float) -> _Connection:
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if self._secure else None
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop, self._buffer), self._host, self._port, ssl=context
                )
        except TimeoutError:
            raise
        except OSError as e:
            raise Unreachable(f"cannot connect to {self._host}:{self._port}: {e}") from e
        return connection

    async def _send(self, connection: _Connection, request: bytes, timeout_s: float) -> StreamedResponse:
        try:
            status = await connection.ask(request, timeout_s)
        except BaseException:
            connection.abort()
            raise
        return StreamedResponse(self, connection, status)

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh():
                return connection
            connection.abort()
        return None

    def _give_back(self, connection: _Connection) -> None:
        if connection.can_be_reused():
            self._idle.append(connection)
        else:
            connection.abort()


class StreamedResponse:
    """The answer to one request. Leaving it before its end drops the connection."""

    def __init__(self, client: StreamClient, connection: _Connection, status: int) -> None:
        self.status = status
        self._client = client
        self._connection: _Connection | None = connection

    async def read(self, *, timeout_s: float | None) -> bytes:
        """What has come since the last read, at least a byte; b"" at the end.

        Raises:
            ConnectionLost: When the connection ends before the answer.
            TimeoutError: When nothing comes for `timeout_s`, if there is one; one may go on reading.
        """
        if self._connection is None:
            return b""
        data = await self._connection.read(timeout_s)
        if self._connection.has_ended():
            self.close()
        return data

    def expect_much(self) -> None:
        """Read in large pieces from now on, to the end of this answer."""
        if self._connection is not None:
            self._connection.read_in_pieces_of(_MUCH_BYTES)

    def close(self) -> None:
        """Let the connection go: back to the client if the answer was read to its end."""
        if self._connection is not None:
            self._client._give_back(self._connection)
            self._connection = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Connection(asyncio.BufferedProtocol):
    """One connection: writes a request, takes the answer apart as it comes.

    ```
    idle ─ask─► head ─► body (chunked, or of a known length) ─► ended ─give back─► idle
    ```
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, buffer: bytearray) -> None:
        self._loop = loop
        # All connections share it: it is filled and emptied in one step of the loop. A read of its own would
        # be made as long as the longest and cut down, for a few hundred bytes at a time.
        self._all = memoryview(buffer)
        self._buffer = self._all
        self._transport: asyncio.Transport
        self._error: ConnectionLost | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since_s = 0.0
        self._paused = False
        self._expect_answer(reading=False)

    def _expect_answer(self, *, reading: bool) -> None:
        self._in_head = reading
        self._status = 0
        self._chunked = False
        self._close_after = False
        self._rest = b""  # an unfinished head, or line between chunks
        self._left = 0  # bytes of the current chunk, or of the body, still to come
        self._skip = 0  # bytes of the line end after a chunk still to come
        self._trailer = False
        self._ended = not reading
        self._parts: list[bytes] = []
        self._size = 0
        self.read_in_pieces_of(_READ_BYTES)

    # -- for the client -----------------------------------------------------------------------------------

    async def ask(self, request: bytes, timeout_s: float) -> int:
        """Send a request, wait for the head of the answer; its status."""
        if self._error is not None:
            raise self._error
        self._expect_answer(reading=True)
        self._transport.write(request)
        while not self._status:
            await self._wait(timeout_s)
        return self._status

    async def read(self, timeout_s: float | None) -> bytes:
        """See `Answer.read`."""
        while not self._parts:
            if self._ended:
                return b""
            await self._wait(timeout_s)
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def has_ended(self) -> bool:
        """Whether the answer has been read to its end."""
        return self._ended and not self._parts

    def can_be_reused(self) -> bool:
        """Whether the next request may be sent on it; it then counts as idle."""
        self._idle_since_s = self._loop.time()
        return self.has_ended() and self._error is None and not self._close_after

    def is_fresh(self) -> bool:
        """Whether it has not been idle for so long that the server may be closing it."""
        return self._error is None and self._loop.time() - self._idle_since_s < _KEEP_ALIVE_S

    def abort(self) -> None:
        """Drop it at once."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._transport.abort()

    def read_in_pieces_of(self, size: int) -> None:
        """Take so many bytes at a time from now on, to the end of this answer."""
        self._buffer = self._all[:size]

    # -- waiting ------------------------------------------------------------------------------------------

    async def _wait(self, timeout_s: float | None) -> None:
        """Wait until something has changed. One timer serves all waits; it is only ever moved on."""
        if self._error is not None:
            raise self._error
        self._deadline_s = math.inf if timeout_s is None else self._loop.time() + timeout_s
        if timeout_s is not None and (self._timer is None or self._timer.when() > self._deadline_s):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(self._deadline_s, self._look_at_clock)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _look_at_clock(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._deadline_s == math.inf:
            return
        if self._loop.time() < self._deadline_s:
            self._timer = self._loop.call_at(self._deadline_s, self._look_at_clock)
        else:
            self._waiter.set_exception(TimeoutError())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, why: str) -> None:
        self._error = ConnectionLost(why)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._error)

    # -- what the loop calls ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits."""
        if self._error is None:
            self._fail(f"the connection was closed before the answer had ended: {exc or 'by the server'}")

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next read goes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take apart what has come."""
        data = self._buffer[:nbytes].tobytes()
        if self._ended:
            self._fail("the server sent something that nobody asked for")
            self._transport.abort()
            return
        if self._rest:
            data, self._rest = self._rest + data, b""
        try:
            position = self._take_head(data) if self._in_head else 0
            if not self._in_head:
                self._take_body(data, position)
        except ValueError as e:
            self._fail(f"the server does not speak HTTP/1.1: {e}")
            self._transport.abort()
            return
        if self._size > _HIGH_WATER * len(self._buffer) and not self._paused and not self._ended:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def _take_head(self, data: bytes) -> int:
        """Read the head if it is there; where the body begins."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._keep(data)
            return 0
        line, *fields = data[:end].split(b"\r\n")
        version, status, *_ = line.split(b" ", 2)
        if not version.startswith(b"HTTP/1."):
            raise ValueError(line[:80])
        length: int | None = None
        for field in fields:
            name, _, value = field.partition(b":")
            match name.lower():
                case b"content-length":
                    length = int(value)
                case b"transfer-encoding":
                    self._chunked = value.strip().lower() == b"chunked"
                case b"connection":
                    self._close_after = value.strip().lower() == b"close"
        if not self._chunked and length is None:
            raise ValueError("an answer without a length")
        self._left = 0 if self._chunked else length or 0
        self._ended = not self._chunked and not self._left
        self._in_head, self._status = False, int(status)
        return end + 4

    def _take_body(self, data: bytes, position: int) -> None:
        size = len(data)
        while position < size and not self._ended:
            if self._left:
                part = data[position : position + self._left]
                position += len(part)
                self._left -= len(part)
                self._parts.append(part)
                self._size += len(part)
                if not self._left:
                    self._skip, self._ended = 2, not self._chunked
            elif self._skip:
                step = min(self._skip, size - position)
                position += step
                self._skip -= step
            else:
                end = data.find(b"\r\n", position)
                if end < 0:
                    self._keep(data[position:])
                    return
                line, position = data[position:end], end + 2
                if self._trailer:
                    self._ended = not line
                else:
                    self._left = int(line.split(b";", 1)[0], 16)
                    self._trailer = self._left == 0

    def _keep(self, rest: bytes) -> None:
        if len(rest) > _MAX_HEAD:
            raise ValueError(f"a line of more than {_MAX_HEAD} bytes")
        self._rest = rest
