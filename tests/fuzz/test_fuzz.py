"""A short run of the fuzz targets, where atheris is installed; by hand they run for longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="pip install atheris; see tests/fuzz/codec.py")


@pytest.mark.case(28)
def test_no_frame_makes_anything_but_the_documented_errors(tmp_path: Path) -> None:
    target = Path(__file__).parent / "codec.py"
    command = [sys.executable, str(target), "-runs=20000", "-seed=1", str(tmp_path / "found")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "Done 20000 runs" in ended.stderr
