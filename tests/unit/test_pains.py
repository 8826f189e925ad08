"""What docs/pains.md says is held by a test is held by one that exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_pain_has_tests_that_exist() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)$", (ROOT / "docs" / "pains.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 14))
    for number, row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"pain {number} names no test"
        for path, name in named:
            tree = ast.parse((ROOT / path).read_text())
            functions = {
                node.name
                for node in ast.walk(tree)
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert name in functions, f"pain {number}: {path} has no {name}"
