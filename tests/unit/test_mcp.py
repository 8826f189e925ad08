"""Tools of a real MCP server, over both transports."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from agent_loops.mcp import McpServer, McpServerSpec
from agent_loops.tool_loop import ToolLoop
from agent_loops.toolbox import Toolbox
from async_rl.errors import ConfigError, EnvironmentNotReady, ToolBroken, ToolError
from tests.support.scripted_session import ScriptedSession

pytestmark = pytest.mark.real_time

STDIO = {"command": [sys.executable, "-m", "tests.support.mcp_server", "stdio"]}
LONG_S = 100.0
"""Not reached unless something is wrong: a server starts in a second or two."""


@asynccontextmanager
async def http_server(port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A server that answers at a port."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.mcp_server", "http", str(port),
        env={**os.environ, "SERVER_KEY": "key-7"}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LONG_S):
            while True:
                assert process.returncode is None, "the server has ended"
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    await writer.wait_closed()
                    break
                except ConnectionRefusedError:
                    await asyncio.sleep(0.05)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
def port() -> Iterator[int]:
    """A port that no other program is given: it stays bound, and a server with SO_REUSEADDR may listen."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def by_name(server: McpServer) -> dict[str, Any]:
    return {tool.name: tool for tool in server.tools()}


async def test_tools_of_a_command_are_called_cut_and_restarted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_TOKEN", "token-7")
    monkeypatch.setenv("WANDB_API_KEY", "not for others")
    async with McpServer(
        McpServerSpec(**STDIO, connect_timeout_s=LONG_S, env={"TOKEN": "MY_TOKEN"})
    ) as server:
        tools = by_name(server)
        with pytest.raises(EnvironmentNotReady, match=r"has no tool 'sub'; there are add, secret"):
            server.tools(["sub"])
        function = tools["add"].schema["function"]
        assert (function["name"], function["description"]) == ("add", "Add two numbers.")
        assert function["parameters"]["required"] == ["a"]
        assert await tools["add"].call({"a": 2, "b": 3}, timeout_s=LONG_S) == "5"
        assert await tools["secret"].call({}, timeout_s=LONG_S) == "token-7 None"
        with pytest.raises(ToolError, match=r"fail: .*out of paper"):
            await tools["fail"].call({}, timeout_s=LONG_S)
        assert await tools["crowd"].call({"blocks": 5000}, timeout_s=LONG_S) == "\n".join("x" * 5000)
        with pytest.raises(ToolError, match=r"crowd: .*more than 10000 objects or blocks"):
            await tools["crowd"].call({"blocks": 10_001}, timeout_s=LONG_S)
        with pytest.raises(ToolError, match=r"add: .*a"):
            await tools["add"].call({"a": "two"}, timeout_s=LONG_S)
        with pytest.raises(ToolError, match=r"hang: no result within 0\.2 s$"):
            await tools["hang"].call({}, timeout_s=0.2)
        with pytest.raises(
            ToolBroken, match=r"die: the connection to the MCP server .* broke during the call"
        ):
            await tools["die"].call({}, timeout_s=LONG_S)
        # The next call has it started again; calls at the same time share the connection.
        sums = [tools["add"].call({"a": number}, timeout_s=LONG_S) for number in range(3)]
        assert await asyncio.gather(*sums) == ["1", "2", "3"]


@pytest.mark.real
async def test_tools_of_a_url_are_called_with_the_key_and_after_the_server_was_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, port: int
):
    monkeypatch.setenv("MY_KEY", "key-7")
    spec = McpServerSpec(
        url=f"http://127.0.0.1:{port}/mcp",
        headers={"x-key": "MY_KEY"},
        prefix="far_",
        connect_timeout_s=LONG_S,
    )
    async with http_server(port):
        server = McpServer(spec)
        await server.__aenter__()
        tools = by_name(server)
        assert await tools["far_add"].call({"a": 2}, timeout_s=LONG_S) == "3"
        with pytest.raises(ToolError, match=r"far_crowd: .*more than 10000 objects or blocks"):
            await tools["far_crowd"].call({"blocks": 10_001}, timeout_s=LONG_S)
        monkeypatch.setenv("MY_KEY", "wrong-8")
        with pytest.raises(EnvironmentNotReady, match="cannot be used") as refused:
            await McpServer(spec).__aenter__()
        assert "wrong-8" not in str(refused.value)
        monkeypatch.setenv("MY_KEY", "key-7")
        with pytest.raises(ToolBroken, match="far_die: "):
            await tools["far_die"].call({}, timeout_s=5.0)
    with pytest.raises(ToolBroken, match="far_add: "):
        await tools["far_add"].call({"a": 2}, timeout_s=0.5)
    async with http_server(port):
        assert await tools["far_add"].call({"a": 4}, timeout_s=LONG_S) == "5"
        await server.__aexit__(None, None, None)
    assert "key-7" not in caplog.text


class ByHand(McpServer):
    """A server whose calls fail at once, or when the test says so, over the connection that they began on."""

    def __init__(self) -> None:
        super().__init__(McpServerSpec(url="http://nowhere"))
        self.begun = {name: asyncio.Event() for name in ("late", "held")}
        self.fail = {name: asyncio.Event() for name in self.begun}

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        async def call_tool(name: str, arguments: dict[str, Any]) -> None:
            if name in self.begun:
                self.begun[name].set()
                await self.fail[name].wait()
            raise ConnectionError(name)

        self._tools = []
        yield SimpleNamespace(call_tool=call_tool)


async def test_a_late_error_of_an_earlier_connection_leaves_the_new_one_open():
    async with asyncio.timeout(LONG_S), ByHand() as server:
        late = asyncio.ensure_future(server.call_tool("late", {}))
        await server.begun["late"].wait()
        with pytest.raises(ToolBroken, match="broke during the call"):
            await server.call_tool("now", {})
        held = asyncio.ensure_future(server.call_tool("held", {}))
        await server.begun["held"].wait()  # over the new connection
        server.fail["late"].set()
        with pytest.raises(ToolBroken, match="broke during the call"):
            await late
        assert server.state().endswith(": connected")
        server.fail["held"].set()
        with pytest.raises(ToolBroken, match="broke during the call"):
            await held
        assert server.state().endswith(": not connected")


async def test_environment_error_when_the_command_is_no_server():
    command = [sys.executable, "-c", "print('hello')"]
    with pytest.raises(EnvironmentNotReady, match="cannot be used: MCPError: Connection closed"):
        async with McpServer(McpServerSpec(command=command, connect_timeout_s=20.0)):
            pass


async def test_the_reason_is_said_when_a_url_cannot_be_reached(port: int) -> None:
    for host, reason in (
        (f"127.0.0.1:{port}", "refused the connection: start it, or correct its url"),
        ("no-such-host.invalid", "cannot be used: ConnectError: .*not known"),
    ):
        with pytest.raises(EnvironmentNotReady, match=reason):
            async with McpServer(McpServerSpec(url=f"http://{host}/mcp")):
                pass


async def test_a_server_that_says_nothing_is_given_up_at_its_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/mcp"
        with pytest.raises(EnvironmentNotReady, match=r"did not answer within 0\.3 s"):
            async with McpServer(McpServerSpec(url=url, connect_timeout_s=0.3)):
                pass


def test_a_command_that_does_not_exist_is_refused_before_a_start():
    with pytest.raises(ConfigError, match="there is no program '/nowhere/server'"):
        McpServer(McpServerSpec(command=["/nowhere/server"]))


async def test_loop_offers_what_the_server_has_while_it_is_entered():
    call = '<tool_call>{"name": "m_add", "arguments": {"a": 1}}</tool_call>'
    server = {**STDIO, "prefix": "m_", "connect_timeout_s": LONG_S}
    loop = ToolLoop([{"mcp": server, "only": ["add"], "max_concurrent": 2}])
    session = ScriptedSession(call, "done")
    with pytest.raises(RuntimeError, match="enter the toolbox"):
        await loop.run(session.task, session)
    async with loop:
        session = ScriptedSession(call, "done", tool_timeout_s=LONG_S)
        await loop.run(session.task, session)
    assert session.tool_results == ["2"]
    assert [tool["function"]["name"] for tool in session.tools] == ["m_add"]


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ({"url": "http://x", "headers": {"A": "NOT_SET_HERE"}}, "environment variable NOT_SET_HERE"),
        ({"url": "http://x", "command": ["y"]}, "either a `command` or a `url`"),
        ({"url": "http://x", "env": {"A": "B"}}, "`env` is for a `command`"),
        ({"url": "http://x", "header": {}}, "unknown field `header`"),
    ],
)
def test_config_error_when_a_server_cannot_be_meant(spec: dict[str, Any], error: str):
    with pytest.raises(ConfigError, match=error):
        Toolbox([{"mcp": spec}])


def test_label_shows_no_key():
    spec = McpServerSpec(url="https://me:pass@example.org/mcp?key=hidden")
    assert spec.label == "example.org/mcp"
    assert McpServerSpec(command=["/usr/bin/npx", "serve", "--key", "hidden"]).label == "npx serve"
    assert McpServerSpec(command=["python", "-m", "serve", "hidden"]).label == "python -m serve"
