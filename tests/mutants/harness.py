"""Applies a mutant to a copy of the tree and runs the tests that must fail."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tests.mutants.table import Mutant

ROOT: Final = Path(__file__).parent.parent.parent

_TEST_TIMEOUT_S: Final = 60
"""The limit of one test. A mutant that makes a test wait forever counts as killed."""

_FAILED: Final = 1
"""The exit code of pytest when tests have failed. Any other one is an error in the mutant or its row."""

Verdict = Literal["killed", "survived", "error"]


class Result(NamedTuple):
    """The result of one mutant, or of the unchanged program."""

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

    def __init__(self, folder: Path) -> None:
        """Copies the repository to a folder that does not exist yet."""
        self._folder = folder
        shutil.copytree(ROOT, folder, ignore=_left_out)

    def try_mutant(self, mutant: Mutant) -> Result:
        """Applies a mutant, runs its tests, and undoes it."""
        path = self._folder / mutant.file
        text = path.read_text()
        if (count := text.count(mutant.old)) != 1:
            return Result("error", 0.0, f"the old text is {count} times in {mutant.file}, expected once", "")
        self._write(path, text.replace(mutant.old, mutant.new))
        try:
            code, seconds, output = self._test(mutant.tests)
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
        failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
        return Result("killed", seconds, failed[1] if failed else "", output)

    def run_unchanged(self, tests: Sequence[str]) -> Result:
        """Runs tests on the unchanged program. They must pass, or a killed mutant proves nothing."""
        code, seconds, output = self._test(tests)
        if code == 0:
            return Result("survived", seconds, "", output)
        return Result("error", seconds, f"without a mutant pytest exits with {code}", output)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Writes a module and removes its bytecode, which Python compares by size and whole seconds only."""
        path.write_text(text)
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)

    def _test(self, tests: Sequence[str]) -> tuple[int, float, str]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short"]
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment = {**own, "PYTHONPATH": str(self._folder), "OMP_NUM_THREADS": "1"}
        begin_s = time.monotonic()
        done = subprocess.run(
            [*command, f"--timeout={_TEST_TIMEOUT_S}", *tests],
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, time.monotonic() - begin_s, done.stdout


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Names that the copy does without."""
    unwanted = {name for name in names if name.startswith(".") or name == "__pycache__"}
    return unwanted | ({"runs", "models", "data"} & set(names) if Path(folder) == ROOT else set())
