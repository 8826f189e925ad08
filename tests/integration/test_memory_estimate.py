"""What ranks are estimated to hold is what real ranks hold, in each kind of layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory_estimate import CASES, SMALL, Compared, compare

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:::megatron"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

ADAPTED = [name for name in CASES if name.startswith("adapters: ")]
LAYOUTS = [name for name, case in CASES.items() if case.ranks == 2 and name not in ADAPTED]
RECOMPUTED = [name for name in CASES if name.startswith("one rank, ") and name.endswith(" recomputed")]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Compared]]:
    return measured(LAYOUTS + RECOMPUTED + ADAPTED[2:3], Path(tmp_path_factory.mktemp("memory")))


@pytest.fixture(scope="module")
def other_rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Compared]]:
    return measured(ADAPTED[:2] + ADAPTED[3:], Path(tmp_path_factory.mktemp("memory")))


def measured(names: list[str], folder: Path) -> dict[str, list[Compared]]:
    found: dict[str, list[Compared]] = {name: [] for name in names}
    for row in compare(found, SMALL, folder):
        found[row.layout].append(row)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_peak_of_real_ranks_is_estimated(name: str, rows: dict[str, list[Compared]]) -> None:
    assert len(rows[name]) == 2
    for row in rows[name]:
        assert row.error == pytest.approx(0, abs=0.05), row


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_step_adds_is_estimated_by_itself(name: str, rows: dict[str, list[Compared]]) -> None:
    for row in rows[name]:
        # Between steps, Megatron's dispatchers also keep where their last micro-batch was sent.
        assert row.estimated_steady / row.steady == pytest.approx(0.98, abs=0.03), row
        assert row.error_beyond_steady == pytest.approx(0, abs=0.06), row


@pytest.mark.parametrize("name", RECOMPUTED)
def test_what_recompute_modules_keep_is_estimated(name: str, rows: dict[str, list[Compared]]) -> None:
    (row,) = rows[name]
    assert row.error == pytest.approx(0, abs=0.05), row
    assert row.error_beyond_steady == pytest.approx(0, abs=0.1), row


def test_adapters_on_frozen_weights_are_estimated(rows: dict[str, list[Compared]]) -> None:
    check_adapted(rows[ADAPTED[2]])


@pytest.mark.long
@pytest.mark.parametrize("name", ADAPTED[:2] + ADAPTED[3:])
def test_adapters_of_other_layouts_are_estimated(name: str, other_rows: dict[str, list[Compared]]) -> None:
    check_adapted(other_rows[name])


def check_adapted(found: list[Compared]) -> None:
    assert found
    for row in found:
        assert row.error == pytest.approx(0, abs=0.1), row
        assert row.error_beyond_steady == pytest.approx(0, abs=0.15), row
