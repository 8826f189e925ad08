"""What shows that an engine is alive, and what must not count against it (sglang#22511: false kills)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import pytest

from async_rl.config import SGLangEngines, SimulatedEngines
from async_rl.engine_protocol import Engine, PayloadProgress
from async_rl.engines import health
from async_rl.engines.health import HealthWatch, find_stall, first_call_limit
from async_rl.engines.lease import EngineLoad
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.errors import CallLost
from async_rl.observability.metrics import Metrics
from async_rl.planning.virtual_time import VirtualTimeLoop
from async_rl.runtime.supervision import services
from async_rl.runtime.waits import Waits, acting
from tests.support.engine_calls import request
from tests.support.fake_sglang import HANG, FakeSGLang, event
from tests.support.manual_engines import END, ManualPool, manual_pool, settle, tokens

CONFIG = SimulatedEngines(stall_s=60.0)


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROBE_TIMEOUT_S", 5.0)


WELL = EngineLoad(
    calls=4, tokens=9, progress_s=1000.0, decode_s=1000.0, prefill_tokens=0, silent_since_s=1000.0
)


@pytest.mark.parametrize(
    ("changed", "now", "finding"),
    [
        ({}, 1060.0, None),
        ({}, 1061.0, "silent"),
        # An idle engine says nothing, and need not.
        ({"calls": 0}, 9999.0, None),
        # 32768 tokens may take 66 s more.
        ({"prefill_tokens": 32768}, 1120.0, None),
        ({"prefill_tokens": 32768}, 1130.0, "silent"),
        # Others go on: one that has not begun waits in the engine's queue, for as long as that takes.
        ({"progress_s": 5000.0, "decode_s": 5000.0, "silent_since_s": 4999.0}, 5001.0, None),
        # One stream has stopped while the others went on.
        ({"progress_s": 1061.0, "decode_s": 1061.0}, 1061.5, "call"),
        # All streams have stopped while first tokens come: a wave of prefills, which go first.
        ({"progress_s": 1200.0, "decode_s": 1030.0}, 1201.0, None),
        # One was overtaken in the queue by later ones.
        ({"progress_s": 1200.0, "silent_since_s": 1199.0, "overtaken_s": 1139.0}, 1200.0, "overtaken"),
        ({"progress_s": 1200.0, "silent_since_s": 1199.0, "overtaken_s": 1150.0}, 1200.0, None),
    ],
)
def test_an_engine_is_judged_by_what_its_calls_did(
    changed: dict[str, Any], now: float, finding: str | None
) -> None:
    assert find_stall(msgspec.structs.replace(WELL, **changed), now, CONFIG.stall_s) == finding


@pytest.mark.parametrize(
    ("device", "has_answered", "limit_s"),
    [("cpu", False, 60.0), ("cuda", False, 360.0), ("cuda", True, 60.0)],
)
def test_an_engine_may_compile_kernels_before_its_first_token(
    monkeypatch: pytest.MonkeyPatch, device: str, has_answered: bool, limit_s: float
) -> None:
    monkeypatch.setattr("async_rl.engines.health.detect_device", lambda: device)
    compile_s = first_call_limit(SGLangEngines())
    load = msgspec.structs.replace(WELL, has_answered=has_answered)
    assert find_stall(load, WELL.progress_s + limit_s, 60.0, compile_s) is None
    assert find_stall(load, WELL.progress_s + limit_s + 1, 60.0, compile_s) == "silent"


@asynccontextmanager
async def watched(*names: str, config: SimulatedEngines = CONFIG) -> AsyncIterator[ManualPool]:
    async with manual_pool(*names) as bench:
        watch = HealthWatch(bench.pool, config, bench.metrics, asyncio.get_running_loop().time)
        async with services(health=watch.watch_engines):
            yield bench


@pytest.mark.parametrize(("misses", "noticed_s"), [(3, 60.0), (5, 80.0)])
async def test_an_engine_is_left_after_as_many_missed_probes_as_are_allowed(
    monkeypatch: pytest.MonkeyPatch, misses: int, noticed_s: float
) -> None:
    monkeypatch.setattr(health, "PROBE_MISSES", misses)
    async with watched("a", "b") as bench:
        bench.engines["a"].answers.clear()
        await asyncio.sleep(noticed_s)
        assert bench.state("a") is EngineState.QUARANTINED
        assert bench.state("b") is EngineState.SERVING
        assert f"did not answer {misses} times" in str(bench.pool.error_of("a"))
        assert bench.counted("engine_stalls_total", engine="a", kind="unreachable") == 1


async def test_probes_that_are_missed_between_tokens_are_not_added_up() -> None:
    """An engine that prefills or compiles may miss some: only misses without tokens between them count."""
    async with watched("a") as bench:
        await bench.begin("t1")
        bench.engines["a"].answers.clear()
        for _ in range(5):
            bench.engines["a"].say(0, tokens(3))
            await asyncio.sleep(25.0)  # probes 10 and 20 s after the tokens
        assert bench.state("a") is EngineState.SERVING
        await asyncio.sleep(30.0)
        assert bench.state("a") is EngineState.QUARANTINED


async def test_the_first_call_after_a_restart_has_time_to_compile_kernels_and_later_ones_have_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "first_call_limit", lambda _: 200.0)
    async with watched("a") as bench:
        for call, limit_s in enumerate((260.0, 260.0, 60.0)):
            if limit_s == 60.0:
                running = bench.start("answered", prompt=10)
                await settle()
                bench.engines["a"].say(call, tokens(3))
                bench.engines["a"].say(call, END)
                await asyncio.wait([running])
            begin = asyncio.get_running_loop().time()
            await asyncio.wait([bench.start("silent", prompt=10)])
            assert limit_s <= asyncio.get_running_loop().time() - begin <= limit_s + 10.0
            assert bench.state("a") is EngineState.QUARANTINED
            bench.pool.rejoin_engine("a")
            bench.pool.serve_engine("a", 0)


async def test_no_engine_is_killed_when_calls_wait_long_in_its_queue() -> None:
    async with watched("a") as bench:
        await bench.begin("running", "queued")
        for _ in range(60):
            bench.engines["a"].say(0, tokens(1))
            await asyncio.sleep(9.0)
        assert bench.ended["queued"] is None
        assert bench.state("a") is EngineState.SERVING
        assert bench.engines["a"].probes == 0  # its chunks say more than an answer would


async def test_a_stream_that_the_engine_forgot_moves_and_the_others_stay() -> None:
    """verl#7155: everything waits for one id that is lost."""
    async with watched("a") as bench:
        lost, other = bench.start("lost"), bench.start("other")
        await settle()
        bench.engines["a"].say(0, tokens(5))
        bench.engines["a"].say(1, tokens(1))
        while not lost.done():
            await asyncio.sleep(1.0)
            bench.engines["a"].say(1, tokens(1))
        assert asyncio.get_running_loop().time() < 70.0
        assert isinstance(bench.ended["lost"], CallLost)
        assert bench.tokens["lost"] == 5
        assert not other.done()
        assert bench.state("a") is EngineState.SERVING


@pytest.mark.parametrize("sampled", [0, 1])
async def test_a_call_whose_payload_arrives_is_not_forgotten(sampled: int) -> None:
    """It has no more tokens to receive, while the others go on and take the engine's time."""
    async with watched("a") as bench:
        await bench.begin("t1")
        bench.engines["a"].say(0, *[tokens(1)] * sampled, PayloadProgress())
        for number in range(1, 15):
            await bench.begin(f"u{number}")
            for earlier in range(1, number + 1):
                bench.engines["a"].say(earlier, tokens(1))
            await asyncio.sleep(20.0)
        assert not bench.engines["a"].left
        bench.engines["a"].say(0, END)
        await settle()
        assert bench.engines["a"].left == 1
        assert bench.ended["t1"] is None


async def test_an_update_waits_for_a_payload_as_long_as_pieces_arrive() -> None:
    async with watched("a") as bench:
        await bench.begin("t1")
        began_s = asyncio.get_running_loop().time()
        bench.pool.hold_engine("a")

        async def send_pieces() -> None:
            for _ in range(10):
                await asyncio.sleep(250.0)
                bench.engines["a"].say(0, PayloadProgress())

        bench.nursery.start_task("server", send_pieces())
        waits = Waits(asyncio.get_running_loop().time)
        ages_s: list[float] = []

        async def update() -> None:
            async with bench.pool.bounded_request("a", 300.0):
                while True:
                    await asyncio.sleep(100.0)
                    ages_s.append(waits.oldest_s()["engine update"])  # what the stall doctor judges

        with acting("run", waits=waits), pytest.raises(TimeoutError):
            await update()
        assert asyncio.get_running_loop().time() == began_s + 10 * 250.0 + 300.0
        assert max(ages_s) <= 300.0


async def test_a_request_that_the_doctor_has_ended_is_not_ended_again() -> None:
    waits = Waits(asyncio.get_running_loop().time)

    async def wait_for_engine() -> None:
        async with bench.pool.bounded_request("a", 300.0) as request:
            try:
                await asyncio.Future()
            finally:
                request.expire()  # while it ends

    async with watched("a") as bench:
        with acting("run", waits=waits):
            updating = asyncio.ensure_future(wait_for_engine())
            await asyncio.sleep(1.0)
            assert [wait.expire() for wait in list(waits.open)] == [True]
            with pytest.raises(TimeoutError):
                await updating


async def test_an_update_is_no_silence_but_a_missing_answer_ends_it() -> None:
    """Calls are paused during the update; the engine is probed all the same."""
    async with watched("a") as bench:
        await bench.begin("t1")
        bench.engines["a"].say(0, tokens(1))
        await settle()
        bench.pool.hold_engine("a")
        await asyncio.sleep(200.0)
        assert bench.state("a") is EngineState.UPDATING
        bench.pool.serve_engine("a", 0)
        await asyncio.sleep(55.0)
        assert bench.state("a") is EngineState.SERVING
        bench.pool.hold_engine("a")
        bench.engines["a"].answers.clear()
        with pytest.raises(TimeoutError):
            async with bench.pool.bounded_request("a", 300.0):
                await asyncio.Future()
        assert asyncio.get_running_loop().time() < 255.0 + 50.0
        assert bench.state("a") is EngineState.QUARANTINED


async def test_an_engine_that_somebody_restarted_serves_no_more_calls() -> None:
    async with watched("a") as bench:
        bench.pool.hold_engine("a")
        bench.pool.serve_engine("a", 7)
        bench.engines["a"].weight_version = 0  # it came back with the model's own weights
        await asyncio.sleep(25.0)
        assert bench.state("a") is EngineState.QUARANTINED
        assert "serves weight version 0, it was brought to 7" in str(bench.pool.error_of("a"))


async def test_no_engine_is_judged_when_our_own_loop_stalled() -> None:
    """Seen elsewhere: a loop that lags for minutes (prime-rl#1713). What came has not been read yet."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    async with watched("a") as bench:
        await bench.begin("t1")
        bench.engines["a"].say(0, tokens(1))
        await asyncio.sleep(9.0)
        loop.jump(400.0)
        await asyncio.sleep(1.0)
        assert bench.state("a") is EngineState.SERVING


@pytest.mark.real_time
async def test_a_session_is_told_when_a_server_goes_silent_in_mid_stream() -> None:
    """The same over HTTP."""
    server = FakeSGLang()
    server.streams = [[event([10], 1), HANG]]
    config = msgspec.structs.replace(CONFIG, stall_s=0.2)
    metrics = Metrics()
    pool = EnginePool(metrics, time.monotonic)
    async with server.client() as engine:
        pool.add_engine(cast(Engine, engine))
        pool.serve_engine("engine-0", 0)
        async with services(health=HealthWatch(pool, config, metrics, time.monotonic).watch_engines):
            asked = request([5, 6, 7], 8)
            async with pool.dispatcher.lease("t1", 20, prompt=3) as lease:
                stream = lease.generate(asked)
                assert (await anext(stream)).token_ids == [10]
                with pytest.raises(CallLost, match=r"engine\.stall_s is 0\.2"):
                    await anext(stream)
        assert server.requests("abort_request") == [{"rid": asked.request_id}]
        assert not pool.engines(EngineState.SERVING)
