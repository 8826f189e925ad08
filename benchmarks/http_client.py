"""A whole turn with the HTTP client of `engines/streams.py` and with aiohttp, in turns, in one run.

    python benchmarks/http_client.py [--quick] [--json FILE]

A turn is what a rollout worker does for one engine call: session, pool, request, SSE, segments, metrics and,
where it is replayed, routing from its text to checked rows. The server is another process. It sends events at
a fixed pace (`gap`), as an engine that decodes does, or all at once. The CPU time of the client's process per
turn is compared, because other programs do not change it: medians of the rounds, and the ratio of each round
(aiohttp / own) as median, smallest and largest.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import re
import statistics
import time
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import cast

import numpy as np
import pybase64

from async_rl.chat import ChatFormat
from async_rl.config import RolloutConfig, RoutingConfig
from async_rl.engines.facts import facts_of
from async_rl.engines.pool import EnginePool
from async_rl.engines.sglang import SGLangEngine
from async_rl.metrics import Metrics
from async_rl.rollout.session import RolloutSession
from async_rl.types import Task
from benchmarks.aiohttp_streams import AiohttpStreamClient

LAYERS, TOP_K, EXPERTS = 48, 8, 128


@dataclass(frozen=True)
class Case:
    name: str
    prompt: int
    events: int
    tokens: int
    """Of an event."""
    gap_ms: float
    concurrency: int
    turns: int
    routing: bool = False

    @property
    def path(self) -> str:
        return f"p{self.prompt}e{self.events}t{self.tokens}g{round(1e3 * self.gap_ms)}r{int(self.routing)}"


CASES = (
    Case("4 x 1, at once", 1024, 4, 1, 0, 64, 2000),
    Case("4 x 1, at once", 1024, 4, 1, 0, 1, 500),
    Case("16 x 1", 1024, 16, 1, 10, 64, 1200),
    Case("64 x 1", 1024, 64, 1, 10, 64, 400),
    Case("256 x 1", 1024, 256, 1, 10, 64, 192),
    Case("16 x 16", 1024, 16, 16, 10, 64, 800),
    Case("64 x 16", 1024, 64, 16, 10, 64, 256),
    Case("256 x 1, busy", 1024, 256, 1, 0, 64, 192),
    Case("64 x 1 + routing", 1024, 64, 1, 10, 16, 96, routing=True),
    Case("4 x 1 + routing", 1024, 4, 1, 10, 16, 160, routing=True),
    Case("4 x 1 + 32k routing", 32000, 4, 1, 10, 4, 8, routing=True),
)


def _facts(routing: bool):
    if not routing:
        return facts_of({"num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 10**7})
    return facts_of(
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": LAYERS,
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "vocab_size": 512,
            "max_position_embeddings": 10**6,
        }
    )


@lru_cache
def _answer(prompt: int, events: int, tokens: int, routing: int) -> list[bytes]:
    parts = []
    for i in range(events):
        last = i == events - 1
        meta = {
            "id": "0" * 32,
            "finish_reason": {"type": "length", "length": events * tokens} if last else None,
            "prompt_tokens": prompt,
            "weight_version": "0",
            "output_token_logprobs": [[-1.25 - j / 7, 17 + j, None] for j in range(tokens)],
            "completion_tokens": (i + 1) * tokens,
            "cached_tokens": 0,
        }
        if last and routing:
            rows = prompt + events * tokens - 1
            first = np.random.default_rng(0).integers(EXPERTS, size=(rows, LAYERS, 1), dtype=np.int32)
            ids = (first + 13 * np.arange(TOP_K, dtype=np.int32)) % EXPERTS
            meta["routed_experts"] = pybase64.b64encode(ids.tobytes()).decode()
        text = json.dumps(
            {"text": "x", "output_ids": [17 + j for j in range(tokens)], "meta_info": meta},
            separators=(",", ":"),
        ).encode()
        data = b"data: " + text + b"\n\n"
        parts.append(b"%x\r\n%b\r\n" % (len(data), data))
    parts[0] = (
        b"HTTP/1.1 200 OK\r\ndate: Mon, 03 Aug 2026 10:00:00 GMT\r\nserver: uvicorn\r\n"
        b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n" + parts[0]
    )
    parts[-1] += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    return parts


class _Server(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(1 << 30)
        self.buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            found = re.search(rb"(?i)content-length: (\d+)", self.buffer[:end])
            size = end + 4 + (int(found[1]) if found else 0)
            if len(self.buffer) < size:
                return
            what = re.match(rb"POST /p(\d+)e(\d+)t(\d+)g(\d+)r(\d+)/generate", bytes(self.buffer[:100]))
            del self.buffer[:size]
            if what is None:
                self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                continue
            prompt, events, tokens, gap, routing = map(int, what.groups())
            parts = _answer(prompt, events, tokens, routing)
            if not gap:
                self.transport.write(b"".join(parts)) if events < 64 else self.send(parts, 0, 0.0)
            else:
                self.send(parts, 0, gap / 1e6)

    def send(self, parts: list[bytes], index: int, gap: float) -> None:
        self.transport.write(parts[index])
        if index + 1 < len(parts):
            loop = asyncio.get_running_loop()
            if gap:
                loop.call_later(gap, self.send, parts, index + 1, gap)
            else:
                loop.call_soon(self.send, parts, index + 1, gap)


def _serve(ready: Connection) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0, backlog=2048)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


class _Chat:
    stop_token_ids = ()
    end_of_turn_id = None

    def __init__(self, length: int) -> None:
        self.prompt = np.arange(length, dtype=np.int32) % 500

    def prompt_ids(self, messages: object, tools: object = ()) -> np.ndarray:
        return self.prompt

    def decode(self, token_ids: object) -> str:
        return ""


_TASK = Task(task_id="t", messages=[])


async def _measure(case: Case, pool: EnginePool, metrics: Metrics, turns: int) -> dict[str, float]:
    facts, chat = _facts(case.routing), cast(ChatFormat, _Chat(case.prompt))
    rollout = RolloutConfig(max_context_tokens=1 << 17, max_new_tokens=case.events * case.tokens)
    routing = RoutingConfig(replay="r3" if case.routing else "off")
    numbers = iter(range(turns))

    async def worker() -> None:
        for number in numbers:
            name = f"{number:032x}"
            session = RolloutSession(
                task=_TASK,
                trajectory_id=name,
                group_id="g",
                pool=pool,
                chat=chat,
                facts=facts,
                rollout=rollout,
                routing_config=routing,
                interrupt="abort",
                metrics=metrics,
                new_id=lambda: name,
                clock=time.monotonic,
            )
            session.start([])
            turn = await session.generate()
            assert len(turn.token_ids) == case.events * case.tokens
            if case.routing:
                trajectory = await session.finish("completed", {})
                assert trajectory.trace is not None
                assert len(trajectory.trace.rows) == case.prompt + len(turn.token_ids) - 1
            else:
                pool.forget(name)

    gc.collect()
    begin, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(case.concurrency, turns)):
            group.create_task(worker())
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {"cpu_us": 1e6 * cpu / turns, "wall_us": 1e6 * seconds / turns}


async def _run(url: str, quick: bool) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for case in CASES:
        setups, clients = {}, []
        for name in ("own", "aiohttp"):
            engine = SGLangEngine(
                "engine-0", f"{url}/{case.path}", _facts(case.routing), routing=case.routing
            )
            if name == "aiohttp":
                client = AiohttpStreamClient(str(engine._url / "generate"), engine._headers)
                engine._streams.close()
                engine._streams = client  # type: ignore[assignment]
                clients.append(client)
            metrics = Metrics()
            pool = EnginePool(metrics, time.monotonic)
            pool.add(engine)
            pool.serve("engine-0", 0)
            setups[name] = (engine, pool, metrics)
        turns = max(case.concurrency, case.turns // 4) if quick else case.turns
        found = {name: [] for name in setups}
        for name, (_, pool, metrics) in setups.items():
            await _measure(case, pool, metrics, max(case.concurrency, turns // 4))
        for round_ in range(3 if quick else 7):
            order = list(setups) if round_ % 2 else list(setups)[::-1]
            for name in order:
                _, pool, metrics = setups[name]
                found[name].append(await _measure(case, pool, metrics, turns))
        row = {"case": case.name, "concurrency": case.concurrency}
        for key in ("cpu_us", "wall_us"):
            for name in setups:
                row[f"{name}_{key}"] = round(statistics.median(m[key] for m in found[name]))
            ratios = [a[key] / o[key] for a, o in zip(found["aiohttp"], found["own"], strict=True)]
            row[f"ratio_{key}"] = [round(f(ratios), 2) for f in (statistics.median, min, max)]
        rows.append(row)
        print(json.dumps(row), flush=True)
        for engine, _, _ in setups.values():
            await engine.close()
        for client in clients:
            await client.aclose()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(sender,), daemon=True)
    server.start()
    sender.close()
    try:
        rows = asyncio.run(_run(f"http://127.0.0.1:{receiver.recv()}", arguments.quick))
    finally:
        server.terminate()
        server.join()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
