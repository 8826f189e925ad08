"""Runs tests in processes that ignore a setting: a test that then fails shows that the setting has an effect.

pytest collects all tests once. Each trial is a fork of this process that runs one test. Without an ignored
setting every test must pass, or its failure would show nothing.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from typing import IO, Final, NamedTuple

import pytest

from tests.settings.ignoring import ignore_setting

_LIMIT_S: Final = 120
"""The limit of one trial, which then counts as failed: a test that waits forever has noticed."""

_CONTROL_LIMIT_S: Final = 600
"""The limit of a trial that ignores no setting."""

_PASSED, _FAILED, _BROKEN = range(3)
"""Exit codes of a trial. A process that reaches its limit exits with 1, too."""


class Effect(NamedTuple):
    """A setting, and whether its test notices when the program ignores it."""

    key: str
    test: str
    seconds: float
    problem: str
    """Why nothing is shown; empty where the test fails without the setting and passes with it."""
    output: str


class _Trial(NamedTuple):
    key: str | None
    test: str
    output: IO[bytes]
    begin_s: float


class _Verdict(NamedTuple):
    code: int
    seconds: float
    output: str


class Trials:
    """A plugin of pytest that replaces its loop over the tests by trials, `jobs` at a time."""

    def __init__(self, tests: dict[str, str], jobs: int) -> None:
        """Take the test of each setting, by the setting's key."""
        self._tests, self._jobs = tests, jobs
        self._verdicts: dict[tuple[str | None, str], _Verdict] = {}
        self._reports: list[pytest.TestReport] = []
        """In the process of a trial: those of its test."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run each test once for every setting that it should notice, and once with all settings."""
        items = {item.nodeid: item for item in session.items}
        pairs: list[tuple[str | None, str]] = [(None, test) for test in dict.fromkeys(self._tests.values())]
        waiting = deque((key, test) for key, test in [*pairs, *self._tests.items()] if test in items)
        running: dict[int, _Trial] = {}
        while waiting or running:
            while waiting and len(running) < self._jobs:
                key, test = waiting.popleft()
                output = tempfile.TemporaryFile()  # noqa: SIM115, read and closed when the trial ends
                trial = _Trial(key, test, output, time.monotonic())
                running[self._fork(trial, items[test])] = trial
            process, status = os.waitpid(-1, 0)
            trial = running.pop(process)
            self._verdicts[trial.key, trial.test] = _verdict(trial, os.waitstatus_to_exitcode(status))
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the report of a phase of the test, in the process of its trial."""
        self._reports.append(report)

    def _fork(self, trial: _Trial, item: pytest.Item) -> int:
        """Start the process of a trial, and return its id."""
        process = os.fork()
        if process:
            return process
        code = _BROKEN
        try:
            for stream in (1, 2):
                os.dup2(trial.output.fileno(), stream)
            limit_s = _CONTROL_LIMIT_S if trial.key is None else _LIMIT_S
            faulthandler.dump_traceback_later(limit_s, exit=True)
            if trial.key is not None:
                ignore_setting(trial.key)
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            print(*(report.longreprtext for report in self._reports if not report.passed), sep="\n")
            if all(report.passed for report in self._reports):
                code = _PASSED
            elif any(report.failed for report in self._reports):
                code = _FAILED
        finally:
            sys.stdout.flush()
            os._exit(code)

    def effects(self) -> Iterator[Effect]:
        """Yield the result of each setting, in order."""
        for key, test in self._tests.items():
            whole, without = self._verdicts.get((None, test)), self._verdicts.get((key, test))
            if whole is None or without is None:
                yield Effect(key, test, 0.0, "there is no such test", "")
            elif whole.code != _PASSED:
                yield Effect(key, test, without.seconds, "the test fails or is skipped anyway", whole.output)
            else:
                problem = {_FAILED: "", _PASSED: "the test passes without it"}
                found = problem.get(without.code, "the trial broke")
                yield Effect(key, test, without.seconds, found, without.output)


def run_trials(tests: dict[str, str], jobs: int) -> list[Effect]:
    """Run the trials of settings, given the test of each."""
    trials = Trials(tests, jobs)
    files = sorted({test.partition("::")[0] for test in tests.values()})
    # The table imports test modules, so pytest comes too late to rewrite their asserts and those of plugins.
    late = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    pytest.main(["-q", "-s", "-p", "no:cacheprovider", *late, *files], plugins=[trials])
    return list(trials.effects())


def _verdict(trial: _Trial, code: int) -> _Verdict:
    with trial.output as output:
        output.seek(0)
        text = output.read().decode(errors="replace")
    return _Verdict(code, time.monotonic() - trial.begin_s, text)
