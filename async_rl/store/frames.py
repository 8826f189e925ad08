"""The frame of one trajectory in a spool: its per-token data as columns.

```
Trajectory ─ encode_trajectory ─► frame in a file ─► StoredTrajectory (ledger, queue, batches)
                                        └─ read_columns ─► token_ids, rollout_log_probs, routed_experts, …
```

The frame holds what only a trainer rank needs. Versions, masks and rewards are in the reference. Where one
call rewards a group, a completion, which only that call needs, is a frame of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from async_rl import codec
from async_rl.codec import Bytes, Frame
from async_rl.errors import AgentLoopError, CorruptFrame
from async_rl.runtime.shortages import is_shortage
from async_rl.types import Completion, StoredCompletion, StoredTrajectory, Trajectory

TOKEN_IDS: Final = "token_ids"  # [T] int32
ROLLOUT_LOG_PROBS: Final = "rollout_log_probs"  # [T] float32, nats, 0 where not sampled
MASK_COUNTS: Final = "mask_counts"  # [T] uint16; absent, like the next, where sampling was not truncated
MASK_TOKEN_IDS: Final = "mask_token_ids"  # [sum of the counts] uint16 | uint32
TEACHER_LOG_PROBS: Final = "teacher_log_probs"  # [T] float32, nats; absent without a teacher
ROUTED_EXPERTS: Final = "routed_experts"  # [T-1, L_moe, K] uint8 | uint16
ROUTING_VALID: Final = "routing_valid"  # [T-1] bool; absent where all rows are valid

_MAX_READ_BYTES: Final = 128 << 10
"""A frame of at most this size is read at once: a mapping and its page faults would take longer."""


class TrajectoryColumns(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The content of a frame: per-token arrays by name, each in the order of the tokens."""

    trajectory_id: str
    columns: dict[str, np.ndarray]


def encode_trajectory(trajectory: Trajectory) -> Frame:
    """Return the frame of a trajectory; its routing rows are not copied."""
    columns: dict[str, np.ndarray] = {
        TOKEN_IDS: trajectory.token_ids,
        ROLLOUT_LOG_PROBS: trajectory.rollout_log_probs,
    }
    if (mask := trajectory.sampling_mask) is not None:
        columns[MASK_COUNTS], columns[MASK_TOKEN_IDS] = mask.counts, mask.token_ids
    if trajectory.teacher_log_probs is not None:
        columns[TEACHER_LOG_PROBS] = trajectory.teacher_log_probs
    if (trace := trajectory.trace) is not None:
        columns[ROUTED_EXPERTS] = trace.rows
        if not trace.valid.all():
            columns[ROUTING_VALID] = trace.valid
    return Frame(TrajectoryColumns(trajectory_id=trajectory.trajectory_id, columns=columns))


def verify_frame(stored: StoredTrajectory) -> None:
    """Check that the frame of a trajectory is there and complete, without decoding it.

    Raises:
        CorruptFrame: When it is missing, damaged, or not the frame that the reference is of.
    """
    with _named(stored):
        _check(stored, codec.inspect(_read_small(stored) or _map(stored)).checksum)


def find_flaws(stored: Iterable[StoredTrajectory]) -> dict[str, str]:
    """Return what is wrong with frames that are missing or damaged, by trajectory."""
    flaws: dict[str, str] = {}
    for each in stored:
        try:
            verify_frame(each)
        except CorruptFrame as error:
            flaws[each.trajectory_id] = str(error)
    return flaws


def read_columns(stored: StoredTrajectory) -> dict[str, np.ndarray]:
    """Map the frame of a trajectory, verify it and return its columns, read-only views of the mapping.

    Raises:
        CorruptFrame: As `verify_frame`.
    """
    with _named(stored):
        buffer = _map(stored)
        content = codec.decode(buffer, TrajectoryColumns)
        _check(stored, codec.checksum_of(buffer))
    return content.columns


def read_frame(stored: StoredTrajectory) -> Bytes:
    """Return the bytes of a frame, a view of its mapping. They are not verified.

    Raises:
        CorruptFrame: When the file does not exist.
    """
    with _named(stored):
        return _map(stored)[: stored.nbytes]


def encode_completion(completion: Completion, trajectory_id: str) -> Frame:
    """Return the frame of a trajectory's completion.

    Raises:
        AgentLoopError: When its messages hold something else than JSON has.
    """
    try:
        return Frame(completion)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise AgentLoopError(
            f"the messages of trajectory {trajectory_id} cannot be stored until its group is scored: "
            f"{error}; use only what JSON has in messages"
        ) from error


def read_completion(stored: StoredCompletion) -> Completion:
    """Read a completion.

    Raises:
        CorruptFrame: When the file is missing, damaged, or not the one that the reference is of.
    """
    with _named(stored):
        content = Path(stored.path).read_bytes()
        completion = codec.decode(content, Completion)
        if (checksum := codec.checksum_of(content)) != stored.checksum:
            raise CorruptFrame(
                f"holds another completion: checksum {checksum:08x}, expected {stored.checksum:08x}"
            )
    return completion


def _read_small(stored: StoredTrajectory) -> bytes | None:
    """Return a frame that is read faster than mapped; None for a large one."""
    if stored.nbytes > _MAX_READ_BYTES:
        return None
    file = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(file, stored.nbytes, stored.offset)
    finally:
        os.close(file)


def _map(stored: StoredTrajectory) -> Bytes:
    return np.frombuffer(codec.map_file(stored.path), np.uint8)[stored.offset :]


@contextmanager
def _named(stored: StoredTrajectory | StoredCompletion) -> Iterator[None]:
    """Name the file in what is wrong with it."""
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptFrame(f"{stored.path} does not exist") from error
    except OSError as error:
        if is_shortage(error):
            raise
        raise CorruptFrame(f"{stored.path} cannot be read: {error.strerror}") from error
    except CorruptFrame as error:
        raise CorruptFrame(f"{stored.path}: {error}") from error


def _check(stored: StoredTrajectory, checksum: int) -> None:
    if checksum != stored.checksum:
        raise CorruptFrame(
            f"holds another frame than that of trajectory {stored.trajectory_id}: checksum {checksum:08x}, "
            f"expected {stored.checksum:08x}"
        )
