"""Folders of weights on the hosts of engines, when the processes that made them are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.weights.weight_folder import WeightFolder, remove_left_folders

KILLED = """
import os, sys
from pathlib import Path
from async_rl.weights.weight_folder import WeightFolder
for number in (1, 2):
    WeightFolder(Path(sys.argv[1]) / f"run-{number}").copy_version(sys.argv[2], 4)
os._exit(9)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "version_4"
    folder.mkdir()
    (folder / "weights").write_bytes(b"weights")
    return folder


def test_what_killed_engines_left_is_removed_and_what_others_use_is_not(tmp_path: Path, source: Path) -> None:
    memory = tmp_path / "shm"
    command = [sys.executable, "-c", KILLED, str(memory), str(source)]
    subprocess.run(command, check=False, timeout=120)
    ours, other_run = WeightFolder(memory / "run-3"), memory / "other-1"
    other_run.mkdir()
    copy = Path(ours.copy_version(str(source), 4))
    assert sorted(path.name for path in memory.iterdir()) == ["other-1", "run-1", "run-2", "run-3"]
    remove_left_folders(memory, "run-")
    assert sorted(path.name for path in memory.iterdir()) == ["other-1", "run-3"]
    assert (copy / "weights").read_bytes() == b"weights"
    copy = Path(ours.copy_version(str(source), 5))
    remove_left_folders(memory, "run-")
    assert (copy / "weights").read_bytes() == b"weights"
    ours.clear_folder()
    assert sorted(path.name for path in memory.iterdir()) == ["other-1"]
