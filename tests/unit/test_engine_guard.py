"""The guard around a server process, with `sleep` for a server."""

from __future__ import annotations

import asyncio
import importlib.metadata
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from async_rl.config import Config, ModelConfig, RoutingConfig, SGLangEngines
from async_rl.engines.sglang import guard
from async_rl.engines.sglang.server import SGLangServer
from async_rl.errors import EnvironmentNotReady
from tests.support.processes import wait_gone

SERVER = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"


def start(scratch: Path, program: str, *, grace_s: float = 0.0) -> subprocess.Popen[str]:
    """Start a guard around a Python program."""
    scratch.mkdir()
    (scratch / "socket").touch()
    arguments = [str(os.getpid()), str(scratch), str(grace_s), sys.executable, "-c", program]
    return subprocess.Popen(
        [sys.executable, "-I", guard.__file__, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str]) -> int:
    """End a server that has said something, by its guard."""
    process.stdout.readline()
    process.terminate()
    return process.wait(15)


@pytest.fixture
def shared_file() -> Iterator[Path]:
    """A path in shared memory."""
    path = Path(f"/dev/shm/async_rl_guard_test_{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


def test_its_exit_code_is_passed_on_when_the_server_ends(tmp_path: Path) -> None:
    with start(tmp_path / "scratch", "raise SystemExit(7)") as process:
        assert process.wait(10) == 7
    assert not (tmp_path / "scratch").exists()


def test_the_whole_group_ends_when_the_guard_is_told_to(tmp_path: Path) -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SERVER!r}])"
    with start(tmp_path / "scratch", child) as process:
        grandchild = int(process.stdout.readline())
        process.terminate()
        assert process.wait(10) == 128 + signal.SIGKILL
        wait_gone(grandchild)
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize("code", [3, 137])
def test_shared_memory_is_unlinked_when_the_server_leaves_some(
    tmp_path: Path, shared_file: Path, code: int
) -> None:
    """Also when it ends in order, for which there may be grace, soon after it has begun to use it."""
    ends = "import signal, sys; signal.signal(15, lambda *_: sys.exit(3)); " if code == 3 else ""
    make = f"import mmap; f = open({str(shared_file)!r}, 'w+b'); f.truncate(4096); "
    program = f"{ends}{make}m = mmap.mmap(f.fileno(), 4096); {SERVER}"
    with start(tmp_path / "scratch", program, grace_s=10 if code == 3 else 0) as process:
        assert end(process) == code
    assert not shared_file.exists()


@pytest.mark.parametrize(
    ("mode", "access"),
    [("rb", "mmap.ACCESS_READ"), ("r+b", "mmap.ACCESS_COPY"), ("r+b", "mmap.ACCESS_WRITE")],
    ids=["weights that it only reads", "weights that it maps privately", "memory of another process"],
)
def test_files_in_shared_memory_stay_when_others_made_them(
    tmp_path: Path, shared_file: Path, mode: str, access: str
) -> None:
    making = shared_file.with_suffix(".making")
    program = (
        "import mmap, os, time\nprint('begun', flush=True)\n"  # the guard has seen what was there before it
        f"while not os.path.exists({str(shared_file)!r}): time.sleep(0.01)\n"
        f"f = open({str(shared_file)!r}, {mode!r})\n"
        f"m = mmap.mmap(f.fileno(), 4096, access={access})\n{SERVER}"
    )
    with start(tmp_path / "scratch", program) as process:
        process.stdout.readline()
        with making.open("w+b") as file:
            file.truncate(4096)
            making.rename(shared_file)
            with mmap.mmap(file.fileno(), 4096) if access == "mmap.ACCESS_WRITE" else nullcontext():
                end(process)
    assert shared_file.exists()


def test_files_in_shared_memory_stay_when_they_are_older_than_the_server(
    tmp_path: Path, shared_file: Path
) -> None:
    shared_file.write_bytes(bytes(4096))
    program = f"import mmap; f = open({str(shared_file)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 4096); {SERVER}"
    with start(tmp_path / "scratch", program) as process:
        end(process)
    assert shared_file.exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_when_its_starter_is_gone(tmp_path: Path, how: signal.Signals) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    starter = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-I', {guard.__file__!r}, str(os.getpid()),\n"
        f"    {str(scratch)!r}, '0', sys.executable, '-c', {SERVER!r}], start_new_session=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True) as process:
        server = int(process.stdout.readline())
        process.send_signal(how)
        process.wait(10)
        wait_gone(server)
        assert process.stdout.read() == ""  # at its end: the guard, which holds it too, has ended
    assert not scratch.exists()


class SleepingServer(SGLangServer):
    """A server that takes its port, reports its process and its scratch folder, and sleeps."""

    def command(self) -> list[str]:
        bind = f"import os, socket, time; s = socket.create_server(('127.0.0.1', {self._port}))\n"
        report = "print(os.getpid(), os.environ['TMPDIR'], flush=True)\n"
        return [sys.executable, "-c", bind + report + "time.sleep(600)"]

    async def reported(self, number: int) -> tuple[int, Path]:
        """Return what the server has reported at its start of this number, from 0 on."""
        lines: list[str] = []
        for _ in range(1000):
            if len(lines := self.log_path.read_text().splitlines()) > number:
                break
            await asyncio.sleep(0.02)
        process, scratch = lines[number].split()
        return int(process), Path(scratch)


def sleeping_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SleepingServer:
    """Return one that has not started, whether SGLang is installed or not."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.15")
    config = Config(
        engine=SGLangEngines(device="cpu"),
        model=ModelConfig(path=str(folder)),
        routing=RoutingConfig(replay="off"),
    )
    return SleepingServer(config, index=0, log_dir=folder)


@pytest.mark.real_time
async def test_starts_and_stops_of_a_server_come_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may have given up a start that still runs in the server's actor."""
    server = sleeping_server(tmp_path, monkeypatch)
    try:
        await server.start()
        await server.stop()
        first, second = await asyncio.gather(server.start(), server.start(), return_exceptions=True)
        assert first is None
        assert isinstance(second, EnvironmentNotReady)
        await server.stop()
        await asyncio.gather(server.start(), server.stop())
        assert server.poll() is not None
    finally:
        await server.stop()


@pytest.mark.real_time
@pytest.mark.parametrize("then", ["stop", "start"])
async def test_the_server_ends_when_its_guard_alone_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    server = sleeping_server(tmp_path, monkeypatch)
    await server.start()
    process, scratch = await server.reported(0)
    try:
        os.kill(server.pid, signal.SIGKILL)
        assert await server.wait() == -signal.SIGKILL
        await (server.stop() if then == "stop" else server.start())
        # It has ended, though its new parent may not have reaped it: then it has no descriptors.
        assert not Path(f"/proc/{process}/fd/0").exists()
        assert not scratch.exists()
        if then == "start":
            assert (await server.reported(1))[0] != process  # it got the port
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        await server.stop()
