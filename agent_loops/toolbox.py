"""The tools of a run as its config lists them, and how each trajectory uses them.

```
 Toolbox  one a run           tools, limits of how many calls run at a time, MCP servers
    └ Hands  one a trajectory     states of stateful tools, from their first call to the trajectory's end
         └ answer(call)              a message for the policy, whatever happens
```
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Annotated, Any, Final, Protocol, Self

import msgspec
from msgspec import Meta

from agent_loops.mcp import McpServer, McpServerSpec
from agent_loops.parsing import Call, MalformedCall
from agent_loops.tools import load_tool
from async_rl.errors import ConfigError, ToolError
from async_rl.rollout.session.api import Session
from async_rl.runtime.supervision import finished
from async_rl.runtime.waits import waiting
from async_rl.types import Task

log = logging.getLogger(__name__)

_RELEASE_S: Final = 10.0
"""For giving back the state of one tool; what takes longer is cancelled and logged."""
_NO_TOOL: Final = "unknown"
"""Stands in metrics for what the policy calls without there being one: its words must not become labels."""

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]


class _Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What can be said of any tool."""

    max_concurrent: PositiveInt | None = None
    """Calls at a time, over all trajectories; others wait, and their time does not run meanwhile."""
    timeout_s: PositiveFloat | None = None
    """Longest call; `rollout.tool_timeout_s` by default."""


class ToolSpec(_Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function or class by dotted path."""

    tool: str
    args: dict[str, Any] = {}
    """What a class is made with."""
    name: str | None = None


class McpSpec(_Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tools of an MCP server."""

    mcp: McpServerSpec
    only: list[str] | None = None
    """Names of those that are offered; all by default."""


class AnyTool(Protocol):
    """What a toolbox holds: see `agent_loops.tools.Tool`."""

    name: str
    schema: dict[str, Any]
    keeps_state: bool

    async def create(self, task: Task) -> Any:
        """Make what the calls of one trajectory share."""

    async def release(self, state: Any) -> None:
        """Give it back."""

    async def call(self, arguments: Mapping[str, Any], *, timeout_s: float, state: Any = None) -> str:
        """The result as text; raises `ToolError`."""


class _Offer:
    """A tool, and how often it may be called at a time."""

    def __init__(self, tool: AnyTool, limits: _Limits) -> None:
        self.tool = tool
        self.timeout_s = limits.timeout_s
        self._limit = limits.max_concurrent
        self._room = None if self._limit is None else asyncio.Semaphore(self._limit)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait until one more call may run, and be that one."""
        if self._room is None:
            yield
            return
        if self._room.locked():
            with waiting(
                "tool", self.tool.name, why=lambda: f"its {self._limit} calls at a time are all running"
            ):
                await self._room.acquire()
        else:
            await self._room.acquire()  # at once
        try:
            yield
        finally:
            self._room.release()


class Toolbox:
    """The tools of a run. Entered for as long as the run: MCP servers are connected to meanwhile.

    Args:
        specs: Each a dotted path, or a mapping as of `ToolSpec` or `McpSpec`.

    Raises:
        ConfigError: A tool is missing or cannot be described, or two have one name.

    Example:
        >>> async with Toolbox(["my_tools:search"]) as toolbox, toolbox.hands(task, session) as hands:
        ...     message = await hands.answer(call)
    """

    def __init__(self, specs: Sequence[str | Mapping[str, Any]]) -> None:
        if isinstance(specs, str) or not specs:
            raise ConfigError(f"rollout.agent_loop_args: tools is {specs!r}; expected a list of dotted paths")
        self._offers: dict[str, _Offer] = {}
        self._servers: list[tuple[McpServer, McpSpec]] = []
        for number, given in enumerate(specs):
            spec = _as_spec(given, f"rollout.agent_loop_args: tools[{number}]")
            if isinstance(spec, McpSpec):
                self._servers.append((McpServer(spec.mcp), spec))
            else:
                self._add(load_tool(spec.tool, spec.args, name=spec.name), spec)
        self._open = AsyncExitStack()

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What the policy is told of the tools; those of MCP servers once it is entered."""
        return [offer.tool.schema for offer in self._offers.values()]

    @property
    def listing(self) -> str:
        """Its tools in a line."""
        servers = [f"those of the MCP server {spec.mcp.label}" for _, spec in self._servers]
        return ", ".join([*(name for name in self._offers), *servers])

    async def __aenter__(self) -> Self:
        """Connect to the MCP servers.

        Raises:
            EnvironmentNotReady: One does not answer, or lacks a tool.
        """
        async with AsyncExitStack() as stack:
            for server, spec in self._servers:
                await stack.enter_async_context(server)
                for tool in server.tools(spec.only):
                    self._add(tool, spec)
                    stack.callback(self._offers.pop, tool.name)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._open.aclose()

    @asynccontextmanager
    async def hands(
        self, task: Task, session: Session, max_result_chars: int = 16_384
    ) -> AsyncIterator[Hands]:
        """The tools in the hands of one trajectory; what they keep for it is released when the block ends.

        That happens however the block ends, and a cancellation meanwhile waits for it.
        """
        if missing := [server for server, _ in self._servers if not server.is_open]:
            raise RuntimeError(
                f"{missing[0].state()}: enter the toolbox (or its agent loop) first: `async with`"
            )
        hands = Hands(self._offers, task, session, max_result_chars)
        try:
            yield hands
        finally:
            await hands.release()

    def _add(self, tool: AnyTool, limits: _Limits) -> None:
        if tool.name in self._offers:
            raise ConfigError(
                f"rollout.agent_loop_args: two tools are called {tool.name!r}; give one another `name` "
                "(`prefix` for those of an MCP server), or leave it out by `only`"
            )
        self._offers[tool.name] = _Offer(tool, limits)


class Hands:
    """See `Toolbox.hands`."""

    def __init__(
        self, offers: Mapping[str, _Offer], task: Task, session: Session, max_result_chars: int
    ) -> None:
        self._offers = offers
        self._task = task
        self._session = session
        self._max_result_chars = max_result_chars
        self._locks: dict[str, asyncio.Lock] = {}
        self._states: dict[str, Any] = {}
        """By tool, in the order in which they were made."""

    async def answer(self, call: Call) -> dict[str, Any]:
        """The tool message that answers one call, an error as text; counted in outcome and metrics."""
        offer = None if isinstance(call, MalformedCall) else self._offers.get(call.name)
        clock = asyncio.get_running_loop().time
        begin = started = clock()
        try:
            if isinstance(call, MalformedCall):
                raise ToolError(call.error)
            if offer is None:
                raise ToolError(f"there is no tool {call.name!r}; there are {', '.join(self._offers)}")
            async with self._turn_of(offer.tool), offer.slot():
                started = clock()
                timeout_s = offer.timeout_s or self._session.tool_timeout_s
                state = await self._state(offer.tool, timeout_s)
                content = await offer.tool.call(call.arguments, timeout_s=timeout_s, state=state)
            error = False
        except ToolError as problem:
            content, error = f"Error: {problem}", True
        self._session.record_tool_call(
            error=error,
            tool=_NO_TOOL if offer is None else offer.tool.name,
            seconds=clock() - started,
            waited_s=started - begin,
        )
        if len(content) > self._max_result_chars:
            cut = len(content) - self._max_result_chars
            content = f"{content[: self._max_result_chars]}\n[{cut} more characters were cut]"
        message = {"role": "tool", "content": content}
        return message if isinstance(call, MalformedCall) else {**message, "name": call.name}

    def refuse(self, limit: int) -> dict[str, Any]:
        """The tool message for a call beyond so many in one turn."""
        self._session.record_tool_call(error=True, tool=_NO_TOOL)
        return {"role": "tool", "content": f"Error: not called: at most {limit} calls a turn are allowed"}

    async def release(self) -> None:
        """Give back all states, the newest first; one that fails keeps none of the others."""
        await finished(self._release(), limit_s=_RELEASE_S * (1 + len(self._states)))

    def _turn_of(self, tool: AnyTool) -> Any:
        """Calls that share a state come one after the other, in the order in which they were made."""
        return self._locks.setdefault(tool.name, asyncio.Lock()) if tool.keeps_state else nullcontext()

    async def _state(self, tool: AnyTool, timeout_s: float) -> Any:
        if not tool.keeps_state:
            return None
        if tool.name not in self._states:
            try:
                async with asyncio.timeout(timeout_s) as limit, waiting("tool", tool.name, scope=limit):
                    self._states[tool.name] = await tool.create(self._task)
            except Exception as error:  # the tool's own code raises what it likes
                raise ToolError(f"{tool.name}: cannot be set up: {error or type(error).__name__}") from error
        return self._states[tool.name]

    async def _release(self) -> None:
        while self._states:
            name, state = self._states.popitem()
            try:
                async with asyncio.timeout(_RELEASE_S) as limit, waiting("tool", name, scope=limit):
                    await self._offers[name].tool.release(state)
            except Exception as error:  # the tool's own code raises what it likes
                log.warning("tool %s: release failed: %s: %s", name, type(error).__name__, error)


def _as_spec(given: Any, where: str) -> ToolSpec | McpSpec:
    if isinstance(given, str):
        return ToolSpec(tool=given)
    is_mcp = isinstance(given, Mapping) and "mcp" in given
    try:
        return msgspec.convert(given, McpSpec) if is_mcp else msgspec.convert(given, ToolSpec)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{where}: {error}; expected `module:name`, {{tool: module:name, args: {{…}}}} or {{mcp: {{…}}}}"
        ) from error
