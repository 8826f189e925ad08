"""A plugin of the pytest processes in which `slices.py` runs cases: chooses them, and reports on each.

Each report is a line of JSON: all cases when they are known (`cases`), then for each one `begin` and `end`.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.proof import NEEDS, Case, Verdict

_NO_TIME, MORE_GPUS, REHEARSED, NOT_REHEARSED = (
    *("no time left", "needs more GPUs"),
    *("rehearsed", "not rehearsed"),
)
"""Verdicts with which the reason of a skipped case may begin."""

_REHEARSALS_TAKE = 4
"""Times the longest time that a case has on a GPU."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report-to", type=int, help="descriptor to which reports are written")
    parser.addoption(
        "--proof-end-s", type=float, help="begin no case that may last longer, of time.monotonic()"
    )
    parser.addoption("--needs", default=",".join(NEEDS), help="run only cases that need nothing else")
    parser.addoption("--done", default="", help="file with the ids of cases that are not run")
    parser.addoption("--rehearse", action="store_true", help="run the code of the cases on a CPU")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reporter(config))


def case_of(item: pytest.Item) -> Case:
    """Return a case by its marks; those of a test go before those of its file."""
    found: dict[str, Any] = {}
    for node in item.listchain():
        for mark in node.own_markers:
            if mark.name == "proof":
                found |= mark.kwargs
    if unknown := set(needs := found["needs"].split()) - set(NEEDS):
        raise pytest.UsageError(f"{item.nodeid} needs {unknown}, which are none of {NEEDS}")
    text = getattr(getattr(item, "function", None), "__doc__", None) or item.name
    title = " ".join(text.split("\n\n")[0].split())
    longest_s = found["seconds"] * (_REHEARSALS_TAKE if item.config.getoption("--rehearse", False) else 1)
    return Case(item.nodeid, title, needs, longest_s, found["value"])


class Reporter:
    """Reports the result of each case, in order."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self.cases = config, dict[str, Case]()
        self._session: pytest.Session | None = None
        os.set_inheritable(config.option.report_to, False)  # a process that is left behind keeps nothing open
        done = config.option.done
        self._done = set(Path(done).read_text().split("\n")) if done else set()

    def _report(self, **what: Any) -> None:
        os.write(self._config.option.report_to, json.dumps(what).encode() + b"\n")

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put the most valuable cases first, and leave out those that are done or that others may run."""
        option = self._config.option
        self.cases = {item.nodeid: case_of(item) for item in items}
        for case in self.cases.values():
            if left_out := [each for each in case.needs if each not in option.needs.split(",")]:
                case.why = f"NEEDS leaves out {', '.join(left_out)}"
        items[:] = [
            each for each in items if each.nodeid not in self._done and not self.cases[each.nodeid].why
        ]
        items.sort(key=lambda item: -self.cases[item.nodeid].value)
        self._report(cases=[asdict(case) for case in self.cases.values()])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Reports a file that cannot be imported as a failed case: its tests are missing from the table."""
        if report.failed:
            case = Case(report.nodeid, "The file's cases can be collected.", [], 0.0, 0.0, verdict="failed")
            case.why = _reason(report.longrepr)
            self._report(end=asdict(case))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        end_s = self._config.option.proof_end_s
        if end_s is not None and time.monotonic() + (longest := self.cases[item.nodeid].longest_s) > end_s:
            pytest.skip(f"{_NO_TIME}: it may last {longest:.0f} s")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._report(begin=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = self.cases[report.nodeid]
        case.seconds += report.duration
        case.figures |= {name: str(value) for name, value in report.user_properties}
        if report.failed:
            case.verdict, case.why = "failed", _reason(report.longrepr)
        elif report.skipped:
            case.why = _reason(report.longrepr).removeprefix("Skipped: ")
            verdicts: tuple[Verdict, ...] = (_NO_TIME, MORE_GPUS, NOT_REHEARSED, REHEARSED)
            case.verdict = next((each for each in verdicts if case.why.startswith(each)), "did not run")
            case.why = case.why.removeprefix(f"{case.verdict}: ")
        elif report.when == "call":
            case.verdict = "rehearsed" if self._config.option.rehearse else "held"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._report(end=asdict(self.cases[nodeid]))
        if self.cases[nodeid].verdict == "failed":
            assert self._session is not None
            self._session.shouldstop = "an error of CUDA stays in a process: the others run in a new one"


def _reason(text: Any) -> str:
    """Return the last line of pytest's report, which is the error itself."""
    words = text[2] if isinstance(text, tuple) else str(getattr(text, "reprcrash", text) or text)
    return str(words).strip().splitlines()[-1][:300]
