"""A real MCP server for tests: `python -m tests.support.mcp_server stdio | stubborn FOLDER | http PORT`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests", log_level="ERROR")


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def secret() -> str:
    """Say what was handed over, and what was not."""
    return f"{os.environ.get('TOKEN')} {os.environ.get('WANDB_API_KEY')}"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("out of paper")


@server.tool()
async def hang() -> str:
    """Never return."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def crowd(blocks: int) -> list[str]:
    """Answer in so many blocks."""
    return ["x"] * blocks


@server.tool()
def die() -> str:
    """Take the whole server down."""
    os._exit(1)


class _NeedsKey:
    """Accepts only requests with the key."""

    def __init__(self, app: Any, key: str) -> None:
        self.app, self.key = app, key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and dict(scope["headers"]).get(b"x-key", b"").decode() != self.key:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, send)


def main() -> None:
    if sys.argv[1] == "stdio":
        server.run("stdio")
        return
    if sys.argv[1] == "stubborn":  # outlives the end of its input
        (Path(sys.argv[2]) / "server").write_text(str(os.getpid()))
        server.run("stdio")
        time.sleep(1000)
    import uvicorn

    app = _NeedsKey(server.streamable_http_app(), os.environ["SERVER_KEY"])
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error")


if __name__ == "__main__":
    main()
