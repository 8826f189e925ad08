"""Starts processes as user code does, and is killed by tests: `python -m tests.support.process_owner KIND`.

Each process notes its pid in a folder when it runs.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from agent_loops.harness.place import local_place
from agent_loops.mcp import McpServer, McpServerSpec
from agent_loops.openai_agent import OpenAIAgentLoop
from agent_loops.sandbox import Interpreter, Limits
from async_rl.runtime.user_processes import ProcessScope, ReleasedBy, write_reports
from async_rl.types import Task

ESCAPES = """
import os, sys, time
folder = sys.argv[1]
def note(name):
    with open(f"{folder}/{name}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}")
    time.sleep(1000)
if not os.fork():
    note("child")
if not os.fork():
    os.setsid()
    if not os.fork():
        note("daemon")  # forked twice, in a session of its own, below process 1
    os._exit(0)
if not os.fork():
    os.setsid()
    note("session")
note("agent")
"""
"""An agent program with a child, a daemon that has forked twice and a child in a session of its own."""

NUM_ESCAPES = 4


def pids_in(folder: Path) -> list[int]:
    """Return the processes that have noted their pids in a folder; a file without one is being written."""
    texts = [path.read_text() for path in folder.iterdir() if path.suffix != ".new"]
    return [int(text) for text in texts if text]


async def agent_program(folder: Path) -> None:
    """Run an agent program that never ends."""
    from tests.support.talk import lines, talking

    bench, _ = talking(lines())
    loop = OpenAIAgentLoop(command=[sys.executable, "-c", ESCAPES, str(folder)])
    await loop.run(Task(task_id="t", messages=[]), bench.session)


async def sandbox(folder: Path) -> None:
    """Run a program that sleeps in a sandbox."""
    interpreter = await Interpreter.start(Limits(wall_s=1000))
    await interpreter.run_program("import time")
    sleeping = asyncio.ensure_future(interpreter.run_program("time.sleep(1000)"))
    await asyncio.sleep(0)  # it has sent the program
    (folder / "sandbox").write_text(str(interpreter.process.pid))
    await sleeping


async def mcp_server(folder: Path) -> None:
    """Use an MCP server that ignores the end of its input."""
    spec = McpServerSpec(command=[sys.executable, "-m", "tests.support.mcp_server", "stubborn", str(folder)])
    async with McpServer(spec):
        await asyncio.Event().wait()


async def own_process(folder: Path) -> None:
    """Start a process as a tool may, without ending it."""
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    (folder / "own").write_text(str(process.pid))
    await process.wait()


async def container(folder: Path) -> None:
    """Hold something that is no process of this host."""
    async with ReleasedBy(["touch", str(folder.parent / "released")]):
        (folder / "held").write_text(str(os.getpid()))
        await asyncio.Event().wait()


async def workspace(folder: Path) -> None:
    """Hold the workspace of a command-line agent."""
    async with local_place(None, max_bytes=1 << 20) as place:
        (folder.parent / "workspace").write_text(place.workspace)
        (folder / "held").write_text(str(os.getpid()))
        await asyncio.Event().wait()


def note_and_sleep(folder: Path) -> None:
    """Note the pid of this process, and never end."""
    (folder / "of multiprocessing").write_text(str(os.getpid()))
    time.sleep(1000)


async def of_multiprocessing(method: str, folder: Path) -> None:
    """Start a process by `multiprocessing`; asked by a file, note that the reaper knows of it."""
    process = multiprocessing.get_context(method).Process(target=note_and_sleep, args=[folder])
    process.start()
    while not (folder.parent / "asked").exists():  # noqa: ASYNC110, a file raises no event
        await asyncio.sleep(0.02)
    async with ReleasedBy(["true"]):  # is entered once the reaper knows everything
        (folder.parent / "known").touch()
        await asyncio.Event().wait()


STARTED: dict[str, Any] = {
    "sandbox": (sandbox, 1),
    "mcp_server": (mcp_server, 1),
    "agent_program": (agent_program, NUM_ESCAPES),
    "other": (own_process, 1),
}
"""What starts processes of each kind, and how many note their pids."""

HELD: dict[str, Any] = {"container": container, "workspace": workspace}
"""What holds something that is no process."""


async def _main(kind: str, folder: Path, run_dir: Path) -> None:
    write_reports(run_dir)
    with ProcessScope("the test").active():
        if kind in multiprocessing.get_all_start_methods():
            await of_multiprocessing(kind, folder)
        await (HELD[kind] if kind in HELD else STARTED[kind][0])(folder)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
