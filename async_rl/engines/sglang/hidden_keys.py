"""Runs an SGLang server that does not tell its keys: `/server_info` shows the admin key to API clients.

    python -m async_rl.engines.sglang.hidden_keys [arguments of sglang.launch_server]

Rollout workers have API keys and run user code, which must not get admin keys by them. ASGI middleware in the
server's process takes the keys out of the reply. It uses SGLang's HTTP API only, so it fits every version.
`memory_gate.py` and `cpu_launcher.py` install it too. Servers with several tokenizer workers do not have it:
other processes answer.
"""

# mypy: disable-error-code="import-untyped, no-untyped-call"
# (SGLang has no type marker.)

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_TELLS_SETTINGS: Final = ("/server_info", "/get_server_info")


class HiddenKeys:
    """ASGI middleware that replaces keys in replies about the server's settings by asterisks."""

    def __init__(self, app: App, keys: Sequence[str]) -> None:
        """Put it in front of the server `app`."""
        self._app = app
        self._keys = [json.dumps(key)[1:-1].encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its reply without the keys."""
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if path not in _TELLS_SETTINGS:
            await self._app(scope, receive, send)
            return
        start: Message = {}
        body = bytearray()

        async def send_whole(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            body.extend(message.get("body", b""))
            if message.get("more_body", False):
                return
            text = bytes(body)
            for key in self._keys:
                text = text.replace(key, b"***")
            others = [each for each in start["headers"] if each[0].lower() != b"content-length"]
            start["headers"] = [*others, (b"content-length", str(len(text)).encode())]
            await send(start)
            await send({"type": "http.response.body", "body": text})

        await self._app(scope, receive, send_whole)


def install(given: Any) -> None:
    """Put the middleware into SGLang's HTTP server, in this process.

    Args:
        given: The server's arguments, as SGLang has read them.
    """
    from sglang.srt.entrypoints import http_server

    if keys := [key for key in (given.api_key, given.admin_api_key) if key]:
        http_server.app.add_middleware(HiddenKeys, keys=keys)


def serve(arguments: list[str], *installs: Callable[[Any], None]) -> None:
    """Run the server with these arguments until it is ended, after the calls of `installs` with them."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        given = prepare_server_args(arguments)
        for install_part in (install, *installs):
            install_part(given)
        run_server(given)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    serve(sys.argv[1:])
