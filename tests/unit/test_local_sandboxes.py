"""Commands in a local sandbox that try to get out, to take more, or to end its first process."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agent_loops.sandboxes import Sandboxes, ShellSandbox

pytestmark = pytest.mark.real_time


@pytest_asyncio.fixture
async def box(tmp_path: Path) -> AsyncIterator[ShellSandbox]:
    settings = {"kind": "local", "max_processes": 16, "memory_mb": 128, "scratch_mb": 4}
    async with Sandboxes(settings, folder=tmp_path) as sandboxes, sandboxes.open() as box:
        yield box


def python(code: str) -> str:
    return f"python3 - <<'END' 2>&1 | tail -1\n{code}\nEND"


@pytest.mark.needs("namespaces")
@pytest.mark.parametrize(
    "command",
    [
        "kill -9 1; kill -STOP 1; kill -9 -1",
        python("import os, resource as r\nr.prlimit(1, r.RLIMIT_CPU, (0, 0))"),
        python("import ctypes\nprint(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"),
        python("import ctypes\nc = ctypes.CDLL(None)\nprint(c.syscall(438, c.syscall(434, 1, 0), 1, 0))"),
        "unshare -Ur true",
        python("import ctypes\nprint(ctypes.CDLL(None).clone(0, 0, 0x10000011, 0))"),
        "for i in $(seq 200); do sleep 100 & done",
        "head -c 100000000 /dev/zero > big",
        "rm -rf /scratch/* /scratch/.[a-z]* /usr/bin/env /lib/os-release",
        "rm -f /bin /lib64; rm -rf /scratch; mv /bin /gone; mv /lib64 /usr /dev /scratch /tmp; mkdir /bin",
        "ln -sf /usr/x /program.py; ln -sf /scratch/x /stdin",
        python("x = bytearray(1 << 30)"),
        "(setsid sh -c 'yes' &) ; exit 0",
    ],
)
async def test_a_command_harms_only_itself(box: ShellSandbox, command: str) -> None:
    ran = await box.exec(command, timeout_s=20)
    assert not ran.timed_out
    await box.exec("kill -9 -1")  # what it has left running may hold all processes
    assert (await box.exec("echo usable")).stdout == "usable\n"


@pytest.mark.needs("namespaces")
async def test_calls_that_would_leave_the_sandbox_are_refused(box: ShellSandbox) -> None:
    refused = {
        python("import resource as r\nr.prlimit(1, r.RLIMIT_CPU, (0, 0))"): "PermissionError",
        python("import resource as r\nprint(r.prlimit(0, r.RLIMIT_CPU))"): "(",
        python("import ctypes\nprint(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"): "-1",
        python(
            "import ctypes\nc = ctypes.CDLL(None)\nprint(c.syscall(434, 1, 0) > 2, c.syscall(438, 3, 1, 0))"
        ): "True -1",
        "unshare -Ur true 2>&1": "Operation not permitted",
        python("import socket\nsocket.socket()"): "Operation not permitted",
        "ls /proc/1 /home /etc 2>&1 | tail -1": "No such file",
        "touch /usr/file 2>&1": "Read-only file system",
    }
    for command, told in refused.items():
        assert told in (await box.exec(command)).stdout, command


@pytest.mark.needs("namespaces")
async def test_folders_are_made_anywhere_but_in_those_of_this_machine(box: ShellSandbox) -> None:
    made = await box.exec("mkdir -p /app/a /tests /logs/verifier && cd /app && echo x > /tests/file && pwd")
    assert (made.exit_code, made.stdout) == (0, "/app\n")
    shown = (await box.exec("ls /")).stdout.split()
    for name in {"bin", "dev", "lib", "usr"} & set(shown):
        assert (await box.exec(f"touch /{name}/file || mv /{name} /tests")).exit_code == 1
    big = await box.exec("head -c 3000000 /dev/zero > /app/big && head -c 3000000 /dev/zero > /scratch/big")
    assert (big.exit_code, "No space left" in big.stderr) == (1, True)  # scratch_mb is of both
    assert (await box.exec("ls / ")).stdout.split() == shown


@pytest.mark.needs("namespaces")
async def test_this_machine_cannot_be_reached(box: ShellSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        ran = await box.exec(python(f"import socket\nsocket.create_connection({address})\nprint('I am out')"))
    assert "Error" in ran.stdout
    assert "I am out" not in ran.stdout


@pytest.mark.needs("namespaces")
async def test_processes_of_a_sandbox_end_with_it(tmp_path: Path) -> None:
    async with Sandboxes("local", folder=tmp_path) as sandboxes:
        async with sandboxes.open() as box:
            marker = f"{box.name}-sleeps"
            await box.exec(f"setsid sh -c 'sleep 1000; echo {marker}' > /dev/null 2>&1 &")
            assert running(marker)
    assert not running(marker)


def running(marker: str) -> bool:
    """Whether a process of this host has a text in its arguments."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False
