"""Requests to the HTTP API of a sandbox backend; whatever fails is a `SandboxLost`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import msgspec

from agent_loops.sandboxes.protocol import MAX_FILE_BYTES, SandboxRefused
from async_rl.errors import SandboxLost

REQUEST_S: Final = 60.0
"""The time limit of a request that runs no command."""
_MAX_ANSWER_BYTES: Final = MAX_FILE_BYTES + (1 << 20)
_MAX_SHOWN: Final = 500
_PASSING: Final = frozenset({408, 409, 425, 429})
"""Client errors that a repetition may overcome: conflicts with what is under way, and limits of rates."""


class AnswerTooLarge(SandboxLost):
    """An answer has more bytes than any file may have."""


class HttpCalls:
    """Sends requests with the keys of a backend, which appear in no error."""

    def __init__(self, what: str, connector: aiohttp.BaseConnector, headers: Mapping[str, str]) -> None:
        """Open no connection yet.

        Args:
            what: The backend, for messages.
            connector: Makes the connections, and is closed with this.
            headers: Sent with every request; their values are secret.
        """
        self._what = what
        self._secrets = [value.removeprefix("Bearer ") for value in headers.values()]
        self._session = aiohttp.ClientSession(
            connector=connector, headers=dict(headers), timeout=aiohttp.ClientTimeout(total=None)
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    @asynccontextmanager
    async def open_response(
        self,
        method: str,
        url: str,
        *,
        limit_s: float = REQUEST_S,
        may_be: tuple[int, ...] = (),
        **request: Any,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the response, whose body the block reads within the limit.

        Args:
            method: The method.
            url: The address.
            limit_s: The time limit of the block.
            may_be: Further statuses than 200 to 299 that the caller handles.
            request: Arguments of aiohttp.

        Raises:
            SandboxRefused: The status says that a repetition would not help.
            SandboxLost: There was no answer, or another status.
        """
        try:
            async with (
                asyncio.timeout(limit_s),
                self._session.request(method, url, allow_redirects=False, **request) as response,
            ):
                if not (200 <= response.status < 300 or response.status in may_be):
                    told = (await response.content.read(4 * _MAX_SHOWN)).decode(errors="replace")
                    kind = SandboxRefused if _is_final(response.status) else SandboxLost
                    raise kind(f"{self._what} answered {method} with {response.status}: {self._shown(told)}")
                yield response
        except TimeoutError as error:
            raise SandboxLost(f"{self._what} did not answer {method} within {limit_s:g} s") from error
        except aiohttp.ClientError as error:
            # Without a cause, because some of aiohttp's errors hold the headers.
            told = f"{type(error).__name__}: {self._shown(str(error))}"
            raise SandboxLost(f"{self._what} did not answer {method}: {told}") from None

    async def request(self, method: str, url: str, **request: Any) -> tuple[int, bytes]:
        """Send a request as `open_response` does; return the status and the whole body.

        Raises:
            SandboxLost: See `open_response`; or the body is too large.
        """
        async with self.open_response(method, url, **request) as response:
            body = bytearray()
            async for data in response.content.iter_any():
                body += data
                if len(body) > _MAX_ANSWER_BYTES:
                    raise AnswerTooLarge(
                        f"{self._what} answered {method} with more than {_MAX_ANSWER_BYTES} bytes"
                    )
            return response.status, bytes(body)

    async def request_file(self, url: str, path: str, **request: Any) -> tuple[int, bytes]:
        """Ask for the file at a path inside a sandbox as `request` does.

        Raises:
            OSError: It is too large.
            SandboxLost: See `open_response`.
        """
        try:
            return await self.request("GET", url, params={"path": path}, **request)
        except AnswerTooLarge:
            raise OSError(f"{path} is no file of at most {MAX_FILE_BYTES} bytes") from None

    async def request_json(self, method: str, url: str, **request: Any) -> Any:
        """Send a request as `open_response` does; return the body's value.

        Raises:
            SandboxLost: See `open_response`; or the body is no JSON.
        """
        _, body = await self.request(method, url, **request)
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            raise SandboxLost(
                f"{self._what} answered {method} with something else than JSON: {error}"
            ) from error

    def _shown(self, text: str) -> str:
        return without_secrets(text, self._secrets)


def without_secrets(text: str, secrets: Iterable[str]) -> str:
    """Return the beginning of what a service says, for an error, without keys that it repeats."""
    for secret in filter(None, secrets):
        text = text.replace(secret, "<key>")
    return text[:_MAX_SHOWN]


def _is_final(status: int) -> bool:
    return 400 <= status < 500 and status not in _PASSING
