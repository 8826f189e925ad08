"""The environment that `make setup` builds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

LIST = Path(__file__).parents[2] / "requirements" / "pip-check.txt"
CONFLICT = re.compile(r"(\S+) \S+ (?:requires|has requirement) ([\w.-]+)")


@pytest.mark.skipif(
    not (Path(sys.prefix) / "requirements.stamp").exists(), reason="this environment is not from `make setup`"
)
def test_pip_reports_only_conflicts_that_are_listed_with_a_reason() -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    found = {match.groups() if (match := CONFLICT.match(line)) else (line,) for line in lines}
    listed = [
        tuple(line.split()) for line in LIST.read_text().splitlines() if line and not line.startswith("#")
    ]
    assert len(set(listed)) == len(listed)
    assert found - set(listed) == set(), f"fix the versions in requirements/, or list them in {LIST.name}"
    assert set(listed) - found == set(), f"these are solved: take them out of {LIST.name}"
