"""The interface of `async_rl.engines.streams` on aiohttp, for `generate_path.py` to compare the two."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import aiohttp
from yarl import URL

from async_rl.engines.streams import ConnectionLost, Unreachable


class AiohttpStreamClient:
    """Sends POST requests to one address through aiohttp, set up to do as little as it can."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = URL(url)
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: bytes, *, timeout_s: float) -> AiohttpAnswer:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
                read_bufsize=1 << 18,
            )
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._session.post(self._url, data=body, allow_redirects=False)
        except aiohttp.ClientConnectorError as e:
            raise Unreachable(str(e)) from e
        except aiohttp.ClientError as e:
            raise ConnectionLost(repr(e)) from e
        return AiohttpAnswer(response)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def close(self) -> None:
        return


class AiohttpAnswer:
    """The answer to one request. Leaving it before its end drops the connection."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self._response = response
        self._content = response.content

    async def read(self, *, timeout_s: float | None) -> bytes:
        try:
            if timeout_s is None:
                return await self._content.readany()
            async with asyncio.timeout(timeout_s):
                return await self._content.readany()
        except aiohttp.ClientError as e:
            raise ConnectionLost(repr(e)) from e

    def expect_much(self) -> None:
        return

    def close(self) -> None:
        self._response.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
