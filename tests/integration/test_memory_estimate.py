"""What ranks are estimated to hold is what real ranks hold, in each kind of layout."""

from __future__ import annotations

import pytest

from tests.support.measured_ranks import CASES, Compared, compare

pytestmark = [pytest.mark.real, pytest.mark.megatron, pytest.mark.timeout(600)]

ADAPTED = [name for name in CASES if name.startswith("adapters: ")]
LAYOUTS = [name for name, case in CASES.items() if case.ranks == 2 and name not in ADAPTED]
RECOMPUTED = [name for name in CASES if name.startswith("one rank, ") and name.endswith(" recomputed")]

OF_REAL_LANE = {"tensor and expert", ADAPTED[1]}
"""A layout and adapters once; `make test-long` has the other cases."""


@pytest.fixture(scope="module")
def rows(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Compared]]:
    """Of the cases that the selected tests look at."""
    selected = {item.callspec.params["name"] for item in request.session.items if item.path == request.path}
    found: dict[str, list[Compared]] = {name: [] for name in CASES if name in selected}
    for row in compare(found, tmp_path_factory.mktemp("memory")):
        found[row.layout].append(row)
    return found


def of_cases(names: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "name", [pytest.param(n, marks=() if n in OF_REAL_LANE else pytest.mark.long) for n in names]
    )


@of_cases(LAYOUTS)
def test_the_peak_of_real_ranks_and_what_a_step_adds_are_estimated(
    name: str, rows: dict[str, list[Compared]]
) -> None:
    assert len(rows[name]) == 2
    for row in rows[name]:
        assert row.error == pytest.approx(0, abs=0.05), row
        # Between steps, Megatron's dispatchers also keep where their last micro-batch was sent.
        assert row.estimated_steady / row.steady == pytest.approx(0.98, abs=0.03), row
        assert row.error_beyond_steady == pytest.approx(0, abs=0.06), row


@of_cases(RECOMPUTED)
def test_what_recompute_modules_keep_is_estimated(name: str, rows: dict[str, list[Compared]]) -> None:
    (row,) = rows[name]
    assert row.error == pytest.approx(0, abs=0.05), row
    assert row.error_beyond_steady == pytest.approx(0, abs=0.1), row


@of_cases(ADAPTED)
def test_adapters_on_frozen_weights_are_estimated(name: str, rows: dict[str, list[Compared]]) -> None:
    assert rows[name]
    for row in rows[name]:
        assert row.error == pytest.approx(0, abs=0.1), row
        assert row.error_beyond_steady == pytest.approx(0, abs=0.15), row
