"""Routing traces: validation, splice and fit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from async_rl import routing
from async_rl.errors import AlignmentError
from async_rl.routing import fit, flip_ratio, hash_tokens, make_trace, splice
from async_rl.types import RoutingTrace
from tests.support.trajectories import make_group, make_rows, verify

PROMPT = 4
TEXT = np.arange(100, 120, dtype=np.int32)
LAYERS = (1, 3)


def full(num_tokens: int, version: int, low: int = 0) -> RoutingTrace:
    """A trace of the text's beginning, with ids in [low, low + 4): sets A and B tell the calls apart."""
    rows = make_rows(num_tokens - 1, seed=version, experts=4) + low
    return make_trace(rows, 16, version, moe_layers=LAYERS, token_ids=TEXT[: num_tokens - 1])


def spans(trace: RoutingTrace) -> list[tuple[int, int, int]]:
    return [(s.start, s.end, s.weight_version) for s in trace.spans]


@pytest.mark.case(33, 36)
@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (np.array([[[0, 8]]]), r"expert id 8 outside \[0, 8\)"),
        (np.array([[[0, -1]]]), r"expert id -1 outside"),
        (np.array([[[0, 1]], [[2, 2]]]), r"ids \[2, 2\] of row 1, layer 0 are not distinct"),
        (np.array([[[0, 1], [0, 0]]]), r"row 0, layer 1 are not distinct"),
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


@pytest.mark.case(12)
def test_the_boundary_row_is_the_new_one_when_spliced() -> None:
    old, new = full(PROMPT + 3, 1), full(PROMPT + 3 + 3, 2, low=4)
    trace = splice(old, new)
    assert trace is not None
    boundary = PROMPT + 3 - 1
    assert np.array_equal(trace.rows[:boundary], old.rows)
    assert np.array_equal(trace.rows[boundary:], new.rows[boundary:])
    assert spans(trace) == [(0, boundary, 1), (boundary, boundary + 3, 2)]


@pytest.mark.case(12)
def test_nothing_changes_when_a_splice_brings_no_new_token() -> None:
    old = full(7, 1)
    assert splice(old, full(7, 2, low=4)) is old


def test_merging_is_refused_when_the_new_trace_does_not_continue_the_old_one() -> None:
    with pytest.raises(AlignmentError, match="do not continue"):
        splice(full(7, 1), full(6, 2))
    with pytest.raises(AlignmentError, match="do not continue"):
        splice(full(7, 1), full(6, 2), start=7)
    with pytest.raises(AlignmentError, match="not there"):
        splice(None, full(6, 2), start=1)


def test_merging_is_refused_when_the_models_differ() -> None:
    other = make_trace(make_rows(8, experts=4), 8, 1)
    with pytest.raises(AlignmentError, match="two models"):
        splice(full(7, 1), other)


@pytest.mark.case(15)
def test_concatenated_sequences_are_found_when_fitted() -> None:
    first, second = full(7, 1), full(10, 2)
    both = msgspec.structs.replace(first, rows=np.concatenate([first.rows, second.rows]))
    with pytest.raises(AlignmentError, match="15 routing rows for 10 tokens, expected at most 9") as caught:
        fit(both, TEXT[:10])
    assert caught.value.reason == "too_many_rows"
    with pytest.raises(AlignmentError, match="another trajectory's"):  # nor do they pass as a longer text's
        fit(both, TEXT[:16])


@pytest.mark.case(22, 28)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (TEXT[:7], None),
        (np.where(TEXT == 102, 1, TEXT)[:7], "wrong_prefix"),
        (TEXT[1:8], "wrong_prefix"),
        (np.where(TEXT == 106, 1, TEXT)[:7], None),  # the last token was not fed
    ],
)
def test_rows_belong_to_one_text(text: np.ndarray, reason: str | None) -> None:
    if reason is None:
        verify(full(7, 1), text, LAYERS)
        return
    with pytest.raises(AlignmentError) as caught:
        fit(full(7, 1), text)
    assert caught.value.reason == reason


def test_rows_of_another_text_are_not_merged() -> None:
    other = msgspec.structs.replace(full(7, 2), prefix_hash=5)
    with pytest.raises(AlignmentError, match="two texts"):
        splice(full(7, 1), other)
    with pytest.raises(AlignmentError, match="another trajectory's"):
        fit(full(7, 1), TEXT[1:12])


@pytest.mark.case(15, 28)
def test_rows_of_a_sibling_are_refused() -> None:
    ours, theirs = make_group("g", size=2).trajectories
    assert ours.trace is not None
    assert theirs.trace is not None
    with pytest.raises(AlignmentError, match="another trajectory's") as caught:
        fit(theirs.trace, np.resize(ours.token_ids, theirs.num_tokens))
    assert caught.value.reason == "wrong_prefix"


def test_a_text_has_one_name_whatever_its_width_and_order_in_memory() -> None:
    assert hash_tokens(TEXT) == hash_tokens(TEXT.astype(np.int64)) == hash_tokens(TEXT.tolist())
    assert hash_tokens(TEXT[::2]) == hash_tokens(TEXT[::2].copy())
    assert len({hash_tokens(TEXT[:n]) for n in range(len(TEXT) + 1)}) == len(TEXT) + 1
    assert hash_tokens(TEXT[:0]) != 0


def test_changed_experts_are_counted_whatever_their_order() -> None:
    old = np.array([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], np.uint8)
    assert flip_ratio(old, old[..., ::-1]) == 0
    new = old.copy()
    new[0, 0, 1] = 7  # one of eight
    assert flip_ratio(old, new) == 1 / 8
    assert flip_ratio(old, old[:, ::-1]) == 1  # of the other layer
    assert np.isnan(flip_ratio(old[:0], old[:0]))


class NoTruth(np.ndarray):
    """An array that fails the test when its truth value is used, however many elements it has."""

    def __bool__(self) -> bool:
        raise AssertionError("the truth of an array was asked for")


def as_tensor(rows: np.ndarray) -> object:
    return pytest.importorskip("torch").from_numpy(rows)


@pytest.mark.case(14)
@pytest.mark.parametrize("kind", [np.asarray, lambda rows: rows.view(NoTruth), as_tensor])
@pytest.mark.parametrize("count", [0, 1, 6])
def test_no_array_decides_by_its_truth(kind: Callable[[np.ndarray], Any], count: int) -> None:
    rows = kind(make_rows(count).astype(np.uint8))
    trace = make_trace(rows, 8, 1, moe_layers=LAYERS, token_ids=TEXT[:count])
    if isinstance(rows, NoTruth):
        trace = msgspec.structs.replace(trace, rows=rows)
    longer = make_trace(make_rows(count + 2), 8, 2, moe_layers=LAYERS, token_ids=TEXT[: count + 2])
    assert splice(None, trace) is trace
    assert splice(trace, None) is trace
    merged = splice(fit(trace, TEXT[: count + 2]), longer)
    assert merged is not None
    verify(merged, TEXT[: count + 3], LAYERS)
    assert np.array_equal(merged.rows[:count], np.asarray(rows))
    assert (~fit(trace, TEXT[: count + 3]).valid).sum() == 2


def test_a_refusal_keeps_its_reason_when_it_is_pickled() -> None:
    error = pickle.loads(pickle.dumps(AlignmentError("no", "wrong_layers")))
    assert (str(error), error.reason) == ("no", "wrong_layers")


@pytest.mark.parametrize("shape", [(10, 1 << 39, 0), (1 << 39, 4, 0), (10, 0, 1 << 39)])
def test_rows_without_elements_are_looked_at_at_once_however_long_their_sides_are(
    shape: tuple[int, ...],
) -> None:
    """A fuzzer's find: a shape of billions of rows of no expert took minutes to check."""
    assert routing.find_repeated(np.zeros(shape, np.uint8)) is None
