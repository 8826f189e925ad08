"""Measures decoding the routing of 32k tokens (48 layers, top-8), against the methods of peers.

    python benchmarks/routing_payload.py [--quick] [--json FILE]

First one payload that has arrived, as an event with its JSON: time, MB/s of what was sent against memcpy
of the same bytes, bytes a token sent and kept, and the most memory held meanwhile. Then many that arrive at
the same time over HTTP, from a server in another process: payloads/s, the lag of the event loop (and how much
of it was the loop's own doing: CPU time of its thread between two ticks, which the load of other programs
does not change), and the most memory beyond the rows that are kept. "json + base64" is how verl's servers
read them (on the event loop); "orjson + pybase64" is the best of general libraries, also there. Times are
medians of the rounds, ratios are of the same round, with their smallest and largest.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import resource
import socketserver
import statistics
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import aiohttp
import numpy as np
import orjson
import pybase64

from async_rl.engine_protocol import Finish, GenerateRequest, RoutingPayload, SamplingParams
from async_rl.engines.model_facts import facts_of
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.routing_payload import PIECE_BYTES, SLABS, RoutingText, RoutingWire
from async_rl.engines.sglang.sse import EventReader

TOKENS, LAYERS, TOP_K, EXPERTS = 32768, 48, 8, 128
ROWS = TOKENS - 1
FACTS = facts_of(
    {
        "model_type": "qwen3_moe",
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "vocab_size": 512,
        "max_position_embeddings": 2 * TOKENS,
    }
)
PROMPT = np.arange(TOKENS - 1, dtype=np.int32) % 500
_READ = 1 << 18
"""What a connection reads at once."""


def ids() -> np.ndarray:
    """`[ROWS, LAYERS, TOP_K] int32`, distinct within a row."""
    first = np.random.default_rng(0).integers(EXPERTS, size=(ROWS, LAYERS, 1), dtype=np.int32)
    return (first + 13 * np.arange(TOP_K, dtype=np.int32)) % EXPERTS


def event(rows: np.ndarray) -> bytes:
    """The last event of a call, as SGLang writes it."""
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "length", "length": 1},
        "prompt_tokens": len(PROMPT),
        "weight_version": "0",
        "routed_experts": "@",
        "output_token_logprobs": [[-1.25, 17, None]],
        "completion_tokens": 1,
        "cached_tokens": 0,
    }
    document = json.dumps(
        {"text": "x", "output_ids": [17], "meta_info": meta}, separators=(",", ":")
    ).encode()
    head, tail = document.split(b"@")
    return b"data: " + head + pybase64.b64encode(rows.tobytes()) + tail + b"\n\n"


# -- the server, in a process of its own ----------------------------------------------------------------


def serve(ready: Connection) -> None:
    """Answer every call with the routing of 32k tokens, on each connection in a thread of its own.

    `/narrow/generate` sends uint8, any other path int32.
    """
    rows = ids()
    answers = {}
    for name, sent in (("narrow", rows.astype(np.uint8)), ("wide", rows)):
        body = event(sent)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        answers[name] = (head + b"%x\r\n" % len(body), body, b"\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                length = 0
                while (field := self.rfile.readline().strip().lower()) != b"":
                    if field.startswith(b"content-length:"):
                        length = int(field.split(b":")[1])
                self.rfile.read(length)
                for part in answers["narrow" if b"narrow" in line else "wide"]:
                    self.request.sendall(part)

    class Server(socketserver.ThreadingTCPServer):
        request_queue_size = 256
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        ready.send(server.server_address[1])
        server.serve_forever()


# -- one payload ----------------------------------------------------------------------------------------


def by_json(document: bytes) -> np.ndarray:
    """Decodes as verl's rollout servers do, then narrows the ids as async_rl does."""
    text = json.loads(document)["meta_info"]["routed_experts"]
    rows = np.frombuffer(base64.b64decode(text), np.int32).reshape(-1, LAYERS, TOP_K)
    return rows.astype(np.uint8)


def by_orjson(document: bytes) -> np.ndarray:
    """Does the same with the fastest libraries."""
    text = orjson.loads(document)["meta_info"]["routed_experts"]
    rows = np.frombuffer(pybase64.b64decode(text), np.int32).reshape(-1, LAYERS, TOP_K)
    return rows.astype(np.uint8)


def by_us(reads: list[bytes], engine: SGLangEngine, *, narrow: bool) -> np.ndarray:
    """Event to trace, without the network: decoded piece by piece as it arrives."""
    wire = RoutingWire(facts=FACTS, narrow=narrow)
    reader = EventReader(lambda: RoutingText(wire, ROWS - 1, ROWS), 1 << 20)
    for data in reads:
        events = reader.feed(data)
        if reader.payload is not None and reader.payload.pending >= PIECE_BYTES:
            reader.payload.decode_pending()
    ((_, text),) = events
    assert text is not None
    payload = RoutingPayload(data=text.finish_rows(ROWS).data, num_rows=ROWS, weight_version=0)
    return engine.decode_routing(payload).rows


def cut(document: bytes) -> list[bytes]:
    """Reads of the size that a connection makes."""
    return [document[begin : begin + _READ] for begin in range(0, len(document), _READ)]


def one_payload(rounds: int) -> list[dict[str, object]]:
    """Measures each method once per round."""
    rows = ids()
    wide, narrow = event(rows), event(rows.astype(np.uint8))
    engines = [SGLangEngine("engine-0", "http://nowhere", FACTS, narrow_routing=n) for n in (False, True)]
    wide_reads, narrow_reads = cut(wide), cut(narrow)
    ways: dict[str, tuple[bytes, Callable[[bytes], np.ndarray]]] = {
        "json + base64": (wide[6:-2], by_json),
        "orjson + pybase64": (wide[6:-2], by_orjson),
        "ours, int32": (wide, lambda _: by_us(wide_reads, engines[0], narrow=False)),
        "ours, narrowed by the engine": (narrow, lambda _: by_us(narrow_reads, engines[1], narrow=True)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    copies: dict[str, list[float]] = {name: [] for name in ways}
    target = np.ones(len(wide), np.uint8)
    for round_ in range(rounds + 1):
        for name, (document, read) in ways.items():
            begin = time.perf_counter()
            got = read(document)
            seconds = time.perf_counter() - begin
            assert got.shape == rows.shape, name
            assert np.array_equal(got[-1], rows[-1]), name
            begin = time.perf_counter()
            np.copyto(target[: len(document)], np.frombuffer(document, np.uint8))
            copy = time.perf_counter() - begin
            if round_:  # the first one warms up
                times[name].append(1e3 * seconds)
                copies[name].append(copy / seconds)
            del got
    result: list[dict[str, object]] = []
    for name, (document, read) in ways.items():
        tracemalloc.start()
        idle = SLABS.usage()[1]
        got = read(document)
        peak = tracemalloc.get_traced_memory()[1] + idle - SLABS.usage()[1]
        tracemalloc.stop()
        del got
        milliseconds = statistics.median(times[name])
        ratios = [first / mine for first, mine in zip(times["json + base64"], times[name], strict=True)]
        result.append(
            {
                "what": "one payload",
                "way": name,
                "ms": round(milliseconds, 2),
                "mb_per_s": round(len(document) / milliseconds / 1e3),
                "of_memcpy": round(statistics.median(copies[name]), 3),
                "sent_bytes_per_token": round(len(document) / ROWS),
                "kept_bytes_per_token": LAYERS * TOP_K,
                "peak_mb": round(peak / 1e6, 1),
                "times_faster": [round(f(ratios), 2) for f in (statistics.median, min, max)],
            }
        )
    return result


# -- many of them ---------------------------------------------------------------------------------------


async def take(engine: SGLangEngine, number: int) -> np.ndarray:
    """One call with its routing decoded, as a session does it."""
    request = GenerateRequest(
        request_id=f"{number:032x}",
        input_ids=PROMPT,
        max_new_tokens=1,
        sampling=SamplingParams(),
        return_routing=True,
    )
    async with aclosing(engine.generate(request)) as stream:
        async for part in stream:
            if isinstance(part, Finish):
                assert part.routing is not None
                return (await asyncio.to_thread(engine.decode_routing, part.routing)).rows
    raise AssertionError("a call without an end")


async def take_on_the_loop(
    session: aiohttp.ClientSession, url: str, read: Callable[[bytes], np.ndarray]
) -> np.ndarray:
    """Decodes on the event loop, as peers do."""
    async with session.post(f"{url}/generate", data=b"{}") as response:
        body = await response.read()
    return read(body[6 : body.index(b"\n\n")])


def resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


async def arrivals(
    call: Callable[[int], Awaitable[np.ndarray]], count: int, at_once: int
) -> dict[str, float]:
    """Take in so many payloads, so many at a time; all rows are kept, as sessions keep them."""
    lags: list[float] = []
    busy: list[float] = []
    kept: list[np.ndarray] = []
    numbers = iter(range(count))
    before = peak = resident_mb()

    async def worker() -> None:
        for number in numbers:
            rows = await call(number)
            kept.append(rows)

    async def watch() -> None:
        nonlocal peak
        while True:
            due, used = time.perf_counter() + 0.002, time.thread_time()
            await asyncio.sleep(0.002)
            lags.append(time.perf_counter() - due)
            busy.append(time.thread_time() - used)
            peak = max(peak, resident_mb())

    watcher = asyncio.create_task(watch())
    begin, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(worker())
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    peak = max(peak, resident_mb())
    watcher.cancel()
    rows_mb = sum(rows.nbytes for rows in kept) / 1e6
    return {
        "payloads_per_s": count / seconds,
        "cpu_ms": 1e3 * cpu / count,
        "lag_p50_ms": 1e3 * float(np.quantile(lags, 0.5)),
        "lag_p99_ms": 1e3 * float(np.quantile(lags, 0.99)),
        "lag_max_ms": 1e3 * max(lags),
        "busy_p99_ms": 1e3 * float(np.quantile(busy, 0.99)),
        "busy_max_ms": 1e3 * max(busy),
        "extra_mb": peak - before - rows_mb,
        "rows_mb": rows_mb,
    }


WAYS = ("ours, int32", "ours, narrowed by the engine", "json + base64", "orjson + pybase64")


def many_payloads(way: str, url: str, quick: bool, sender: Connection) -> None:
    """Measures one method in its own process, so that none reuses memory that another has warmed."""
    sender.send(asyncio.run(_many_payloads(way, url, quick)))


async def _many_payloads(way: str, url: str, quick: bool) -> dict[str, object]:
    # Peers' ways hold all of a payload several times: eight at a time are enough to show their lag.
    ours = way.startswith("ours")
    count, at_once = (16 if quick else 64) // (1 if ours else 4), 64 if ours else 8
    if ours:
        narrow = "narrowed" in way
        engine = SGLangEngine("engine-0", f"{url}/narrow" if narrow else url, FACTS, narrow_routing=narrow)
        measured = [
            await arrivals(lambda number: take(engine, number), count, at_once)
            for _ in range(1 if quick else 3)
        ]
        await engine.close()
    else:
        read = by_json if way.startswith("json") else by_orjson
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            measured = [await arrivals(lambda _: take_on_the_loop(session, url, read), count, at_once)]
    row: dict[str, object] = {"what": "arrivals", "way": way, "payloads": count, "at_once": at_once}
    row |= {key: round(statistics.median(m[key] for m in measured), 2) for key in measured[0]}
    return row | {"extra_mb": round(measured[0]["extra_mb"], 1)}  # later rounds reuse what the first one took


def show(rows: list[dict[str, object]]) -> None:
    print(
        f"{'one payload':<30}{'ms':>8}{'MB/s':>8}{'memcpy':>8}{'sent B':>8}{'kept B':>8}{'peak MB':>9}"
        "  faster"
    )
    for row in rows:
        if row["what"] == "one payload":
            faster = row["times_faster"]
            assert isinstance(faster, list)
            print(
                f"{row['way']:<30}{row['ms']:>8}{row['mb_per_s']:>8}{row['of_memcpy']:>8}"
                f"{row['sent_bytes_per_token']:>8}{row['kept_bytes_per_token']:>8}{row['peak_mb']:>9}"
                f"  {faster[0]} x ({faster[1]} to {faster[2]})"
            )
    print(
        f"\n{'arrivals':<30}{'of':>5}{'at once':>8}{'per s':>8}{'CPU ms':>8}{'lag p50':>9}{'p99 ms':>8}"
        f"{'max':>8}{'own p99':>8}{'max':>8}{'rows MB':>9}{'extra MB':>9}"
    )
    for row in rows:
        if row["what"] == "arrivals":
            print(
                f"{row['way']:<30}{row['payloads']:>5}{row['at_once']:>8}{row['payloads_per_s']:>8}"
                f"{row['cpu_ms']:>8}{row['lag_p50_ms']:>9}{row['lag_p99_ms']:>8}{row['lag_max_ms']:>8}"
                f"{row['busy_p99_ms']:>8}{row['busy_max_ms']:>8}"
                f"{row['rows_mb']:>9}{row['extra_mb']:>9}"
            )


def begin(target: Callable[..., None], *arguments: Any) -> tuple[SpawnProcess, Connection]:
    """Starts a process and returns the pipe of its replies; its end raises EOFError there."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=target, args=(*arguments, sender), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer payloads and rounds")
    parser.add_argument("--json", metavar="FILE", help="write the same rows there")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = one_payload(3 if arguments.quick else 9)
    server, receiver = begin(serve)
    try:
        url = f"http://127.0.0.1:{receiver.recv()}"
        for way in WAYS:
            child, receiver = begin(many_payloads, way, url, arguments.quick)
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
