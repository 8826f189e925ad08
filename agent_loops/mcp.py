"""Tools of MCP servers, with the official client (`pip install -e '.[mcp]'`).

```
 trajectories ── call ──► McpServer ── one connection, held by its own task ─► server
                              └ lost: the call fails; the next call waits for a new connection, with back-off
```

A call that a lost connection interrupts fails. It is not repeated, because it may have had effects.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import logging
import os
import re
import shutil
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import msgspec
from msgspec import Meta

from agent_loops.tools import Tool
from async_rl.errors import ConfigError, EnvironmentNotReady, ToolBroken, ToolError
from async_rl.runtime.printable import as_json
from async_rl.runtime.serving_clock import serving_timeout
from async_rl.runtime.supervision import Nursery, first_error
from async_rl.runtime.user_processes import marked
from async_rl.runtime.waits import waiting

if TYPE_CHECKING:
    from mcp import Client

log = logging.getLogger(__name__)

_MAX_PAGES: Final = 100
"""The most pages of a server's list of tools, so that an endless list cannot block the start."""
_MAX_BACKOFF_S: Final = 30.0
_MAX_OBJECTS: Final = 10_000
"""The most JSON objects of a message. The client reads 100,000 a second, and nothing else runs meanwhile."""
_OBJECT: Final = re.compile(r'\{\s*"')
"""The beginning of an object. In a string the quotation mark would have a backslash before it."""
_ID: Final = re.compile(r'"id"\s*:\s*(\d+|"[^"\\]*")')
_MAX_TIMEOUTS: Final = 3
"""The connection is closed after this many timeouts in a row."""


class McpServerSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to reach a server: `command` starts one, `url` names a running one."""

    command: list[str] = []
    url: str = ""
    env: dict[str, str] = {}
    """For a command: maps its environment variables to the variables of ours that hold their values."""
    headers: dict[str, str] = {}
    """For a URL: maps headers to our environment variables that hold their whole values."""
    prefix: str = ""
    """A prefix for the names of its tools."""
    connect_timeout_s: Annotated[float, Meta(gt=0)] = 30.0

    def __post_init__(self) -> None:
        """Refuse contradictory settings."""
        if bool(self.command) == bool(self.url):
            raise ValueError("an MCP server has either a `command` or a `url`")
        if (self.url and self.env) or (self.command and self.headers):
            raise ValueError("`env` is for a `command`, `headers` are for a `url`")

    @property
    def label(self) -> str:
        """A short name for messages, without later arguments or URL queries, which may contain keys."""
        if self.command:
            words = self.command[: 3 if self.command[1:2] == ["-m"] else 2]
            return " ".join([os.path.basename(words[0]), *words[1:]])
        return self.url.split("?")[0].rpartition("@")[2].removeprefix("http://").removeprefix("https://")


class McpTool(Tool):
    """One tool of a server, which has no state for each trajectory."""

    def __init__(self, server: McpServer, name: str, described: Any) -> None:
        self.name = name
        self._server = server
        self._own_name: str = described.name
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": name,
                "description": described.description or described.title or described.name,
                "parameters": described.input_schema,
            },
        }

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float, state: Any = None) -> str:
        """Run the tool on the server, which checks the arguments itself.

        Raises:
            ToolError: The tool failed or took too long.
            ToolBroken: Its server cannot be reached, or the connection broke.
        """
        try:
            async with (
                serving_timeout(timeout_s) as limit,
                waiting("tool", self.name, scope=limit, why=self._server.state),
            ):
                return await self._server.call_tool(self._own_name, dict(arguments))
        except TimeoutError as error:
            self._server.record_timeout()
            kind = ToolBroken if (trouble := self._server.trouble) else ToolError
            raise kind(f"{self.name}: no result within {timeout_s:g} s{trouble}") from error
        except ToolBroken as error:
            raise ToolBroken(f"{self.name}: {error}") from error
        except ToolError as error:
            raise ToolError(f"{self.name}: {error}") from error


class McpServer:
    """One server and the connection to it, entered for the whole run.

    Raises:
        ConfigError: A named environment variable is not set, or the command does not exist.
        EnvironmentNotReady: The client package is not installed.
    """

    def __init__(self, spec: McpServerSpec) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise EnvironmentNotReady(
                "tools of MCP servers need the package `mcp`, which is not installed: run "
                "`pip install -e '.[mcp]'` in async_rl's checkout"
            )
        if spec.command and shutil.which(spec.command[0]) is None:
            raise ConfigError(
                f"MCP server {spec.label}: there is no program {spec.command[0]!r}; expected one on the "
                f"PATH, or a path from {os.getcwd()}"
            )
        self._spec = spec
        _secrets({**spec.env, **spec.headers}, spec.label)  # check them now, not at the first call
        self._tools: list[Any] | None = None
        self._client: Client | None = None
        self._changed = asyncio.Condition()
        self._wanted, self._lost = asyncio.Event(), asyncio.Event()
        self._failure: Exception | None = None
        self._num_timeouts = 0
        self._open = AsyncExitStack()
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether the server is entered."""
        return self._is_open

    @property
    def trouble(self) -> str:
        """Why there is no connection, as the end of a sentence; empty if there is one."""
        if self._client is not None or self._failure is None:
            return ""
        return f": the MCP server {self._spec.label} cannot be reached ({_describe_error(self._failure)})"

    def state(self) -> str:
        """Describe the connection for a stall report."""
        return (
            f"MCP server {self._spec.label}: {'connected' if self._client is not None else 'not connected'}"
        )

    async def __aenter__(self) -> Self:
        """Connect, and read the list of tools.

        Raises:
            EnvironmentNotReady: The server cannot be reached, or does not answer.
        """
        async with AsyncExitStack() as stack:
            nursery = await stack.enter_async_context(Nursery())
            stack.callback(nursery.cancel_tasks)
            nursery.start_task(f"MCP server {self._spec.label}", self._keep_connected())
            self._wanted.set()
            async with self._changed:
                with waiting("tool", self._spec.label):
                    await self._changed.wait_for(
                        lambda: self._client is not None or self._failure is not None
                    )
            if self._client is not None:
                self._open, self._is_open = stack.pop_all(), True
                return self
        raise EnvironmentNotReady(f"the MCP server {self._spec.label} {self._start_problem()}")

    def _start_problem(self) -> str:
        failure, seen = self._failure, list[BaseException]()
        if isinstance(failure, TimeoutError):
            return f"did not answer within {self._spec.connect_timeout_s:g} s"
        cause: BaseException | None = failure
        while cause is not None and cause not in seen:
            seen.append(cause)
            cause = cause.__cause__ or cause.__context__
        if any(isinstance(each, ConnectionRefusedError) for each in seen):
            return "refused the connection: start it, or correct its url"
        return f"cannot be used: {_describe_error(failure)}"

    async def __aexit__(self, *error: object) -> None:
        self._client, self._failure, self._is_open = None, None, False
        await self._open.aclose()

    def tools(self, only: Sequence[str] | None = None) -> list[McpTool]:
        """Return the server's tools, as of the first connection.

        Raises:
            EnvironmentNotReady: The server lacks a tool of `only`.
        """
        known = {tool.name: tool for tool in self._tools or []}
        missing = [name for name in only or [] if name not in known]
        if missing:
            raise EnvironmentNotReady(
                f"the MCP server {self._spec.label} has no tool {missing[0]!r}; there are {', '.join(known)}"
            )
        names = known if only is None else only
        return [McpTool(self, self._spec.prefix + name, known[name]) for name in names]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its result as text; the caller sets the time limit.

        Raises:
            ToolError: The tool failed.
            ToolBroken: The connection broke.
        """
        from mcp import MCPError

        client = await self._connected()
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if client is self._client and _is_broken(error):
                self._drop_connection(error)
                raise ToolBroken(
                    f"the connection to the MCP server {self._spec.label} broke during the call"
                ) from error
            raise ToolError(str(error)) from error
        except Exception as error:  # transports may raise anything
            if client is self._client:  # not of an earlier connection
                self._drop_connection(error)
            raise ToolBroken(
                f"the connection to the MCP server {self._spec.label} broke during the call"
            ) from error
        self._num_timeouts = 0
        text = "\n".join(_as_text(block) for block in result.content)
        if not text and result.structured_content is not None:
            text = as_json(result.structured_content)
        if result.is_error:
            raise ToolError(text or "the tool failed without a message")
        return text

    def record_timeout(self) -> None:
        """Record that a call timed out; after a few in a row the connection is renewed."""
        self._num_timeouts += 1
        if self._num_timeouts >= _MAX_TIMEOUTS and self._client is not None:
            self._drop_connection(TimeoutError(f"{self._num_timeouts} calls in a row timed out"))

    async def _connected(self) -> Client:
        async with self._changed:
            if self._client is None:
                self._wanted.set()
            await self._changed.wait_for(lambda: self._client is not None)
            assert self._client is not None
            return self._client

    def _drop_connection(self, error: Exception) -> None:
        log.warning("MCP server %s: connection lost: %s", self._spec.label, _describe_error(error))
        self._client, self._failure, self._num_timeouts = None, error, 0
        self._wanted.clear()
        self._lost.set()

    async def _keep_connected(self) -> None:
        """Connect when a call needs it, and hold the connection until it is lost.

        Consumes: `_wanted`. Waits for: `_lost`. Produces: `_client`. Client and transport have task groups
        that the task that entered them must exit, which is this one.
        """
        failures = 0
        while True:
            with waiting("idle"):
                await self._wanted.wait()
            self._lost.clear()
            try:
                async with self._connection() as client:
                    failures = 0
                    await self._set_connection(client, None)
                    with waiting("idle"):
                        await self._lost.wait()
            except Exception as error:  # SDK, server and transport raise many kinds, often in groups
                self._client = None
                failures += 1
                await self._set_connection(None, _cause(error))
                log.warning("MCP server %s: %s", self._spec.label, _describe_error(_cause(error)))
                with waiting("idle"):
                    await asyncio.sleep(min(_MAX_BACKOFF_S, 0.1 * 2**failures))  # back-off, not a poll

    async def _set_connection(self, client: Client | None, failure: Exception | None) -> None:
        async with self._changed:
            self._client, self._failure = client, failure
            self._changed.notify_all()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Client]:
        """Open one connection, and read the list of tools."""
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        _bound_messages()
        spec = self._spec
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(spec.connect_timeout_s):
                if spec.command:
                    env = marked(_secrets(spec.env, spec.label), "mcp_server")
                    server = StdioServerParameters(command=spec.command[0], args=spec.command[1:], env=env)
                    transport = stdio_client(server)
                else:
                    limits = httpx2.Timeout(spec.connect_timeout_s, read=None)  # each call has its own limit
                    headers = _secrets(spec.headers, spec.label)
                    http = await stack.enter_async_context(
                        httpx2.AsyncClient(
                            headers=headers, timeout=limits, verify=await asyncio.to_thread(_tls_context)
                        )
                    )
                    transport = streamable_http_client(spec.url, http_client=http)
                client = await stack.enter_async_context(Client(transport))
                tools, cursor = [], None
                for _ in range(_MAX_PAGES):
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    if (cursor := page.next_cursor) is None:
                        break
            if self._tools is None:
                self._tools = tools
            yield client


@functools.cache
def _bound_messages() -> None:
    """Make the client answer messages of too many objects with an error instead of parsing them.

    Both transports of the package parse with this adapter, on the event loop, and have no limit of their own.
    """
    from mcp_types import INVALID_REQUEST, ErrorData, JSONRPCError, jsonrpc_message_adapter

    parse = jsonrpc_message_adapter.validate_json

    def parse_if_small(message: str | bytes, **options: Any) -> Any:
        text = message.decode("utf-8", "replace") if isinstance(message, bytes) else message
        if next(islice(_OBJECT.finditer(text), _MAX_OBJECTS, None), None) is None:
            return parse(message, **options)
        ids = _ID.findall(text[:200]) or _ID.findall(text[-200:])
        why = f"the result has more than {_MAX_OBJECTS} objects or blocks, which are not read"
        return JSONRPCError(
            jsonrpc="2.0",
            id=json.loads(ids[0]) if ids else None,
            error=ErrorData(code=INVALID_REQUEST, message=why),
        )

    jsonrpc_message_adapter.validate_json = parse_if_small  # type: ignore[method-assign, assignment]


@functools.cache
def _tls_context() -> ssl.SSLContext:
    """Return the TLS context of all connections; to read all certificates takes 32 to 50 ms."""
    import httpx2

    return httpx2.create_ssl_context()


def _secrets(names: Mapping[str, str], label: str) -> dict[str, str]:
    """Return the values of environment variables."""
    missing = sorted(name for name in names.values() if name not in os.environ)
    if missing:
        raise ConfigError(
            f"the MCP server {label} needs the environment variable {missing[0]}, which is not set (`env` "
            "and `headers` name variables; secrets do not belong in a config)"
        )
    return {key: os.environ[name] for key, name in names.items()}


def _is_broken(error: Any) -> bool:
    """Return whether an error ends the connection, instead of only refusing a request."""
    from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

    return error.error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT)


def _as_text(block: Any) -> str:
    """Return a part of a result as text for the policy."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        resource = block.resource
        return str(getattr(resource, "text", None) or f"[{resource.uri}]")
    if block.type == "resource_link":
        return f"[{block.uri}]"
    return f"[{block.mime_type}, {len(block.data)} characters of base64]"


def _cause(error: Exception) -> Exception:
    cause = first_error(error)
    return cause if isinstance(cause, Exception) else error


def _describe_error(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
