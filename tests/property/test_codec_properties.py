"""Any object of ours survives a frame; any damage of a frame is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from async_rl.codec import decode, encode
from async_rl.errors import AlignmentError, CorruptFrame
from async_rl.types import Group, RoutingTrace
from tests.support.frames import VALID, read, seal, split
from tests.support.trajectories import make_group, verify

DTYPES = ["bool", "i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8"]

any_array = st.sampled_from(DTYPES).flatmap(
    lambda name: arrays.arrays(name, arrays.array_shapes(min_dims=0, min_side=0, max_side=7))
)
strided = any_array.map(lambda array: array[..., ::2] if array.ndim else array)
plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.floats(allow_nan=False)
tree: st.SearchStrategy[Any] = st.recursive(
    plain | any_array | strided,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@given(st.lists(tree, max_size=4))
def test_a_value_comes_back_the_same_whatever_it_is_made_of(value: list[Any]) -> None:
    assert same(decode(b"".join(encode(value)), list), value)


GROUP = b"".join(encode(make_group("g")))


@pytest.mark.case(28)
@given(st.integers(0, len(GROUP) - 1), st.integers(1, 255))
def test_a_frame_is_refused_when_any_byte_is_changed(index: int, change: int) -> None:
    damaged = bytearray(GROUP)
    damaged[index] ^= change
    with pytest.raises(CorruptFrame):
        decode(damaged, Group)


@pytest.mark.case(28)
@given(st.integers(0, len(GROUP) - 1))
def test_a_frame_is_refused_when_it_is_cut_anywhere(length: int) -> None:
    with pytest.raises(CorruptFrame):
        decode(GROUP[:length], Group)


edits = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 12), st.binary(max_size=12)), min_size=1, max_size=4
)
"""Stretches of a header that are replaced: where, how long, by what."""


def edited(header: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    for place, length, other in changes:
        start = place % (len(header) + 1)
        header = header[:start] + other + header[start + length :]
    return header


@pytest.mark.case(28)
@settings(max_examples=400, deadline=None)
@given(st.sampled_from(VALID), edits)
def test_any_header_is_read_or_refused_when_its_checksums_are_right(
    obj: Any, changes: list[tuple[int, int, bytes]]
) -> None:
    header, payload = split(obj)
    assert read(seal(edited(header, changes), payload), type(obj)) in (
        "passed",
        "CorruptFrame",
        "AlignmentError",
    )


@pytest.mark.case(28)
@given(st.binary(max_size=80), st.integers(0, 12))
def test_noise_behind_a_right_name_is_refused(noise: bytes, deep: int) -> None:
    for obj in VALID:
        header, payload = split(obj)
        name = header[: header.index(type(obj).__name__.encode()) + len(type(obj).__name__)]
        assert read(seal(name + b"\x91" * 3**deep + noise, payload), type(obj)) == "CorruptFrame"


@pytest.mark.case(28)
@given(st.data())
def test_rows_are_refused_when_a_resealed_payload_breaks_them(data: st.DataObject) -> None:
    """Checksums that are right do not help rows that are wrong."""
    trace, trajectory, _ = VALID
    header, payload = split(trace)
    damaged = bytearray(payload)
    row = data.draw(st.integers(0, len(trace.rows) - 1))
    layer = data.draw(st.integers(0, 1))
    at = (row * 2 + layer) * 2
    damaged[at] = data.draw(st.sampled_from([damaged[at + 1], 8, 255]))  # twice, or none of the eight experts
    with pytest.raises(AlignmentError):
        verify(decode(seal(header, bytes(damaged)), RoutingTrace), trajectory.token_ids, trace.moe_layers)
    verify(decode(seal(header, payload), RoutingTrace), trajectory.token_ids, trace.moe_layers)
