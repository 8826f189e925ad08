"""A range of a flattened tensor as boxes of the tensor.

The distributed optimizer cuts parameters where a buffer is full, in the middle of a row if need be.
Checkpoints know parts of tensors only as boxes:

```
. . . x x      a range of a [4, 5] tensor, from 3 to 17:
x x x x x          the end of row 0, rows 1 and 2, the beginning of row 3
x x x x x
x x . . .
```
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Box(NamedTuple):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cut `[start, stop)` of a flattened tensor into boxes, at most `2 len(shape) - 1` of them.

    Args:
        shape: Of the tensor.
        start: First element, row by row.
        stop: One behind the last.

    Yields:
        Boxes in the order of their elements, of which each holds a range without a gap.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows that are whole
    if first > last:  # all of it is inside of one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    begin = index * math.prod(shape[1:])
    for box in boxes(shape[1:], start - begin, stop - begin):
        yield Box((index, *box.offsets), (1, *box.sizes))
