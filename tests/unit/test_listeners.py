"""Attacks on listening sockets, each over real connections."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web

from async_rl.observability.endpoints import serve
from async_rl.observability.metrics import Metrics
from async_rl.openai_api import endpoint as endpoint_module
from async_rl.openai_api.endpoint import Endpoint, EndpointAccess
from async_rl.rollout.workers.link import connect_link, listen
from async_rl.runtime import http_listener
from async_rl.runtime.listeners import ByteBudget, ConnectionLimit
from tests.support.api import asked
from tests.support.talk import lines

pytestmark = pytest.mark.real_time

STRANGERS = """
import resource, socket, sys
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
held = []
for _ in range(int(sys.argv[2])):
    try:
        held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5))
    except OSError:
        break
print(len(held), flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def strangers(port: int, number: int, *, descriptors: int = 130) -> AsyncIterator[None]:
    """Connections of another process that send nothing, once so many descriptors are free again."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STRANGERS, str(port), str(number),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert int(await process.stdout.readline()) > 100
        # A server accepts a backlog of 100 connections before it closes those beyond its limit.
        async with asyncio.timeout(60):
            while free_descriptors() < descriptors:  # noqa: ASYNC110 (nothing says when)
                await asyncio.sleep(0.01)
        yield
    finally:
        process.stdin.close()
        await process.wait()


def few_descriptors(more: int) -> AbstractContextManager[None]:
    """Let this process open few more files, of which so many are left when half of all are connections."""
    return most_descriptors(2 * (len(os.listdir("/proc/self/fd")) + more))


@contextmanager
def most_descriptors(number: int) -> Iterator[None]:
    """Let this process have so many open files at most."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def free_descriptors() -> int:
    """How many more files this process can open."""
    try:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
    except OSError:  # not even the folder
        return 0


def port_of(url: str) -> int:
    port = httpx.URL(url).port
    assert port is not None
    return port


async def raw_answer(port: int, request: str | bytes) -> bytes:
    """What a listener sends before it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request if isinstance(request, bytes) else request.encode())
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@asynccontextmanager
async def metrics_served(*more: web.RouteDef) -> AsyncIterator[str]:
    async with serve(Metrics(), "127.0.0.1", 0, lambda: {"status": "ok"}, more) as url:
        yield url


def head(access: EndpointAccess, request: str, *more: str) -> str:
    """The head of a request to the API with its key."""
    key = f"Authorization: Bearer {access.api_key}"
    return "\r\n".join([f"{request} HTTP/1.1", "Host: x", key, *more, "", ""])


COMPLETION = "POST /v1/chat/completions"


@pytest.mark.real
async def test_all_listeners_answer_while_strangers_hold_all_connections(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with few_descriptors(200):
        async with asked(lines("Hello.")) as a, strangers(port_of(a.access.base_url), 600):
            assert (await a.say("Hi")).choices[0].message.content == "Hello."
        async with metrics_served() as url, strangers(port_of(url), 600):
            async with httpx.AsyncClient(trust_env=False) as client:
                assert (await client.get(f"{url}/health")).status_code == 200
        async with listen("127.0.0.1") as listener, strangers(listener.port, 600):
            worker = await connect_link("127.0.0.1", listener.port, listener.key)
            (await listener.accept_link()).close()
            worker.close()
    assert len(caplog.records) < 20


@pytest.mark.real
# asyncio accepts connections in one turn of the loop and serves them in the next. Those of a server that is
# closed in between are dropped unclosed (Python 3.11, `Server._attach` of asyncio/base_events.py).
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_server_that_ends_without_descriptors_logs_a_few_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with metrics_served() as url:
        # The server has its limit of connections by now, and that is more than there are descriptors for.
        with most_descriptors(len(os.listdir("/proc/self/fd")) + 60):
            async with strangers(port_of(url), 600, descriptors=0), asyncio.timeout(60):
                while "out of system resource" not in caplog.text:  # noqa: ASYNC110 (only the log says it)
                    await asyncio.sleep(0.01)
    await asyncio.sleep(1.5)  # asyncio serves again after a second, also what is closed by then
    assert "_start_serving" in caplog.text
    assert len(caplog.records) < 20


@pytest.mark.parametrize("what", ["api", "metrics"])
async def test_a_connection_is_closed_when_its_headers_drip(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_listener, "IDLE_S", 0.05)
    async with asked(lines("Hello.")) as a, metrics_served() as url:
        port = port_of(url if what == "metrics" else a.access.base_url)
        assert await raw_answer(port, "GET / HTTP/1.1\r\nHost: local") == b""


async def test_a_request_is_refused_when_its_body_drips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "TRANSFER_S", 0.05)
    monkeypatch.setattr(http_listener, "LINGER_S", 0.05)
    async with asked(lines("Hello.")) as a:
        request = head(a.access, COMPLETION, "Content-Length: 1000") + "{"
        answer = await raw_answer(port_of(a.access.base_url), request)
        assert b" 408 " in answer.partition(b"\r\n")[0]
        assert b'"type":"invalid_request_error"' in answer


async def test_a_connection_is_closed_when_its_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_listener, "TRANSFER_S", 0.05)
    sent = asyncio.Event()

    class Large(web.Response):
        async def write_eof(self, data: bytes = b"") -> None:
            try:
                await super().write_eof(data)
            finally:
                sent.set()

    async def large(_: web.Request) -> web.Response:
        return Large(body=bytes(32 << 20))

    async with metrics_served(web.get("/large", large)) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(url), limit=1)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await writer.drain()
        await sent.wait()
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(32 << 20)
        writer.close()


async def test_a_key_has_a_limit_of_connections() -> None:
    endpoint = Endpoint()
    async with asked(lines("Hello.", "Hello."), endpoint=endpoint) as a:
        held = []
        for number in range(200):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(a.access.base_url))
            writer.write(head(a.access, "GET /v1/models").encode())
            status = (await reader.readuntil(b"\r\n")).split()[1]
            assert status == (b"200" if number < 128 else b"429")
            held.append(writer)
        async with asked(lines("Another."), endpoint=endpoint) as other:
            assert (await other.say("Hi")).choices[0].message.content == "Another."
        for writer in held:
            writer.close()


async def test_a_large_body_is_parsed_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    read = endpoint_module._read_body

    def read_body(*arguments: Any) -> object:
        threads.append(threading.current_thread() is threading.main_thread())
        return read(*arguments)

    monkeypatch.setattr(endpoint_module, "_read_body", read_body)
    async with asked(lines("Hello.", "Hello.")) as a:
        await a.say("Hi")
        with pytest.raises(openai.BadRequestError, match="objects and lists"):
            await a.say("[" * (1 << 20))
    assert threads == [True, False]


async def test_a_body_is_refused_before_it_is_read_when_its_length_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_listener, "LINGER_S", 0.05)
    async with asked(lines("Hello.")) as a:
        request = head(a.access, COMPLETION, "Connection: close", f"Content-Length: {9 << 20}")
        assert b" 400 " in (await raw_answer(port_of(a.access.base_url), request))[:20]


@pytest.mark.parametrize("named", ["[::1", "localhost:99999999", "@", "%zz"])
async def test_an_invalid_host_is_no_error_of_the_server(named: str) -> None:
    async with metrics_served() as url:
        request = f"GET /health HTTP/1.1\r\nConnection: close\r\nHost: {named}\r\n\r\n"
        answer = await raw_answer(port_of(url), request)
        assert answer.split()[1][:1] in (b"2", b"4"), answer[:200]


@pytest.mark.parametrize("what", ["api", "metrics", "link"])
async def test_invalid_requests_do_not_fill_the_log(what: str, caplog: pytest.LogCaptureFixture) -> None:
    async with asked(lines("Hello.")) as a, metrics_served() as url, listen("127.0.0.1") as listener:
        ports = {"api": port_of(a.access.base_url), "metrics": port_of(url), "link": listener.port}
        for _ in range(50):
            await raw_answer(ports[what], b"GET / HTTP/9\r\n\x00: \x00\r\n\r\n" + bytes(64))
    assert len(caplog.records) <= 10


@pytest.mark.parametrize("named", ["evil.example", "127.0.0.1.evil.example", "a:b:c", "\xff"])
@pytest.mark.parametrize("path", ["/metrics", "/health", "/more"])
async def test_a_run_is_shown_only_under_names_of_the_loopback_device(named: str, path: str) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(text="shown")

    async with metrics_served(web.get("/more", handler)) as url:
        for host, expected in ((named, b"4"), ("localhost:1", b"2"), ("[::1]:80", b"2")):
            request = f"GET {path} HTTP/1.1\r\nConnection: close\r\nHost: {host}\r\n\r\n"
            answer = await raw_answer(port_of(url), request.encode("latin-1"))
            assert answer.split()[1][:1] == expected, answer[:200]


class FakeTransport(asyncio.Transport):
    """A connection that only knows whether it was closed."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("seed", range(8))
def test_no_sequence_of_events_exceeds_the_limit_or_closes_a_connection_with_a_key(seed: int) -> None:
    random_ = random.Random(seed)
    limit = ConnectionLimit("a test", max_connections=10, max_per_key=3)
    open_: dict[FakeTransport, str | None] = {}
    for _ in range(2000):
        event, key = random_.randrange(5), random_.choice("abcde")
        if event <= 1:
            transport = FakeTransport()
            if limit.open(transport):
                open_[transport] = None
            else:
                assert all(open_.values())
        elif event == 2 and open_:
            transport = random_.choice(list(open_))
            if limit.admit(transport, key):
                open_[transport] = key
            else:
                assert list(open_.values()).count(key) == 3
        elif event == 3 and open_:
            transport = random_.choice(list(open_))
            limit.close(transport)
            del open_[transport]
        elif random_.random() < 0.2:
            limit.forget_key(key)
            open_ = {t: None if of == key else of for t, of in open_.items()}
        for transport in [t for t in open_ if t.aborted]:
            assert open_.pop(transport) is None
        assert len(limit) == len(open_) <= 10
        assert max(Counter(key for key in open_.values() if key).values(), default=0) <= 3


async def test_bodies_wait_when_a_key_or_all_keys_hold_too_many_bytes() -> None:
    budget = ByteBudget(10, 6)
    order = []

    async def read(name: str, key: str, num_bytes: int, done: asyncio.Event) -> None:
        async with budget.hold(key, num_bytes):
            order.append(name)
            assert budget.held_bytes <= 10
            await done.wait()

    async with asyncio.TaskGroup() as tasks:
        done = [asyncio.Event() for _ in range(5)]
        cases = [("a1", "a", 4), ("a2", "a", 4), ("b", "b", 5), ("c", "c", 5), ("d", "d", 1)]
        started = [tasks.create_task(read(*case, done[i])) for i, case in enumerate(cases)]
        await asyncio.sleep(0)
        assert order == ["a1", "b", "d"]
        started[1].cancel()
        done[0].set()
        await asyncio.sleep(0)
        done[2].set()
        await started[2]
        await asyncio.sleep(0)
        assert order[3:] == ["c"]
        for each in done:
            each.set()
    assert budget.held_bytes == 0
