"""Measures our cost of one generate call: session and engine client against a plain aiohttp loop.

    python benchmarks/generate_path.py [--quick] [--json FILE]

The server is another process that answers at once (a 1024-token prompt, 4 tokens back, one event each), so
that what is measured is the client. Reported for each concurrency: calls/s, p50 latency, CPU of the client
process a call. Each figure is the median of the rounds, ratios are of the same
round, with their smallest and largest. "client" is the engine client alone, "session" a whole turn: pool,
session, segments and metrics around the same call.
"""

from __future__ import annotations

import asyncio
import json
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

from async_rl.config import Config, ModelConfig, RolloutConfig, RoutingConfig
from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import Chunk, GenerateRequest, SamplingParams
from async_rl.engines.model_facts import facts_of
from async_rl.engines.pool import EnginePool
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.observability.metrics import Metrics
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.session.transcript import Transcript
from async_rl.store.journal import JournalEntry
from async_rl.types import Task
from benchmarks.support.paced_server import Counts, Pace, PacedEngine
from benchmarks.support.tables import Row, argument_parser, other_process, report

PROMPT = np.arange(1024, dtype=np.int32) % 500
TOKENS = 4

FACTS = facts_of({"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 10**7})


class _AtOnce(PacedEngine):
    """Answers a call as soon as it comes."""

    def generate(self, transport: asyncio.Transport, content: bytes) -> None:
        super().generate(transport, content)
        for _ in range(TOKENS):
            self.advance()


def _serve(ready: Connection) -> None:
    async def main() -> None:
        engine = _AtOnce(Pace(), Counts(), seed=0)
        server = await asyncio.get_running_loop().create_server(
            engine.connection, "127.0.0.1", 0, backlog=2048
        )
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def _ours(engine: SGLangEngine, number: int) -> int:
    request = GenerateRequest(
        request_id=f"{number:032x}", input_ids=PROMPT, max_new_tokens=TOKENS, sampling=SamplingParams()
    )
    tokens = 0
    async with aclosing(engine.generate(request)) as stream:
        async for event in stream:
            if isinstance(event, Chunk):
                tokens += len(event.token_ids)
    return tokens


class _Chat:
    """A prompt of 1024 tokens; nothing is decoded, as tokenizers are not what is measured."""

    stop_token_ids = ()
    end_of_turn_ids = ()

    def prompt_ids(self, messages: object, tools: object = ()) -> np.ndarray:
        return PROMPT

    def decode(self, token_ids: object) -> str:
        return ""


_CONFIG = Config(
    model=ModelConfig(path="m"),
    rollout=RolloutConfig(max_context_tokens=2048, max_new_tokens=TOKENS),
    routing=RoutingConfig(replay="off"),
)


async def _turn(pool: EnginePool, metrics: Metrics, number: int) -> int:
    """One turn of an agent loop."""
    context = SessionContext(
        config=_CONFIG,
        chat=cast(ChatFormat, _Chat()),
        metrics=metrics,
        clock=time.monotonic,
        serving_clock=pool.own.serving_clock,
        calls=pool.dispatcher,
        facts=FACTS,
        new_id=lambda: f"{number:032x}",
    )
    transcript = Transcript(context, JournalEntry(f"{number:032x}"))
    session = RolloutSession(context, Task(task_id="t", messages=[]), transcript, group_id="g")
    session.start([])
    turn = await session.generate()
    pool.dispatcher.forget_trajectory(f"{number:032x}")
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
    numbers = iter(range(calls))

    async def worker() -> None:
        for number in numbers:
            begin = time.perf_counter()
            if await call(number) != TOKENS:
                raise RuntimeError("a call came back with the wrong number of tokens")
            latencies.append(time.perf_counter() - begin)

    begin, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker())
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {
        "calls_per_s": calls / seconds,
        "p50_ms": 1e3 * statistics.median(latencies),
        "cpu_us_per_call": 1e6 * cpu / calls,
    }


async def _run(url: str, quick: bool) -> list[Row]:
    engine = SGLangEngine("engine-0", url, FACTS)
    rows: list[Row] = []
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
                ratios = [
                    ours["calls_per_s"] / plain["calls_per_s"]
                    for ours, plain in zip(measured, results["plain aiohttp"], strict=True)
                ]
                medians = {key: statistics.median(m[key] for m in measured) for key in measured[0]}
                spread = [f(ratios) for f in (statistics.median, min, max)]
                rows.append({"concurrency": concurrency, "what": name} | medians | {"x plain": spread})
    await engine.close()
    return rows


def main() -> None:
    options = argument_parser(__doc__, quick="a quarter of the calls, fewer rounds").parse_args()
    with other_process(_serve) as server:
        rows = asyncio.run(_run(f"http://127.0.0.1:{server.recv()}", options.quick))
    report(rows, "generate calls", options.json)


if __name__ == "__main__":
    main()
