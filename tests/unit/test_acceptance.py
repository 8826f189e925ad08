"""Every acceptance case of docs/design/routing-replay.md has a test, and every marked test a case."""

import ast
import re
from pathlib import Path

from tests.support.pages import section

ROOT = Path(__file__).parent.parent.parent


def cases_in_docs() -> set[int]:
    text = section("design/routing-replay.md", "## Acceptance cases")
    return {int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}


def marked_tests() -> dict[str, set[int]]:
    """Which cases each test function (or whole file, by `pytestmark`) is marked with."""
    found: dict[str, set[int]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                numbers = {n for d in function.decorator_list for n in marked_with(d)}
                if numbers:
                    assert function.name.startswith("test_"), f"{path}: {function.name} is no test"
                    found[f"{path.relative_to(ROOT)}::{function.name}"] = numbers
    return found


def marked_with(decorator: ast.expr) -> list[int]:
    if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.case"):
        return []
    return [ast.literal_eval(argument) for argument in decorator.args]


def test_every_case_has_a_test_and_every_mark_a_case():
    documented = cases_in_docs()
    assert documented == set(range(1, 49))
    marked = set().union(*marked_tests().values())
    assert marked - documented == set()
    assert sorted(documented - marked) == []
