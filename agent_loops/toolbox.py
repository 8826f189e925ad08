"""The tools of a run as its config lists them, and their use by each trajectory.

```
 Toolbox  one per run                   tools, limits of concurrent calls, MCP servers
    └ TrajectoryTools  one per trajectory   states of stateful tools, from their first call to its end
         └ answer_call(call)                  a message for the policy, whatever happens
```
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Annotated, Any, Final, Self

import msgspec
from msgspec import Meta

from agent_loops.mcp import McpServer, McpServerSpec
from agent_loops.parsing import Call, MalformedCall
from agent_loops.tools import Tool, load_tool
from async_rl.errors import ConfigError, ToolBroken, ToolError
from async_rl.rollout.session.api import Session
from async_rl.runtime.serving_clock import serving_timeout
from async_rl.runtime.supervision import finished
from async_rl.runtime.waits import waiting
from async_rl.types import Task

log = logging.getLogger(__name__)

_RELEASE_S: Final = 10.0
"""The time for releasing the state of one tool; a longer release is cancelled and logged."""
_NO_TOOL: Final = "unknown"
"""The label of calls of tools that do not exist: text of the policy must not become a label."""

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]


class _Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of any tool."""

    max_concurrent: PositiveInt | None = None
    """The most concurrent calls over all trajectories; waiting for a slot does not count for `timeout_s`."""
    timeout_s: PositiveFloat | None = None
    """The longest call; by default the tool's own limit, or `rollout.tool_timeout_s`."""


class ToolSpec(_Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool that is a function or class, by dotted path."""

    tool: str
    args: dict[str, Any] = {}
    """Keyword arguments of a class."""
    name: str | None = None


class McpSpec(_Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tools of an MCP server."""

    mcp: McpServerSpec
    only: list[str] | None = None
    """Names of the offered tools; all by default."""


class _LimitedTool:
    """A tool with its limit of concurrent calls."""

    def __init__(self, tool: Tool, limits: _Limits) -> None:
        self.tool = tool
        self.timeout_s = limits.timeout_s
        self._limit = limits.max_concurrent
        self._semaphore = None if self._limit is None else asyncio.Semaphore(self._limit)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one of the slots for concurrent calls."""
        if self._semaphore is None:
            yield
            return
        if self._semaphore.locked():
            with waiting(
                "tool", self.tool.name, why=lambda: f"all {self._limit} concurrent calls are running"
            ):
                await self._semaphore.acquire()
        else:
            await self._semaphore.acquire()  # without waiting
        try:
            yield
        finally:
            self._semaphore.release()


class Toolbox:
    """The tools of a run. It is entered for the whole run and holds the connections to MCP servers.

    Args:
        specs: Dotted paths, or mappings with the fields of `ToolSpec` or `McpSpec`.

    Raises:
        ConfigError: A tool is missing or cannot be described, or two have one name.

    Example:
        >>> from agent_loops.parsing import ToolCall
        >>> call = ToolCall(name="calculator", arguments={"expression": "6 * 7"})
        >>> async with Toolbox(["agent_loops.calculator:calculator"]) as toolbox:
        ...     async with toolbox.open_tools(session.task, session) as tools:
        ...         message = await tools.answer_call(call)
        >>> message["content"]
        '42'
    """

    def __init__(self, specs: Sequence[str | Mapping[str, Any]]) -> None:
        if isinstance(specs, str) or not specs:
            raise ConfigError(f"rollout.agent_loop_args: tools is {specs!r}; expected a list of dotted paths")
        self._tools: dict[str, _LimitedTool] = {}
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
        """The schemas of the tools for the policy; those of MCP servers only once the toolbox is entered."""
        return [limited.tool.schema for limited in self._tools.values()]

    @property
    def listing(self) -> str:
        """The names of the tools in one line."""
        servers = [f"those of the MCP server {spec.mcp.label}" for _, spec in self._servers]
        return ", ".join([*(name for name in self._tools), *servers])

    async def __aenter__(self) -> Self:
        """Enter the tools that trajectories share something of, and connect to the MCP servers.

        Raises:
            EnvironmentNotReady: A tool cannot be entered, or a server does not answer or lacks a tool.
        """
        async with AsyncExitStack() as stack:
            for limited in self._tools.values():
                if limited.tool.shared is not None:
                    await stack.enter_async_context(limited.tool.shared)
            for server, spec in self._servers:
                await stack.enter_async_context(server)
                for tool in server.tools(spec.only):
                    self._add(tool, spec)
                    stack.callback(self._tools.pop, tool.name)
            self._open = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._open.aclose()

    @asynccontextmanager
    async def open_tools(
        self, task: Task, session: Session, max_result_chars: int = 16_384
    ) -> AsyncIterator[TrajectoryTools]:
        """Give one trajectory access to the tools, and release their states when the block ends.

        The release happens however the block ends; a cancellation waits for it.
        """
        if missing := [server for server, _ in self._servers if not server.is_open]:
            raise RuntimeError(
                f"{missing[0].state()}: enter the toolbox (or its agent loop) first: `async with`"
            )
        tools = TrajectoryTools(self._tools, task, session, max_result_chars)
        try:
            yield tools
        finally:
            await tools.release_states()

    def _add(self, tool: Tool, limits: _Limits) -> None:
        if tool.name in self._tools:
            raise ConfigError(
                f"rollout.agent_loop_args: two tools are called {tool.name!r}; give one another `name` "
                "(`prefix` for those of an MCP server), or exclude it with `only`"
            )
        self._tools[tool.name] = _LimitedTool(tool, limits)


class TrajectoryTools:
    """The tools of a toolbox as one trajectory uses them, with the states of stateful tools."""

    def __init__(
        self, tools: Mapping[str, _LimitedTool], task: Task, session: Session, max_result_chars: int
    ) -> None:
        self._tools = tools
        self._task = task
        self._session = session
        self._max_result_chars = max_result_chars
        self._locks: dict[str, asyncio.Lock] = {}
        self._states: dict[str, Any] = {}
        """States by tool, in the order of their creation."""

    async def answer_call(self, call: Call) -> dict[str, Any]:
        """Run one call and return its tool message, with an error as text; outcome and metrics count it.

        Raises:
            ToolBroken: The tool does not work, so that the attempt cannot be scored.
        """
        limited = None if isinstance(call, MalformedCall) else self._tools.get(call.name)
        clock = asyncio.get_running_loop().time
        begin = started = clock()
        broken: ToolError | None = None
        try:
            if isinstance(call, MalformedCall):
                raise ToolError(call.error)
            if limited is None:
                raise ToolError(f"there is no tool {call.name!r}; there are {', '.join(self._tools)}")
            async with self._lock_of(limited.tool), limited.slot():
                started = clock()
                timeout_s = limited.timeout_s or limited.tool.timeout_s or self._session.tool_timeout_s
                state = await self._state_of(limited.tool, timeout_s)
                content = await limited.tool.call(call.arguments, timeout_s=timeout_s, state=state)
            error = False
        except ToolError as problem:
            content, error = f"Error: {problem}", True
            if problem.failure_kind != "agent_wrong":
                broken = problem
        self._session.record_tool_call(
            error=error,
            tool=_NO_TOOL if limited is None else limited.tool.name,
            seconds=clock() - started,
            waited_s=started - begin,
            fault="" if broken is None else str(broken),
        )
        if isinstance(broken, ToolBroken):
            raise broken
        if len(content) > self._max_result_chars:
            cut = len(content) - self._max_result_chars
            content = f"{content[: self._max_result_chars]}\n[{cut} more characters were cut]"
        message = {"role": "tool", "content": content}
        return message if isinstance(call, MalformedCall) else {**message, "name": call.name}

    def refuse_call(self, limit: int) -> dict[str, Any]:
        """Return the tool message for a call beyond the limit of calls in one turn."""
        self._session.record_tool_call(error=True, tool=_NO_TOOL)
        return {"role": "tool", "content": f"Error: not called: at most {limit} calls a turn are allowed"}

    async def release_states(self) -> None:
        """Release all states, the newest first, even if one of them fails."""
        await finished(self._release_all(), limit_s=_RELEASE_S * (1 + len(self._states)))

    def _lock_of(self, tool: Tool) -> Any:
        """Return the lock that runs calls with a shared state one after the other, in order."""
        return self._locks.setdefault(tool.name, asyncio.Lock()) if tool.keeps_state else nullcontext()

    async def _state_of(self, tool: Tool, timeout_s: float) -> Any:
        if not tool.keeps_state:
            return None
        if tool.name not in self._states:
            try:
                async with serving_timeout(timeout_s) as limit, waiting("tool", tool.name, scope=limit):
                    self._states[tool.name] = await tool.create(self._task)
            except ToolBroken:
                raise
            except Exception as error:  # the tool's own code may raise anything
                told = str(error) or type(error).__name__
                raise ToolBroken(f"{tool.name}: cannot be set up: {told}") from error
        return self._states[tool.name]

    async def _release_all(self) -> None:
        while self._states:
            name, state = self._states.popitem()
            try:
                async with asyncio.timeout(_RELEASE_S) as limit, waiting("tool", name, scope=limit):
                    await self._tools[name].tool.release(state)
            except Exception as error:  # the tool's own code may raise anything
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
