"""Runs the tests of a mutant with and without it."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from verification.mutants.patching import Mutant
from verification.mutants.plugin import NAME, REACHED

ROOT: Final = Path(__file__).parents[2]

_TEST_TIMEOUT_S: Final = 60
"""The limit of one test with a mutant, which may make it wait forever."""

_LIMIT_S: Final = 240
"""The limit of all tests of a mutant: an event loop swallows what a test's limit raises inside a callback."""

Verdict = Literal["killed", "survived", "error"]


class Result(NamedTuple):
    """The result of one mutant."""

    verdict: Verdict
    seconds: float
    detail: str
    """The test that failed, or the error."""
    output: str


def try_mutant(mutant: Mutant, root: Path = ROOT, plugin: str = "verification.mutants.plugin") -> Result:
    """Run the tests of a mutant, then the one that failed without it."""
    begin_s = time.monotonic()

    def ended(verdict: Verdict, detail: str, output: str) -> Result:
        return Result(verdict, time.monotonic() - begin_s, detail, output)

    with tempfile.TemporaryDirectory(prefix="async-rl-mutant-") as folder:
        reached = Path(folder) / "reached"
        code, output = run_tests(
            mutant.tests, root, ("-p", plugin), {NAME: mutant.name, REACHED: str(reached)}
        )
        was_reached = reached.exists()
    if code not in (0, 1, None):
        return ended("error", f"pytest exited with {code}: the mutant or its tests are wrong", output)
    if not was_reached:
        return ended("error", f"no test calls {mutant.target}", output)
    if code == 0:
        return ended("survived", f"not noticed by {' '.join(mutant.tests)}", output)
    found = re.search(r"^(?:FAILED|ERROR) (\S+?\.py::.+?)(?: - |$)", output, re.MULTILINE)
    failed = (found[1],) if found else mutant.tests
    if not _passes(failed, root):  # it proves nothing
        return ended("error", f"{' '.join(failed)} fails without the mutant, too", output)
    return ended("killed", " ".join(failed), output)


@functools.cache
def _passes(tests: tuple[str, ...], root: Path) -> bool:
    return run_tests(tests, root, (), {})[0] == 0


def run_tests(
    tests: Sequence[str], root: Path, options: Sequence[str], variables: Mapping[str, str]
) -> tuple[int | None, str]:
    """Run tests until the first failure; return pytest's exit code (None: they did not end) and output."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-m",
        "not long",
    ]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**own, "PYTHONPATH": f"{root}:{ROOT}", "OMP_NUM_THREADS": "1", **variables}
    command += [f"--timeout={_TEST_TIMEOUT_S}", *options, *tests]
    return bounded_run(command, _LIMIT_S, root, environment)


def bounded_run(
    command: Sequence[str], limit_s: float, cwd: Path, env: Mapping[str, str]
) -> tuple[int | None, str]:
    """Run a command, kill its group after a limit, and return its exit code (None then) and output."""
    # A file and not a pipe: servers that a killed pytest leaves behind would hold a pipe open.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read()
