"""The frame of one trajectory in a spool: its per-token data as columns.

```
Trajectory ─ encode_trajectory ─► frame in a file ─► StoredTrajectory (ledger, queue, batches)
                                        └─ read_columns ─► token_ids, rollout_log_probs, routed_experts, …
                                             └─ read_trajectories ─► TrainBatch, each token copied once
```

The frame holds what only a trainer rank needs. Versions, masks and rewards are in the reference. Where one
call rewards a group, a completion, which only that call needs, is a frame of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from async_rl import codec, routing
from async_rl.codec import Bytes, Frame
from async_rl.errors import AgentLoopError, AlignmentError, CorruptFrame
from async_rl.runtime.shortages import is_shortage
from async_rl.types import (
    Completion,
    SamplingMask,
    StoredCompletion,
    StoredTrajectory,
    TakenBatch,
    TrainBatch,
    Trajectory,
)

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


def read_trajectories(taken: TakenBatch, indices: Iterable[int] | None = None) -> TrainBatch:
    """Read trajectories of a batch from their frames, which are verified.

    The arrays have the shapes of the whole batch, so that positions mean the same on all ranks. What is not
    read stays 0: its pages are never touched and take no memory.

    Args:
        taken: The batch.
        indices: Whose token ids, log-probs and routing rows are read; None reads all. Versions, masks and
            rewards of all trajectories are known without.

    Raises:
        CorruptFrame: When a frame is damaged, missing, or not the one that its reference is of.
        AlignmentError: When routing rows are of another model than the batch's.
    """
    trajectories = taken.trajectories
    offsets = np.concatenate([[0], np.cumsum(taken.lengths)]).astype(np.int64)
    tokens, rows, valid = int(offsets[-1]), None, None
    if taken.num_experts:
        shape = (tokens, len(taken.moe_layers), taken.top_k)
        rows = np.zeros(shape, routing.id_dtype(taken.num_experts))
        valid = np.zeros(tokens, np.bool_)
    rewarded = [
        (offset, each)
        for offset, trajectory in zip(offsets[:-1].tolist(), trajectories, strict=True)
        for each in trajectory.turn_rewards
    ]
    any_recorded = any(span.sampling is not None for trajectory in trajectories for span in trajectory.spans)
    any_unknown = any(span.lag_unknown for trajectory in trajectories for span in trajectory.spans)
    batch = TrainBatch(
        batch_id=taken.batch_id,
        trainer_version=taken.trainer_version,
        trajectory_ids=taken.trajectory_ids,
        group_index=np.array(taken.group_index, np.int32),
        rewards=np.array(taken.rewards, np.float32),
        offsets=offsets,
        token_ids=np.zeros(tokens, np.int32),
        loss_mask=np.concatenate([trajectory.loss_mask(taken.masked_below) for trajectory in trajectories]),
        rollout_log_probs=np.zeros(tokens, np.float32),
        weight_versions=np.concatenate([trajectory.weight_versions for trajectory in trajectories]),
        routed_experts=rows,
        routing_valid=valid,
        num_experts=taken.num_experts,
        moe_layers=taken.moe_layers,
        lag_unknown=np.concatenate([each.lag_unknown for each in trajectories]) if any_unknown else None,
        temperatures=np.concatenate([each.temperatures for each in trajectories]) if any_recorded else None,
        turn_reward_positions=np.array([offset + each.end - 1 for offset, each in rewarded], np.int64),
        turn_reward_values=np.array([each.reward for _, each in rewarded], np.float32),
    )
    masks: dict[int, SamplingMask] = {}
    scores = np.zeros(tokens, np.float32)
    any_scored = False
    for index in range(len(trajectories)) if indices is None else indices:
        columns = read_columns(trajectories[index])
        _copy_columns(batch, int(offsets[index]), int(offsets[index + 1]), trajectories[index], columns)
        if MASK_COUNTS in columns:
            masks[index] = SamplingMask(counts=columns[MASK_COUNTS], token_ids=columns[MASK_TOKEN_IDS])
        found = columns.get(TEACHER_LOG_PROBS)
        scores[offsets[index] : offsets[index + 1]] = np.nan if found is None else found
        any_scored = any_scored or found is not None
    if any_scored:
        batch = msgspec.structs.replace(batch, teacher_log_probs=scores)
    if not masks:
        return batch
    known = [
        masks.get(index) or SamplingMask.untruncated(length) for index, length in enumerate(taken.lengths)
    ]
    return msgspec.structs.replace(batch, sampling_mask=SamplingMask.joined(known))


def _copy_columns(
    batch: TrainBatch, start: int, end: int, trajectory: StoredTrajectory, columns: Mapping[str, np.ndarray]
) -> None:
    batch.token_ids[start:end] = columns[TOKEN_IDS]
    batch.rollout_log_probs[start:end] = columns[ROLLOUT_LOG_PROBS]
    experts, valid, described = batch.routed_experts, batch.routing_valid, trajectory.routing
    if experts is None or valid is None or described is None:
        return
    found = described.num_experts, described.moe_layers, described.shape[2]
    if found != (expected := (batch.num_experts, batch.moe_layers, experts.shape[2])):
        raise AlignmentError(
            f"trajectory {trajectory.trajectory_id} has routing rows of another model: experts, layers with "
            f"experts and experts of a token are {found}, expected {expected}. The model of a run cannot "
            "change: start a new one",
            "wrong_layers",
        )
    if (rows := columns.get(ROUTED_EXPERTS)) is not None:  # the token sampled last was never fed
        experts[start : end - 1] = rows
        valid[start : end - 1] = columns.get(ROUTING_VALID, True)


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
