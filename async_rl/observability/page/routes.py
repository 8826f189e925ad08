"""Serves the live page over HTTP: its files, a snapshot as JSON, and server-sent events, all by GET.

The page may not load anything from another host, run scripts other than its own, or be framed elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aiohttp import web

from async_rl.observability.page import STATIC
from async_rl.observability.page.feed import Feed, TooManyClients
from async_rl.runtime.http_listener import Handler

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


def page_routes(feed: Feed) -> Sequence[web.RouteDef]:
    """Return the routes of the live page.

    Args:
        feed: The feed of the run that the page shows.
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

    routes = [web.get(path, _file(*file)) for path, file in _FILES.items()]
    routes += [
        web.get("/api/snapshot", snapshot),
        web.get("/api/events", events),
    ]
    return routes


def _file(name: str, content_type: str) -> Handler:
    text = (STATIC / name).read_text(encoding="utf-8")

    async def show(_: web.Request) -> web.Response:
        return web.Response(text=text, content_type=content_type, charset="utf-8", headers=_HEADERS)

    return show
