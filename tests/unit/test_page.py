"""The live page over HTTP: access, content, and isolation from slow readers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import aiohttp
import msgspec
import pytest

from async_rl.observability.page import STATIC
from async_rl.observability.page import feed as feed_module
from async_rl.observability.page.feed import Feed, TooManyClients
from async_rl.observability.page.view import slowest
from async_rl.runtime.waits import Waits, acting, waiting
from async_rl.types import Task
from tests.support.finished_run import HOSTILE, records
from tests.support.watched_run import config, now, watched

pytestmark = pytest.mark.real_time

STEPS = records(12)


async def fetch(url: str, **headers: str) -> tuple[int, aiohttp.typedefs.LooseHeaders, str]:
    async with aiohttp.ClientSession() as client, client.get(url, headers=headers) as answer:
        return answer.status, answer.headers, await answer.text()


@asynccontextmanager
async def stream(url: str, **headers: str) -> AsyncIterator[AsyncIterator[tuple[str, Any, str]]]:
    """Yield server-sent events as (name, data, id)."""

    async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any, str]]:
        fields: dict[str, str] = {}
        async for line in answer.content:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name:
                fields[name] = value
            else:
                yield fields["event"], json.loads(fields["data"]), fields.get("id", "")
                fields = {}

    async with aiohttp.ClientSession(read_bufsize=1 << 22) as client, client.get(url, headers=headers) as got:
        assert got.status == 200
        assert got.content_type == "text/event-stream"
        yield events(got)


async def test_a_snapshot_is_the_whole_run() -> None:
    async with watched(now, lambda: STEPS) as (url, _):
        status, _, body = await fetch(f"{url}/api/snapshot")
    page = json.loads(body)
    assert status == 200
    assert page["run"] == "calculator-moe"
    assert page["now"]["engines"][2]["state"] == "quarantined"
    assert [row["step"] for row in page["steps"]["recent"]] == list(range(12, 0, -1))
    charts = {chart["name"]: chart for section in page["steps"]["sections"] for chart in section["charts"]}
    assert charts["kl-parts"]["xs"] == list(range(1, 13))
    assert page["now"]["stages"][0] == {"label": "trained", "count": 6514, "share": "97%", "tone": 2}


FILES = [f"/{file.name}" for file in STATIC.iterdir() if file.suffix in (".css", ".js", ".svg")]


@pytest.mark.parametrize("path", ["/", *FILES, "/api/snapshot"])
async def test_every_answer_forbids_other_hosts_and_other_scripts(path: str) -> None:
    async with watched(now, lambda: STEPS) as (url, _):
        status, headers, _ = await fetch(url + path)
        async with aiohttp.ClientSession() as client, client.post(url + path) as answer:
            assert answer.status == 405
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("named", "status"), [("localhost", 200), ("127.0.0.1:80", 200), ("[::1]", 200), ("evil.example", 403)]
)
async def test_a_name_that_somebody_points_at_loopback_is_refused(named: str, status: int) -> None:
    async with watched(now, lambda: STEPS) as (url, _), aiohttp.ClientSession() as client:
        for path in ("/", "/api/snapshot", "/api/events"):
            async with client.get(url + path, headers={"Host": named}) as answer:
                assert answer.status == status


async def test_any_name_is_answered_when_the_server_is_not_bound_to_loopback() -> None:
    async with watched(now, lambda: STEPS, host="0.0.0.0") as (url, _):
        for headers in ({}, {"Host": "node-7"}):
            assert (await fetch(url + "/", **headers))[0] == 200


async def test_the_run_is_not_read_while_no_client_is_connected() -> None:
    looks: list[int] = []

    def look() -> Any:
        looks.append(1)
        return now()

    async with watched(look, lambda: STEPS, refresh_s=3600.0) as (url, _):
        await fetch(f"{url}/page.css")
        assert looks == []
        async with stream(f"{url}/api/events") as events:
            await anext(events)
        assert len(looks) == 1


async def test_who_watches_is_told_of_each_step_once() -> None:
    steps = list(STEPS[:3])
    async with watched(now, lambda: steps) as (url, _), stream(f"{url}/api/events") as events:
        told: list[int] = []
        async for name, data, _ in events:
            if name == "steps":
                told.append(data["recent"][0]["step"])
                if len(told) == 3:
                    break
                steps.append(STEPS[len(steps)])
        names = [(await anext(events))[0] for _ in range(3)]
    assert told == [3, 4, 5]
    assert names == ["now"] * 3


async def test_who_comes_back_is_told_only_what_is_new() -> None:
    steps = list(STEPS[:3])
    async with watched(now, lambda: steps) as (url, _):
        known = json.loads((await fetch(f"{url}/api/snapshot"))[2])["steps"]["id"]
        headers = {"Last-Event-ID": known}
        async with stream(f"{url}/api/events?have=other", **headers) as events:
            name, _, _ = await anext(events)
            assert name == "now"
        steps.append(STEPS[3])
        async with stream(f"{url}/api/events", **headers) as events:
            seen = [await anext(events), await anext(events)]
    name, data, number = next(event for event in seen if event[0] == "steps")
    assert data["recent"][0]["step"] == 4
    assert number == data["id"] != known


async def test_a_step_done_again_after_a_restart_of_the_trainer_is_told() -> None:
    steps = list(STEPS[:3])
    feed = Feed(config(), now, lambda: steps)
    before = json.loads(await feed.snapshot())["steps"]["id"]
    steps[2] = msgspec.structs.replace(STEPS[2], time_s=STEPS[2].time_s + 60)
    assert json.loads(await feed.snapshot())["steps"]["id"] != before


async def test_all_who_watch_are_told_that_the_run_ends() -> None:
    async with watched(now, lambda: STEPS) as (url, feed):
        async with stream(f"{url}/api/events") as events:
            await anext(events)
            loop = asyncio.get_running_loop()
            watcher = next(task for task in asyncio.all_tasks(loop) if task.get_name() == "page")
            watcher.cancel()
            names = [name async for name, _, _ in events]
    assert names[-1] == "end"
    assert feed.num_clients == 0


async def test_a_connection_that_is_not_read_is_closed() -> None:
    wordy = now(report="word " * 200_000)
    async with watched(lambda: wordy, lambda: STEPS) as (url, feed):
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with stream(f"{url}/api/events") as events:
            watching: list[int] = []
            async for _ in events:
                watching.append(feed.num_clients)
                if 2 in watching and watching[-1] == 1:
                    break
        with closing(writer):
            body = await reader.read(-1)
        assert b"text/event-stream" in body
        assert not body.endswith(b"0\r\n\r\n")  # the stream was cut, it did not end


async def test_a_client_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_CLIENTS", 1)
    feed = Feed(config(), now, lambda: STEPS)
    for _ in range(2):
        with feed.client(lambda: None, ""):
            assert feed.num_clients == 1
            with pytest.raises(TooManyClients), feed.client(lambda: None, ""):
                pass
        assert feed.num_clients == 0


async def test_the_run_goes_on_when_the_page_cannot_be_drawn(caplog: pytest.LogCaptureFixture) -> None:
    look = Mock(side_effect=chain([ZeroDivisionError("a bug of the page")], iter(now, None)))
    async with watched(look, lambda: STEPS) as (url, _), stream(f"{url}/api/events") as events:
        name, _, _ = await anext(events)
    assert name in ("now", "steps")
    assert "the live page cannot be drawn" in caplog.text


class RunningSession(SimpleNamespace):
    """A session as far as the page reads it."""

    def __init__(self, number: int, started_s: float) -> None:
        task = Task(task_id=f"task-{number} {HOSTILE}", messages=(), answer="")
        counts = {"num_turns": number, "num_tokens": 100 * number}
        super().__init__(task=task, trajectory_id=f"trajectory-{number}", started_s=started_s, **counts)


def test_the_slowest_come_first_with_what_they_wait_for() -> None:
    waits = Waits(lambda: 50.0)
    running = [RunningSession(number, started_s=40.0 - number) for number in range(20)]
    with acting("run", waits=waits), acting("trajectory", "trajectory-19"), waiting("agent loop", "mine"):
        with waiting("chunk", "engine-1"):
            views = slowest(running, waits)
    assert [view.trajectory_id for view in views] == [f"trajectory-{n}" for n in range(19, 7, -1)]
    first, second, *_ = views
    assert (first.age_s, first.turn, first.tokens, first.engine) == (29.0, 20, 1900, "engine-1")
    assert first.waits_for == "a chunk of engine-1"
    assert (second.engine, second.waits_for) == ("", "at work")
    # trajectory-1 is the beginning of trajectory-19, which therefore needs all of its id.
    assert [first.shown_id, second.shown_id] == ["trajectory-19", "trajectory-18"]


def test_a_long_run_is_a_page_of_bounded_size() -> None:
    changed = msgspec.structs.replace
    long = [changed(STEPS[i % 12], step=i + 1, time_s=float(i)) for i in range(5_000)]
    assert len(msgspec.json.encode(feed_module.draw_steps("x", long, 4))) < 600_000
