"""`async-rl new-loop`: its files work unchanged, and it overwrites nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.cli.inspection.try_out import rollout
from async_rl.cli.main import main
from async_rl.cli.new_loop import FILES, new_loop
from tests.support.writer import writing

ROOT = Path(__file__).parents[2]


def test_what_is_written_passes_its_own_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-loop", "my_capitals", "--dir", str(tmp_path)]) == 0
    assert f"cd {tmp_path}\npytest my_capitals\n" in capsys.readouterr().out
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "my_capitals"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
    assert "5 passed" in ended.stdout


def test_what_is_written_can_be_tried_out(
    tmp_path: Path, calculator: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new_loop("capitals_tried", tmp_path)
    monkeypatch.chdir(tmp_path)

    def answer(conversation: str) -> str:
        country = re.findall(r"capital of (\w+)\?", conversation)[-1]
        asked = f'<tool_call>\n{{"name": "lookup", "arguments": {{"country": "{country}"}}}}\n</tool_call>'
        found = re.findall(r"<tool_response>\n(.*)\n</tool_response>", conversation)
        return found[-1] if found else asked

    overrides = [f"model.path={calculator / 'model'}"]
    config = tmp_path / "capitals_tried" / "config.yaml"
    assert rollout(config, overrides, number=5, open_engines=writing(answer)) == 0
    out = capsys.readouterr().out
    assert "5 trajectories: mean reward 1.000, 0 failed" in out
    assert "(asked 1.000)" in out


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    assert main(["new-loop", "mine", "--dir", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-loop", "not a valid name of a Python package"),
        ("class", "not a valid name of a Python package"),
        ("../escape", "not a valid name of a Python package"),
        ("agent_loops", "a Python module 'agent_loops'"),
    ],
)
def test_a_name_that_cannot_be_imported_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, said: str
) -> None:
    assert main(["new-loop", name, "--dir", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_all_files_are_packaged(tmp_path: Path) -> None:
    assert {path.name for path in new_loop("a_name", tmp_path).iterdir()} == set(FILES)
    template = ROOT / "async_rl" / "cli" / "new_loop" / "template"
    assert {path.name for path in template.iterdir()} == {f"{name}.txt" for name in FILES}
    assert '"cli/new_loop/template/*"' in (ROOT / "pyproject.toml").read_text()
