"""A server in another process that answers every call at once with the routing of a long sequence."""

from __future__ import annotations

import json
import multiprocessing
import socketserver
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np
import pybase64


def make_ids(num_rows: int, num_layers: int, top_k: int, num_experts: int) -> np.ndarray:
    """`[num_rows, num_layers, top_k] int32`, distinct within a row and telling rows apart."""
    first = np.random.default_rng(num_rows).integers(
        num_experts, size=(num_rows, num_layers, 1), dtype=np.int32
    )
    return (first + np.arange(top_k, dtype=np.int32)) % num_experts


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
    receiver, sender = multiprocessing.Pipe(duplex=False)
    shape = (num_rows, num_layers, top_k, num_experts)
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(shape, sender), daemon=True)
    server.start()
    try:
        yield f"http://127.0.0.1:{receiver.recv()}"
    finally:
        server.terminate()
        server.join()
        receiver.close()
        sender.close()
