"""Serves the live page over HTTP: its files, a snapshot as JSON, and server-sent events, all by GET.

The page may not load anything from another host, run scripts other than its own, or be framed elsewhere.
If the server is bound to the loopback device, requests must name that device: otherwise a web site whose host
name resolves to 127.0.0.1 could read the page through its visitor's browser (DNS rebinding).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from aiohttp import web

from async_rl.observability.page import STATIC
from async_rl.observability.page.feed import Feed, TooManyClients

_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript"),
    "/uPlot.min.css": ("uPlot.min.css", "text/css"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def page_routes(feed: Feed, host: str) -> Sequence[web.RouteDef]:
    """Return the routes of the live page.

    Args:
        feed: The feed of the run that the page shows.
        host: The address that the server is bound to.
    """

    async def snapshot(_: web.Request) -> web.Response:
        return web.Response(body=await feed.snapshot(), content_type="application/json", headers=_HEADERS)

    async def events(request: web.Request) -> web.StreamResponse:
        known = request.headers.get("Last-Event-ID") or request.query.get("have", "")
        transport = request.transport
        if transport is None:
            raise web.HTTPBadRequest
        try:
            with feed.client(transport.abort, known) as client:
                response = web.StreamResponse(headers=_HEADERS)
                response.content_type = "text/event-stream"
                await response.prepare(request)
                async for message in client.messages():
                    await response.write(message)
        except TooManyClients:
            return web.Response(status=503, text="too many pages are open", headers=_HEADERS)
        except ConnectionError:  # the client has disconnected or was dropped
            pass
        return response

    routes = [web.get(path, _checked(_file(*file), host)) for path, file in _FILES.items()]
    routes += [
        web.get("/api/snapshot", _checked(snapshot, host)),
        web.get("/api/events", _checked(events, host)),
    ]
    return routes


def _file(name: str, content_type: str) -> Handler:
    text = (STATIC / name).read_text(encoding="utf-8")

    async def show(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type=content_type, charset="utf-8", headers=_HEADERS)

    return show


def _checked(handler: Handler, host: str) -> Handler:
    """Refuses requests that do not name the loopback device, if the server is bound to it."""
    if not _is_loopback(host):
        return handler

    async def check(request: web.Request) -> web.StreamResponse:
        if not _is_loopback(request.url.host or ""):
            return web.Response(
                status=403, text="this page is served on localhost: open it by that name", headers=_HEADERS
            )
        return await handler(request)

    return check


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
