"""A range of a flattened tensor and its boxes hold the same elements, in the same order."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.megatron.shards import boxes


@st.composite
def ranges(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    size = math.prod(shape)
    start = draw(st.integers(0, size))
    return shape, start, draw(st.integers(start, size))


@given(ranges())
def test_boxes_hold_the_range_in_order_when_cut(case):
    shape, start, stop = case
    elements = np.arange(math.prod(shape)).reshape(shape)
    cut = list(boxes(shape, start, stop))
    parts = []
    for box in cut:
        part = elements[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
        assert part.shape == box.sizes
        parts += part.ravel().tolist()
    assert parts == list(range(start, stop))
    assert len(cut) <= max(2 * len(shape) - 1, 1)


def test_a_whole_tensor_is_one_box():
    assert [tuple(box) for box in boxes((3, 4, 5), 0, 60)] == [((0, 0, 0), (3, 4, 5))]
