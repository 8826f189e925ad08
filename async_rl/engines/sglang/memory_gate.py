"""Lets an SGLang server refuse calls while it lacks device memory: a call would end its process.

    python -m async_rl.engines.sglang.memory_gate [arguments of sglang.launch_server]

The gate is ASGI middleware in the server's process. No client can ensure the same: a request may wait in the
server's sockets until its client has left, and memory is released.

```
 open ──/release_memory_occupation──► closed ──► calls aborted, ended ──► cache flushed ──► memory released
  ▲                                   503, Retry-After                                           │
  └───────── all parts resumed ◄──────────── /resume_memory_occupation ◄── weights loaded ◄──────┘
```

The gate is in one process, so servers with several tokenizer workers, which take calls too, are refused. It
uses SGLang's HTTP API only, so it fits every version. `cpu_launcher.py` and `narrow_launcher.py` install
it too. SGLang adds the check of keys afterwards, in front of it, so that the admin key is needed to close it.
"""

# mypy: disable-error-code="import-untyped, no-untyped-call"
# (SGLang has no type marker.)

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from typing import Any, Final

from async_rl.engines.sglang import hidden_keys
from async_rl.engines.sglang.hidden_keys import App, Message, Receive, Scope, Send

RETRY_AFTER_S: Final = 5
"""What a refused client is asked to wait. Clients of this project ask the driver instead."""

_ABORT_RESEND_S: Final = 0.2
"""A request that is still on its way to the scheduler misses an abort, so the abort is repeated."""

_FLUSH_LIMIT_S: Final = 5.0
"""How long SGLang retries a flush of its cache, which it refuses while a call runs."""

_ALL_PARTS: Final = frozenset({"kv_cache", "weights", "cuda_graph"})
"""What a request without tags means."""

_RELEASE: Final = "/release_memory_occupation"
_RESUME: Final = "/resume_memory_occupation"

_CONTROL: Final = frozenset(
    {
        "/abort_request",
        "/begin_weight_update",
        "/continue_generation",
        "/destroy_weights_update_group",
        "/end_weight_update",
        "/flush_cache",
        "/get_load",
        "/get_model_info",
        "/get_server_info",
        "/init_weights_update_group",
        "/load_lora_adapter",
        "/metrics",
        "/metrics/",
        "/model_info",
        "/pause_generation",
        "/ping",
        "/ready",
        "/server_info",
        "/slow_down",
        "/unload_lora_adapter",
        "/update_weight_version",
        "/update_weights_from_disk",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/update_weights_from_tensor",
        "/v1/loads",
        "/v1/models",
        "/weights_checker",
    }
)
"""What runs no model: these always pass."""


class MemoryGate:
    """ASGI middleware that refuses calls from the beginning of a release to the end of the last resume."""

    def __init__(self, app: App, limit_s: float = 30.0) -> None:
        """Start open.

        Args:
            app: The server.
            limit_s: How long calls may take to end after they were aborted.
        """
        self._app = app
        self._limit_s = limit_s
        self._missing: set[str] = set()
        self._num_releases = 0
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_closed(self) -> bool:
        """Whether calls are refused."""
        return bool(self._missing or self._num_releases)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if path == _RELEASE:
            await self._release(scope, receive, send)
        elif path == _RESUME:
            await self._resume(scope, receive, send)
        elif not path or path in _CONTROL:
            await self._app(scope, receive, send)
        elif not self.is_closed:
            await self._call(scope, receive, send)
        elif path == "/health":  # SGLang's own answer would sample a token
            await _answer(send, 200, "the device memory is released")
        else:
            await _answer(send, 503, "this server has released its device memory, or is about to do so")

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may run the model."""
        self._running += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def _release(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._num_releases += 1
        try:
            body = await _read_body(receive)
            if not await self._end_calls(scope):
                problem = (
                    f"{self._running} calls did not end within {self._limit_s} s after they were aborted"
                )
                await _answer(send, 409, problem)
                return
            # The last batch of a call may still run after its answer; a flush waits for it.
            status, text = await self._ask(scope, "/flush_cache", query=f"timeout={_FLUSH_LIMIT_S}".encode())
            if status != 200:
                problem = text.decode(errors="replace").strip()
                await _answer(send, 409, f"the prefix cache could not be flushed: {problem}")
                return
            self._missing |= _parts_of(body)  # also if it fails: then nothing is known of the memory
            await self._app(scope, _replay(body, receive), send)
        finally:
            self._num_releases -= 1

    async def _resume(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read_body(receive)
        status = 0

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            if message["type"] == "http.response.body" and status == 200:
                self._missing -= _parts_of(body)  # before the client knows, who will then make calls
            await send(message)

        await self._app(scope, _replay(body, receive), note_status)

    async def _end_calls(self, scope: Scope) -> bool:
        """Abort all calls that were let in; return whether they have ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limit_s):
                while self._running:
                    await self._ask(scope, "/abort_request", body=b'{"abort_all": true}')
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_ABORT_RESEND_S):
                            await self._idle.wait()
        return not self._running

    async def _ask(
        self, scope: Scope, path: str, *, body: bytes = b"", query: bytes = b""
    ) -> tuple[int, bytes]:
        """Make a control request to the server itself; return its status and text."""
        status, text = 500, b""

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, text
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                text += message.get("body", b"")

        asked = {
            **{
                key: scope[key]
                for key in ("type", "asgi", "http_version", "server", "client")
                if key in scope
            },
            "scheme": scope.get("scheme", "http"),
            "root_path": "",
            "app": scope.get("app"),
            "state": scope.get("state", {}),
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query,
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
        }
        await self._app(asked, receive, send)
        return status, text


def install(given: Any) -> None:
    """Put the gate into SGLang's HTTP server, in this process; end it if others would take calls as well.

    Args:
        given: The server's arguments, as SGLang has read them.
    """
    if given.tokenizer_worker_num > 1:
        sys.exit(
            f"--tokenizer-worker-num is {given.tokenizer_worker_num}: {given.tokenizer_worker_num} processes "
            "would take calls, and the gate that refuses them while the server lacks its memory is in this "
            "one only; remove it from engine.extra_args"
        )
    from sglang.srt.entrypoints import http_server

    http_server.app.add_middleware(MemoryGate)


async def _read_body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that delivers a body which has been read, and then what comes after it."""
    unread = [body]

    async def receive_again() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return receive_again


def _parts_of(body: bytes) -> frozenset[str]:
    """Return the parts of the memory that a request names."""
    with suppress(ValueError):
        content = json.loads(body or b"{}")
        if isinstance(content, dict) and isinstance(tags := content.get("tags"), list) and tags:
            return frozenset(map(str, tags))
    return _ALL_PARTS


async def _answer(send: Send, status: int, message: str) -> None:
    """Answer as SGLang does."""
    body = json.dumps({"object": "error", "success": status == 200, "message": message}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 503:
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main(arguments: list[str]) -> None:
    """Run the server with these arguments until it is ended."""
    hidden_keys.serve(arguments, install)


if __name__ == "__main__":
    main(sys.argv[1:])
