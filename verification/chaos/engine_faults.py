"""Faults inside a real SGLang server, and its own account of the routing rows that it sent.

```
 harness ── request file ──► middleware in the server's process ──► SGLang
    ▲                             │
    └────── evidence.jsonl ◄──────┘     sent-<pid>.bin: a digest of each routing row sent
```

`sitecustomize` installs the middleware in the server, so that a fault strikes exactly where it is meant to:
a payload is stopped after its first half has left the server, which no process outside could time.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pybase64

FAULTS: Final = "ASYNC_RL_CHAOS_FAULTS"
"""Environment variable with the folder of requests and evidence."""

PADDING: Final = 1 << 16
"""Spaces before a payload that is to be stopped: the client treats events above 64 KiB as large ones."""

_MARK: Final = b'"routed_experts":"'

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """A fault took effect in a server."""

    fault: str
    pid: int
    bytes_sent: int = 0
    """The bytes of the event that left the server before it was stopped."""
    bytes_left: int = 0


class TooBusy(msgspec.Struct, frozen=True):
    """The request to answer 429."""

    until: float
    """Seconds since the epoch, in case the harness ends before it removes the request."""


class EngineFaults:
    """The folder by which the harness and the servers communicate.

    Example:
        >>> faults = EngineFaults(folder)
        >>> faults.request("stuck_payload", pid)
        >>> faults.evidence()
        [Evidence(fault='stuck_payload', pid=4711, bytes_sent=68000, bytes_left=2730)]
    """

    def __init__(self, folder: Path) -> None:
        """Create the folder."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def register(self, pid: int) -> None:
        """Record that the server with this process can be struck."""
        (self.folder / f"server-{pid}").touch()

    def servers(self) -> list[int]:
        """Return the processes of servers that run."""
        pids = sorted(int(path.name.partition("-")[2]) for path in self.folder.glob("server-*"))
        return [pid for pid in pids if Path(f"/proc/{pid}/stat").exists()]

    def request(self, fault: str, pid: int, content: bytes = b"") -> None:
        """Request a fault of a server."""
        waiting = self.folder / f".{fault}-{pid}"
        waiting.write_bytes(content)
        waiting.rename(self._request(fault, pid))

    def withdraw(self, fault: str, pid: int) -> None:
        """Remove a request, if it is still there."""
        self._request(fault, pid).unlink(missing_ok=True)

    def wanted(self, fault: str, pid: int) -> bytes | None:
        """Return the content of a request, None if there is none."""
        try:
            return self._request(fault, pid).read_bytes()
        except FileNotFoundError:
            return None

    def record(self, evidence: Evidence) -> None:
        """Append evidence by a single write."""
        append(self.folder / "evidence.jsonl", msgspec.json.encode(evidence) + b"\n")

    def evidence(self) -> list[Evidence]:
        """Return all evidence so far."""
        with suppress(FileNotFoundError):
            whole, _, _ = (self.folder / "evidence.jsonl").read_bytes().rpartition(b"\n")
            return msgspec.json.Decoder(Evidence).decode_lines(whole) if whole else []
        return []

    def sent_rows(self) -> np.ndarray:
        """Return the digests of all routing rows that servers sent: `[rows]` uint64, sorted."""
        return _digests(self.folder.glob("sent-*.bin"))

    def trained_rows(self) -> np.ndarray:
        """Return the digests of all routing rows that were trained on: `[rows]` uint64, sorted."""
        return _digests(self.folder.glob("trained.bin"))

    def _request(self, fault: str, pid: int) -> Path:
        return self.folder / f"{fault}-{pid}"


def _digests(paths: Any) -> np.ndarray:
    return np.unique(np.concatenate([np.zeros(0, np.uint64), *(np.fromfile(p, np.uint64) for p in paths)]))


def append(path: Path, data: bytes) -> None:
    """Append data by a single write, so that a kill leaves all of it or nothing."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def row_digests(token_ids: np.ndarray, rows: np.ndarray, start: int) -> np.ndarray:
    """Return a digest of each routing row together with all tokens up to its own.

    Args:
        token_ids: `[T]`, of the sequence from its begin.
        rows: `[R, L_moe, K]`, of the tokens from `start` on.
        start: Index of the token of the first row.

    Returns:
        `[R]` uint64: equal exactly if the row, the token and everything before it are equal.
    """
    tokens = np.ascontiguousarray(token_ids, np.int32)
    ids = np.ascontiguousarray(rows, np.int32)
    prefix = hashlib.blake2b(tokens[:start].tobytes(), digest_size=8)
    digests = bytearray()
    for token, row in zip(tokens[start : start + len(ids)], ids, strict=True):
        prefix.update(token.tobytes())
        of_row = prefix.copy()
        of_row.update(row.tobytes())
        digests += of_row.digest()
    return np.frombuffer(bytes(digests), np.uint64)


class CallRecord:
    """The tokens that one generate call was sent, and the digests of the rows that it received."""

    def __init__(self, body: bytes) -> None:
        """Read the request."""
        request = msgspec.json.decode(body)
        self._tokens: list[int] = list(request["input_ids"])
        self._num_prompt = len(self._tokens)
        self._start = int(request.get("routed_experts_start_len") or 0)

    def digests(self, event: bytes, moe_layers: tuple[int, ...], num_layers: int) -> np.ndarray | None:
        """Return the digests of the rows that an event delivers, None if it delivers none.

        Args:
            event: The text of one event, `data: {...}`.
            moe_layers: Layers with experts.
            num_layers: All layers, which a row covers.
        """
        if not event.startswith(b"data: {"):
            return None
        document = msgspec.json.decode(event.removeprefix(b"data: ").strip())
        meta = document.get("meta_info") or {}
        completed = int(meta.get("completion_tokens", 0))
        new = self._num_prompt + completed - len(self._tokens)
        if new > 0:  # an abort after a retraction repeats its last token
            self._tokens += document["output_ids"][-new:]
        text = meta.get("routed_experts")
        if not text:
            return None
        ids = np.frombuffer(pybase64.b64decode(text), np.int32)
        num_rows = len(self._tokens) - 1 - self._start
        if num_rows < 1 or len(ids) % (num_rows * num_layers):
            return None
        rows = ids.reshape(num_rows, num_layers, -1)[:, list(moe_layers)]
        return row_digests(np.array(self._tokens), rows, self._start)


class FaultMiddleware:
    """Stops payloads in the middle, answers 429, and records all rows that a server sends."""

    def __init__(
        self,
        app: App,
        faults: EngineFaults,
        moe_layers: tuple[int, ...],
        num_layers: int,
        stop: Callable[[], None],
    ) -> None:
        """Wrap an ASGI application.

        Args:
            app: SGLang's.
            faults: Requests and evidence.
            moe_layers: Layers with experts.
            num_layers: All layers.
            stop: Stops all processes of this server; returns when they are resumed.
        """
        self._app = app
        self._faults = faults
        self._moe_layers = moe_layers
        self._num_layers = num_layers
        self._stop = stop
        self._pid = os.getpid()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
        elif (busy := self._faults.wanted("too_busy", self._pid)) and _is_on(busy):
            self._faults.record(Evidence(fault="too_busy", pid=self._pid))
            headers = [(b"retry-after", b"1"), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 429, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "too many requests"}'})
        elif scope["path"] == "/generate":
            await self._generate(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        body = bytearray()
        record: CallRecord | None = None

        async def receive_and_note() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def send_and_note(message: Message) -> None:
            nonlocal record
            event = bytes(message.get("body", b""))
            if event.startswith(b"data: {"):
                record = record or CallRecord(bytes(body))
                digests = record.digests(event, self._moe_layers, self._num_layers)
                if digests is not None:  # recorded first: the server may be killed once they are sent
                    append(self._faults.folder / f"sent-{self._pid}.bin", digests.tobytes())
                    if self._faults.wanted("stuck_payload", self._pid) is not None:
                        self._faults.withdraw("stuck_payload", self._pid)
                        message = await self._send_half(message, event, send)
            await send(message)

        await self._app(scope, receive_and_note, send_and_note)

    async def _send_half(self, message: Message, event: bytes, send: Send) -> Message:
        """Send the first half of a payload, stop this server, and return the rest when it is resumed."""
        mark = event.index(_MARK)
        event = event[:mark] + b" " * PADDING + event[mark:]
        begin = mark + PADDING + len(_MARK)
        cut = begin + (event.index(b'"', begin) - begin) // 2
        await send({**message, "body": event[:cut], "more_body": True})
        await asyncio.sleep(0.05)  # the transport writes in a later iteration of the loop
        self._faults.record(
            Evidence(fault="stuck_payload", pid=self._pid, bytes_sent=cut, bytes_left=len(event) - cut)
        )
        self._stop()
        return {**message, "body": event[cut:]}


def _is_on(request: bytes) -> bool:
    return time.time() < msgspec.json.decode(request, type=TooBusy).until


def stop_server() -> None:
    """Stop all processes of this server: its children first, then itself."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)


def install() -> None:
    """Wrap the application that uvicorn serves in this process."""
    import uvicorn

    from async_rl.engines.model_facts import load_facts

    model = next(w.partition("=")[2] for w in sys.orig_argv if w.startswith("--model-path="))
    load = uvicorn.Config.load

    def load_with_faults(self: uvicorn.Config) -> None:
        load(self)
        facts, faults = load_facts(model), EngineFaults(Path(os.environ[FAULTS]))
        faults.register(os.getpid())
        self.loaded_app = FaultMiddleware(
            self.loaded_app, faults, facts.moe_layers, facts.num_layers, stop_server
        )

    uvicorn.Config.load = load_with_faults  # type: ignore[method-assign]
