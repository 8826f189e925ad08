"""The little HTTP client of the generate path, against servers that write raw bytes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from async_rl.engines.sglang.http_streams import ConnectionLost, StreamClient

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[bool | None]]
"""Answers a body; False closes the connection."""

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes, trailer: bytes = b"") -> bytes:
    return HEAD + b"".join(b"%x;x=y\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n" + trailer + b"\r\n"


class Server:
    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.connections = 0
        self.heads: list[bytes] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                body = await reader.readexactly(int(re.search(rb"Content-Length: (\d+)", head)[1]))
                if await self.handler(body, writer) is False:
                    return
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    @asynccontextmanager
    async def client(self, **headers: str) -> AsyncIterator[StreamClient]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = StreamClient(f"http://127.0.0.1:{port}/generate", headers)
        try:
            yield client
        finally:
            client.close()
            server.close()


def replies(*answers: bytes) -> Server:
    """A server that answers request after request."""
    left = list(answers)

    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(left.pop(0))

    return Server(handler)


async def ask(client: StreamClient, body: bytes = b"{}") -> bytes:
    read = bytearray()
    async with await client.post(body, timeout_s=5) as answer:
        assert answer.status == 200
        while data := await answer.read(timeout_s=5):
            read += data
    return bytes(read)


async def test_one_connection_is_used_again_when_answers_are_read_to_their_end() -> None:
    server = replies(
        chunked(b"one", b"two"),
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nthree",
        chunked(b"4", trailer=b"A: b\r\n"),
    )
    async with server.client(Authorization="Bearer key") as client:
        assert [await ask(client) for _ in range(3)] == [b"onetwo", b"three", b"4"]
    assert server.connections == 1
    assert server.heads[0].startswith(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer key\r\n" in server.heads[0]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
async def test_an_answer_is_whole_when_it_comes_in_pieces(size: int) -> None:
    whole = chunked(b"abc" * 10, b"\r\n\r\n", b"d" * 300)

    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        for begin in range(0, len(whole), size):
            writer.write(whole[begin : begin + size])
            await writer.drain()

    server = Server(handler)
    async with server.client() as client:
        assert await ask(client) == b"abc" * 10 + b"\r\n\r\n" + b"d" * 300
        assert await ask(client) == b"abc" * 10 + b"\r\n\r\n" + b"d" * 300
    assert server.connections == 1


async def test_all_of_a_large_answer_comes_when_its_reader_is_slow() -> None:
    part = bytes(range(256)) * 1024
    server = replies(chunked(*[part] * 40))
    async with server.client() as client:
        async with await client.post(b"{}", timeout_s=5) as answer:
            first = await answer.read(timeout_s=5)
            held = answer._connection
            while not held._paused:  # the server is held back once enough is waiting
                await asyncio.get_running_loop().run_in_executor(None, lambda: None)
            assert held._size < 40 * len(part)
            read = bytearray(first)
            while data := await answer.read(timeout_s=5):
                read += data
    assert read == part * 40


async def test_a_new_connection_is_made_when_the_server_closed_the_idle_one() -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(chunked(b"ok"))
        return False

    server = Server(handler)
    async with server.client() as client:
        assert [await ask(client) for _ in range(3)] == [b"ok"] * 3
    assert server.connections == 3


async def test_the_connection_is_dropped_when_an_answer_is_left() -> None:
    gone = asyncio.Event()

    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        if server.connections == 1:
            writer.write(HEAD + b"3\r\nabc\r\n")
            await writer.wait_closed()
            gone.set()
        else:
            writer.write(chunked(b"next"))

    server = Server(handler)
    async with server.client() as client:
        async with await client.post(b"{}", timeout_s=5) as answer:
            assert await answer.read(timeout_s=5) == b"abc"
        assert await ask(client) == b"next"
    assert server.connections == 2


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (HEAD + b"3\r\nab", "before the answer had ended"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "does not speak HTTP"),
        (HEAD + b"zz\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "without a length"),
        (b"x" * 70_000, "more than 65536 bytes"),
        (chunked(b"a")[:-5] + b"0\r\n\r\nHTTP/1.1", None),
    ],
)
async def test_a_lost_connection_says_why_when_the_answer_is_no_answer(raw: bytes, words: str | None) -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(raw)
        return False

    async with Server(handler).client() as client:
        if words is None:  # what follows an answer does not spoil it
            assert await ask(client) == b"a"
            return
        with pytest.raises(ConnectionLost, match=words):
            await ask(client)


async def test_an_answer_can_be_read_on_when_a_read_timed_out() -> None:
    go = asyncio.Event()

    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        await go.wait()
        writer.write(chunked(b"late").removeprefix(HEAD))

    async with Server(handler).client() as client:
        async with await client.post(b"{}", timeout_s=5) as answer:
            for timeout_s in (0.02, 0.01):
                with pytest.raises(TimeoutError):
                    await answer.read(timeout_s=timeout_s)
            go.set()
            assert await answer.read(timeout_s=5) == b"late"


async def test_a_request_times_out_when_no_head_comes() -> None:
    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        await writer.wait_closed()

    async with Server(handler).client() as client:
        with pytest.raises(TimeoutError):
            await client.post(b"{}", timeout_s=0.02)


async def test_nobody_is_there_when_the_port_is_closed() -> None:
    server = replies()
    async with server.client() as client:
        pass
    with pytest.raises(ConnectionLost, match="cannot connect to"):
        await client.post(b"{}", timeout_s=5)


async def test_the_status_is_told_when_the_server_refuses() -> None:
    server = replies(
        b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno", chunked(b"ok")
    )
    async with server.client() as client:
        async with await client.post(b"{}", timeout_s=5) as answer:
            assert (answer.status, await answer.read(timeout_s=5)) == (401, b"no")
        assert await ask(client) == b"ok"
    assert server.connections == 2
