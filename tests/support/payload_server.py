"""A server in another process that answers every call at once with the routing of a long sequence.

Also what tests of the memory that such answers take need.
"""

from __future__ import annotations

import asyncio
import json
import socketserver
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np
import psutil
import pybase64

from async_rl.engine_protocol import EngineFacts
from benchmarks.support.tables import other_process


def make_ids(num_rows: int, num_layers: int, top_k: int, num_experts: int) -> np.ndarray:
    """`[num_rows, num_layers, top_k] int32`, distinct within a row and telling rows apart."""
    first = np.random.default_rng(num_rows).integers(
        num_experts, size=(num_rows, num_layers, 1), dtype=np.int32
    )
    return (first + np.arange(top_k, dtype=np.int32)) % num_experts


def facts_of_long_calls(tokens: int) -> EngineFacts:
    """A model of 48 layers with 8 of 128 experts each, which `tokens` fit twice."""
    return EngineFacts(
        num_layers=48,
        moe_layers=tuple(range(48)),
        num_experts=128,
        top_k=8,
        vocab_size=512,
        context_length=2 * tokens,
    )


class PeakMemory:
    """The most by which the process of an event loop grows, looked up every 2 ms.

    Example:
        >>> peak = PeakMemory()
        >>> ...
        >>> peak.stop()
    """

    def __init__(self) -> None:
        self._process, self._peak = psutil.Process(), 0
        self._before = self._process.memory_info().rss
        self._loop = asyncio.get_running_loop()
        self._look()

    def _look(self) -> None:
        self._peak = max(self._peak, self._process.memory_info().rss - self._before)
        self._timer = self._loop.call_later(0.002, self._look)

    def stop(self) -> int:
        """Return the growth, bytes."""
        self._timer.cancel()
        return self._peak


def _serve(shape: tuple[int, int, int, int], ready: Connection) -> None:
    meta = {
        "finish_reason": {"type": "length"},
        "weight_version": "0",
        "routed_experts": "@",
        "output_token_logprobs": [[-0.5, 7, None]],
        "completion_tokens": 1,
    }
    document = json.dumps({"output_ids": [7], "meta_info": meta}, separators=(",", ":")).encode()
    body = b"data: %b\n\n" % document.replace(b"@", pybase64.b64encode(make_ids(*shape).tobytes()))
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n" % len(body)
    tail = b"\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            try:
                while line := self.rfile.readline():
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                    if line == b"\r\n":
                        self.rfile.read(length)
                        for part in (head, body, tail):  # not joined: each is sent from where it lies
                            self.request.sendall(part)
            except ConnectionError:
                return  # the client left in the middle, as it may

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as server:
        ready.send(server.server_address[1])
        server.serve_forever()


@contextmanager
def payload_server(num_rows: int, num_layers: int, top_k: int, num_experts: int) -> Iterator[str]:
    """Serve while the block runs; its address. Every answer is one token and `make_ids` of these."""
    with other_process(_serve, (num_rows, num_layers, top_k, num_experts)) as server:
        yield f"http://127.0.0.1:{server.recv()}"
