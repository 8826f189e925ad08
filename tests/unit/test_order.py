"""The order of tasks: pure in (seed, position), whole epochs, shares by weight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.data.order import Mixture, TaskOrder


def test_every_epoch_has_every_task_once_in_its_own_order_when_shuffled():
    order = TaskOrder(50, seed=3, shuffle=True)
    epochs = [[order.task_at(epoch * 50 + i) for i in range(50)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_depends_on_seed_and_position_alone():
    order = TaskOrder(20, seed=1, shuffle=True)
    forwards = [order.task_at(position) for position in range(100)]
    again = TaskOrder(20, seed=1, shuffle=True)
    assert [again.task_at(position) for position in reversed(range(100))] == forwards[::-1]
    other = TaskOrder(20, seed=2, shuffle=True)
    assert [other.task_at(position) for position in range(100)] != forwards


def test_order_is_the_files_when_not_shuffled():
    order = TaskOrder(3, seed=1, shuffle=False)
    assert [order.task_at(position) for position in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(ValueError, match="expected at least 1"):
        TaskOrder(0, seed=1, shuffle=True)


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    data=st.data(),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_each_dataset_has_its_share_and_its_epochs_when_weights_are_set(sizes, data, seed, shuffle):
    n = len(sizes)
    weights = data.draw(st.lists(st.floats(0.05, 20), min_size=n, max_size=n))
    mixture = Mixture(sizes, weights, seed, shuffle)
    stream = [mixture.task_at(position) for position in range(3000)]
    edges = np.cumsum([0, *sizes])
    shares = np.array(weights) / sum(weights)
    for i, size in enumerate(sizes):
        mine = [task - edges[i] for task in stream if edges[i] <= task < edges[i + 1]]
        assert abs(len(mine) / len(stream) - shares[i]) < 0.004  # a place in a thousand, or the stream's end
        epochs = [mine[k : k + size] for k in range(0, len(mine) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    late = data.draw(st.integers(0, 2999))
    assert Mixture(sizes, weights, seed, shuffle).task_at(late) == stream[late]
