"""Engines that refuse calls: who is blamed, how much they are still given, and when they are broken."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

from async_rl.engine_protocol import Finish
from async_rl.engines.back_pressure import BackPressure
from async_rl.engines.lease_dispatcher import Balancer
from async_rl.engines.pool import EngineState
from async_rl.engines.sglang.refusals import explain_refusal, parse_retry_after
from async_rl.errors import CallLost, EngineBusy, EngineError, LocalShortage, RequestRefused
from tests.support.engine_calls import call
from tests.support.fake_sglang import FakeSGLang, event, finish
from tests.support.manual_engines import END, ManualPool, manual_pool, settle, tokens

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SGLANG_ERROR = b'{"object":"error","message":"bad temperature","type":"BadRequest","param":null,"code":400}'


# -- who is to blame ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "retry_after", "body", "kind"),
    [
        (400, None, SGLANG_ERROR, RequestRefused),
        (413, None, SGLANG_ERROR, RequestRefused),
        (422, None, b'{"detail":[{"msg":"field required"}]}', RequestRefused),
        (400, None, b'{"error":"input_ids: expected a list"}', RequestRefused),
        (400, None, b"<html>400 Bad Request, nginx</html>", CallLost),
        (413, None, b"<html>413 Request Entity Too Large</html>", CallLost),
        (400, None, b"[]", CallLost),
        (401, None, b'{"error":"Unauthorized"}', CallLost),
        (403, None, b'{"error":"Forbidden"}', CallLost),
        (404, None, b'{"detail":"Not Found"}', CallLost),
        (429, None, b"", EngineBusy),
        (429, "3", b"", EngineBusy),
        (500, None, SGLANG_ERROR, CallLost),
        (503, None, b"", CallLost),
        (503, "3", b"", EngineBusy),
    ],
)
def test_the_request_is_blamed_only_if_the_reply_says_so(
    status: int, retry_after: str | None, body: bytes, kind: type[Exception]
) -> None:
    error = explain_refusal("engine-0", status, retry_after, body, NOW)
    assert type(error) is kind
    assert f"engine-0 answered {status}" in str(error)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("12", 12.0),
        ("soon", None),
        ("-1", None),
        ("Thu, 01 Jan 2026 00:01:00 GMT", 60.0),
        ("Wed, 31 Dec 2025 00:00:00 GMT", None),
        ("0", None),
    ],
)
def test_a_retry_after_is_read_when_it_is_seconds_or_a_date_to_come(
    value: str | None, seconds: float | None
) -> None:
    assert parse_retry_after(value, NOW) == seconds


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("code", "kind"), [(400, RequestRefused), (429, EngineBusy), (500, CallLost), (503, EngineBusy)]
)
async def test_a_refusal_within_a_stream_is_blamed_by_its_code(code: int, kind: type[Exception]) -> None:
    server = FakeSGLang()
    refusal = finish("abort", status_code=code, message="The request queue is full.")
    server.streams = [[event([], 0, finish_reason=refusal)]]
    async with server.client() as engine:
        with pytest.raises(kind, match="queue is full"):
            await call(engine, [1, 2, 3], 8)


@pytest.mark.real_time
async def test_a_control_request_waits_out_a_busy_server() -> None:
    server = FakeSGLang()
    statuses = iter([429, 429, 200])
    server.answers["pause_generation"] = lambda _: (next(statuses), {"success": True})
    async with server.client() as engine:
        await engine.interrupt("retract")
    assert len(server.requests("pause_generation")) == 3


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Lower the limit of open files to those that are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.open(os.devnull, os.O_RDONLY)  # the lowest free number
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.real_time
async def test_the_engine_is_not_blamed_when_this_process_has_no_descriptor() -> None:
    async with FakeSGLang().client() as engine:
        with no_descriptor_left():
            with pytest.raises(LocalShortage, match=r"Too many open files.*ulimit -n"):
                await call(engine, [1, 2, 3], 8)
            with pytest.raises(LocalShortage):
                await engine.health()
        await engine.health()


# -- what the pool does ---------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 404, 500])
async def test_an_engine_that_refuses_every_call_attracts_no_more_than_three(status: int) -> None:
    """The engine with the fewest calls is chosen, and one that refuses at once always has the fewest."""
    async with manual_pool("broken", "a") as bench:
        for number in range(8):
            await bench.begin(f"t{number}")
            broken = bench.engines["broken"]
            if len(broken.streams) > broken.left:
                error = explain_refusal("broken", status, None, b'{"error":"Unauthorized"}', NOW)
                broken.say(len(broken.streams) - 1, error)
                await settle()
        assert len(bench.engines["broken"].streams) == 3
        assert bench.state("broken") is EngineState.QUARANTINED
        assert bench.state("a") is EngineState.SERVING


async def refuse_requests(bench: ManualPool, count: int, *, accepts: bool = True) -> int:
    """Start calls, of which "broken" refuses its own as wrong; return how many it was given."""
    broken = bench.engines["broken"]
    for number in range(count):
        bench.start(f"t{number}")
        await asyncio.sleep(1.0)
        if len(broken.streams) > broken.left:
            broken.say(len(broken.streams) - 1, explain_refusal("broken", 400, None, SGLANG_ERROR, NOW))
        for name, engine in bench.engines.items():
            if accepts and name != "broken" and len(engine.streams) > engine.left:
                engine.say(len(engine.streams) - 1, tokens(1))
        await settle()
    return len(broken.streams)


async def test_an_engine_is_quarantined_when_it_alone_refuses_every_request_as_wrong() -> None:
    async with manual_pool("broken", "a") as bench:
        assert await refuse_requests(bench, 40) == 6
        assert bench.state("broken") is EngineState.QUARANTINED
        assert bench.state("a") is EngineState.SERVING


def kinds_of(bench: ManualPool) -> set[type[Exception]]:
    """How calls have failed that have ended."""
    return {type(error) for error in bench.ended.values() if error is not None}


@pytest.mark.parametrize("state", ["updating", "joining"])
async def test_calls_wait_when_the_only_engine_that_serves_refuses_all(state: str) -> None:
    async with manual_pool("broken", "a") as bench:
        bench.pool.hold_engine("a")
        if state == "joining":
            bench.pool.quarantine_engine("a", EngineError("gone"))
            bench.pool.rejoin_engine("a")
        broken, refusal = bench.engines["broken"], explain_refusal("broken", 400, None, SGLANG_ERROR, NOW)
        await bench.begin(*(f"t{number}" for number in range(50)))
        for number in range(50):
            broken.say(number, refusal)
        await settle()
        assert kinds_of(bench) == {EngineBusy}
        for number in range(50, 100):
            bench.start(f"t{number}")
        for _ in range(10):
            await asyncio.sleep(1.0)
            if len(broken.streams) > broken.left:
                broken.say(len(broken.streams) - 1, refusal)
        assert 50 < len(broken.streams) <= 60, "at most one call a second shows whether it still refuses"
        bench.pool.serve_engine("a", 1)
        await settle()
        assert len(bench.engines["a"].streams) >= 39
        assert kinds_of(bench) == {EngineBusy}


@pytest.mark.parametrize("others", [0, 1])
async def test_engines_are_believed_when_none_can_show_that_a_request_is_right(others: int) -> None:
    refused = RequestRefused("bad temperature")
    async with manual_pool("a", *["b"] * others) as bench:
        for name in bench.engines:
            for number in range(4):
                bench.pool.own.record_refused_request(name, f"{name}{number}", refused)
        assert bench.pool.own.record_refused_request("a", "a9", refused)
        assert bench.state("a") is EngineState.SERVING


async def test_an_engine_accepts_requests_when_it_answers_without_tokens() -> None:
    async with manual_pool("scores", "a") as bench:
        for number in range(9):
            bench.pool.own.record_refused_request("scores", f"t{number}", RequestRefused("too long"))
            await asyncio.sleep(1.1)
            await bench.begin(f"s{number}")
            bench.engines["scores"].say(-1, Finish(reason="length", version_spans=()))
            await settle()
        assert len(bench.engines["scores"].streams) == 9, "it is never doubted, nor limited"


@pytest.mark.parametrize("names", [("broken",), ("broken", "a")])
async def test_an_engine_is_believed_when_no_other_accepts_requests_meanwhile(names: tuple[str, ...]) -> None:
    async with manual_pool(*names) as bench:
        assert await refuse_requests(bench, 10, accepts=False) > 5
        assert bench.state("broken") is EngineState.SERVING


async def test_an_engine_is_believed_when_it_accepts_others_or_refuses_one_trajectory_only() -> None:
    refused = RequestRefused("bad temperature")
    async with manual_pool("broken", "a") as bench:
        for number in range(20):
            await asyncio.sleep(1.0)
            bench.pool.own.record_refused_request("broken", f"t{number}", refused)
            bench.pool.own.record_refused_request("broken", f"bad.{number}", refused)  # a branch of `bad`
            for key in ("b", "c"):  # one on each engine
                await bench.begin(f"{key}{number}")
            for engine in bench.engines.values():
                engine.say(-1, tokens(1), END)
            await settle()
        assert bench.state("broken") is EngineState.SERVING
        for number in range(20):
            await asyncio.sleep(1.0)
            bench.pool.own.record_refused_request("broken", f"bad.{number}", refused)
            await bench.begin(f"d{number}")
        assert [len(engine.streams) for engine in bench.engines.values()] == [30, 30], "it is not paused"


async def test_a_busy_engine_gets_no_calls_until_it_asked_for_them() -> None:
    async with manual_pool("a") as bench:
        await bench.begin("t1")
        bench.engines["a"].say(0, EngineBusy("429", 7.0))
        await settle()
        bench.start("t1")
        await asyncio.sleep(6.9)
        assert len(bench.engines["a"].streams) == 1
        await asyncio.sleep(0.2)
        assert len(bench.engines["a"].streams) == 2
        assert bench.state("a") is EngineState.SERVING
        assert bench.counted("engine_busy_total", engine="a") == 1


async def test_an_engine_that_refuses_a_late_call_while_it_does_not_serve_gets_all_calls_afterwards() -> None:
    async with manual_pool("a") as bench:
        bench.pool.hold_engine("a")
        bench.pool.own.record_back_pressure("a", EngineBusy("its memory is released", 5.0))
        bench.pool.serve_engine("a", 1)
        await bench.begin(*(f"t{index}" for index in range(4)))
        assert bench.pool.load_of("a").calls == 4


async def test_a_busy_engine_is_given_what_it_accepted_and_the_others_the_rest() -> None:
    async with manual_pool("a", "b") as bench:
        await bench.begin(*(f"t{number}" for number in range(8)))
        a, b = bench.engines["a"], bench.engines["b"]
        a.say(0, tokens(1))
        for stream in (1, 2, 3):  # it takes one call, and refuses the rest of the burst
            a.say(stream, EngineBusy("429", 1.0))
        await settle()
        await asyncio.sleep(1.5)  # the pause is over
        await bench.begin(*(f"u{number}" for number in range(20)))
        assert len(a.streams) - a.left == 1
        assert len(b.streams) == 4 + 20, "a limited engine must not lower the bound of the others"


async def test_a_busy_engine_is_quarantined_only_when_nothing_succeeds() -> None:
    async with manual_pool("a", "b") as bench:
        bench.pool.hold_engine("b")
        await bench.begin("long")
        bench.engines["a"].say(0, tokens(1))  # it decodes one call, and refuses all others
        await settle()
        bench.pool.hold_engine("a")
        bench.pool.serve_engine("b", 0)

        async def call_for(engine_id: str, seconds: float) -> None:
            loop, engine = asyncio.get_running_loop(), bench.engines[engine_id]
            end = loop.time() + seconds
            while loop.time() < end and bench.state(engine_id) is EngineState.SERVING:
                if len(engine.streams) - engine.left > (engine_id == "a"):
                    engine.say(len(engine.streams) - 1, EngineBusy("429", 5.0))
                    await settle()
                bench.start(f"t{loop.time()}")
                await asyncio.sleep(5.1)

        await call_for("b", 300.0)
        assert bench.state("b") is EngineState.QUARANTINED
        assert 60.0 <= asyncio.get_running_loop().time() < 75.0
        bench.pool.serve_engine("a", 0)
        await call_for("a", 300.0)
        assert bench.state("a") is EngineState.SERVING


async def test_no_engine_is_blamed_and_calls_wait_when_this_process_cannot_connect() -> None:
    async with manual_pool("a", "b") as bench:
        await bench.begin(*(f"t{number}" for number in range(8)))
        for engine in bench.engines.values():
            for stream in range(4):
                engine.say(stream, LocalShortage("no descriptors"))
        await settle()
        await bench.begin("later")
        assert bench.order[8:] == []
        assert [bench.state(name) for name in "ab"] == [EngineState.SERVING] * 2
        assert bench.counted("local_shortages_total") == 8
        await asyncio.sleep(1.1)
        assert bench.order[8:] == ["later"]


# -- the limit ------------------------------------------------------------------------------------------


def test_pauses_grow_and_end_when_calls_are_accepted_again() -> None:
    pressure = BackPressure()
    busy = EngineBusy("429")
    assert [pressure.record_refusal(0.0, busy, accepted=1) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    pressure.record_accepted_call(1.0)
    assert pressure.record_refusal(2.0, busy, accepted=1) == 1.0
    assert pressure.record_refusal(2.0, EngineBusy("429", 3600.0), accepted=1) == 300.0


def test_the_limit_rises_by_one_for_each_round_and_is_forgotten_after_ten_minutes() -> None:
    pressure = BackPressure()
    pressure.record_refusal(0.0, EngineBusy("429"), accepted=10)
    for _ in range(11):
        pressure.record_accepted_call(1.0)
    assert 10.9 < pressure.max_calls < 11.1
    pressure.record_accepted_call(601.0)
    assert pressure.max_calls == float("inf")


def test_limited_engines_are_filled_to_their_limit_when_no_other_serves() -> None:
    balancer = Balancer()
    for name in ("a", "b"):
        balancer.add_engine(name)
        balancer.open_engine(name)
        balancer.limit_calls(name, 2.0)
    chosen = []
    while (name := balancer.choose_engine(sticky="a")) is not None:
        balancer.begin_call(name, tokens=100, prefill_tokens=0)
        chosen.append(name)
    assert sorted(chosen) == ["a", "a", "b", "b"]
    balancer.end_call("b", 100)
    assert balancer.choose_engine(sticky="a") == "b"
