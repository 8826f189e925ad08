"""Applies a mutant to a copy of the tree and runs the tests that must fail."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tests.mutants.table import Mutant

ROOT: Final = Path(__file__).parent.parent.parent

_TEST_TIMEOUT_S: Final = 60
"""The limit of one test. A mutant that makes a test wait forever counts as killed."""

_UNCHANGED_TIMEOUT_S: Final = 300
"""The limit of one test on the unchanged program, where none waits forever but the machine may be busy."""

_HANG_S: Final = 180
"""The limit of one mutant: an event loop swallows what a test's limit raises inside one of its callbacks."""

_FAILED: Final = 1
"""The exit code of pytest when tests have failed. Any other one is an error in the mutant or its row."""

Verdict = Literal["killed", "survived", "error"]


class Result(NamedTuple):
    """The result of one mutant."""

    verdict: Verdict
    seconds: float
    detail: str
    """The test that failed, or the error."""
    output: str


class Tree:
    """A copy of the repository, without its hidden files and what runs left in it.

    Example:
        >>> tree = Tree(tmp_path / "tree")
        >>> tree.try_mutant(mutant).verdict
        'killed'
    """

    def __init__(self, folder: Path, original: Path = ROOT) -> None:
        """Copies the repository, or another folder, to a folder that does not exist yet."""
        self._folder = folder
        shutil.copytree(original, folder, ignore=_left_out)
        (folder / ".tools").symlink_to(ROOT / ".tools")  # promtool, for mutants of the alerts

    def try_mutant(self, mutant: Mutant) -> Result:
        """Applies a mutant, runs its tests, undoes it, and runs the test that failed without it."""
        path = self._folder / mutant.file
        text = path.read_text()
        if (count := text.count(mutant.old)) != 1:
            return Result("error", 0.0, f"the old text is {count} times in {mutant.file}, expected once", "")
        self._write(path, text.replace(mutant.old, mutant.new))
        try:
            code, seconds, output = self._test(mutant.tests, _TEST_TIMEOUT_S, limit_s=_HANG_S)
        finally:
            self._write(path, text)
        if code == 0:
            return Result("survived", seconds, f"not noticed by {' '.join(mutant.tests)}", output)
        if code != _FAILED:
            return Result(
                "error", seconds, f"pytest exited with {code}: the mutant or its tests are wrong", output
            )
        if mutant.says and not re.search(mutant.says, output):
            return Result("error", seconds, f"it failed, but did not say {mutant.says!r}", output)
        found = re.search(r"^FAILED (.+?)(?: - |$)", output, re.MULTILINE)
        failed = found[1] if found else ""
        # A test that fails on the unchanged program as well proves nothing.
        code, more_s, unchanged = self._test([failed] if failed else mutant.tests, _UNCHANGED_TIMEOUT_S)
        seconds += more_s
        if code != 0:
            detail = f"{failed or 'a test'} fails without the mutant, too (pytest exited with {code})"
            return Result("error", seconds, detail, unchanged)
        return Result("killed", seconds, failed, output)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Writes a module and removes its bytecode, which Python compares by size and whole seconds only."""
        path.write_text(text)
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)

    def _test(
        self, tests: Sequence[str], timeout_s: int, limit_s: float | None = None
    ) -> tuple[int, float, str]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short"]
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment = {**own, "PYTHONPATH": str(self._folder), "OMP_NUM_THREADS": "1"}
        begin_s = time.monotonic()
        command.extend([f"--timeout={timeout_s}", *tests])
        code, output = bounded_run(command, limit_s, cwd=self._folder, env=environment)
        return (_FAILED if code is None else code), time.monotonic() - begin_s, output


def bounded_run(
    command: Sequence[str], limit_s: float | None, cwd: Path, env: Mapping[str, str]
) -> tuple[int | None, str]:
    """Runs a command, kills its group after a limit, and returns its exit code (None then) and output."""
    # A file and not a pipe: servers that a killed pytest leaves behind would hold a pipe open.
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=cwd, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            output.write(f"\nTimeout: not ended within {limit_s} s.\n")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read()


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Names that the copy does without."""
    unwanted = {name for name in names if name.startswith(".") or name == "__pycache__"}
    return unwanted | ({"runs", "models", "data"} & set(names) if Path(folder) == ROOT else set())
