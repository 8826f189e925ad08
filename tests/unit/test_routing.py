"""Routing traces: validation, replace, splice, fit, truncate, check."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from async_rl import routing
from async_rl.errors import AlignmentError
from async_rl.routing import NEVER_COMPUTED, check, fit, invalid_rows, make_trace, replace, splice, truncate
from async_rl.types import RoutingTrace, VersionSpan
from tests.support.trajectories import make_rows

PROMPT = 4


def full(num_tokens: int, version: int, low: int = 0) -> RoutingTrace:
    """A trace whose ids lie in [low, low + 4), so that rows of different calls can be told apart."""
    return make_trace(make_rows(num_tokens - 1, seed=version, experts=4) + low, 16, version)


def spans(trace: RoutingTrace) -> list[tuple[int, int, int]]:
    return [(s.start, s.end, s.weight_version) for s in trace.spans]


@pytest.mark.parametrize(("experts", "dtype"), [(2, "u1"), (256, "u1"), (257, "u2"), (384, "u2")])
def test_ids_are_as_narrow_as_the_number_of_experts_allows(experts: int, dtype: str) -> None:
    rows = np.array([[[experts - 1, 0]]])
    trace = make_trace(rows, experts, 1)
    assert trace.rows.dtype == np.dtype(dtype)
    assert trace.rows.tolist() == rows.tolist()


def test_a_narrow_array_is_kept_without_a_copy() -> None:
    rows = make_rows(5).astype(np.uint8)
    assert np.shares_memory(make_trace(rows, 8, 1).rows, rows)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (np.array([[[0, 8]]]), r"expert id 8 outside \[0, 8\)"),
        (np.array([[[0, -1]]]), r"expert id -1 outside"),
        (np.array([[[0, 300]]]), r"expert id 300 outside"),
        (np.array([[[0, 1]], [[2, 2]]]), r"ids \[2, 2\] of row 1, layer 0 are not distinct"),
        (np.array([[[0, 1], [0, 0]]]), r"row 0, layer 1 are not distinct"),
        (np.array([[[3, 1, 3]]]), r"ids \[3, 1, 3\]"),
        (np.array([[0, 1]]), r"shape \(1, 2\)"),
        (np.array([[[0.0, 1.0]]]), "float64"),
    ],
)
def test_rows_are_refused_when_they_are_no_routing(rows: np.ndarray, reason: str) -> None:
    with pytest.raises(AlignmentError, match=reason):
        make_trace(rows, 8, 1)


def test_a_repeated_id_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_BLOCK", 16)
    rows = make_rows(20, top_k=4)
    rows[13, 1, 3] = rows[13, 1, 0]
    with pytest.raises(AlignmentError, match="row 13, layer 1"):
        make_trace(rows, 8, 1)


@pytest.mark.parametrize("interruptions", [1, 3])
def test_all_rows_are_the_newest_when_replaced(interruptions: int) -> None:
    trace: RoutingTrace | None = None
    for version in range(interruptions + 1):
        low = 4 if version == interruptions else 0
        trace = replace(trace, full(PROMPT + 3 * (version + 1), version, low))
    assert trace is not None
    assert trace.rows.min() >= 4
    assert len(trace.rows) == PROMPT + 3 * (interruptions + 1) - 1
    assert spans(trace) == [(0, len(trace.rows), interruptions)]


def test_a_response_without_rows_changes_nothing_when_merged() -> None:
    trace = full(7, 1)
    assert replace(trace, None) is trace
    assert splice(trace, None) is trace
    assert replace(None, trace) is trace
    assert splice(None, trace) is trace
    assert replace(None, None) is None


def test_the_boundary_row_is_the_new_one_when_spliced() -> None:
    old, new = full(PROMPT + 3, 1), full(PROMPT + 3 + 3, 2, low=4)
    trace = splice(old, new)
    assert trace is not None
    boundary = PROMPT + 3 - 1
    assert np.array_equal(trace.rows[:boundary], old.rows)
    assert np.array_equal(trace.rows[boundary:], new.rows[boundary:])
    assert spans(trace) == [(0, boundary, 1), (boundary, boundary + 3, 2)]


def test_nothing_changes_when_a_splice_brings_no_new_token() -> None:
    old = full(7, 1)
    assert splice(old, full(7, 2, low=4)) is old


def test_only_the_end_is_needed_when_a_splice_starts_late() -> None:
    old, whole = full(7, 1), full(10, 2, low=4)
    tail = make_trace(whole.rows[5:], 16, 2)
    expected, found = splice(old, whole), splice(old, tail, start=5)
    assert expected is not None
    assert found is not None
    assert np.array_equal(found.rows, expected.rows)
    assert found.spans == expected.spans


def test_rows_that_were_never_reported_come_from_the_new_trace_when_spliced() -> None:
    old = fit(full(5, 1), 9)  # 4 rows, 4 missing
    new = full(12, 2, low=4)
    trace = splice(old, new)
    assert trace is not None
    assert np.array_equal(trace.rows[4:], new.rows[4:])
    assert spans(trace) == [(0, 4, 1), (4, 11, 2)]
    check(trace, 12)
    assert invalid_rows(trace) == 0


def test_merging_is_refused_when_the_new_trace_does_not_continue_the_old_one() -> None:
    with pytest.raises(AlignmentError, match="a sequence only grows"):
        replace(full(7, 1), full(6, 2))
    with pytest.raises(AlignmentError, match="do not continue"):
        splice(full(7, 1), full(6, 2))
    with pytest.raises(AlignmentError, match="do not continue"):
        splice(full(7, 1), full(6, 2), start=7)
    with pytest.raises(AlignmentError, match="not there"):
        splice(None, full(6, 2), start=1)


def test_merging_is_refused_when_the_models_differ() -> None:
    other = make_trace(make_rows(8, experts=4), 8, 1)
    for merge in (replace, splice):
        with pytest.raises(AlignmentError, match="two models"):
            merge(full(7, 1), other)


def test_missing_rows_are_marked_and_in_no_version_when_fitted() -> None:
    trace = fit(full(6, 3), 9)
    assert trace.valid.tolist() == [True] * 5 + [False] * 3
    assert spans(trace) == [(0, 5, 3), (5, 8, NEVER_COMPUTED)]
    assert invalid_rows(trace) == 3
    check(trace, 9)


def test_concatenated_sequences_are_found_when_fitted() -> None:
    first, second = full(7, 1), full(10, 2)
    both = msgspec.structs.replace(first, rows=np.concatenate([first.rows, second.rows]))
    with pytest.raises(AlignmentError, match="15 routing rows for 10 tokens, expected at most 9"):
        fit(both, 10)


def test_rows_go_with_their_tokens_when_truncated() -> None:
    old, new = full(7, 1), full(10, 2)
    spliced = splice(old, new)
    assert spliced is not None
    for length in range(12):
        trace = truncate(spliced, length)
        assert np.array_equal(trace.rows, spliced.rows[: max(length - 1, 0)])
        check(fit(trace, length), length)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": make_rows(5, experts=4).astype(np.uint8)}, "expected \\[6, L, K\\]"),
        ({"rows": make_rows(6, experts=4)}, "int32 for 16 experts"),
        ({"rows": np.asfortranarray(make_rows(6).astype(np.uint8))}, "not contiguous"),
        ({"rows": np.full((6, 2, 2), 9, np.uint8)}, "not distinct"),
        ({"rows": np.zeros((6, 2, 2), np.uint8)}, "not distinct"),
        ({"num_experts": 3}, "expert id 3 outside"),
        ({"valid": np.ones(5, np.bool_)}, "validity"),
        ({"valid": np.ones(6, np.uint8)}, "validity"),
        ({"spans": ()}, "end at row 0 of 6"),
        ({"spans": (VersionSpan(start=0, end=5, weight_version=1),)}, "end at row 5 of 6"),
        (
            {
                "spans": (
                    VersionSpan(start=0, end=4, weight_version=1),
                    VersionSpan(start=3, end=6, weight_version=2),
                )
            },
            "gap or overlap at row 4",
        ),
    ],
)
def test_a_trace_is_refused_when_it_breaks_its_promise(change: dict[str, object], reason: str) -> None:
    trace = full(7, 1)
    check(trace, 7)
    with pytest.raises(AlignmentError, match=reason):
        check(msgspec.structs.replace(trace, **change), 7)


def test_invalid_rows_may_hold_anything_when_checked() -> None:
    trace = full(7, 1)
    rows, valid = trace.rows.copy(), trace.valid.copy()
    rows[2], valid[2] = 255, False
    check(msgspec.structs.replace(trace, rows=rows, valid=valid), 7)
