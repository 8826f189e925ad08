"""Tests that every setting has an effect: the test that tests/settings/table.py names notices its absence."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from async_rl.config import describe_fields
from tests.settings.ignoring import sections_of_settings
from tests.settings.table import EFFECTS, WITHOUT

ROOT: Final = Path(__file__).parent.parent.parent


def test_every_setting_has_a_test_or_a_reason() -> None:
    keys = dict.fromkeys(key for key, *_ in describe_fields())
    assert EFFECTS.keys() <= keys.keys()
    assert keys.keys() - EFFECTS.keys() == WITHOUT.keys()
    assert len(WITHOUT) <= 0.05 * len(keys)
    assert EFFECTS.keys() <= sections_of_settings().keys()


@cache
def has_cases(file: str) -> dict[str, bool]:
    """Return whether each test function of a file is parametrized."""
    functions = (
        node for node in ast.parse((ROOT / file).read_text()).body if hasattr(node, "decorator_list")
    )
    return {node.name: "parametrize" in "".join(map(ast.unparse, node.decorator_list)) for node in functions}


def test_every_named_test_exists() -> None:
    """With the case in brackets where the test is parametrized."""
    for name in EFFECTS.values():
        (file, test), case = name.partition("[")[0].split("::"), name.partition("[")[2]
        assert test in has_cases(file), name
        assert case or not has_cases(file)[test], name


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_named_tests_fail_when_the_program_ignores_their_settings() -> None:
    """A third of the settings, drawn by the commit: all take nine minutes (`python -m tests.settings`)."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    keys = random.Random(commit).sample(sorted(EFFECTS), len(EFFECTS) // 3)
    done = subprocess.run(
        [sys.executable, "-m", "tests.settings", "--jobs", "2", *keys],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    problems = [line for line in done.stdout.splitlines() if "  noticed  " not in line]
    assert done.returncode == 0, "\n".join([*problems, done.stderr])
