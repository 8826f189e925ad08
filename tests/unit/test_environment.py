"""What happens to tests whose machine lacks what they need."""

from __future__ import annotations

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
