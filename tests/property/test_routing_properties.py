"""Over random interruptions, each row of a merged trace is what the law says; spans partition the rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from async_rl.routing import fit, make_trace, splice
from async_rl.types import NEVER_COMPUTED, RoutingTrace
from tests.support.trajectories import make_rows, verify

calls = st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=6)
"""Per engine call: tokens sampled, and whether rows came with them."""


TEXT = np.arange(100, dtype=np.int32)
LAYERS = (0, 2)


def reported(num_tokens: int, version: int, start: int = 0) -> RoutingTrace:
    rows = make_rows(num_tokens - 1, seed=version)[start:]
    return make_trace(rows, 8, version, moe_layers=LAYERS, token_ids=TEXT[: num_tokens - 1])


def version_of(trace: RoutingTrace) -> list[int]:
    return [span.weight_version for span in trace.spans for _ in range(span.start, span.end)]


@given(st.integers(1, 4), calls, st.booleans())
def test_each_row_is_of_the_first_response_that_covered_it_when_spliced(
    prompt: int, calls: list[tuple[int, bool]], fit_between: bool
) -> None:
    tokens = prompt
    merged: RoutingTrace | None = None
    expected: list[tuple[int, np.ndarray]] = []
    for version, (sampled, has_rows) in enumerate(calls):
        tokens += sampled
        if not has_rows:
            continue
        new = reported(tokens, version)
        merged = splice(merged, new)
        expected += [(version, row) for row in new.rows[len(expected) :]]
        if fit_between:
            merged = fit(merged, TEXT[:tokens]) if merged is not None else None
    if merged is None:
        assert not expected
        return
    fitted = fit(merged, TEXT[:tokens])
    verify(fitted, TEXT[:tokens], LAYERS)
    missing = tokens - 1 - len(expected)
    assert version_of(fitted) == [v for v, _ in expected] + [NEVER_COMPUTED] * missing
    for row, (_, wanted) in zip(fitted.rows, expected, strict=False):
        assert np.array_equal(row, wanted)
