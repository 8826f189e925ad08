"""Servers that join and leave a job that runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.urls_file import parse_urls
from async_rl.engine_protocol import Engine
from async_rl.engines.membership import REREAD_S, EngineMembership, diff_urls
from async_rl.engines.pool import EngineState
from async_rl.errors import ConfigError
from async_rl.runtime.supervision import Nursery, services
from tests.support.manual_engines import END, ManualEngine, ManualPool, settle, tokens

A, B, C = "http://a:1", "http://b:1", "http://c:1"


def test_a_file_has_a_url_a_line_and_comments() -> None:
    text = f"# ours\n{A}/\n\n  {B}  # the new one\n{A}\n"
    assert parse_urls(text, "servers.txt") == (A, B)


@pytest.mark.parametrize("line", ["a:1", "ftp://a:1", "http://", "http:/a"])
def test_a_line_that_is_no_url_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match=rf"servers.txt:2: '{line.rstrip('/')}"):
        parse_urls(f"{A}\n{line}\n", "servers.txt")


@given(known=st.sets(st.sampled_from("abcdef")), wanted=st.lists(st.sampled_from("abcdef"), unique=True))
def test_what_joins_and_leaves_makes_the_known_the_wanted(known: set[str], wanted: list[str]) -> None:
    joins, leaves = diff_urls(known, wanted)
    assert (known | set(joins)) - set(leaves) == set(wanted)
    assert not set(joins) & known
    assert joins == [url for url in wanted if url in joins]


class Job:
    """A pool that follows a file."""

    def __init__(self, path: Path, nursery: Nursery) -> None:
        self.path = path
        self.bench = ManualPool(nursery=nursery)
        self.departed: list[str] = []
        self.urls: dict[str, str] = {}
        self.aborted: list[str] = []
        self.members = EngineMembership(path, self.bench.pool, self.connect, self.depart, drain_s=30.0)

    def connect(self, engine_id: str, url: str) -> Engine:
        engine = ManualEngine(engine_id)
        self.bench.engines[engine_id] = engine
        self.urls[engine_id] = url

        async def interrupt(mode: str) -> None:
            self.aborted.append(engine_id)
            for stream in range(len(engine.streams)):
                engine.say(stream, END)
            await settle()

        engine.interrupt = interrupt  # type: ignore[attr-defined]
        return cast(Engine, engine)

    async def depart(self, engine_id: str) -> None:
        self.departed.append(engine_id)

    async def write(self, *lines: str) -> None:
        self.path.write_text("\n".join(lines))
        await asyncio.sleep(2.5 * REREAD_S)

    async def let_a_leave_in_a_call(self) -> asyncio.Task[str]:
        """Remove the line of server A, whose engine has sampled two tokens of a call."""
        self.bench.pool.serve_engine("engine-0", 3)
        running = self.bench.start("t1")
        await settle()
        self.bench.engines["engine-0"].say(0, tokens(2))
        await self.write(B)
        assert not self.bench.pool.serve_engine("engine-0", 4)  # by an update that was under way
        assert self.states()["engine-0"] is EngineState.DRAINING
        return running

    def states(self) -> dict[str, EngineState | None]:
        return {engine_id: self.bench.state(engine_id) for engine_id in self.urls}


@asynccontextmanager
async def job(tmp_path: Path, *lines: str) -> AsyncIterator[Job]:
    path = tmp_path / "servers.txt"
    path.write_text("\n".join(lines))
    async with Nursery() as nursery:
        made = Job(path, nursery)
        async with services(members=made.members.follow_file):
            await asyncio.sleep(1.5 * REREAD_S)
            yield made
        nursery.cancel_tasks()


async def test_a_server_that_is_refused_is_told_once_and_tried_again_when_it_is_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with job(tmp_path, A) as made:
        connect, refused = made.connect, [B]

        def picky(engine_id: str, url: str) -> Engine:
            if url in refused:
                raise ConfigError(f"{url} is on another node")
            return connect(engine_id, url)

        made.members._connect = picky
        await made.write(A, B)
        await asyncio.sleep(10 * REREAD_S)
        assert caplog.text.count(f"engine engine-1 at {B} stays out: {B} is on another node") == 1
        assert made.urls == {"engine-0": A}
        refused.clear()
        await made.write(A)
        await made.write(A, B)
        assert made.urls == {"engine-0": A, "engine-1": B}
        assert made.departed == []


async def test_a_server_leaves_when_its_calls_have_ended(tmp_path: Path) -> None:
    async with job(tmp_path, A, B) as made:
        made.bench.pool.serve_engine("engine-1", 3)
        running = await made.let_a_leave_in_a_call()
        made.bench.engines["engine-0"].say(0, END)
        await settle()
        assert running.done()
        assert made.departed == ["engine-0"]
        assert made.states() == {"engine-0": None, "engine-1": EngineState.SERVING}
        assert made.aborted == []


async def test_long_calls_are_moved_when_their_server_leaves(tmp_path: Path) -> None:
    async with job(tmp_path, A, B) as made:
        running = await made.let_a_leave_in_a_call()
        await asyncio.sleep(25.0)
        assert not running.done()
        await asyncio.sleep(10.0)
        assert running.done()
        assert made.bench.tokens == {"t1": 2}
        assert made.aborted == made.departed == ["engine-0"]


async def test_a_server_goes_on_leaving_when_the_trainer_was_restarted_meanwhile(tmp_path: Path) -> None:
    async with job(tmp_path, A, B) as made:
        running = await made.let_a_leave_in_a_call()
    assert made.states()["engine-0"] is EngineState.DRAINING
    assert made.departed == []
    async with services(members=made.members.follow_file):
        await made.write(B, A)
        await asyncio.sleep(40.0)
        assert running.done()
        assert made.departed == ["engine-0"]
        assert made.urls == {"engine-0": A, "engine-1": B, "engine-2": A}


async def test_no_engine_leaves_when_the_file_is_half_written_broken_or_gone(tmp_path: Path) -> None:
    async with job(tmp_path, A, B) as made:
        made.path.write_text("")  # an editor truncates, then writes
        await asyncio.sleep(REREAD_S)
        made.path.write_text(f"{A}\n{B}\n{C}")
        await asyncio.sleep(REREAD_S)
        assert list(made.urls.values()) == [A, B]
        await asyncio.sleep(REREAD_S)
        assert list(made.urls.values()) == [A, B, C]
        assert made.bench.pool.needs_repair("engine-2")  # a newcomer: it gets no calls before its weights
        await made.write("no url")
        made.path.unlink()
        await asyncio.sleep(5 * REREAD_S)
        assert made.departed == []
        await made.write(C)
        assert made.departed == ["engine-0", "engine-1"]


async def test_the_run_does_not_start_when_there_is_no_such_file(tmp_path: Path) -> None:
    members = EngineMembership(tmp_path / "none", None, None, None, drain_s=1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"engine\.urls_file"):
        await members.follow_file()
