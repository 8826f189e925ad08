"""The target file of a run for Prometheus."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from async_rl.errors import EnvironmentNotReady
from async_rl.observability.discovery import announced


def told(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_is_found_while_it_lasts(tmp_path: Path, fails: bool) -> None:
    folder = tmp_path / "targets"
    with suppress(KeyError), announced("http://127.0.0.1:9464", "run", folder):
        assert told(folder) == [{"targets": ["127.0.0.1:9464"], "labels": {"run": "run"}}]
        assert os.listdir(folder) == ["run.json"]
        if fails:
            raise KeyError
    assert os.listdir(folder) == []


def test_others_may_read_it_when_the_umask_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "targets"
    before = os.umask(0o077)
    try:
        with announced("http://127.0.0.1:9464", "run", folder):
            assert folder.stat().st_mode & 0o777 == 0o755
            assert (folder / "run.json").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("url", "target"),
    [("http://[::1]:9464", "[::1]:9464"), ("http://[::]:9464", f"{socket.gethostname()}:9464")],
)
def test_the_target_is_an_address_that_can_be_reached(tmp_path: Path, url: str, target: str) -> None:
    with announced(url, "run", tmp_path):
        assert told(tmp_path)[0]["targets"] == [target]


def test_another_runs_file_stays_when_it_has_taken_the_name(tmp_path: Path) -> None:
    with announced("http://127.0.0.1:1", "run", tmp_path):
        with announced("http://127.0.0.1:2", "run", tmp_path):
            pass
        assert not (tmp_path / "run.json").exists()
        (tmp_path / "run.json").write_text("another's")
    assert (tmp_path / "run.json").read_text() == "another's"


def test_the_remedy_is_named_when_the_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(EnvironmentNotReady, match=r"metrics\.targets_dir"),
        announced("http://127.0.0.1:1", "run", tmp_path / "file"),
    ):
        pass
