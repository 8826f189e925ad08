"""Measures what it costs to abort all running calls for a weight update, with and without their routing rows.

    python benchmarks/update_pause.py [--quick] [--json FILE]

A server in another process stands in for all engines, each with 64 calls. On an abort it sends each call what
SGLang 0.5.23 sends (`tests/contract/test_aborted_rows_sglang.py`): one event whose last field is the base64
of int32 ids of all tokens, layers and choices. The table has the pause (from the first abort until every
stream has ended), the bytes that the server's sockets took, and the driver's peak memory above what it had.
"rows moved" fetches all rows, as every call did before it could say that it needs none; "rows left" is a
plain server, "rows omitted" one with `engine.narrow_routing`. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Final

import aiohttp
import numpy as np
import pybase64

from async_rl.engine_protocol import Chunk, Finish, GenerateRequest, SamplingParams
from async_rl.engines.model_facts import facts_of
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.narrow_launcher import OMIT_ABORTED_ROWS

LAYERS, TOP_K, EXPERTS = 48, 8, 128
CALLS_PER_ENGINE: Final = 64
FACTS = facts_of(
    {
        "model_type": "qwen3_moe",
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "vocab_size": 512,
        "max_position_embeddings": 1 << 16,
    }
)
WAYS = ("rows moved", "rows left", "rows omitted")
_PIECE: Final = 1 << 16


# -- the server, in a process of its own ----------------------------------------------------------------


class StandIn:
    """Serves `/ENGINE/generate` and `/ENGINE/abort_request`, and `/sent`, the bytes of events so far."""

    def __init__(self) -> None:
        self.sent = 0
        self.aborts: dict[str, asyncio.Event] = {}
        self.rows: dict[int, bytes] = {}

    async def serve(self, ready: Connection) -> None:
        """Answer until the process ends."""
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0, backlog=8192, limit=1 << 20)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        writer.transport.set_write_buffer_limits(high=_PIECE)
        try:
            while line := await reader.readline():
                path, length = line.split()[1].decode(), 0
                while (field := (await reader.readline()).strip().lower()) != b"":
                    if field.startswith(b"content-length:"):
                        length = int(field.split(b":")[1])
                body = await reader.readexactly(length)
                engine, _, endpoint = path.rpartition("/")
                if endpoint == "generate":
                    await self.generate(writer, self.aborts.setdefault(engine, asyncio.Event()), engine, body)
                    continue
                if endpoint == "abort_request" and engine in self.aborts:
                    self.aborts.pop(engine).set()
                text = str(self.sent).encode() if endpoint == "sent" else b"null"
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            return  # the client has left, as it may
        finally:
            writer.close()

    async def generate(
        self, writer: asyncio.StreamWriter, abort: asyncio.Event, way: str, body: bytes
    ) -> None:
        """Send one token, and the end of the call when its engine has to abort."""
        asked = json.loads(body)
        omits = "omitted" in way and OMIT_ABORTED_ROWS in (asked["sampling_params"]["custom_params"] or {})
        num_rows = len(asked["input_ids"])
        del body
        asked.clear()
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        await self.send(writer, event([7], None, None))
        await abort.wait()
        reason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        head, _, tail = event([], reason, None if omits else "@").partition(b"@")
        await self.send(writer, head)
        if not omits:
            rows = self.rows.get(num_rows) or self.rows.setdefault(num_rows, encode_rows(num_rows))
            for begin in range(0, len(rows), _PIECE):
                await self.send(writer, rows[begin : begin + _PIECE])
            await self.send(writer, tail)
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    async def send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Send a chunk of a reply, and count it."""
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await writer.drain()
        self.sent += len(data)


def event(token_ids: list[int], finish: dict[str, Any] | None, rows: str | None) -> bytes:
    meta: dict[str, Any] = {
        "id": "0" * 32,
        "finish_reason": finish,
        "weight_version": "0",
        "output_token_logprobs": [[-1.25, 7, None]] * len(token_ids),
        "completion_tokens": 1,
        "cached_tokens": 0,
    }
    if rows is not None:
        meta["routed_experts"] = rows
    document = {"text": "", "output_ids": token_ids, "meta_info": meta}
    return b"data: %b\n\n" % json.dumps(document, separators=(",", ":")).encode()


def encode_rows(num_rows: int) -> bytes:
    first = np.random.default_rng(0).integers(EXPERTS, size=(num_rows, LAYERS, 1), dtype=np.int32)
    return pybase64.b64encode(((first + 13 * np.arange(TOP_K, dtype=np.int32)) % EXPERTS).tobytes())


def serve(ready: Connection) -> None:
    raise_descriptors()
    asyncio.run(StandIn().serve(ready))


# -- the driver, in a process of its own for each row ---------------------------------------------------


def measure(url: str, way: str, calls: int, tokens: int, rounds: int, sender: Connection) -> None:
    raise_descriptors()
    sender.send(asyncio.run(_measure(url, way, calls, tokens, rounds)))


async def _measure(url: str, way: str, calls: int, tokens: int, rounds: int) -> dict[str, Any]:
    measured = [
        await _abort_all(f"{url}/{way.replace(' ', '-')}-{n}", url, way, calls, tokens) for n in range(rounds)
    ]
    row: dict[str, Any] = {"way": way, "calls": calls, "tokens": tokens}
    row |= {key: round(statistics.median(m[key] for m in measured), 3) for key in measured[0]}
    return row | {"memory_mb": round(measured[0]["memory_mb"])}  # later rounds reuse what the first one took


async def _abort_all(base: str, url: str, way: str, calls: int, tokens: int) -> dict[str, float]:
    engines = [
        SGLangEngine(f"engine-{i}", f"{base}-{i}", FACTS) for i in range(max(1, calls // CALLS_PER_ENGINE))
    ]
    prompt = np.zeros(tokens, np.int32)
    finishes: list[Finish] = []
    begun = asyncio.Semaphore(0)

    async def run(number: int) -> None:
        request = GenerateRequest(
            request_id=f"{number:032x}",
            input_ids=prompt,
            max_new_tokens=1000,
            sampling=SamplingParams(),
            return_routing=True,
            rows_if_aborted=way == "rows moved",
        )
        async for received in engines[number % len(engines)].generate(request):
            if isinstance(received, Finish):
                finishes.append(received)
            elif isinstance(received, Chunk):
                begun.release()

    async with asyncio.TaskGroup() as group:
        for number in range(calls):
            group.create_task(run(number))
            if number % 256 == 255:
                for _ in range(256):
                    await begun.acquire()
        for _ in range(calls % 256):
            await begun.acquire()
        sent, before, peak = await sent_bytes(url), resident_mb(), 0.0
        begin = time.perf_counter()

        async def watch() -> None:
            nonlocal peak
            while True:
                peak = max(peak, resident_mb())
                await asyncio.sleep(0.01)

        watcher = group.create_task(watch())
        await asyncio.gather(*(engine.interrupt("abort") for engine in engines))
        pause_s = time.perf_counter() - begin
        watcher.cancel()
    peak = max(peak, resident_mb())
    moved = await sent_bytes(url) - sent
    assert all(finish.reason == "abort" for finish in finishes)
    assert all((finish.routing is not None) == (way == "rows moved") for finish in finishes)
    for engine in engines:
        await engine.close()
    return {"pause_s": pause_s, "moved_mb": moved / 1e6, "memory_mb": peak - before}


async def sent_bytes(url: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/sent") as response:
        return int(await response.text())


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def raise_descriptors() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def begin_process(target: Callable[..., None], *arguments: Any) -> tuple[SpawnProcess, Connection]:
    """Starts a process and returns the pipe of its reply."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=target, args=(*arguments, sender), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'':<14}{'calls':>6}{'tokens':>8}{'pause s':>9}{'moved MB':>10}{'memory MB':>11}")
    for row in rows:
        print(
            f"{row['way']:<14}{row['calls']:>6}{row['tokens']:>8}{row['pause_s']:>9}{row['moved_mb']:>10}"
            f"{row['memory_mb']:>11}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few and short calls, one round")
    parser.add_argument("--json", metavar="FILE", help="write the same rows there")
    arguments = parser.parse_args()
    cases = [(64, 2048), (64, 16384), (512, 16384), (4096, 16384)]
    rounds = 3
    if arguments.quick:
        cases, rounds = [(16, 1024), (64, 1024)], 1
    rows = []
    server, receiver = begin_process(serve)
    try:
        url = f"http://127.0.0.1:{receiver.recv()}"
        for calls, tokens in cases:
            for way in WAYS:
                if way == "rows moved" and calls * tokens > 1 << 21:
                    continue  # tens of gigabytes
                child, receiver = begin_process(measure, url, way, calls, tokens, rounds)
                rows.append(receiver.recv())
                child.join()
    finally:
        server.terminate()
        server.join()
    show(rows)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
