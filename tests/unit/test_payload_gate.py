"""Routing payloads that arrive slowly or stop in the middle, and what else waits for their engine."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import cast

import pytest

from async_rl.config import SimulatedEngines
from async_rl.engine_protocol import Engine, Finish
from async_rl.engines.health import find_stall
from async_rl.engines.pool import EnginePool
from async_rl.engines.sglang.routing_payload import MAX_RECEIVING, PIECE_BYTES
from async_rl.errors import EngineTimeout
from async_rl.observability.metrics import Metrics
from async_rl.runtime.supervision import Nursery
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


async def test_a_call_fails_with_its_engine_when_the_payload_stops_arriving() -> None:
    server = FakeSGLang()
    server.streams = [stops_in_the_middle()]
    async with server.client(facts=LONG, stall_s=0.05) as engine:
        with pytest.raises(EngineTimeout, match=r"engine-0 .* in the middle of a routing payload"):
            await read_finish(engine)
        assert not engine.payload_gate.is_full


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


WIDE = facts(max_position_embeddings=1 << 14, num_hidden_layers=96, num_experts_per_tok=8)
HEALTH = SimulatedEngines(stall_s=60.0)
LIMIT_S = 1000.0


class MovedPayload:
    """A call whose payload a real server sends piece by piece, on a clock that moves by hand."""

    def __init__(self, num_pieces: int) -> None:
        data = event([10], 1, finish_reason=finish("length"), routed_experts="A" * (num_pieces * PIECE_BYTES))
        begin = data.find(b"AAA") + PIECE_BYTES // 2
        self.pieces = [
            data[begin + i * PIECE_BYTES : begin + (i + 1) * PIECE_BYTES] for i in range(num_pieces)
        ]
        self.sent = [asyncio.Event() for _ in self.pieces]
        self.server = FakeSGLang()
        gates = [part for pair in zip(self.sent, self.pieces, strict=True) for part in pair]
        self.server.streams = [[event([9], 1), data[:begin], *gates]]
        self.now_s = 0.0
        self.pool = EnginePool(Metrics(), lambda: self.now_s)

    @property
    def finding(self) -> str | None:
        return find_stall(self.pool.statistics.load_of("engine-0"), self.now_s, HEALTH)

    async def call(self) -> None:
        async with self.pool.lease("t1", 2 * ROWS, prompt=ROWS) as lease:
            async for _ in lease.generate(request([5] * ROWS, 2)):
                pass

    async def heard(self) -> None:
        """Wait until the engine has made progress at this time."""
        while self.pool.statistics.load_of("engine-0").progress_s < self.now_s:  # noqa: ASYNC110 - a server
            await asyncio.sleep(0)


@pytest.mark.timeout(120)
async def test_an_engine_is_not_given_up_while_it_moves_a_payload_slowly_but_steadily() -> None:
    """Each piece is progress: to the health check, and to an update that waits for the call to end."""
    moved = MovedPayload(num_pieces=4)
    pool = moved.pool
    async with moved.server.client(facts=WIDE, stall_s=LIMIT_S) as engine, Nursery() as nursery:
        pool.add_engine(cast(Engine, engine))
        pool.serve_engine("engine-0", 0)
        call = nursery.start_task("call", moved.call())
        moved.now_s += 1.0
        await moved.heard()
        async with pool.bounded_request("engine-0", LIMIT_S) as update:
            for sent in moved.sent[:-1]:
                moved.now_s += 50.0
                before_s = update.due_s
                sent.set()
                await moved.heard()
                assert moved.finding is None
                assert update.due_s > before_s
            stood_still_s = update.due_s
            moved.now_s += 61.0
            assert moved.finding == "silent"
            assert update.due_s == stood_still_s
        call.cancel()
