"""Measures our cost of one generate call: session and engine client against a plain aiohttp loop.

    python benchmarks/generate_path.py [--quick] [--json FILE]

The server is another process that answers at once (a 1024-token prompt, 4 tokens back, one event each), so
that what is measured is the client. Reported for each concurrency: calls/s, p50 latency, CPU of the client
process a call, p99 lag of its event loop. Each figure is the median of the rounds, ratios are of the same
round, with their smallest and largest. "client" is the engine client alone, "session" a whole turn: pool,
session, segments and metrics around the same call.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import aiohttp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.config import RolloutConfig, RoutingConfig
from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import Chunk, GenerateRequest, SamplingParams
from async_rl.engines.model_facts import facts_of
from async_rl.engines.pool import EnginePool
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.observability.metrics import Metrics
from async_rl.queue.journal import JournalEntry
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.session.transcript import Transcript
from async_rl.types import Task
from benchmarks.support.tables import argument_parser, write_json

PROMPT = np.arange(1024, dtype=np.int32) % 500
TOKENS = 4

FACTS = facts_of({"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 10**7})


# -- the server, in a process of its own ----------------------------------------------------------------


def _event(index: int, reason: str | None) -> bytes:
    finish = {"type": reason} if reason else None
    meta = {
        "id": "0" * 32,
        "finish_reason": finish,
        "prompt_tokens": len(PROMPT),
        "weight_version": "0",
        "output_token_logprobs": [[-1.25, 17 + index, None]],
        "completion_tokens": index + 1,
        "cached_tokens": 0,
    }
    data = (
        b"data: "
        + json.dumps({"text": "x", "output_ids": [17 + index], "meta_info": meta}).encode()
        + b"\n\n"
    )
    return b"%x\r\n%b\r\n" % (len(data), data)


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_ANSWER = _HEAD + b"".join(_event(i, "length" if i == TOKENS - 1 else None) for i in range(TOKENS)) + _DONE


class _Server(asyncio.Protocol):
    """Just enough HTTP: bodies with a length, one request at a time on a connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            found = re.search(rb"(?i)content-length: (\d+)", self.buffer[:end])
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self.buffer) < size:
                return
            self.buffer = self.buffer[size:]
            self.transport.write(_ANSWER)


def _serve(ready: Connection) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0, backlog=2048)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


# -- the clients ----------------------------------------------------------------------------------------


def _request(number: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{number:032x}",
        input_ids=PROMPT,
        max_new_tokens=TOKENS,
        sampling=SamplingParams(),
    )


async def _ours(engine: SGLangEngine, number: int) -> int:
    tokens = 0
    async with aclosing(engine.generate(_request(number))) as stream:
        async for event in stream:
            if isinstance(event, Chunk):
                tokens += len(event.token_ids)
    return tokens


class _Chat:
    """A prompt of 1024 tokens; nothing is decoded, as tokenizers are not what is measured."""

    stop_token_ids = ()
    end_of_turn_id = None

    def prompt_ids(self, messages: object, tools: object = ()) -> np.ndarray:
        return PROMPT

    def decode(self, token_ids: object) -> str:
        return ""


_TASK = Task(task_id="t", messages=[])
_ROLLOUT = RolloutConfig(max_context_tokens=2048, max_new_tokens=TOKENS)
_NO_ROUTING = RoutingConfig(replay="off")


async def _turn(pool: EnginePool, metrics: Metrics, number: int) -> int:
    """One turn of an agent loop."""
    context = SessionContext(
        chat=cast(ChatFormat, _Chat()),
        rollout=_ROLLOUT,
        metrics=metrics,
        clock=time.monotonic,
        serving_clock=pool.serving_clock,
        calls=pool,
        facts=FACTS,
        routing=_NO_ROUTING,
        interrupt="abort",
        new_id=lambda: f"{number:032x}",
    )
    session = RolloutSession(
        context, _TASK, Transcript(context, JournalEntry(f"{number:032x}")), group_id="g"
    )
    session.start([])
    turn = await session.generate()
    pool.forget_trajectory(f"{number:032x}")
    return len(turn.token_ids)


async def _plain(session: aiohttp.ClientSession, url: str, number: int) -> int:
    """The least that reads a stream: one post, lines, json."""
    tokens = 0
    body = {
        "rid": f"{number:032x}",
        "input_ids": PROMPT.tolist(),
        "sampling_params": {"max_new_tokens": TOKENS, "temperature": 1.0},
        "stream": True,
        "return_logprob": True,
    }
    async with session.post(f"{url}/generate", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                tokens += len(json.loads(line[6:])["output_ids"])
    return tokens


async def _measure(call: Callable[[int], Awaitable[int]], concurrency: int, calls: int) -> dict[str, float]:
    """Make calls, so many at a time."""
    latencies: list[float] = []
    lags: list[float] = []
    numbers = iter(range(calls))

    async def worker() -> None:
        for number in numbers:
            begin = time.perf_counter()
            if await call(number) != TOKENS:
                raise RuntimeError("a call came back with the wrong number of tokens")
            latencies.append(time.perf_counter() - begin)

    async def watch_lag() -> None:
        while True:
            due = time.perf_counter() + 0.002
            await asyncio.sleep(0.002)
            lags.append(time.perf_counter() - due)

    watcher = asyncio.create_task(watch_lag())
    begin, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    watcher.cancel()
    return {
        "calls_per_s": calls / seconds,
        "p50_ms": 1e3 * statistics.median(latencies),
        "cpu_us_per_call": 1e6 * cpu / calls,
        "lag_p99_ms": 1e3 * float(np.quantile(lags, 0.99)) if lags else 0.0,
    }


async def _run(url: str, quick: bool) -> list[dict[str, object]]:
    engine = SGLangEngine("engine-0", url, FACTS)
    rows: list[dict[str, object]] = []
    rounds = 3 if quick else 7
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        metrics = Metrics()
        pool = EnginePool(metrics, time.monotonic)
        pool.add_engine(engine)
        pool.serve_engine("engine-0", 0)
        subjects = {
            "client": lambda number: _ours(engine, number),
            "session": lambda number: _turn(pool, metrics, number),
            "plain aiohttp": lambda number: _plain(session, url, number),
        }
        for concurrency, calls in ((1, 1000), (64, 6000), (512, 6000)):
            calls = calls // 4 if quick else calls
            results: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
            for call in subjects.values():
                await _measure(call, concurrency, max(200, concurrency))  # connections, caches
            for _ in range(rounds):
                for name, call in subjects.items():
                    results[name].append(await _measure(call, concurrency, calls))
            for name, measured in results.items():
                row: dict[str, object] = {"concurrency": concurrency, "client": name}
                row |= {key: round(statistics.median(m[key] for m in measured), 3) for key in measured[0]}
                ratios = [
                    ours["calls_per_s"] / plain["calls_per_s"]
                    for ours, plain in zip(measured, results["plain aiohttp"], strict=True)
                ]
                row["ratio_calls_per_s"] = [round(f(ratios), 3) for f in (statistics.median, min, max)]
                rows.append(row)
    await engine.close()
    return rows


def _print(rows: list[dict[str, object]]) -> None:
    print(
        f"{'calls':>6} {'client':<14} {'calls/s':>9} {'p50 ms':>8} {'CPU us/call':>12} "
        f"{'lag p99 ms':>11}  ratio"
    )
    for row in rows:
        ratio = row.get("ratio_calls_per_s")
        spread = f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})" if isinstance(ratio, list) else ""
        print(
            f"{row['concurrency']:>6} {row['client']:<14} {row['calls_per_s']:>9.0f} {row['p50_ms']:>8.2f} "
            f"{row['cpu_us_per_call']:>12.0f} {row['lag_p99_ms']:>11.2f}  {spread}"
        )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the calls, fewer rounds")
    arguments = parser.parse_args()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(sender,), daemon=True)
    server.start()
    sender.close()  # so that the end of the process raises an EOFError here
    try:
        rows = asyncio.run(_run(f"http://127.0.0.1:{receiver.recv()}", arguments.quick))
    finally:
        server.terminate()
        server.join()
    _print(rows)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
