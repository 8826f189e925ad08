"""Has sandboxes in containers until it is killed.

`python -m tests.support.sandbox_owner SOCKET FOLDER NUMBER`
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from agent_loops.sandboxes import Sandboxes


async def main(socket: str, folder: str, number: str) -> None:
    """Start sandboxes, say so, and wait."""
    backend = {"kind": "containers", "socket": socket, "image": "python:3.11"}
    async with Sandboxes(backend, folder=Path(folder), pool=1) as sandboxes, AsyncExitStack() as stack:
        for _ in range(int(number)):
            await stack.enter_async_context(sandboxes.open())
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
