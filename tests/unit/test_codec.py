"""Frames: what they keep, what they refuse, how they are written."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from async_rl.codec import (
    ALIGNMENT,
    Frame,
    decode,
    encode,
    encoded_size,
    read_frame,
    write_frame,
)
from async_rl.errors import CorruptFrame
from async_rl.routing import fit, hash_tokens, make_trace
from async_rl.types import RoutingTrace, TrainBatch, VersionSpan
from tests.support.frames import seal, split
from tests.support.trajectories import MadeGroup, make_group, verify


def frame_of(obj: object) -> bytes:
    return b"".join(encode(obj))


def test_arrays_are_not_copied_when_encoded() -> None:
    array = np.arange(1000, dtype=np.int32)
    pieces = encode({"a": array})
    array[0] = 77
    views = [np.frombuffer(piece, np.int32) for piece in pieces if isinstance(piece, memoryview)]
    assert [view[0] for view in views] == [77]
    assert encoded_size(pieces) == len(b"".join(pieces))


def test_arrays_are_aligned_read_only_views_when_decoded() -> None:
    buffer = np.frombuffer(frame_of([np.ones(3, np.int8), np.arange(5.0)]), np.uint8)
    aligned = np.empty(len(buffer) + ALIGNMENT, np.uint8)
    start = -aligned.ctypes.data % ALIGNMENT
    aligned = aligned[start : start + len(buffer)]
    aligned[:] = buffer
    for array in decode(aligned, list):
        assert array.ctypes.data % ALIGNMENT == 0
        assert not array.flags.writeable
        assert np.shares_memory(array, aligned)


def test_the_mapping_stays_alive_when_only_an_array_of_the_frame_is_held(tmp_path: Path) -> None:
    path = tmp_path / "frame"
    write_frame(path, {"a": np.arange(100_000)})
    array = read_frame(path, dict)["a"]
    path.unlink()
    gc.collect()
    assert array[-1] == 99_999


def test_an_array_larger_than_a_chunk_is_summed_whole() -> None:
    array = np.random.default_rng(0).integers(0, 255, (1 << 20) + 13, np.uint8)
    whole = bytearray(b"".join(encode([array])))
    assert np.array_equal(decode(whole, list)[0], array)
    whole[-1] ^= 1
    with pytest.raises(CorruptFrame, match="fails its checksum"):
        decode(whole, list)


@pytest.mark.parametrize(
    "value",
    [object(), np.array(["a"]), np.array([None]), np.arange(3, dtype=">i4"), np.zeros(2, np.complex64)],
    ids=["object", "strings", "objects", "big-endian", "complex"],
)
def test_encoding_is_refused_when_a_value_has_no_place_in_a_frame(value: object) -> None:
    with pytest.raises(TypeError, match="cannot encode"):
        encode([value])


@pytest.mark.case(28)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b"", "shorter than the prefix"),
        (lambda b: b[:31], "shorter than the prefix"),
        (lambda b: b[:-1], "cut short"),
        (lambda b: b"pickle!!" + b[8:], "bad magic"),
        (lambda b: b[:8] + b"\x63\0" + b[10:], "format version 99"),
        (lambda b: b[:40] + bytes([b[40] ^ 1]) + b[41:], "head fails its checksum"),
        (lambda b: b[:-1] + bytes([b[-1] ^ 1]), "payload .* fails its checksum"),
    ],
)
def test_the_reason_is_named_when_a_frame_is_corrupt(change: object, reason: str) -> None:
    damaged = change(frame_of(make_group("g")))  # type: ignore[operator]
    with pytest.raises(CorruptFrame, match=reason):
        decode(damaged, MadeGroup)


def test_a_frame_is_refused_when_it_holds_another_type() -> None:
    with pytest.raises(CorruptFrame, match="holds a MadeGroup, expected a TrainBatch"):
        decode(frame_of(make_group("g")), TrainBatch)


def test_an_array_is_refused_when_a_crafted_header_points_outside_the_payload() -> None:
    frame = Frame([np.zeros(8)])
    frame._header = frame._header.replace((8).to_bytes(8, "little"), (9).to_bytes(8, "little"))
    with pytest.raises(CorruptFrame, match="outside 64 of payload"):
        decode(b"".join(frame.buffers()), list)


def test_the_old_frame_stays_when_a_new_one_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "frame"
    write_frame(path, [1])
    with pytest.raises(TypeError):
        write_frame(path, [object()])
    assert read_frame(path, list) == [1]
    assert list(tmp_path.iterdir()) == [path]


def test_numpy_scalars_become_numbers_when_encoded() -> None:
    assert decode(frame_of([np.float32(0.5), np.int64(7), np.bool_(True)]), list) == [0.5, 7, True]


def trace_of(experts: int, largest: int, rows: int = 10, layers: int = 4, top_k: int = 8) -> RoutingTrace:
    """A trace whose ids go up to the largest one of so many experts."""
    ids = largest - np.tile(np.arange(top_k), (rows, layers, 1)) * (largest // top_k)
    text = np.arange(rows, dtype=np.int32)
    return make_trace(ids, experts, 3, moe_layers=range(layers), token_ids=text)


@pytest.mark.case(26)
@pytest.mark.parametrize(
    ("experts", "largest", "dtype"), [(256, 255, np.uint8), (257, 256, np.uint16), (384, 383, np.uint16)]
)
def test_ids_come_back_as_narrow_as_they_were_sent(experts: int, largest: int, dtype: type) -> None:
    trace = trace_of(experts, largest)
    back = decode(frame_of(trace), RoutingTrace)
    assert back.rows.dtype == trace.rows.dtype == dtype
    assert int(back.rows.max()) == largest
    assert np.array_equal(back.rows, trace.rows)
    assert (back.spans, back.num_experts) == (trace.spans, trace.num_experts)
    assert (back.moe_layers, back.prefix_hash) == (trace.moe_layers, trace.prefix_hash)
    verify(back, np.arange(11, dtype=np.int32), range(4))


@pytest.mark.real
@pytest.mark.case(27)
@pytest.mark.parametrize("held", [32767, 32000, 0])
@pytest.mark.parametrize(("experts", "width", "layers"), [(128, 1, 48), (384, 2, 60)])
def test_a_trace_takes_its_ids_and_at_most_4_kib(held: int, experts: int, width: int, layers: int) -> None:
    text = np.arange(32768, dtype=np.int32) % 1000
    whole = trace_of(experts, experts - 1, 32767, layers)
    whole = msgspec.structs.replace(whole, prefix_hash=hash_tokens(text[:-1]))
    begun = msgspec.structs.replace(whole, rows=whole.rows[:held], prefix_hash=hash_tokens(text[:held]))
    spans = (VersionSpan(start=0, end=held, weight_version=3),) if held else ()
    trace = fit(msgspec.structs.replace(begun, spans=spans), text)
    assert (~trace.valid).sum() == 32767 - held
    # Sixteen weight updates make the spans longer.
    bounds = [*range(0, held, max(held // 16, 1)), held] if held else []
    parts = [(a, b, v) for v, (a, b) in enumerate(pairwise(bounds))] + [(held, 32767, -1)]
    trace = msgspec.structs.replace(
        trace, spans=tuple(VersionSpan(start=a, end=b, weight_version=v) for a, b, v in parts if a < b)
    )
    size = len(frame_of(trace))
    payload = 32767 * layers * 8 * width
    assert payload < size <= payload + 4096
    back = decode(frame_of(trace), RoutingTrace)
    assert back.valid.tolist() == [True] * held + [False] * (32767 - held)
    assert not back.valid.flags.writeable


@pytest.mark.parametrize("sides", [(1 << 62, 1), (1 << 63, 1), (1 << 33, 1 << 33)])
def test_an_empty_array_is_refused_when_its_shape_cannot_be_counted(sides: tuple[int, int]) -> None:
    header, payload = split([np.zeros((0, 7, 9))])
    shape = b"".join(side.to_bytes(8, "little") for side in (7, 9))
    crafted = header.replace(shape, b"".join(side.to_bytes(8, "little") for side in sides))
    assert crafted != header
    with pytest.raises(CorruptFrame, match="outside 0 of payload"):
        decode(seal(crafted, payload), list)
