"""pass@k against what it means: draw k of the answers in every way there is, and look for one that passes."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.evaluation.estimates import pass_at_k


@given(data=st.data(), answers=st.integers(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_an_answer_that_passes(data, answers):
    passed = data.draw(st.integers(0, answers))
    k = data.draw(st.integers(1, answers))
    marks = [True] * passed + [False] * (answers - passed)
    draws = [any(draw) for draw in combinations(marks, k)]
    assert pass_at_k(answers, passed, k) == pytest.approx(sum(draws) / len(draws))
