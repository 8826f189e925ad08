"""Sandboxes end after `kill -9` of the process that has them, with or without its reaper."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from agent_loops.sandboxes import Sandboxes
from tests.support.fake_container_engine import fake_container_engine
from tests.support.fake_machines import FakeMachines

pytestmark = [pytest.mark.real_time, pytest.mark.real]

LIMIT_S = 120.0
NUM_OPEN = 3


@asynccontextmanager
async def owner(folder: Path) -> AsyncIterator[tuple[Process, str, FakeMachines]]:
    """A process with sandboxes, the socket, and what runs there; the log is in `folder / "log"`."""
    async with asyncio.timeout(LIMIT_S), fake_container_engine(folder) as (socket, machines):
        arguments = ["-m", "tests.support.sandbox_owner", socket, str(folder / "log"), str(NUM_OPEN)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[2]
        )
        try:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
            await machines.until(NUM_OPEN + 1)
            yield process, socket, machines
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def test_the_reaper_ends_sandboxes_when_their_process_is_killed(tmp_path: Path) -> None:
    async with owner(tmp_path) as (process, _, machines):
        process.send_signal(signal.SIGKILL)
        await machines.until(0)


async def test_the_next_process_ends_sandboxes_when_their_process_was_killed_with_its_reaper(
    tmp_path: Path,
) -> None:
    async with owner(tmp_path) as (process, socket, machines):
        running = psutil.Process(process.pid)
        killed = [running, *running.children(recursive=True)]
        for each in killed:
            each.send_signal(signal.SIGSTOP)
        for each in killed:
            each.send_signal(signal.SIGKILL)
        await process.wait()
        assert len(machines.requested) == NUM_OPEN + 1
        backend = {"kind": "containers", "socket": socket, "image": "python:3.11"}
        async with Sandboxes(backend, folder=tmp_path / "log"):
            await machines.until(0)
