"""The known-issues regression index in docs/design/simulation.md names tests that exist."""

import ast
import re
from pathlib import Path

from tests.support.pages import section

ROOT = Path(__file__).parents[2]


def test_every_known_issue_has_tests_that_exist() -> None:
    index = section("design/simulation.md", "## Known-issues regression index")
    rows = re.findall(r"^\| (\d+) \|(.*)$", index, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 14))
    for number, row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"issue {number} names no test"
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text())
            functions = {
                node.name
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert name in functions, f"issue {number}: {path} has no {name}"
