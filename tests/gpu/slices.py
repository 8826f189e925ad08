"""Runs cases in processes of pytest, within a time; one that crashes or hangs loses only its own case.

A process runs one case after the other, because it imports for ten seconds. It ends with the first one that
fails, and another one takes the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.gpu.machine import ROOT
from tests.gpu.proof import NEEDS, Case

_START_S = 240.0
"""Longest time until a process has collected the cases, and between two of them."""


@dataclass
class Slice:
    """The cases of a suite, of which `run` runs what fits."""

    suite: Sequence[str]
    """Arguments of pytest."""
    log: Path
    """What pytest prints."""
    minutes: float | None = None
    """The last case ends within them, if longest times are right."""
    needs: Sequence[str] = NEEDS
    rehearse: bool = False
    cases: dict[str, Case] = field(default_factory=dict)
    """By id; those that are done are not run."""
    ended: Callable[[Case], None] = lambda case: None
    """Called with each case that has ended."""
    grace_s: float = 20.0
    """Time beyond its longest time that a case has to end by itself, with a stack: pytest-timeout interrupts
    Python, but no kernel."""
    begin_s: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Run the cases."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        finished = {node for node, case in self.cases.items() if case.is_done}
        while True:
            num_before = len(finished)
            self._run_process(finished)
            left = [case for node, case in self.cases.items() if node not in finished and not case.why]
            if len(finished) == num_before or not left:
                break
        self.cases = dict(sorted(self.cases.items(), key=lambda each: -each[1].value))

    def _run_process(self, finished: set[str]) -> None:
        """Run cases in a process until it ends; add those that have ended to `finished`."""
        process, reports = self._start(finished)
        running, num_reports, is_late = None, 0, threading.Event()

        def end_late() -> None:
            is_late.set()
            end_family(process.pid)

        timer = threading.Timer(_START_S, end_late)
        timer.start()
        try:
            with open(reports, encoding="utf-8") as lines:
                for line in lines:
                    timer.cancel()
                    report, limit_s, num_reports = json.loads(line), _START_S, num_reports + 1
                    if "cases" in report:
                        self._add_cases([Case(**each) for each in report["cases"]], finished)
                    elif "begin" in report:
                        running = self.cases[report["begin"]]
                        limit_s = running.longest_s + self.grace_s
                    else:
                        running = None
                        self._end_case(Case(**report["end"]), finished)
                    timer = threading.Timer(limit_s, end_late)
                    timer.start()
        finally:
            timer.cancel()
            end_family(process.pid)
            code = process.wait()
        if running is not None or not num_reports:
            lost = running or Case("the suite", "The cases can be collected.", [], _START_S, 0.0)
            lost.verdict, lost.why = "failed", f"its process ended with code {code}: see {self.log}"
            if is_late.is_set():
                lost.why = f"did not end within {lost.longest_s:g} s, and was killed: see {self.log}"
            self._end_case(lost, finished)

    def _add_cases(self, found: Sequence[Case], finished: set[str]) -> None:
        """Take the cases that a process has found; of those that are not run, keep what is known."""
        kept = finished | {case.node for case in found if case.why and case.node in self.cases}
        self.cases |= {case.node: case for case in found if case.node not in kept}

    def _end_case(self, case: Case, finished: set[str]) -> None:
        is_new = case.node not in finished
        finished.add(case.node)
        self.cases[case.node] = case
        if is_new:
            self.ended(case)

    def _start(self, finished: set[str]) -> tuple[subprocess.Popen[bytes], int]:
        """Start a process; return it and the descriptor of its reports."""
        read, write = os.pipe()
        done = self.log.with_suffix(".done")
        done.write_text("\n".join(finished))
        command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.session", "-q", "--no-header"]
        command += ["--continue-on-collection-errors", f"--report-to={write}", f"--done={done}"]
        command.append(f"--needs={','.join(self.needs)}")
        if self.minutes is not None:
            command.append(f"--proof-end-s={self.begin_s + 60 * self.minutes}")
        environment = dict(os.environ)
        if self.rehearse:
            command.append("--rehearse")
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*command, *self.suite],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[write],
                start_new_session=True,
            )
        os.close(write)
        return process, read


def end_family(pid: int) -> None:
    """Kill a process and all that it has started; those of them whose own parents have ended stay."""
    family = []
    with suppress(psutil.NoSuchProcess):
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
