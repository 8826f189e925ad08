"""Serves `/metrics`, `/health` and further routes of the driver over HTTP.

If the server is bound to the loopback device, requests must name that device: otherwise a web site whose host
name resolves to 127.0.0.1 could read the run through its visitor's browser (DNS rebinding).
"""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from async_rl.errors import EnvironmentNotReady
from async_rl.observability.metrics import Metrics
from async_rl.runtime.addresses import is_loopback
from async_rl.runtime.http_listener import Handler, send_whole_responses, serve_http
from async_rl.runtime.listeners import ConnectionLimit

_MAX_CONNECTIONS: Final = 256
"""Prometheus, probes and people at the page. There are no keys, so a new connection closes the oldest."""


def check_address(host: str, port: int) -> None:
    """Check that an address can be bound, before anything is started that would have to be ended again.

    Raises:
        EnvironmentNotReady: Another process has it, or it is none of this machine.
    """
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise _not_bound(host, port, error) from error


def _not_bound(host: str, port: int, error: OSError) -> EnvironmentNotReady:
    return EnvironmentNotReady(
        f"cannot serve metrics on {host}:{port} ({error.strerror or error}): set metrics.port to a free "
        "port, or to 0 for any"
    )


@asynccontextmanager
async def serve(
    metrics: Metrics,
    host: str,
    port: int,
    health: Callable[[], dict[str, Any]],
    more: Sequence[web.RouteDef] = (),
) -> AsyncIterator[str]:
    """Serve `/metrics` (Prometheus text) and `/health` (JSON) while the block runs.

    Args:
        metrics: The metrics that `/metrics` exports.
        host: The address to bind to.
        port: The port to bind to; 0 takes a free one.
        health: Returns the body of `/health`; the status code is 503 if its `"status"` is `"stalled"`,
            else 200: a run that makes progress need not be restarted.
        more: Further routes, such as those of the live page.

    Yields:
        The URL that was bound, without a path.

    Raises:
        EnvironmentNotReady: The address cannot be bound.
    """

    async def show_metrics(_: web.Request) -> web.Response:
        body = generate_latest(metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def show_health(_: web.Request) -> web.Response:
        state = health()
        status = 503 if state["status"] == "stalled" else 200
        return web.json_response(state, status=status, dumps=lambda value: json.dumps(value, default=str))

    app = web.Application(middlewares=[_check_host(host), send_whole_responses])
    app.add_routes([web.get("/metrics", show_metrics), web.get("/health", show_health), *more])
    limit = ConnectionLimit("the server of metrics", max_connections=_MAX_CONNECTIONS)
    async with AsyncExitStack() as serving:
        try:
            bound = await serving.enter_async_context(serve_http(app, host, port, limit))
        except OSError as error:
            raise _not_bound(host, port, error) from error
        yield f"http://{f'[{host}]' if ':' in host else host}:{bound.port}"


def _check_host(host: str) -> Middleware:
    """Refuse requests that do not name the loopback device, if the server is bound to it."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if is_loopback(host) and not is_loopback(_named_host(request)):
            return web.Response(status=403, text="this run is served on localhost: open it by that name")
        return await handler(request)

    return check


def _named_host(request: web.Request) -> str:
    try:
        return request.url.host or ""
    except ValueError:  # no valid host
        return ""
