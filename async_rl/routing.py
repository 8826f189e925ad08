"""What may be done with the expert ids that an engine reported: replace, splice, fit, truncate, check.

Row i of a trace says where the forward pass that was fed token i sent it. The token sampled last was never
fed, so T tokens have T-1 rows:

```
tokens      p0 p1 p2 p3 | a0 a1 a2 | b0 b1 b2        4 read, 3 sampled, interrupted, 3 sampled on resume
first trace  0  1  2  3   4  5                       6 rows: a2 was never fed
second       0  1  2  3   4  5  6    7  8            9 rows: a full sequence again
replace      second whole
splice      of the first 0-5, of the second 6-8      6, the boundary, was first fed on resume
```

Traces are never laid end to end: each is a full sequence, and `fit` refuses what comes of that. Ids stay as
narrow as the number of experts allows. The functions are pure; results may share memory with what they are
made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from async_rl.errors import AlignmentError
from async_rl.types import ExpertIdArray, RoutingTrace, VersionSpan

NEVER_COMPUTED = -1
"""Weight version of the spans of rows that no engine reported."""

_BLOCK = 1 << 15
"""Tokens times layers that are compared at once; with 8 experts each they fit the second-level cache."""


def id_dtype(num_experts: int) -> np.dtype[np.unsignedinteger]:
    """The narrowest type that holds every expert id: uint8 up to 256 experts, uint16 up to 65536."""
    if not 1 <= num_experts <= 1 << 16:
        raise ValueError(f"{num_experts} experts, expected between 1 and {1 << 16}")
    return np.dtype(np.uint8 if num_experts <= 1 << 8 else np.uint16)


def make_trace(rows: npt.NDArray[np.integer], num_experts: int, weight_version: int) -> RoutingTrace:
    """Make a trace of what one response reported, all of it computed under one version.

    Args:
        rows: `[R, L_moe, K]`, any integer type; kept without a copy when it is C-contiguous and narrow.
        num_experts: E, of one layer.
        weight_version: The weights the rows were computed under.

    Raises:
        AlignmentError: When the shape is wrong, an id lies outside `[0, E)` or is repeated within a row.
    """
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise AlignmentError(
            f"routing of shape {rows.shape} and {rows.dtype}, expected integers [R, L_moe, K]"
        )
    _check_range(rows, num_experts)
    narrow = np.ascontiguousarray(rows, id_dtype(num_experts))
    _check_unique(narrow)
    count = len(narrow)
    return RoutingTrace(
        rows=narrow,
        valid=np.ones(count, np.bool_),
        spans=_spans([(0, count, weight_version)]),
        num_experts=num_experts,
    )


def replace(old: RoutingTrace | None, new: RoutingTrace | None) -> RoutingTrace | None:
    """The newest full sequence wins as a whole; a response without rows changes nothing.

    Raises:
        AlignmentError: When the new trace is of another model, or shorter than what it continues.
    """
    if old is None or new is None:
        return new if old is None else old
    _check_kin(old, new)
    if len(new.rows) < len(old.rows):
        raise AlignmentError(f"{len(new.rows)} rows would replace {len(old.rows)}: a sequence only grows")
    return new


def splice(old: RoutingTrace | None, new: RoutingTrace | None, *, start: int = 0) -> RoutingTrace | None:
    """Keep the valid rows of the old trace and take all others from the new one.

    Args:
        old: What was gathered so far.
        new: What the newest response reported.
        start: The position of the first row of `new`, where only the end of the sequence was asked for.

    Raises:
        AlignmentError: When the traces are of two models, leave a gap or end before the old one does.
    """
    if new is None:
        return old
    if old is None:
        if start:
            raise AlignmentError(f"rows from {start} on continue a trace that is not there")
        return new
    _check_kin(old, new)
    held, end = len(old.rows), start + len(new.rows)
    if not 0 <= start <= held <= end:
        raise AlignmentError(f"rows [{start}, {end}) do not continue a trace of {held} rows")
    if end == held and bool(old.valid.all()):
        return old
    rows = np.empty((end, *old.rows.shape[1:]), old.rows.dtype)
    valid = np.empty(end, np.bool_)
    versions = np.empty(end, np.int64)
    rows[:held], valid[:held], versions[:held] = old.rows, old.valid, _versions(old)
    taken = np.ones(end, np.bool_)
    taken[:start] = False
    taken[start:held] = ~old.valid[start:]
    from_new = taken[start:]
    rows[taken] = new.rows[from_new]
    valid[taken], versions[taken] = new.valid[from_new], _versions(new)[from_new]
    return RoutingTrace(rows=rows, valid=valid, spans=_runs(versions), num_experts=old.num_experts)


def fit(trace: RoutingTrace, num_tokens: int) -> RoutingTrace:
    """The trace with exactly `num_tokens - 1` rows; missing ones are marked invalid.

    Raises:
        AlignmentError: When there are more. Sequences laid end to end are found here.
    """
    wanted, held = max(num_tokens - 1, 0), len(trace.rows)
    if held > wanted:
        raise AlignmentError(
            f"{held} routing rows for {num_tokens} tokens, expected at most {wanted}: were full sequences "
            "concatenated instead of replaced?"
        )
    if held == wanted:
        return trace
    rows = np.zeros((wanted, *trace.rows.shape[1:]), trace.rows.dtype)
    valid = np.zeros(wanted, np.bool_)
    rows[:held], valid[:held] = trace.rows, trace.valid
    spans = (*trace.spans, VersionSpan(start=held, end=wanted, weight_version=NEVER_COMPUTED))
    return RoutingTrace(rows=rows, valid=valid, spans=spans, num_experts=trace.num_experts)


def truncate(trace: RoutingTrace, num_tokens: int) -> RoutingTrace:
    """The rows of the first `num_tokens` tokens, for a trajectory cut to that length."""
    end = min(len(trace.rows), max(num_tokens - 1, 0))
    spans = _spans((s.start, min(s.end, end), s.weight_version) for s in trace.spans)
    return RoutingTrace(
        rows=trace.rows[:end], valid=trace.valid[:end], spans=spans, num_experts=trace.num_experts
    )


def check(trace: RoutingTrace, num_tokens: int) -> None:
    """Check everything that a finished trajectory of `num_tokens` promises of its trace.

    Raises:
        AlignmentError: When the number of rows is not T-1, types or shapes are wrong, the spans do not
            partition the rows, or a valid row holds an id out of range or twice. A layer that an engine left
            at zeros is found so as well, where a token has more than one expert.
    """
    wanted = max(num_tokens - 1, 0)
    rows, valid = trace.rows, trace.valid
    if rows.ndim != 3 or len(rows) != wanted:
        raise AlignmentError(
            f"routing of shape {rows.shape} for {num_tokens} tokens, expected [{wanted}, L, K]"
        )
    if rows.dtype != id_dtype(trace.num_experts) or not rows.flags.c_contiguous:
        raise AlignmentError(
            f"routing rows of {rows.dtype} for {trace.num_experts} experts, or not contiguous"
        )
    if valid.shape != (wanted,) or valid.dtype != np.bool_:
        raise AlignmentError(f"validity of shape {valid.shape} and {valid.dtype}, expected bool [{wanted}]")
    position = 0
    for span in trace.spans:
        if span.start != position or span.end <= position:
            raise AlignmentError(f"version spans leave a gap or overlap at row {position}: {span}")
        position = span.end
    if position != wanted:
        raise AlignmentError(f"version spans end at row {position} of {wanted}")
    reported = rows if valid.all() else rows[valid]
    _check_range(reported, trace.num_experts)
    _check_unique(reported)


def invalid_rows(trace: RoutingTrace) -> int:
    """How many rows were never reported and are routed natively in training."""
    return len(trace.valid) - int(np.count_nonzero(trace.valid))


def _check_range(rows: npt.NDArray[np.integer], num_experts: int) -> None:
    unsigned = rows.view(rows.dtype.str.replace("i", "u"))  # a negative id becomes a huge one
    if rows.size and (largest := int(unsigned.max())) >= num_experts:
        found = int(rows.min()) if rows.min() < 0 else largest
        raise AlignmentError(f"expert id {found} outside [0, {num_experts})")


def _check_unique(rows: ExpertIdArray) -> None:
    """Compare all pairs of columns, a block at a time, transposed so that each comparison is contiguous."""
    count, layers, top_k = rows.shape
    flat = rows.reshape(count * layers, top_k)
    for begin in range(0, len(flat), _BLOCK):
        columns = np.ascontiguousarray(flat[begin : begin + _BLOCK].T)
        for shift in range(1, top_k):
            twice = columns[shift:] == columns[:-shift]
            if twice.any():
                row, layer = divmod(begin + int(twice.any(axis=0).argmax()), layers)
                ids = rows[row, layer].tolist()
                raise AlignmentError(f"expert ids {ids} of row {row}, layer {layer} are not distinct")


def _check_kin(old: RoutingTrace, new: RoutingTrace) -> None:
    a, b = (old.rows.shape[1:], old.num_experts), (new.rows.shape[1:], new.num_experts)
    if a != b:
        raise AlignmentError(f"traces of two models: layers and top-k, experts are {a} and {b}")


def _versions(trace: RoutingTrace) -> npt.NDArray[np.int64]:
    """The version of each row."""
    versions = np.full(len(trace.rows), NEVER_COMPUTED, np.int64)
    for span in trace.spans:
        versions[span.start : span.end] = span.weight_version
    return versions


def _runs(versions: npt.NDArray[np.int64]) -> tuple[VersionSpan, ...]:
    """Spans of equal versions, longest possible."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return _spans((a, b, int(versions[a])) for a, b in pairwise(edges) if a < b)


def _spans(parts: Iterator[tuple[int, int, int]] | list[tuple[int, int, int]]) -> tuple[VersionSpan, ...]:
    """Spans without the empty ones."""
    return tuple(VersionSpan(start=a, end=b, weight_version=v) for a, b, v in parts if a < b)
