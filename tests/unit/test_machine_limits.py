"""How much of memory and descriptors is in use."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from async_rl.runtime.machine_limits import descriptor_usage, memory_usage


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
