"""The wrong rows of `benchmarks/wrong_routing.py`."""

import numpy as np

from benchmarks.support.wrong_rows import concatenated, shifted


def test_answers_of_a_resumed_call_are_appended_and_cut():
    rows = np.arange(8).reshape(8, 1, 1)
    # Three tokens of the prompt, two of version 4, two of version 5, a tool's token, one of version 6.
    versions = np.array([-1, -1, -1, 4, 4, 5, 5, -1, 6], np.int32)
    assert concatenated(rows, versions).ravel().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert concatenated(rows, np.full(9, 4, np.int32)).ravel().tolist() == list(range(8))
    assert shifted(rows, versions).ravel().tolist() == [7, 0, 1, 2, 3, 4, 5, 6]
