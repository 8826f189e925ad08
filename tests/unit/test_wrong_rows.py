"""The wrong rows of `benchmarks/wrong_routing.py`, and what it makes of its figures."""

import numpy as np

from benchmarks.support.wrong_rows import concatenated, shifted
from benchmarks.wrong_routing import MODES, Row, violations


def test_answers_of_a_resumed_call_are_appended_and_cut():
    rows = np.arange(8).reshape(8, 1, 1)
    # Three tokens of the prompt, two of version 4, two of version 5, a tool's token, one of version 6.
    versions = np.array([-1, -1, -1, 4, 4, 5, 5, -1, 6], np.int32)
    assert concatenated(rows, versions).ravel().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert concatenated(rows, np.full(9, 4, np.int32)).ravel().tolist() == list(range(8))
    assert shifted(rows, versions).ravel().tolist() == [7, 0, 1, 2, 3, 4, 5, 6]


def test_wrong_rows_that_no_mismatch_shows_are_a_violation():
    def row(variant, mode, mismatch):
        return Row(variant, mode, 1, 0.1, mismatch, 3, 0.5)

    right = [row("correct", mode, 0.01) for mode in MODES]
    wrong = [row(variant, mode, 0.2) for mode in MODES for variant in ("concatenated", "shifted")]
    assert violations(right + wrong) == []
    hidden = [row(variant, mode, 0.01) for mode in MODES for variant in ("concatenated", "shifted")]
    assert len(violations(right + hidden)) == 4
    assert len(violations(right)) == 4  # nothing was measured
