"""What becomes of tests whose machine lacks what they need, or whose lane lacks the time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

SUITE = """
import pytest
from tests.support import environment

environment.NEEDS["a boat"] = environment.Need(lambda: "there is no water", "move to the sea")
environment.NEEDS["ground"] = environment.Need(lambda: "", "")

@pytest.fixture
def crew():
    raise AssertionError("nothing is set up for a test that is skipped")

@pytest.mark.needs("a boat")
@pytest.mark.parametrize("number", range(2))
def test_it_sails(number, crew): ...

@pytest.mark.needs("ground")
def test_it_walks(): ...
"""


@pytest.fixture(autouse=True)
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("ASYNC_RL_WITHOUT", raising=False)
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    pytester.makepyfile(SUITE)
    pytester.makeini("[pytest]\nmarkers = needs\nasyncio_default_fixture_loop_scope = function")


def run(pytester: pytest.Pytester) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "tests.support.environment")


def test_what_is_missing_is_named_in_the_last_lines_and_an_error_in_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(pytester)
    assert result.ret == 0
    result.assert_outcomes(passed=1, skipped=2)
    assert result.outlines[-2:] == [
        "LEFT OUT: 2 tests that need a boat: there is no water",
        "  To run them: move to the sea.",
    ]
    monkeypatch.setenv("CI", "true")
    result = run(pytester)
    assert result.ret == 1
    result.assert_outcomes(passed=1, errors=2)
    result.stdout.fnmatch_lines(
        ["*needs a boat: there is no water. Remedy: move to the sea; or ASYNC_RL_WITHOUT=a boat"]
    )
    monkeypatch.setenv("ASYNC_RL_WITHOUT", "something,a boat")
    result = run(pytester)
    assert result.ret == 0
    assert result.outlines[-1] == "LEFT OUT: 2 tests that need a boat: ASYNC_RL_WITHOUT names it"


# -- a lane with less time than its tests -------------------------------------------------------------


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
