"""Every acceptance case of docs/design/routing-replay.md has a test, and every marked test a case."""

import re
from pathlib import Path

from tests.support.pages import section

ROOT = Path(__file__).parent.parent.parent


def cases_in_docs() -> set[int]:
    text = section("design/routing-replay.md", "## Acceptance cases")
    return {int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}


def marked_cases() -> set[int]:
    marks = (
        mark
        for path in (ROOT / "tests").rglob("test_*.py")
        for mark in re.findall(r"\bpytest\.mark\.case\(([\d, ]+)\)", path.read_text())
    )
    return {int(number) for mark in marks for number in mark.split(",")}


def test_every_case_has_a_test_and_every_mark_a_case():
    documented = cases_in_docs()
    assert documented == set(range(1, 49))
    assert marked_cases() == documented
