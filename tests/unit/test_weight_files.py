"""Folders of weights, of the publisher and of engines, whatever was killed while it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from async_rl.runtime.files import replaced_folder
from async_rl.trainer_protocol import Trainer
from async_rl.weights.publisher import WeightPublisher
from async_rl.weights.weight_folder import WeightFolder, remove_left_folders
from tests.support.scripted import RecordingTrainer


def new_publisher(folder: Path) -> WeightPublisher:
    return WeightPublisher(cast(Trainer, RecordingTrainer()), folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_stays_as_it_was_when_its_replacement_cannot_be_written(tmp_path: Path) -> None:
    def publish(content: str, error: Exception | None) -> None:
        with replaced_folder(tmp_path / "version_1") as scratch:
            (scratch / "weights").write_text(content)
            if error is not None:
                raise error

    publish("old", None)
    with pytest.raises(OSError, match="full"):
        publish("new", OSError("full"))
    assert names(tmp_path) == ["version_1"]
    assert (tmp_path / "version_1" / "weights").read_text() == "old"


def test_what_killed_processes_were_writing_goes_when_the_folder_is_written_again(tmp_path: Path) -> None:
    program = f"""
import os, pathlib, signal
from async_rl.runtime.files import replaced_folder
with replaced_folder(pathlib.Path({str(tmp_path / "hf")!r})) as scratch:
    (scratch / "weights").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    assert [name.split(".")[1] for name in names(tmp_path)] == ["hf"]
    others = [f".hf.{os.getppid()}.tmp", ".hf.notes.tmp", ".other.4194305.tmp"]  # no number is so high
    for name in others:
        (tmp_path / name).mkdir()
    with replaced_folder(tmp_path / "hf"):
        assert len(names(tmp_path)) == 1 + len(others)  # before it is written: its space may be needed
    assert names(tmp_path) == sorted([*others, "hf"])


async def test_what_a_killed_process_was_publishing_leaves_the_disk_at_the_next_start(tmp_path: Path) -> None:
    for name in ("version_3", ".version_4.4711.tmp", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").touch()
    await new_publisher(tmp_path).remove_leftovers()
    assert names(tmp_path) == ["other"]


async def test_the_current_version_stays_while_the_next_one_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.weights.publisher.KEEP_VERSIONS", 1)
    publisher = new_publisher(tmp_path)
    for version in (1, 2):
        (tmp_path / f"version_{version}").mkdir()
        await publisher.publish_files(version)
        publisher.current_version = 1
    await publisher.remove_old_files()  # an engine has caught up meanwhile
    with publisher.reading_files(1) as path:
        assert path.exists()
    publisher.current_version = 2
    await publisher.remove_old_files()
    assert names(tmp_path) == ["version_2"]


# -- folders of weights on the hosts of engines -------------------------------------------------------


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
