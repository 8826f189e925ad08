"""Environments behind an OpenEnv server.

```
 websocket   one connection to URL/ws for each episode:   {"type": "reset", "data": {seed, …}}
                                                          {"type": "step", "data": {action}}
             answers: {"type": "observation", "data": {observation, reward, done}} or {"type": "error", …}
 http        POST URL/reset {seed, …}, POST URL/step {"action": {action}}: {observation, reward, done}
```

Servers of the package OpenEnv keep an episode for each WebSocket; their HTTP requests have a new environment
each, so `http` is for other servers that speak the same format.

**Source**: `openenv/core/env_server/types.py` and `http_server.py` of OpenEnv 0.4.1 (PyPI: openenv).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import aiohttp
import msgspec

from agent_loops.environment.base import Environment, Observation
from async_rl.errors import AgentLoopError, ConfigError
from async_rl.runtime.loading import load_object
from async_rl.types import Task

MAX_ANSWER_BYTES: Final = 4 << 20
"""The largest answer of a server: more text than a context holds."""
FIRST_DELAY_S: Final = 0.5
"""The wait before an episode is begun again; it doubles each time."""
_MAX_DELAY_S: Final = 8.0
_BUSY: Final = "CAPACITY_REACHED"
_REFUSED_ACTION: Final = "VALIDATION_ERROR"
_UNPROCESSABLE: Final = 422
"""The status of an action that does not have the form that the server expects."""


class _Seen(msgspec.Struct, frozen=True):
    """`ResetResponse` and `StepResponse` of OpenEnv."""

    observation: Any
    reward: float | None = None
    done: bool = False


class _SocketMessage(msgspec.Struct, frozen=True):
    """What the server sends on a WebSocket."""

    type: str
    data: msgspec.Raw = msgspec.Raw(b"{}")


class _ServerIsBusy(AgentLoopError):
    """The server takes no further episode now."""


class OpenEnvEnvironment(Environment):
    """One episode on a server that speaks OpenEnv's format.

    A connection that is refused, or a server that is at its capacity, is tried again for `timeout_s`, because
    the episode has not begun. Nothing else is repeated: a step may have had its effect. Redirects are not
    followed.

    Args:
        url: The server, such as `http://127.0.0.1:8000`.
        transport: `websocket`, which OpenEnv's own servers need for episodes of several steps, or `http`.
        action_field: The field of an action that is the policy's text. Without it, the policy writes a JSON
            object.
        action: `module:function`, which returns the action, a dict, of a text, or raises ValueError with what
            the policy shall read.
        observation: `module:function`, which returns the text of an observation; by default the only text in
            it, or all of it as JSON.

    Raises:
        ConfigError: An argument cannot be used.
    """

    def __init__(
        self,
        url: str,
        transport: Literal["websocket", "http"] = "websocket",
        action_field: str | None = None,
        action: str | None = None,
        observation: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"rollout.agent_loop_args: url is {url!r}; expected http://HOST:PORT")
        if transport not in ("websocket", "http"):
            raise ConfigError(
                f"rollout.agent_loop_args: transport is {transport!r}; expected websocket or http"
            )
        if action is not None and action_field is not None:
            raise ConfigError("rollout.agent_loop_args: expected either action or action_field")
        self._url = url.rstrip("/")
        self._uses_websocket = transport == "websocket"
        self._field = action_field
        self._action_of: Callable[[str], dict[str, Any]] = self._read_action
        if action is not None:
            self._action_of = load_object(action, what="action")
        self._text_of: Callable[[Any], str] = observation_text
        if observation is not None:
            self._text_of = load_object(observation, what="observation")
        self._open = AsyncExitStack()
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self, task: Task) -> Observation:
        """Implements `Environment.reset`; the arguments are the task's `reset`, if it has one."""
        loop = asyncio.get_running_loop()
        begin, delay_s = loop.time(), FIRST_DELAY_S
        no_limit = aiohttp.ClientTimeout(total=None)  # the loop has one
        self._http = await self._open.enter_async_context(aiohttp.ClientSession(timeout=no_limit))
        while True:
            try:
                return await self._reset(task.metadata.get("reset") or {})
            except (_ServerIsBusy, aiohttp.ClientConnectorError) as error:
                if loop.time() - begin + delay_s >= self.timeout_s:
                    raise AgentLoopError(f"{self._url} takes no episode: {error}") from error
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    async def _reset(self, arguments: dict[str, Any]) -> Observation:
        assert self._http is not None
        if self._uses_websocket:
            self._socket = await self._http.ws_connect(
                f"{self._url}/ws", max_msg_size=MAX_ANSWER_BYTES, heartbeat=None
            )
            try:
                return await self._ask("reset", arguments)
            except _ServerIsBusy:
                await self._socket.close()
                raise
        return await self._post("reset", arguments)

    async def step(self, action: str) -> Observation:
        """Implements `Environment.step`."""
        try:
            chosen = self._action_of(action.rpartition("</think>")[2].strip())
        except ValueError as error:
            return Observation(text=f"Invalid action: {error}", is_invalid=True)
        if self._uses_websocket:
            return await self._ask("step", chosen)
        return await self._post("step", {"action": chosen})

    async def close(self) -> None:
        """Implements `Environment.close`; the server ends the episode with its connection."""
        try:
            if self._socket is not None:
                await self._socket.close()
        finally:
            await self._open.aclose()

    async def _ask(self, kind: str, data: dict[str, Any]) -> Observation:
        assert self._socket is not None
        with suppress(ConnectionError):  # a server that closes has said why before
            await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        received = await self._socket.receive()
        if received.type is not aiohttp.WSMsgType.TEXT:
            raise AgentLoopError(
                f"{self._url} closed the connection ({received.type.name}: {received.extra or received.data})"
            )
        message: _SocketMessage = self._decoded(received.data, _SocketMessage)
        if message.type == "observation":
            return self._observation(self._decoded(message.data, _Seen))
        told: dict[str, Any] = self._decoded(message.data, dict[str, Any])
        code = told.get("code")
        why = f"{self._url} answered {kind} with {code}: {told.get('message')}"
        if code == _BUSY:
            raise _ServerIsBusy(why)
        if code == _REFUSED_ACTION and kind == "step":
            return _refused(told.get("errors"))
        raise AgentLoopError(why)

    async def _post(self, path: str, body: dict[str, Any]) -> Observation:
        assert self._http is not None
        async with self._http.post(f"{self._url}/{path}", json=body, allow_redirects=False) as response:
            content = bytearray()
            async for data in response.content.iter_any():
                content += data
                if len(content) > MAX_ANSWER_BYTES:
                    raise AgentLoopError(
                        f"{self._url}/{path} sent more than {MAX_ANSWER_BYTES} bytes; the limit is there "
                        "because no policy reads as much"
                    )
        if response.status == _UNPROCESSABLE and path == "step":
            return _refused(self._decoded(content, dict[str, Any]).get("detail"))
        if response.status != 200:
            text = content.decode(errors="replace")
            raise AgentLoopError(f"{self._url}/{path} answered {response.status}: {text:.200}")
        return self._observation(self._decoded(content, _Seen))

    def _decoded(self, content: bytes | bytearray | msgspec.Raw | str, kind: Any) -> Any:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise AgentLoopError(
                f"{self._url} does not answer in OpenEnv's format: {error}; it sent {content!r:.200}"
            ) from error

    def _observation(self, seen: _Seen) -> Observation:
        return Observation(
            text=self._text_of(seen.observation), reward=seen.reward or 0.0, terminated=seen.done
        )

    def _read_action(self, text: str) -> dict[str, Any]:
        """Return the action that a policy has written.

        Raises:
            ValueError: It is no JSON object.
        """
        if self._field is not None:
            return {self._field: text}
        if text.startswith("```") and text.endswith("```"):
            text = text.strip("`").removeprefix("json")
        try:
            return dict(msgspec.json.decode(text, type=dict[str, Any]))
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise ValueError(f"expected a JSON object ({error})") from error


def observation_text(observation: Any) -> str:
    """Return what the policy reads of an observation: its only text, or all of it as JSON.

    Example:
        >>> observation_text({"echoed": "Hello.", "metadata": {}})
        'Hello.'
        >>> observation_text({"board": "x..", "turn": 2})
        '{"board": "x..", "turn": 2}'
    """
    values = observation
    if isinstance(observation, dict):
        filled = {name: value for name, value in observation.items() if value not in (None, {}, [])}
        values = next(iter(filled.values())) if len(filled) == 1 else filled
    return values if isinstance(values, str) else json.dumps(values, ensure_ascii=False)


def _refused(errors: Any) -> Observation:
    """Return what pydantic says of an action as an observation."""
    told = errors if isinstance(errors, list) else []
    why = "; ".join(
        f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg', '')}"
        for each in told
        if isinstance(each, dict)
    )
    return Observation(text=f"Invalid action: {why or 'the environment refused it'}", is_invalid=True)
