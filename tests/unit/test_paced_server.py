"""The stand-in server of the benchmarks speaks SGLang's API as the real client reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from async_rl.engine_protocol import Chunk, Finish, GenerateRequest, SamplingParams
from async_rl.engines.sglang.client import SGLangEngine
from benchmarks.support.paced_server import Counts, Pace, PacedEngine
from tests.support.fake_sglang import facts

pytestmark = pytest.mark.real_time  # sockets


def request(tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(
        request_id="0" * 32,
        input_ids=np.arange(4, dtype=np.int32),
        max_new_tokens=tokens,
        sampling=SamplingParams(),
    )


@asynccontextmanager
async def serving(pace: Pace) -> AsyncIterator[tuple[PacedEngine, SGLangEngine, Counts]]:
    """Serve one engine, with a client of it; steps are taken by the test."""
    counts = Counts()
    engine = PacedEngine(pace, counts, seed=0)
    server = await asyncio.get_running_loop().create_server(engine.connection, "127.0.0.1", 0)
    client = SGLangEngine(
        "engine-0",
        f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",
        facts(max_position_embeddings=1000),
    )
    await client.wait_ready()
    try:
        yield engine, client, counts
    finally:
        await client.close()
        server.close()


async def collect(
    client: SGLangEngine, call: GenerateRequest, started: asyncio.Event
) -> tuple[list[int], Finish]:
    """Return the tokens of a call and its finish."""
    tokens: list[int] = []
    async for event in client.generate(call):
        if isinstance(event, Chunk):
            tokens += list(event.token_ids)
            started.set()
        elif isinstance(event, Finish):
            finish = event
    return tokens, finish


async def send_first_event(engine: PacedEngine, counts: Counts, started: asyncio.Event) -> None:
    """Take two steps once the call runs, and wait until the client has read the event."""
    while not counts.running:
        engine.advance()  # of no call
        await asyncio.sleep(0)
    engine.advance()
    engine.advance()
    await started.wait()


async def advance_until(engine: PacedEngine, done: asyncio.Task[tuple[list[int], Finish]]) -> None:
    """Take steps until a call has ended."""
    while not done.done():
        engine.advance()
        await asyncio.sleep(0)


async def test_tokens_have_the_new_version_when_an_update_came_before_them():
    async with serving(Pace(stream_interval=2)) as (engine, client, counts):
        started = asyncio.Event()
        call = asyncio.create_task(collect(client, request(400), started))
        await send_first_event(engine, counts, started)
        engine.control("update_weight_version", b'{"new_version": "7"}')
        await advance_until(engine, call)
        tokens, finish = await call
        assert (await client.health()).weight_version == 7
    assert (len(tokens), finish.reason) == (400, "length")
    assert [(s.start, s.end, s.weight_version) for s in finish.version_spans] == [(0, 2, 0), (2, 400, 7)]
    assert (counts.tokens, counts.answers, counts.running) == (400, 1, 0)
