"""Ending processes in every state, without hitting others."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from async_rl.runtime.processes import Process, kill

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "from async_rl.runtime.processes import die_with_parent; die_with_parent(); import os, signal; "
    "print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"])
time.sleep(600)
"""


def started(code: str) -> tuple[subprocess.Popen[str], str]:
    """Run a process; yield it with its first line of output."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def described(pid: int) -> Process:
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return Process("here", pid, ticks)


def test_a_process_is_killed_when_it_is_stopped() -> None:
    process, _ = started(SLEEPER)
    with process:
        process.send_signal(signal.SIGSTOP)
        assert kill(described(process.pid), limit_s=60)
        assert process.wait(10) == -signal.SIGKILL
    assert kill(Process("here", process.pid, "0"), limit_s=60)  # it has ended already


def test_a_process_is_killed_when_more_descriptors_are_open_than_select_can_take() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    process, _ = started(SLEEPER)
    try:
        if soft < 4096:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        while not opened or opened[-1] < 1024:
            opened.append(os.open("/dev/null", os.O_RDONLY))
        with process:
            assert kill(described(process.pid), limit_s=60)
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_another_process_is_left_alone_when_it_has_the_number_now() -> None:
    process, _ = started(SLEEPER)
    with process:
        earlier = msgspec.structs.replace(described(process.pid), started="1")
        assert kill(earlier, limit_s=60)
        assert process.poll() is None
        process.kill()


@pytest.mark.real
def test_a_stopped_child_dies_when_its_parent_is_killed() -> None:
    process, child = started(PARENT)
    with process:
        stopped = psutil.Process(int(child))
        process.kill()
        process.wait(10)
        assert stopped.wait(10) is None or not stopped.is_running()
