"""Reading many event streams in turn."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import aiohttp
import msgspec
import pytest

from async_rl.engine_protocol import Chunk, Finish
from async_rl.engines.sglang.read_schedule import EventStream, ReadSchedule
from tests.support.engine_calls import call, request
from tests.support.fake_sglang import FakeSGLang, event, finish


class Body:
    """A response whose body comes in parts, on a transport that can be paused."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.paused = False
        self.content = self.connection = self.transport = self

    async def readany(self) -> bytes:
        data = b"".join(self.parts)
        self.parts.clear()
        return data

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


def open_stream(schedule: ReadSchedule) -> tuple[EventStream, Any]:
    body: Any = Body()
    return EventStream(cast(aiohttp.ClientResponse, body), schedule), body


def make_schedule(num_open: int) -> ReadSchedule:
    schedule = ReadSchedule(asyncio.get_running_loop())
    schedule.num_open = num_open
    return schedule


async def read(stream: EventStream, body: Any, *parts: bytes) -> bytes:
    body.parts += parts
    return await stream.read()


async def test_a_stream_is_paused_until_its_turn_when_there_are_many() -> None:
    schedule = make_schedule(100)
    stream, body = open_stream(schedule)
    assert await read(stream, body, b"one") == b"one"
    assert body.paused
    schedule.begin_turn()
    assert not body.paused
    assert await read(stream, body, b"two", b"three") == b"twothree"
    assert body.paused
    stream.close()
    assert not body.paused
    assert schedule.num_open == 100


async def test_one_of_few_streams_and_one_that_is_behind_are_read_on_at_once() -> None:
    stream, body = open_stream(make_schedule(10))
    await read(stream, body, b"one")
    assert not body.paused
    stream, body = open_stream(make_schedule(100))
    await read(stream, body, b"x" * 40_000)
    assert not body.paused
    await read(stream, body, b"x")
    assert body.paused


async def test_the_rest_is_read_as_it_arrives_when_its_call_is_interrupted() -> None:
    stream, body = open_stream(make_schedule(100))
    await read(stream, body, b"one")
    stream.read_at_once()
    assert not body.paused
    await read(stream, body, b"two")
    assert not body.paused


async def test_a_connection_is_not_paused_when_the_response_has_returned_it() -> None:
    stream, body = open_stream(make_schedule(100))
    body.connection = None  # the end has arrived with the last piece, and another call may use it
    await read(stream, body, b"last")
    assert not body.paused


@pytest.mark.parametrize("num_streams", [1, 64, 512, 1024, 8192])
async def test_the_work_of_a_turn_is_bounded_and_each_stream_has_its_turn(num_streams: int) -> None:
    schedule = make_schedule(0)
    streams = [open_stream(schedule) for _ in range(num_streams)]
    schedule.num_open = num = max(num_streams, 64)  # fewer are not paused
    for stream, body in streams:
        await read(stream, body, b"one")
    per_turn, turns = schedule.streams_per_turn(), 0
    assert per_turn <= max(13, num // 100 + 1)
    while waiting := sum(body.paused for _, body in streams):
        schedule.begin_turn()
        turns += 1
        assert waiting - sum(body.paused for _, body in streams) == min(per_turn, waiting)
    assert turns <= 100  # of 5 ms: each is read after 0.5 s at the latest


def never_begin_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let streams be read only at once, in a process with many of them."""
    monkeypatch.setattr(ReadSchedule, "begin_turn", lambda self: None)
    ReadSchedule.of_running_loop().num_open = 100


@pytest.mark.real_time  # a real server
async def test_an_update_does_not_wait_for_the_turns_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    never_begin_turn(monkeypatch)
    server, aborted = FakeSGLang(), asyncio.Event()
    server.streams = [[event([1], 1), aborted, event([2], 2, finish_reason=finish("abort"))]]
    server.answers["abort_request"] = lambda body: (aborted.set(), (200, {"success": True}))[1]
    async with server.client() as engine:
        seen: list[int] = []
        interrupts: list[asyncio.Task[None]] = []
        async with asyncio.timeout(60):
            async for part in engine.generate(request([5, 6, 7], 8)):
                if isinstance(part, Chunk):
                    seen += part.token_ids.tolist()
                    if not interrupts:
                        asyncio.get_running_loop().call_soon(
                            lambda: interrupts.append(asyncio.create_task(engine.interrupt("abort")))
                        )
                else:
                    assert isinstance(part, Finish)
                    assert part.reason == "abort"
            await interrupts[0]
    assert seen == [1, 2]  # no token is lost


@pytest.mark.real_time  # a real server
async def test_a_call_that_has_finished_does_not_wait_for_another_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never_begin_turn(monkeypatch)
    server, seen = FakeSGLang(), asyncio.Event()
    server.streams = [[event([1], 1, finish_reason=finish("length")), seen]]
    async with server.client() as engine, asyncio.timeout(60):
        async for part in engine.generate(request([5, 6, 7], 1)):
            if isinstance(part, Chunk):
                asyncio.get_running_loop().call_soon(seen.set)
    assert ReadSchedule.of_running_loop().num_open == 100


@pytest.mark.real_time  # a real server
async def test_all_tokens_arrive_when_streams_are_read_in_turn() -> None:
    server = FakeSGLang()
    together = asyncio.Event()
    whole = [event([10], 1), together, event([11, 12], 3), event([13], 4, finish_reason=finish("length"))]
    server.streams = [list(whole) for _ in range(100)]
    schedule = ReadSchedule.of_running_loop()
    async with server.client() as engine, asyncio.TaskGroup() as group:
        calls = [group.create_task(call(engine, [5, 6, 7], 4)) for _ in range(100)]
        while schedule.num_open < 100:  # noqa: ASYNC110
            await asyncio.sleep(0)
        together.set()
    assert all(done.result().token_ids == [10, 11, 12, 13] for done in calls)
    assert schedule.num_open == 0


@pytest.mark.real_time  # a real server
@pytest.mark.parametrize(("num_open", "asked", "sent"), [(0, None, 1), (512, None, 8), (512, 1, 1)])
async def test_events_have_more_tokens_when_many_streams_are_open(
    num_open: int, asked: int | None, sent: int
) -> None:
    server = FakeSGLang()
    server.streams = [[event([1], 1, finish_reason=finish("length"))]]
    ReadSchedule.of_running_loop().num_open = num_open
    async with server.client() as engine:
        made = msgspec.structs.replace(request([5, 6, 7], 1), stream_interval=asked)
        async for _ in engine.generate(made):
            pass
    (body,) = server.requests("generate")
    assert body["sampling_params"]["stream_interval"] == sent
