"""Operations on the routing rows that engines report: check, splice and fit.

Row i of a trace belongs to the forward pass that was fed token i. The token sampled last was never fed, so T
tokens have T-1 rows:

```
tokens      p0 p1 p2 p3 | a0 a1 a2 | b0 b1 b2        4 read, 3 sampled, interrupted, 3 sampled on resume
first trace  0  1  2  3   4  5                       6 rows: a2 was never fed
second       0  1  2  3   4  5  6    7  8            9 rows: a full sequence again
splice      rows 0-5 of the first, 6-8 of the second  row 6, the boundary, was first fed on resume
```

Traces are never concatenated: each is a full sequence, and `fit` refuses the result of a concatenation. A
trace identifies its text by a hash and its layers by their numbers, so that rows of another text or model are
refused even if their size fits. Ids stay as narrow as the number of experts allows. The functions are pure;
results may share memory with their arguments.

Rows are checked twice. `make_trace` checks all ids of an engine's answer, and `fit` that they belong to the
trajectory's tokens. Later stages rely on it, because checksums protect the trajectory on disk. The trainer
compares only the model that rows are of with its own, when it reads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from async_rl.errors import AlignmentError
from async_rl.types import NEVER_COMPUTED, ExpertIdArray, Int32Array, RoutingTrace, VersionSpan

MIN_ROWS_TO_JUDGE_LAYER: Final = 64
"""With one expert per token, a layer counts as not recorded by the engine when it is zero in at least this
many rows. A short text may really send every token to expert 0; 64 tokens do not. With more experts per
token, a single row of zeros names expert 0 twice, so no minimum is needed."""

_BLOCK = 1 << 15
"""The number of tokens times layers that are compared at once; with 8 experts each they fit the second-level
cache."""


def id_dtype(num_experts: int) -> np.dtype[np.unsignedinteger]:
    """Return the narrowest type for expert ids: uint8 up to 256 experts, uint16 up to 65536."""
    if not 1 <= num_experts <= 1 << 16:
        raise ValueError(f"{num_experts} experts, expected between 1 and {1 << 16}")
    return np.dtype(np.uint8 if num_experts <= 1 << 8 else np.uint16)


def hash_tokens(token_ids: npt.ArrayLike) -> int:
    """Hash a text: blake2b of its ids as little-endian int32, 64 bits. 32k tokens take a tenth of a ms."""
    text = np.ascontiguousarray(token_ids, "<i4")
    return int.from_bytes(hashlib.blake2b(text.data, digest_size=8).digest(), "little")


def make_trace(
    rows: npt.NDArray[np.integer],
    num_experts: int,
    weight_version: int,
    *,
    moe_layers: Sequence[int] = (),
    row_versions: npt.NDArray[np.integer] | None = None,
    token_ids: Int32Array | None = None,
) -> RoutingTrace:
    """Make a trace of the rows that one response reported.

    Args:
        rows: `[R, L_moe, K]`, any integer type; kept without a copy when it is C-contiguous and narrow.
        num_experts: E, the number of experts of one layer.
        weight_version: The weights that all rows were computed under.
        moe_layers: The layers of the model that the rows belong to; empty where they are not known.
        row_versions: `[R]`, the weights of each row, where they are known; replaces `weight_version`.
        token_ids: All that was fed up to the last row, where it is known.

    Raises:
        AlignmentError: When the shape is wrong, or an id is outside `[0, E)` or repeated within a row.
    """
    rows = np.asarray(rows)
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise AlignmentError(
            f"routing of shape {rows.shape} and {rows.dtype}, expected integers [R, L_moe, K]", "wrong_shape"
        )
    if len(moe_layers) not in (0, rows.shape[1]):
        raise AlignmentError(
            f"routing of {rows.shape[1]} layers, expected those of the {len(moe_layers)} layers {moe_layers}",
            "wrong_layers",
        )
    _check_range(rows, num_experts)
    narrow = np.ascontiguousarray(rows, id_dtype(num_experts))
    _check_unique(narrow)
    if row_versions is None:
        spans = _spans([(0, len(narrow), weight_version)])
    else:
        spans = _runs(np.asarray(row_versions, np.int64))
    return RoutingTrace(
        rows=narrow,
        spans=spans,
        num_experts=num_experts,
        moe_layers=tuple(moe_layers),
        prefix_hash=0 if token_ids is None else hash_tokens(token_ids),
    )


def splice(old: RoutingTrace | None, new: RoutingTrace | None, *, start: int = 0) -> RoutingTrace | None:
    """Keep the valid rows of the old trace and take all others from the new one.

    Args:
        old: The rows so far.
        new: The rows of the newest response; its hash, where it has one, is of the whole text up to its end.
        start: The position of the first row of `new`, where only the end of the sequence was requested.

    Raises:
        AlignmentError: When the traces are of different models or texts, leave a gap, or the new one ends
            before the old one.
    """
    if new is None:
        return old
    if old is None:
        if start:
            raise AlignmentError(f"rows from {start} on continue a trace that is not there", "wrong_shape")
        return new
    _check_kin(old, new)
    held, end = len(old.rows), start + len(new.rows)
    if not 0 <= start <= held <= end:
        raise AlignmentError(f"rows [{start}, {end}) do not continue a trace of {held} rows", "wrong_shape")
    if end == held:
        if old.prefix_hash and new.prefix_hash and old.prefix_hash != new.prefix_hash:
            raise AlignmentError(f"{held} old and {end} new rows are of two texts", "wrong_prefix")
        if old.valid.all():
            return old
    rows = np.empty((end, *old.rows.shape[1:]), old.rows.dtype)
    versions = np.empty(end, np.int64)
    rows[:held], versions[:held] = old.rows, _versions(old)
    rows[held:], versions[held:] = new.rows[held - start :], _versions(new)[held - start :]
    missing = np.flatnonzero(~old.valid[start:]) + start
    rows[missing], versions[missing] = new.rows[missing - start], _versions(new)[missing - start]
    return msgspec.structs.replace(new, rows=rows, spans=_runs(versions))


def fit(trace: RoutingTrace, token_ids: Int32Array) -> RoutingTrace:
    """Check the text of a trace and return it with exactly T-1 rows; added rows are marked as never computed.

    Args:
        trace: The trace of the first tokens, or of all of them.
        token_ids: `[T] int32`.

    Raises:
        AlignmentError: When there are more than T-1 rows, as in concatenated full sequences, or the rows are
            of another text.
    """
    wanted, held = max(len(token_ids) - 1, 0), len(trace.rows)
    if held > wanted:
        raise AlignmentError(
            f"{held} routing rows for {len(token_ids)} tokens, expected at most {wanted}: were full "
            "sequences concatenated instead of replaced?",
            "too_many_rows",
        )
    _check_text(trace, token_ids)
    if held == wanted:
        return trace
    rows = np.zeros((wanted, *trace.rows.shape[1:]), trace.rows.dtype)
    rows[:held] = trace.rows
    spans = _spans([*_parts(trace.spans), (held, wanted, NEVER_COMPUTED)])
    return msgspec.structs.replace(trace, rows=rows, spans=spans, prefix_hash=hash_tokens(token_ids[:wanted]))


def flip_ratio(old: ExpertIdArray, new: ExpertIdArray) -> float:
    """Return the share of old experts that are not among the new ones of their token and layer.

    Args:
        old: `[R, L_moe, K]`.
        new: `[R, L_moe, K]`.

    Returns:
        A share in [0, 1]; nan without rows.
    """
    kept = np.zeros(old.shape, np.bool_)
    for column in range(new.shape[-1]):
        kept |= old == new[..., column : column + 1]
    return 1.0 - float(np.mean(kept)) if kept.size else float("nan")


def _check_text(trace: RoutingTrace, token_ids: Int32Array) -> None:
    fed = len(trace.rows)
    if trace.prefix_hash != hash_tokens(token_ids[:fed]):
        raise AlignmentError(
            f"{fed} routing rows do not belong to their {fed} tokens: the history was edited, or "
            "they are another trajectory's",
            "wrong_prefix",
        )


def _check_range(rows: npt.NDArray[np.integer], num_experts: int) -> None:
    unsigned = rows.view(rows.dtype.str.replace("i", "u"))  # a negative id becomes a huge one
    if rows.size and (largest := int(unsigned.max())) >= num_experts:
        found = int(rows.min()) if rows.min() < 0 else largest
        raise AlignmentError(f"expert id {found} outside [0, {num_experts})", "out_of_range")


def _check_unique(rows: ExpertIdArray) -> None:
    if (found := find_repeated(rows)) is not None:
        row, layer = found
        ids = rows[row, layer].tolist()
        raise AlignmentError(f"expert ids {ids} of row {row}, layer {layer} are not distinct", "duplicate")


def find_repeated(rows: ExpertIdArray) -> tuple[int, int] | None:
    """Return a row of `[R, L_moe, K]` that names an expert twice, and the layer of it; None if there is none.

    It compares all pairs of columns, one block at a time, transposed so that each comparison is contiguous.
    """
    count, layers, top_k = rows.shape
    if not rows.size:
        return None  # without an element, the sides may be of any length
    flat = rows.reshape(count * layers, top_k)
    for begin in range(0, len(flat), _BLOCK):
        columns = np.ascontiguousarray(flat[begin : begin + _BLOCK].T)
        for shift in range(1, top_k):
            twice = columns[shift:] == columns[:-shift]
            if twice.any():
                row, layer = divmod(begin + int(twice.any(axis=0).argmax()), layers)
                return row, layer
    return None


def _check_kin(old: RoutingTrace, new: RoutingTrace) -> None:
    a, b = ((*t.rows.shape[1:], t.num_experts, t.moe_layers) for t in (old, new))
    if a != b:
        raise AlignmentError(
            f"traces of two models: layers, top-k, experts and numbers of the layers are {a} and {b}",
            "wrong_layers",
        )


def _versions(trace: RoutingTrace) -> npt.NDArray[np.int64]:
    """Return the version of each row."""
    versions = np.full(len(trace.rows), NEVER_COMPUTED, np.int64)
    for span in trace.spans:
        versions[span.start : span.end] = span.weight_version
    return versions


def _runs(versions: npt.NDArray[np.int64]) -> tuple[VersionSpan, ...]:
    """Return spans of equal versions, as long as possible."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return _spans([(a, b, int(versions[a])) for a, b in pairwise(edges) if a < b])


def _parts(spans: Sequence[VersionSpan]) -> Iterator[tuple[int, int, int]]:
    return ((span.start, span.end, span.weight_version) for span in spans)


def _spans(parts: Sequence[tuple[int, int, int]]) -> tuple[VersionSpan, ...]:
    """Return spans without the empty ones."""
    return tuple(VersionSpan(start=a, end=b, weight_version=v) for a, b, v in parts if a < b)
