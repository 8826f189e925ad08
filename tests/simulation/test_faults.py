"""Seeds draw their faults from one table, and a new row leaves the draws of the others as they are."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from verification.simulation import faults
from verification.simulation.faults import (
    FAMILIES,
    FAULTS,
    PROMISES,
    SHARED_STREAM,
    Family,
    FaultRow,
    Promise,
    promise_table,
)
from verification.simulation.scenario import draw


def test_every_fault_has_a_family_and_the_first_ones_share_a_stream() -> None:
    assert set(FAMILIES) == set(get_args(Family)) == {row.family for row in FAULTS.values()}
    assert len(SHARED_STREAM) == 26, "give a new fault a `share`: it must not change what seeds have drawn"


def test_the_docs_list_what_attacks_each_promise() -> None:
    assert (
        set(PROMISES) == set(get_args(Promise)) == {each for row in FAULTS.values() for each in row.attacks}
    )
    page = Path(__file__).parents[2] / "docs/design/simulation.md"
    assert promise_table() in page.read_text(), f"paste into {page}:\n{promise_table()}"


@pytest.mark.parametrize("family", ["trainer", "user"])
def test_a_new_fault_leaves_the_draws_of_the_others(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    before = draw(14)
    monkeypatch.setitem(faults.FAULTS, "new_fault", FaultRow(family, ("progress",), "new", share=1.0))
    after = draw(14)
    assert tuple(i for i in after.injections if i.kind != "new_fault") == before.injections
    new_tasks = [task for task in after.tasks if task.metadata["trouble"] == "new_fault"]
    assert [task for task in after.tasks if task not in new_tasks] == [
        task for task in before.tasks if task.task_id not in {new.task_id for new in new_tasks}
    ]
    assert bool(new_tasks) == (family == "user")
    assert (len(after.injections) > len(before.injections)) == (family != "user")
