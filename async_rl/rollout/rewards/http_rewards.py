"""Asking a server for rewards: JSON by POST, one request a call.

```
 {"task_id", "prompt": messages, "label", "data_source", "metadata",      the task
  "messages", "text", "response", "stop_reason"}                          the trajectory; of a group
                                                                          {"completions": [these]}
  ──► 0.5 | {"reward": 0.5, "parts": …}      of a group: a list of these | {"rewards": [...]}
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
from async_rl.errors import ConfigError
from async_rl.types import Completion, Task

_MAX_ANSWER_BYTES: Final = 1 << 20
_MAX_SHOWN: Final = 200
"""Characters of an answer that an error shows."""
_RETRY_STATUS: Final = frozenset({408, 429})


class Refused(Exception):
    """The server will not answer this; asking again would not help."""


class Unavailable(Exception):
    """The server may answer later."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s
        """When it wants to be asked again."""


class HttpAsker:
    """Posts to one URL.

    The token is read once, goes into the header of each request, and nowhere else: no error names it, and
    redirects, which could take it elsewhere, are not followed.
    """

    def __init__(self, name: str, config: HttpReward) -> None:
        """Read the token; connect to nothing yet.

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

    async def ask(self, payload: Any) -> Any:
        """Post, and decode the answer.

        Raises:
            Refused: The server says no, or says something else than JSON.
            Unavailable: It could not be reached, is busy, or failed.
        """
        if self._client is None:
            headers = {"Content-Type": "application/json"}
            if self._token:
                headers["Authorization"] = f"Bearer {self._token}"
            # The caller bounds the time.
            limits = aiohttp.ClientTimeout(total=None)
            self._client = aiohttp.ClientSession(headers=headers, timeout=limits)
        body = msgspec.json.encode(payload, enc_hook=str)
        try:
            async with self._client.post(self._config.url, data=body, allow_redirects=False) as response:
                answer = await self._read(response)
        except aiohttp.ClientError as error:
            raise Unavailable(self._clean(f"{type(error).__name__}: {error}")) from None
        if response.status in _RETRY_STATUS or response.status >= 500:
            raise Unavailable(self._say(response.status, answer), _seconds(response))
        if response.status != 200:
            raise Refused(self._say(response.status, answer))
        try:
            return msgspec.json.decode(answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(f"its answer is not JSON ({error})") from error

    async def close(self) -> None:
        """Let go of connections."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        answer = bytearray()
        async for chunk in response.content.iter_any():
            answer += chunk
            if len(answer) > _MAX_ANSWER_BYTES:
                raise Refused(f"its answer is longer than {_MAX_ANSWER_BYTES} bytes")
        return bytes(answer)

    def _say(self, status: int, answer: bytes) -> str:
        text = " ".join(answer.decode(errors="replace").split())[:_MAX_SHOWN]
        return self._clean(f"HTTP {status}{': ' if text else ''}{text}")

    def _clean(self, text: str) -> str:
        return text.replace(self._token, "…") if self._token else text


def request_of(
    task: Task, completions: Sequence[Completion], responses: Sequence[str], *, group: bool
) -> dict[str, Any]:
    """The body of a request; see the top of this file."""
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
    """What `Retry-After` says in seconds; dates are not worth a parser here."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0
