"""Reads trajectories of a batch: maps their frames and copies each token once, to its position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from async_rl import routing
from async_rl.errors import AlignmentError
from async_rl.store import frames
from async_rl.types import SamplingMask, StoredTrajectory, TakenBatch, TrainBatch


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
        columns = frames.read_columns(trajectories[index])
        _copy_columns(batch, int(offsets[index]), int(offsets[index + 1]), trajectories[index], columns)
        if frames.MASK_COUNTS in columns:
            masks[index] = SamplingMask(
                counts=columns[frames.MASK_COUNTS], token_ids=columns[frames.MASK_TOKEN_IDS]
            )
        found = columns.get(frames.TEACHER_LOG_PROBS)
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
    batch.token_ids[start:end] = columns[frames.TOKEN_IDS]
    batch.rollout_log_probs[start:end] = columns[frames.ROLLOUT_LOG_PROBS]
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
    if (rows := columns.get(frames.ROUTED_EXPERTS)) is not None:  # the token sampled last was never fed
        experts[start : end - 1] = rows
        valid[start : end - 1] = columns.get(frames.ROUTING_VALID, True)
