"""Memory, descriptors and disk: how much is in use, what a config needs, and what a lack looks like."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.config import Config, parse_config
from async_rl.errors import AgentLoopError, AsyncRLError, EnvironmentNotReady
from async_rl.run import descriptor_needs
from async_rl.run.descriptor_needs import check_descriptors
from async_rl.run.descriptor_needs import descriptor_needs as needs_of
from async_rl.runtime.machine_limits import descriptor_usage, memory_usage
from async_rl.runtime.shortages import MAX_SHORTAGE_S, is_shortage, wait_for_files, wait_out_shortage
from tests.support.run_config import config_with


def test_an_open_file_is_a_descriptor_in_use(tmp_path: Path) -> None:
    before = descriptor_usage()
    files = [os.open(tmp_path, os.O_RDONLY) for _ in range(7)]
    try:
        assert descriptor_usage() == (before.used + 7, before.limit)
    finally:
        for file in files:
            os.close(file)


def container(folder: Path, line: str, at: str, names: tuple[str, str], limit: str, cached: str) -> Path:
    """Return the file with the control group of a process; its group uses 8 GiB, of which 2 are a cache."""
    group = folder / at
    group.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (limit, str(8 << 30)), strict=True):
        (group / name).write_text(f"{text}\n")
    (group / "memory.stat").write_text(f"anon 5\n{cached} {2 << 30}\n")
    (folder / "cgroup").write_text(f"8:pids:/\n{line}\n")
    return folder / "cgroup"


V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


@pytest.mark.parametrize(
    ("line", "at", "names", "cached"),
    [
        ("0::/job/7", "job/7", V2, "inactive_file"),
        ("0::/not/seen/from/inside", "", V2, "inactive_file"),
        ("4:memory:/job/7", "memory/job/7", V1, "total_inactive_file"),
        ("4:cpu,memory:/elsewhere", "memory", V1, "total_inactive_file"),
    ],
)
def test_memory_is_that_of_the_container_without_caches(
    tmp_path: Path, line: str, at: str, names: tuple[str, str], cached: str
) -> None:
    mine = container(tmp_path, line, at, names, str((6 << 30) + 1), cached)
    assert memory_usage(tmp_path, mine) == (6 << 30, (6 << 30) + 1)


@pytest.mark.parametrize("limit", ["max", str((1 << 63) - 4096)])
def test_memory_is_that_of_the_machine_when_the_container_has_no_limit(tmp_path: Path, limit: str) -> None:
    mine = container(tmp_path, "0::/", "", V2, limit, "inactive_file")
    assert memory_usage(tmp_path, mine).limit == psutil.virtual_memory().total
    assert memory_usage(tmp_path, tmp_path / "none").limit == psutil.virtual_memory().total


# -- which errors say that this process lacked a descriptor or space on its disk ----------------------


def caused_by(cause: BaseException) -> AgentLoopError:
    error = AgentLoopError("agent loop mine:Loop raised")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EMFILE, "Too many open files"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (sqlite3.OperationalError("database or disk is full"), True),
        (sqlite3.OperationalError("database is locked"), False),
        (caused_by(OSError(errno.EMFILE, "Too many open files")), True),
        (caused_by(ExceptionGroup("two", [ValueError("no"), OSError(errno.ENFILE, "files")])), True),
        (caused_by(ExceptionGroup("two", [ValueError("no"), KeyError("x")])), False),
        (ValueError("no"), False),
    ],
)
def test_a_shortage_is_found_among_the_causes(error: BaseException, expected: bool) -> None:
    assert is_shortage(error) == expected


def test_an_error_that_is_raised_from_its_own_group_is_no_endless_chain() -> None:
    error = ValueError("no")
    error.__cause__ = ExceptionGroup("one", [error])
    assert not is_shortage(error)


async def test_a_start_ends_with_a_sentence_when_the_disk_takes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, data: bytes) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(AsyncRLError, match=r"spool cannot be written: Input/output error; make the disk"):
        await wait_for_files(tmp_path / "spool")


async def test_what_waits_for_space_looks_for_it_about_once_per_second() -> None:
    """Thousands of trajectories may wait to be stored on one full disk."""
    attempts: list[float] = []

    async def store() -> None:
        attempts.append(asyncio.get_running_loop().time())
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        await wait_out_shortage(store)
    assert attempts[1] - attempts[0] < 0.5
    assert attempts[-1] - attempts[0] >= MAX_SHORTAGE_S
    assert len(attempts) < 1.1 * MAX_SHORTAGE_S


# -- the limit of open files is raised at the start and checked against what the config needs ---------


def two_engines(**rollout: Any) -> Config:
    return config_with("engine.num_engines=2", rollout=rollout)


def run_limited(soft: int, hard: int, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )


def test_the_soft_limit_is_raised_when_a_command_starts() -> None:
    code = (
        "import resource\n"
        "from async_rl.cli.main import main\n"
        "main(['schema'])\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    assert run_limited(256, 2000, code).stdout.splitlines()[-1] == "2000"


@pytest.mark.real
def test_a_config_is_refused_in_one_sentence_when_the_limit_is_too_low(
    calculator: Path, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run: {{name: r, dir: {tmp_path}}}\n"
        f"model: {{path: {calculator / 'model'}, dtype: float32}}\n"
        f"data: {{path: {calculator / 'data' / 'tasks.jsonl'}}}\n"
        "rollout: {max_concurrent_trajectories: 2000, num_workers: 0,\n"
        "  max_new_tokens: 64, max_context_tokens: 256}\n"
    )
    code = f"import sys; from async_rl.cli.main import main; sys.exit(main(['check', {str(config)!r}]))"
    done = run_limited(512, 1024, code)
    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "2000 for calls to engines" in line
    assert "the limit is 1024: raise the hard limit" in line
    done = run_limited(512, 4096, code)
    assert done.returncode == 0, done.stderr
    assert "file descriptors: at most " in done.stdout
    assert " of 4096" in done.stdout


def test_agents_count_in_the_driver_or_in_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop:
        descriptors_per_trajectory = 6

    alone = needs_of(two_engines(max_concurrent_trajectories=100), (Loop(), object()))
    assert alone.driver["agents"] == 600
    assert alone.worker == {}
    shared = needs_of(two_engines(max_concurrent_trajectories=100, num_workers=3), (Loop(),))
    assert shared.driver["agents"] == 0
    assert shared.worker["agents"] == 6 * 50  # of two workers, while the third one is missing
    assert (shared.driver["calls to engines"], shared.worker["calls to engines"]) == (0, 50)
    monkeypatch.setattr(descriptor_needs, "raise_descriptor_limit", lambda: 500)
    with pytest.raises(EnvironmentNotReady, match="each rollout worker needs up to 956"):
        check_descriptors(two_engines(max_concurrent_trajectories=100, num_workers=1), (Loop(),))


def test_what_a_config_needs_follows_from_its_settings() -> None:
    needs = needs_of(two_engines(max_concurrent_trajectories=50, max_branches=3)).driver
    assert (needs["calls to engines"], needs["calls to models"], needs["engines"]) == (200, 0, 6)
    assert needs["the queue"] == 8  # however many groups are outstanding: their files are closed
    assert needs_of(two_engines(num_workers=5)).driver["rollout workers"] == 20


def test_judges_and_teachers_count_where_sessions_are() -> None:
    tree = {
        "model": {"path": "m"},
        "data": {"path": "d.jsonl", "validation": [{"path": "v.jsonl"}]},
        "engine": {"num_engines": 2},
        "evaluation": {"max_concurrent": 20},
        "models": {
            "judge": {"path": "j", "num_engines": 4},
            "other": {"path": "k", "urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]},
        },
    }
    alone = needs_of(parse_config(tree | {"rollout": {"max_concurrent_trajectories": 100}}))
    assert alone.driver["engines"] == 3 * (2 + 4 + 2)
    assert alone.driver["calls to models"] == 100 + 20
    rollout = {"max_concurrent_trajectories": 100, "num_workers": 3}
    shared = needs_of(parse_config(tree | {"rollout": rollout}))
    assert (shared.driver["calls to models"], shared.worker["calls to models"]) == (0, 50)
