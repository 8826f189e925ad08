"""Engines of a pool: which one gets a call, how long it is leased, and what a call leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast
from unittest.mock import patch

import pytest

from async_rl.engine_protocol import Engine, EngineCapacity, Finish
from async_rl.engines import lease_dispatcher
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.errors import CallLost, EngineError
from async_rl.observability.metrics import Metrics
from async_rl.runtime.supervision import Nursery
from tests.support.manual_engines import END, ManualPool, settle, tokens


@asynccontextmanager
async def pool_of(*engines: str, budget: int | None = None, **limits: int) -> AsyncIterator[ManualPool]:
    with patch.object(lease_dispatcher, "MAX_PREFILL_TOKENS", budget):
        async with Nursery() as nursery:
            yield ManualPool(*engines, nursery=nursery, **limits)


async def test_a_cancelled_call_gives_its_place_back_when_it_is_streaming() -> None:
    async with pool_of("a", budget=50) as bench:
        first, second = bench.start("t1", prompt=60), bench.start("t2", prompt=60)
        await settle()
        assert bench.order == ["t1"]
        first.cancel()
        await settle()
        assert bench.order == ["t1", "t2"]
        second.cancel()
        await settle()
        assert bench.pool.load_of("a").calls == 0
        assert bench.pool.load_of("a").prefill_tokens == 0


async def test_one_lost_call_is_no_reason_to_stop_an_engine_but_three_are() -> None:
    async with pool_of("a") as bench:
        for number in range(3):
            assert bench.state("a") is EngineState.SERVING
            bench.start(f"t{number}")
            await settle()
            bench.engines["a"].say(number, CallLost("connection reset"))
            await settle()
        assert bench.state("a") is EngineState.QUARANTINED


async def test_who_waits_is_let_in_oldest_first_as_prefills_end() -> None:
    """A wave after an update: everybody wants to prefill, the engine is given little at a time."""
    async with pool_of("a", budget=50) as bench:
        for key in ("t5", "t3", "t9", "t1"):
            bench.start(key, prompt=40)
        await settle()
        assert bench.order == ["t5", "t3"]  # 40 tokens fit, 80 do not
        assert not bench.pool.dispatcher.has_capacity
        for stream, expected in ((0, ["t1"]), (1, ["t1", "t9"])):
            bench.engines["a"].say(stream, tokens(1))
            await settle()
            assert bench.order[2:] == expected
        for stream in range(4):
            bench.engines["a"].say(stream, END)
        await settle()
        assert bench.pool.dispatcher.has_capacity
        bench.pool.dispatcher.pause_calls("no descriptors")
        assert not bench.pool.dispatcher.has_capacity


async def test_a_cancelled_call_stays_cancelled_when_it_is_dropped_in_the_same_moment() -> None:
    """A stop of the run must not become an engine's failure that a session would survive."""
    async with pool_of("a") as bench:
        both, dropped = bench.start("both"), bench.start("dropped")
        await settle()
        bench.pool.quarantine_engine("a", EngineError("gone"))
        both.cancel()
        await settle()
        assert both.cancelled()
        assert dropped.done()
        assert not dropped.cancelled()
        assert isinstance(bench.ended["dropped"], CallLost)


async def test_a_waiting_call_leaves_no_trace_when_it_is_cancelled_as_its_turn_comes() -> None:
    async with pool_of("a") as bench:
        bench.pool.hold_engine("a")
        waits, other = bench.start("t1"), bench.start("t2")
        await settle()
        bench.pool.serve_engine("a", 1)  # its turn has come, but it has not run yet
        waits.cancel()
        await settle()
        assert bench.order == ["t2"]
        assert bench.pool.load_of("a").calls == 1
        bench.engines["a"].say(0, END)
        await settle()
        assert other.result() == "a"
        assert bench.pool.load_of("a").calls == 0


async def test_strikes_are_forgotten_when_they_are_far_apart() -> None:
    async with pool_of("a") as bench:
        for _ in range(9):
            bench.pool.record_strike("a", EngineError("nan"))
            await asyncio.sleep(400.0)
        assert bench.state("a") is EngineState.SERVING


@pytest.mark.parametrize("cause", ["update", "evicted"])
async def test_what_is_prefilled_again_is_counted_by_its_cause(cause: str) -> None:
    async with pool_of("a") as bench:
        bench.start("t1", prompt=10)
        await settle()
        bench.engines["a"].say(0, tokens(5), END)
        await settle()
        if cause == "update":
            bench.pool.hold_engine("a")
            bench.pool.serve_engine("a", 1)
        bench.start("t1", prompt=25)
        await settle()
        finish = Finish(reason="length", version_spans=(), cached_tokens=4)
        bench.engines["a"].say(1, tokens(1), finish)
        await settle()
        # 14 had been fed: the fifth sampled token never was.
        assert bench.counted("prefilled_again_tokens_total", cause=cause) == 14 - 4
        kind = "next" if cause == "evicted" else "again"
        assert bench.counted("first_token_seconds_count", kind=kind) == 1


async def test_vitals_name_the_call_that_was_overtaken() -> None:
    async with pool_of("a") as bench:
        bench.start("t1")
        await settle()
        bench.start("t2")
        await asyncio.sleep(5.0)
        own = bench.pool.own
        assert bench.pool.own.slots["a"].queued_call is not None
        assert bench.pool.own.slots["a"].queued_call.overtaken_s is None
        bench.engines["a"].say(1, tokens(1))
        await asyncio.sleep(2.0)
        vitals = own.load_of("a")
        assert vitals is not None
        assert (vitals.overtaken_s, vitals.progress_s, vitals.silent_since_s) == (5.0, 5.0, 5.0)
        assert vitals.prefill_tokens == 10
        queued = own.slots["a"].queued_call
        assert queued is not None
        queued.drop(CallLost("lost"))
        await settle()
        assert isinstance(bench.ended["t1"], CallLost)
        assert bench.ended["t2"] is None
        assert bench.state("a") is EngineState.SERVING
        bench.engines["a"].say(1, END)


# -- which engine gets a call -------------------------------------------------------------------------


class NamedEngine:
    """The pool never calls an engine; it only hands it out."""

    def __init__(self, engine_id: str) -> None:
        self.capacity = EngineCapacity()
        self.engine_id = engine_id


def make_pool(*names: str, version: int | None = 0, clock=lambda: 0.0) -> EnginePool:
    pool = EnginePool(Metrics(), clock)
    for name in names:
        pool.add_engine(cast(Engine, NamedEngine(name)))
        if version is not None:
            pool.serve_engine(name, version)
    return pool


async def test_calls_go_to_the_least_loaded_engine_when_they_have_no_home():
    pool = make_pool("a", "b")
    async with (
        pool.dispatcher.lease("t1", tokens=100) as first,
        pool.dispatcher.lease("t2", tokens=10) as second,
    ):
        async with pool.dispatcher.lease("t3", tokens=10) as third:
            assert first.engine.engine_id == "a"
            assert second.engine.engine_id == "b"
            assert third.engine.engine_id == "b"


async def test_a_trajectory_returns_to_its_engine_unless_that_is_clearly_busier():
    pool = make_pool("a", "b")
    async with pool.dispatcher.lease("mine", tokens=100) as lease:
        assert lease.engine.engine_id == "a"
    for size, expected in ((100, "a"), (1000, "b")):
        async with (
            pool.dispatcher.lease(f"x{size}", tokens=size),
            pool.dispatcher.lease(f"y{size}", tokens=90),
        ):
            async with pool.dispatcher.lease("mine", tokens=10) as lease:
                assert lease.engine.engine_id == expected


async def test_siblings_follow_their_prompt_until_it_is_flushed_or_its_engine_is_busier_than_most():
    pool = make_pool("a", "b", "c")
    async with AsyncExitStack() as running:

        async def placed(key: str, tokens: int, group: str, prompt: int = 50) -> tuple[str, int]:
            lease = pool.dispatcher.lease(key, tokens=tokens, prompt=prompt, group=group)
            given = await running.enter_async_context(lease)
            return given.engine.engine_id, given.prefill_tokens

        assert await placed("x", 1000, "") == ("a", 50)
        assert await placed("g0", 900, "g") == ("b", 50)
        assert await placed("y", 800, "") == ("c", 50)
        assert await placed("g1", 100, "g") == ("b", 1)  # `c` has the least load
        assert await placed("g2", 10, "g") == ("c", 50)  # now `b` is above the mean
        pool.hold_engine("c")
        pool.serve_engine("c", 1)  # its cache was flushed
        assert await placed("g3", 10, "g", prompt=80) == ("c", 80)
        assert await placed("g4", 10, "g", prompt=80) == ("c", 30)  # they have 50 tokens in common
        pool.dispatcher.forget_trajectory("g4", "g")  # so nothing is kept of a group that has ended
        assert (await placed("g5", 10, "g", prompt=80))[1] == 80
        assert (await placed("g6", 10, "g", prompt=80))[1] == 1


async def test_the_oldest_version_counts_engines_that_are_being_updated():
    pool = make_pool("a", "b", version=3)
    pool.hold_engine("a")
    pool.serve_engine("b", 4)
    assert pool.oldest_version == 3
    pool.serve_engine("a", 4)
    assert pool.oldest_version == 4


async def test_idle_share_is_the_time_without_calls():
    now = [0.0]
    pool = make_pool("a", "b", clock=lambda: now[0])
    pool.restart_idle_clock()
    async with pool.dispatcher.lease("t", tokens=1):
        now[0] = 6.0
    now[0] = 10.0
    # engine a was busy for 6 of 10 seconds, engine b never
    assert pool.idle_share == pytest.approx(0.7)


async def test_an_engine_is_not_idle_when_its_first_calls_waited_for_it():
    now = [0.0]
    pool = make_pool("a", version=None, clock=lambda: now[0])

    async def call() -> None:
        async with pool.dispatcher.lease("t", tokens=1):
            now[0] = 6.0

    async with asyncio.TaskGroup() as group:
        group.create_task(call())
        await asyncio.sleep(0)
        pool.restart_idle_clock()
        pool.serve_engine("a", 0)
    now[0] = 10.0
    assert pool.idle_share == pytest.approx(0.4)
