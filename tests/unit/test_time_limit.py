"""A lane with less time than its tests: what did not run is named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abcdef":
        (tmp_path / f"test_{name}.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    return tmp_path


def run_pytest(folder: Path, *options: str) -> str:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "tests.support.time_limit",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, "-c", "/dev/null", "--rootdir", folder, *options, folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.real
def test_files_are_named_when_there_was_no_time_for_them(folder: Path) -> None:
    output = run_pytest(folder, "--minutes", "0", "-n", "2")
    assert "NOT RUN, as 0 minutes were over:" in output
    assert re.findall(r"^  (\S+): 2 tests$", output, re.M) == [f"test_{name}.py" for name in "abcdef"]
    assert "NOT RUN" not in run_pytest(folder, "--minutes", "5")
