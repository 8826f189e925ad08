"""The mutants are killed (long lane), and what tries them tells verdicts apart."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from verification.mutants.harness import ROOT, try_mutant
from verification.mutants.patching import Mutant, find_target
from verification.mutants.table import MUTANTS, WITHOUT

PROMISES = set(
    re.findall(
        r"^\| .+ \| `make [\w-]+` \| `(tests/\S+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name: str) -> None:
    result = try_mutant(MUTANTS[name])
    assert result.verdict == "killed", f"{result.detail}\n{result.output}"


def test_every_mutant_breaks_a_function_that_exists_and_names_tests_that_exist() -> None:
    for mutant in MUTANTS.values():
        find_target(mutant.target)
        for test in mutant.tests:
            file, *names = test.partition("[")[0].split("::")
            tree = ast.parse((ROOT / file).read_text())
            functions = {
                node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert set(names) <= functions, test


def test_every_promise_has_a_mutant_or_a_reason() -> None:
    assert len(PROMISES) > 40
    broken = {mutant.promise for mutant in MUTANTS.values()}
    assert broken | WITHOUT.keys() == PROMISES
    assert not broken & WITHOUT.keys()


CODE = "def truth(value):\n    return value is True\n\ndef unused():\n    pass\n"
TESTS = {
    "test_good.py": "from code_under_test import truth\n\ndef test_truth():\n    assert truth(True)\n",
    "test_weak.py": "from code_under_test import truth\n\ndef test_truth():\n    truth(True)\n",
    "test_broken.py": "from code_under_test import truth\n\ndef test_truth():\n    assert truth(1) / 0\n",
    "test_no_syntax.py": "def test_truth(:\n",
}
PLUGIN = """
import os
from pathlib import Path
from verification.mutants.patching import Mutant, apply_mutant
target = "code_under_test:" + os.environ["ASYNC_RL_MUTANT"]
mutant = Mutant("m", "It lies.", target, lambda *args: False, "", ())
apply_mutant(mutant, Path(os.environ["ASYNC_RL_MUTANT_REACHED"]).touch)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("function", "test", "verdict", "detail"),
    [
        ("truth", "test_good.py", "killed", "test_good.py::test_truth"),
        ("truth", "test_weak.py", "survived", "not noticed by test_weak.py"),
        ("unused", "test_good.py", "error", "no test calls code_under_test:unused"),
        ("truth", "test_no_syntax.py", "error", "pytest exited with"),
        ("truth", "test_broken.py", "error", "fails without the mutant"),
    ],
)
def test_verdicts_on_a_small_program(
    tmp_path: Path, function: str, test: str, verdict: str, detail: str
) -> None:
    (tmp_path / "code_under_test.py").write_text(CODE)
    (tmp_path / "small_plugin.py").write_text(PLUGIN)
    (tmp_path / test).write_text(TESTS[test])
    mutant = Mutant(function, "It lies.", f"code_under_test:{function}", lambda *args: False, "", (test,))
    result = try_mutant(mutant, tmp_path, "small_plugin")
    assert (result.verdict, detail in result.detail) == (verdict, True), result.output


def test_a_function_that_is_gone_is_an_error() -> None:
    with pytest.raises(LookupError, match="does not exist"):
        find_target("async_rl.staleness:Backlog.no_such_method")
