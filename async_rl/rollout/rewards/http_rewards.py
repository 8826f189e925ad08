"""Rewards from an HTTP server: one JSON POST request for each call.

```
 {"task_id", "prompt": messages, "label", "data_source", "metadata",      the task
  "messages", "text", "response", "stop_reason"}                          the trajectory; of a group
                                                                          {"completions": [...]}
  ──► 0.5 | {"reward": 0.5, "parts": …}      of a group: a list of them | {"rewards": [...]}
```

`prompt`, `response` and `label` are what slime's `remote_rm` sends.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import aiohttp
import msgspec

from async_rl.config import HttpReward
from async_rl.errors import ConfigError, RewardUnavailable
from async_rl.runtime.untrusted_json import UNREADABLE
from async_rl.types import Completion, Task

_MAX_ANSWER_BYTES: Final = 1 << 20
_MAX_SHOWN: Final = 200
"""The most characters of an answer that an error shows."""
_BAD_REQUEST: Final = frozenset({400, 413, 422})
_RETRY_STATUS: Final = frozenset({408, 429})


class RewardRefused(Exception):
    """The server rejected the request; a retry would not help."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.because_of_request = status in _BAD_REQUEST
        """Whether the server blames the request, rather than, say, its key or its URL."""


class RewardUnreachable(RewardUnavailable):
    """No server accepts the connection: it is being restarted, or is gone."""


class RewardClient:
    """Posts requests to the URL of one reward server.

    The token is read once and is only sent in the header of each request: no error contains it, and
    redirects, which could send it elsewhere, are not followed.
    """

    def __init__(self, name: str, config: HttpReward) -> None:
        """Read the token; the first request connects.

        Raises:
            ConfigError: The environment variable of the token is not set.
        """
        self._config = config
        self._token = os.environ.get(config.token_env, "").strip() if config.token_env else ""
        if config.token_env and not self._token:
            raise ConfigError(
                f"rollout.rewards.{name}.token_env names {config.token_env}, which is not set in the "
                "environment: export it, or leave token_env out"
            )
        self._client: aiohttp.ClientSession | None = None

    async def post_request(self, payload: Any) -> Any:
        """Post a request, and return the decoded answer.

        Raises:
            RewardRefused: The server rejected the request, or its answer is not JSON.
            RewardUnreachable: No server accepts the connection.
            RewardUnavailable: The server is busy, or failed.
        """
        if self._client is None:
            headers = {"Content-Type": "application/json"}
            if self._token:
                headers["Authorization"] = f"Bearer {self._token}"
            # The caller sets the time limit.
            limits = aiohttp.ClientTimeout(total=None)
            self._client = aiohttp.ClientSession(headers=headers, timeout=limits)
        body = msgspec.json.encode(payload, enc_hook=str)
        try:
            async with self._client.post(self._config.url, data=body, allow_redirects=False) as response:
                answer = await self._read_answer(response)
        except aiohttp.ClientConnectorError as error:
            raise RewardUnreachable(self._redact(f"{type(error).__name__}: {error}")) from None
        except aiohttp.ClientError as error:
            raise RewardUnavailable(self._redact(f"{type(error).__name__}: {error}")) from None
        if response.status in _RETRY_STATUS or response.status >= 500:
            raise RewardUnavailable(self._describe(response.status, answer), _seconds(response))
        if response.status != 200:
            raise RewardRefused(self._describe(response.status, answer), response.status)
        try:
            return msgspec.json.decode(answer)
        except UNREADABLE as error:
            raise RewardRefused(f"its answer is not JSON ({error})") from error

    async def close(self) -> None:
        """Close connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _read_answer(self, response: aiohttp.ClientResponse) -> bytes:
        answer = bytearray()
        async for chunk in response.content.iter_any():
            answer += chunk
            if len(answer) > _MAX_ANSWER_BYTES:
                raise RewardRefused(f"its answer is longer than {_MAX_ANSWER_BYTES} bytes")
        return bytes(answer)

    def _describe(self, status: int, answer: bytes) -> str:
        text = " ".join(answer.decode(errors="replace").split())[:_MAX_SHOWN]
        return self._redact(f"HTTP {status}{': ' if text else ''}{text}")

    def _redact(self, text: str) -> str:
        return text.replace(self._token, "…") if self._token else text


def request_of(
    task: Task, completions: Sequence[Completion], responses: Sequence[str], *, group: bool
) -> dict[str, Any]:
    """Return the body of a request, as the module's docstring shows it."""
    described = [
        {
            "messages": completion.messages,
            "text": completion.text,
            "response": response,
            "stop_reason": completion.stop_reason,
        }
        for completion, response in zip(completions, responses, strict=True)
    ]
    return {
        "task_id": task.task_id,
        "prompt": task.messages,
        "label": task.answer,
        "data_source": task.data_source,
        "metadata": task.metadata,
        **({"completions": described} if group else described[0]),
    }


def _seconds(response: aiohttp.ClientResponse) -> float:
    """Return the seconds of a `Retry-After` header; dates are ignored."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0
