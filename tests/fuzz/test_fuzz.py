"""A short run of the fuzz targets; by hand they run for longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="atheris has wheels for x86_64 only; see requirements/dev.txt")

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def fuzz(target: str, folder: Path) -> None:
    path = Path(__file__).parent / target
    # Through a shell that forks: the peak of memory that libFuzzer bounds (`ru_maxrss`) is kept over `exec`;
    # a direct child would start with the peak of these tests.
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, str(path), "-runs=20000", "-seed=1"]
    ended = subprocess.run(
        [*command, str(folder / "found")],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Done 20000 runs" in ended.stderr


@pytest.mark.case(28)
def test_no_frame_makes_anything_but_the_documented_errors(tmp_path: Path) -> None:
    fuzz("codec.py", tmp_path)


def test_no_response_of_an_engine_makes_anything_but_the_documented_errors(tmp_path: Path) -> None:
    fuzz("engine_responses.py", tmp_path)
