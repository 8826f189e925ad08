"""Serves HTTP within the limits that all HTTP listeners of this project share."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from aiohttp import web

from async_rl.runtime.listeners import ConnectionLimit, RepeatFilter
from async_rl.runtime.tls import Handshakes

log = logging.getLogger(__name__)
log.addFilter(RepeatFilter())  # aiohttp logs each invalid request with its traceback

TRANSFER_S: Final = 60.0
"""The longest a client may take to send a body, or to receive data."""
IDLE_S: Final = 30.0
"""The longest a connection may take to send the headers of its first or next request."""
LINGER_S: Final = 2.0
"""How long the rest of a refused body is read, so that its client reads the answer."""
_READ_BYTES: Final = 1 << 16
"""How much of a body is buffered before its handler reads it."""
_SHUTDOWN_S: Final = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServedApplication:
    """An application inside the block of `serve_http`."""

    def __init__(self, port: int, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Describe it.

        Args:
            port: The port that was bound.
            make_protocol: Makes the protocol of a connection without TLS.
        """
        self.port = port
        self._make_protocol = make_protocol

    @asynccontextmanager
    async def served_at(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve also at a socket that listens, without TLS, and close it after the block."""
        server = await asyncio.get_running_loop().create_server(self._make_protocol, sock=listener)
        try:
            yield
        finally:
            server.close()


@asynccontextmanager
async def serve_http(
    app: web.Application,
    host: str,
    port: int,
    limit: ConnectionLimit,
    *,
    handshakes: Handshakes | None = None,
    handler_cancellation: bool = False,
) -> AsyncIterator[ServedApplication]:
    """Serve an application inside the block.

    Args:
        app: The application.
        host: The address to bind to.
        port: The port; 0 takes a free one.
        limit: The limit of its connections.
        handshakes: Does those of TLS; None serves plain HTTP.
        handler_cancellation: Whether a handler is cancelled when its connection is lost.

    Yields:
        What is served, with the port that was bound.

    Raises:
        OSError: The address cannot be bound.
    """
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=log,
        keepalive_timeout=IDLE_S,
        lingering_time=LINGER_S,
        read_bufsize=_READ_BYTES,
        auto_decompress=False,  # what a body decompresses to has no limit
        handler_cancellation=handler_cancellation,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    try:
        assert runner.server is not None
        secure = None if handshakes is None else handshakes.start
        make_protocol = limit.limited(runner.server, secure)
        server = await asyncio.get_running_loop().create_server(make_protocol, host, port)
        try:
            plain = limit.limited(runner.server)
            yield ServedApplication(server.sockets[0].getsockname()[1], plain)
        finally:
            server.close()
    finally:
        await runner.cleanup()


async def send_response(request: web.Request, response: web.StreamResponse, data: bytes = b"") -> None:
    """Send a response to its end, or close the connection of a client that does not receive it in time.

    Args:
        request: The request that it answers.
        response: A whole response, or one that has not ended.
        data: More of its body.

    Raises:
        ConnectionError: The client is gone, or too slow.
    """
    async with in_time(request):
        await response.prepare(request)
        if data:
            await response.write(data)
        await response.write_eof()


@asynccontextmanager
async def in_time(request: web.Request) -> AsyncIterator[None]:
    """Close the connection of a client that does not receive in time what is sent inside the block.

    Raises:
        ConnectionError: The client is gone, or too slow.
    """
    try:
        async with asyncio.timeout(TRANSFER_S):
            yield
    except TimeoutError as error:
        # To close it would wait until the client has received what is buffered.
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the client received no data for {TRANSFER_S:g} s") from error


def json_response(body: bytes, status: int = 200, headers: dict[str, Any] | None = None) -> web.Response:
    """Return a response with encoded JSON."""
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


@web.middleware
async def send_whole_responses(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Send what handlers return within the time limit of transfers."""
    response = await handler(request)
    if not response.prepared:
        await send_response(request, response)
    return response
