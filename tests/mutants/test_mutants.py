"""Tests of the table of mutants and of what runs them. `make mutants` tries them and prints a table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.harness import ROOT, Result, Tree, bounded_run
from tests.mutants.table import MUTANTS, Mutant


def test_every_mutant_still_applies() -> None:
    texts = {mutant.file: (ROOT / mutant.file).read_text() for mutant in MUTANTS}
    places = {mutant.name: texts[mutant.file].count(mutant.old) for mutant in MUTANTS}
    assert {name: count for name, count in places.items() if count != 1} == {}
    assert [mutant.name for mutant in MUTANTS if mutant.old == mutant.new] == []
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


def test_tests_that_never_end_are_killed(tmp_path: Path) -> None:
    """pytest-timeout raises in the main thread, and an event loop swallows that inside a callback."""
    busy = "print('began', flush=True)\nwhile True: pass"
    code, output = bounded_run([sys.executable, "-c", busy], 10.0, tmp_path, os.environ)
    assert code is None
    assert re.fullmatch(r"began\n\nTimeout.*\n", output)


def test_a_run_that_had_no_time_for_a_mutant_proves_nothing_and_fails() -> None:
    command = [
        sys.executable,
        "-m",
        "tests.mutants",
        "--only",
        "bound-admits-a-batch-too-many",
        "--minutes",
        "0",
    ]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1, ended.stderr
    assert re.search(r"^0 of 1 mutants in \d+ s: 0 killed, 0 survived, 0 error$", ended.stdout, re.M)


@pytest.mark.parametrize(
    ("new", "verdict"),
    [("return not value", "killed"), ("return bool(value)", "survived"), ("return (", "error")],
)
def test_a_mutant_is_killed_by_a_test_that_fails_only(tmp_path: Path, new: str, verdict: str) -> None:
    result = _try_on_a_small_program(tmp_path, new, "assert truth(True)")
    assert result.verdict == verdict, result.output
    assert "value is True" in (tmp_path / "tree" / "package" / "code.py").read_text()


def test_a_test_that_fails_without_the_mutant_does_not_kill_it(tmp_path: Path) -> None:
    result = _try_on_a_small_program(tmp_path, "return not value", "assert truth(True) and False")
    assert result.verdict == "error"
    assert result.detail == "test_code.py::test_truth fails without the mutant, too (pytest exited with 1)"


def _try_on_a_small_program(tmp_path: Path, new: str, line: str) -> Result:
    folder = tmp_path / "original"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "code.py").write_text(
        "def truth(value: object) -> bool:\n    return value is True\n"
    )
    (folder / "test_code.py").write_text(
        f"from package.code import truth\n\ndef test_truth() -> None:\n    {line}\n"
    )
    mutant = Mutant("one", "It lies.", "package/code.py", "return value is True", new, ("test_code.py",))
    return Tree(tmp_path / "tree", folder).try_mutant(mutant)
