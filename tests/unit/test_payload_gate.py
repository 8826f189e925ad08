"""Routing payloads that arrive slowly or stop in the middle, and what else waits for their engine."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from async_rl.engine_protocol import Finish
from async_rl.engines.sglang.routing_payload import MAX_RECEIVING
from async_rl.errors import EngineTimeout
from tests.support.engine_calls import request
from tests.support.fake_sglang import HANG, FakeSGLang, event, facts, finish

pytestmark = pytest.mark.real_time

ROWS = 4000
"""Their payload exceeds what an event may hold before it is separated, several times."""
LONG = facts(max_position_embeddings=1 << 14)


def last_event(reason: str = "length") -> bytes:
    return event([10], 1, finish_reason=finish(reason), routed_experts="A" * (ROWS * 32))


def stops_in_the_middle() -> list:
    data = last_event()
    return [data[: -len(data) // 4], HANG]


async def read_finish(engine) -> Finish:
    ended = [e async for e in engine.generate(request([5] * ROWS, 1)) if isinstance(e, Finish)]
    return ended[0]


async def test_other_engines_are_interrupted_when_one_stops_in_the_middle_of_its_payloads() -> None:
    frozen, sound = FakeSGLang(), FakeSGLang()
    frozen.streams = [stops_in_the_middle() for _ in range(MAX_RECEIVING + 2)]
    aborted = asyncio.Event()

    def abort(body):
        aborted.set()
        return 200, {}

    sound.answers["abort_request"] = abort
    sound.streams = [[aborted, last_event("abort")]]
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(frozen.client(facts=LONG, stall_s=1000.0))
        other = await stack.enter_async_context(sound.client(facts=LONG, request_timeout_s=5.0))
        stuck = [asyncio.create_task(read_finish(one)) for _ in frozen.streams]
        while not one.payload_gate.is_full:  # noqa: ASYNC110 - a server, not an event
            await asyncio.sleep(0)
        call = asyncio.create_task(read_finish(other))
        while not sound.requests("generate"):  # noqa: ASYNC110
            await asyncio.sleep(0)
        await other.interrupt("abort")
        assert (await call).reason == "abort"
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        assert not one.payload_gate.is_full


async def test_bytes_that_drip_into_a_payload_do_not_extend_its_time() -> None:
    data, server = last_event(), FakeSGLang()
    ticks = [asyncio.Event() for _ in range(400)]
    parts = [data[70_000 + i : 70_001 + i] for i in range(len(ticks))]
    server.streams = [
        [data[:70_000], *(part for pair in zip(ticks, parts, strict=True) for part in pair), HANG]
    ]

    async def drip() -> None:
        for tick in ticks:
            await asyncio.sleep(0.02)
            tick.set()

    async with server.client(facts=LONG, stall_s=0.3) as engine:
        dripping = asyncio.create_task(drip())
        with pytest.raises(EngineTimeout, match=r"sent \d+ bytes within engine.stall_s = 0.3"):
            await read_finish(engine)
        assert not dripping.done()
        dripping.cancel()
