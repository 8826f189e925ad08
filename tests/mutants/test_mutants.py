"""Tests that the tests named beside each mutant kill it. `make mutants` prints the results as a table."""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from tests.mutants.harness import ROOT, Tree, bounded_run
from tests.mutants.table import MUTANTS, Mutant


def part_of(mutants: Sequence[Mutant], part: str) -> list[Mutant]:
    """Returns the mutants of a part, such as `2/3`. Parts share none, and a mutant stays in its part."""
    number, parts = map(int, part.split("/"))
    assert 1 <= number <= parts
    return [mutant for mutant in mutants if zlib.crc32(mutant.name.encode()) % parts == number - 1]


CHOSEN = part_of(MUTANTS, os.environ.get("ASYNC_RL_MUTANTS", "1/1"))
"""All, but for CI, which has no time for them: it takes half of them, by turns from commit to commit."""


def test_each_mutant_is_in_one_part() -> None:
    parts = [part_of(MUTANTS, f"{number}/2") for number in (1, 2)]
    assert sorted(mutant.name for part in parts for mutant in part) == sorted(m.name for m in MUTANTS)
    assert all(len(part) > 0.4 * len(MUTANTS) for part in parts)
    assert part_of(MUTANTS, "1/1") == list(MUTANTS)


def test_every_mutant_still_applies() -> None:
    texts = {mutant.file: (ROOT / mutant.file).read_text() for mutant in MUTANTS}
    places = {mutant.name: texts[mutant.file].count(mutant.old) for mutant in MUTANTS}
    assert {name: count for name, count in places.items() if count != 1} == {}
    assert [mutant.name for mutant in MUTANTS if mutant.old == mutant.new] == []
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


def test_tests_that_never_end_are_killed(tmp_path: Path) -> None:
    """pytest-timeout raises in the main thread, and an event loop swallows that inside a callback."""
    busy = "print('began', flush=True)\nwhile True: pass"
    code, output = bounded_run([sys.executable, "-c", busy], 2.0, tmp_path, os.environ)
    assert code is None
    assert re.fullmatch(r"began\n\nTimeout.*\n", output)


@pytest.fixture(scope="session")
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Returns a copy of the repository in which all tests of the table pass; one worker runs them."""
    copy, folder = Tree(tmp_path_factory.mktemp("mutants") / "tree"), tmp_path_factory.getbasetemp()
    passed = (folder.parent if hasattr(request.config, "workerinput") else folder) / "unchanged"
    with FileLock(f"{passed}.lock"):
        if not passed.exists():
            result = copy.run_unchanged(sorted({test for mutant in CHOSEN for test in mutant.tests}))
            assert result.verdict != "error", result.output
            passed.touch()
    return copy


@pytest.mark.long
@pytest.mark.timeout(1800)  # the first one also runs all tests of the table on the unchanged program
@pytest.mark.parametrize("mutant", CHOSEN, ids=lambda mutant: mutant.name)
def test_the_tests_notice_when_the_program_is_broken(tree: Tree, mutant: Mutant) -> None:
    result = tree.try_mutant(mutant)
    assert result.verdict == "killed", f"{mutant.breaks} {result.detail}\n{result.output}"
