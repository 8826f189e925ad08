"""What tests need of the machine beyond `make setup`, and what happens where it is missing.

A test names its needs by a mark: `@pytest.mark.needs("chromium")`. Where a machine lacks one, the test is
skipped, and the last lines of the run say what is missing and what to do about it. With `CI=true` it is an
error instead, because skipped tests go unnoticed there; a service of others that does not answer is not.
`ASYNC_RL_WITHOUT=chromium,namespaces` skips the tests on purpose, in CI too.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest

from agent_loops.sandbox import Limits, Sandbox
from async_rl.errors import EnvironmentNotReady
from tests.support.advisories import service_problem
from tests.support.browser import FLAGS

_TOOLS = Path(__file__).parents[2] / ".tools"
"""Where `scripts/tools.sh` unpacks programs, and leaves why it could not."""

SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin") or ""
"""An interpreter that other users may read: as root, guarded programs run as another."""


@dataclass(frozen=True)
class Need:
    """Something that a machine has or lacks."""

    problem: Callable[[], str]
    """Why it is missing; empty where it is there."""

    remedy: str

    required_in_ci: bool = True
    """Whether CI fails without it; it need not depend on a service of others."""


def program(command: str) -> str:
    """Path of a command that starts, for tests that are marked to need its tool."""
    path, problem = _look_up(command)
    assert path is not None, f"{problem}; the test has no mark that it needs it"
    return path


@functools.cache
def _look_up(command: str) -> tuple[str | None, str]:
    """A command from the PATH or from `.tools/bin`, whichever starts, and otherwise why none does."""
    problems = []
    for path in filter(None, (shutil.which(command), shutil.which(command, path=_TOOLS / "bin"))):
        if not (problem := start_problem(path, command)):
            return path, ""
        problems.append(f"{path} does not start: {problem}")
    return None, "; ".join(problems) or f"{command} is neither on the PATH nor in .tools/bin"


def start_problem(path: str, command: str) -> str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Chromium may tell its version and yet lack what it needs to show a page.
        arguments = ["--version"]
        if command == "chromium":
            arguments = [*FLAGS, f"--user-data-dir={profile}", "--dump-dom", "about:blank"]
        try:
            done = subprocess.run(
                [path, *arguments], capture_output=True, text=True, timeout=60, errors="replace", check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if done.returncode == 0:
        return ""
    return f"exit code {done.returncode}, {(done.stderr.splitlines() or ['no message'])[-1]}"


def _tool(name: str, *commands: str) -> Need:
    def problem() -> str:
        if found := "; ".join(filter(None, (_look_up(command)[1] for command in commands))):
            reason = _TOOLS / f"{name}.problem"
            return reason.read_text().strip() if reason.exists() else found
        return ""

    return Need(problem, f"run `make tools`, or install {name}, with {' and '.join(commands)} on the PATH")


def _sandbox(limits: Limits) -> Callable[[], str]:
    def problem() -> str:
        try:
            Sandbox(limits)
        except (EnvironmentNotReady, OSError) as error:
            return str(error)
        return ""

    return problem


def _apt() -> str:
    missing = [command for command in ("apt-get", "dpkg") if shutil.which(command) is None]
    return f"there is no {' and no '.join(missing)}" if missing else ""


def _pypi() -> str:
    try:
        with urlopen("https://pypi.org/simple/pip/", timeout=20):
            return ""
    except OSError as error:
        return f"PyPI does not answer: {error}"


NEEDS = {
    "chromium": _tool("chromium", "chromium"),
    "prometheus": _tool("prometheus", "prometheus", "promtool"),
    "namespaces": Need(
        _sandbox(Limits()),
        "run the tests on the host, or in a container whose seccomp profile allows unshare and mount",
    ),
    "guarded": Need(
        _sandbox(Limits(isolation="guarded", python=SYSTEM_PYTHON)),
        "run the tests as an ordinary user, or as a root that may switch users, with a Python in /usr/bin",
    ),
    "advisories": Need(
        service_problem, "run the tests where the advisory service answers", required_in_ci=False
    ),
    "apt": Need(_apt, "run the tests on Debian or Ubuntu, with their package mirror in reach"),
    "pypi": Need(_pypi, "run the tests where PyPI answers", required_in_ci=False),
}


_ON_PURPOSE = "ASYNC_RL_WITHOUT names it"


@functools.cache
def _problem(need: Need) -> str:
    return need.problem()


def leave_out(item: pytest.Item, name: str, problem: str) -> None:
    """Skip a test that lacks something, to be reported at the end; in CI, fail it."""
    required = os.environ.get("CI") == "true" and NEEDS[name].required_in_ci
    if required and problem != _ON_PURPOSE:
        pytest.fail(
            f"needs {name}: {problem}. Remedy: {NEEDS[name].remedy}; or ASYNC_RL_WITHOUT={name}",
            pytrace=False,
        )
    item.user_properties.append(("left_out", (name, problem)))
    pytest.skip(f"needs {name}: {problem}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Look for what a test needs before anything is set up for it."""
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if name in os.environ.get("ASYNC_RL_WITHOUT", "").split(","):
                leave_out(item, name, _ON_PURPOSE)
            if problem := _problem(NEEDS[name]):
                leave_out(item, name, problem)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest's own, so that this comes after its last line
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Report what was left out."""
    yield
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None:  # in a worker of pytest-xdist
        return
    left_out = Counter(
        tuple(value)
        for report in terminal.stats.get("skipped", ())
        for key, value in getattr(report, "user_properties", ())  # a file that failed to collect has none
        if key == "left_out"
    )
    for (name, problem), number in sorted(left_out.items()):
        terminal.write_line(
            f"LEFT OUT: {number} {'test' if number == 1 else 'tests'} that need {name}: {problem}"
        )
        if problem != _ON_PURPOSE:
            terminal.write_line(f"  To run them: {NEEDS[name].remedy}.")
