"""Packs groups into one batch: copies each token once, to its position, without padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rl import routing
from async_rl.engine_protocol import EngineFacts
from async_rl.errors import AlignmentError, DataError
from async_rl.types import Context, Group, Sampled, TrainBatch, Trajectory


def assemble_batch(
    groups: Sequence[Group],
    version: int,
    batch_id: str,
    facts: EngineFacts | None = None,
    oldest: int | None = None,
) -> TrainBatch:
    """Pack whole groups into new arrays; `plan_batch` and `fill_batch` describe the arguments and errors."""
    batch = plan_batch(groups, version, batch_id, facts)
    fill_batch(batch, groups, oldest)
    return batch


def plan_batch(
    groups: Sequence[Group], version: int, batch_id: str, facts: EngineFacts | None = None
) -> TrainBatch:
    """Return the batch with arrays of the right shapes; they take no memory until they are written.

    Args:
        groups: The groups, in the order of the batch.
        version: The weight version that the trainer holds.
        batch_id: The name of the batch.
        facts: The model's facts, when routing is replayed.

    Raises:
        DataError: When there is nothing to train on, or a trajectory has no tokens.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    lengths = [t.num_tokens for t in trajectories]
    if not all(lengths) or not lengths:
        raise DataError(f"batch {batch_id}: {len(lengths)} trajectories, of {lengths} tokens")
    count, tokens = len(lengths), sum(lengths)
    rows = None
    if facts is not None:
        rows = np.empty((tokens, len(facts.moe_layers), facts.top_k), routing.id_dtype(facts.num_experts))
    return TrainBatch(
        batch_id=batch_id,
        trainer_version=version,
        trajectory_ids=tuple(t.trajectory_id for t in trajectories),
        group_index=np.empty(count, np.int32),
        rewards=np.empty(count, np.float32),
        offsets=np.empty(count + 1, np.int64),
        token_ids=np.empty(tokens, np.int32),
        loss_mask=np.empty(tokens, np.bool_),
        rollout_log_probs=np.empty(tokens, np.float32),
        weight_versions=np.empty(tokens, np.int32),
        routed_experts=rows,
        routing_valid=None if rows is None else np.empty(tokens, np.bool_),
        num_experts=0 if facts is None else facts.num_experts,
        moe_layers=() if facts is None else facts.moe_layers,
        undone=np.empty(tokens, np.bool_) if any(map(_has_undone, trajectories)) else None,
    )


def fill_batch(batch: TrainBatch, groups: Sequence[Group], oldest: int | None = None) -> None:
    """Write every element of the arrays of a planned batch.

    Args:
        batch: The batch, planned for these groups.
        groups: The groups, in the order of the batch; their routing rows have passed `check_model`.
        oldest: Tokens that older weights than this sampled are left out of the loss; None leaves out none.

    Raises:
        DataError: When a trajectory has no reward.
    """
    position = index = 0
    batch.offsets[0] = 0
    for group_index, group in enumerate(groups):
        for trajectory in group.trajectories:
            if trajectory.outcome.reward is None:
                raise DataError(
                    f"trajectory {trajectory.trajectory_id} has no reward; it cannot be trained on"
                )
            batch.group_index[index] = group_index
            batch.rewards[index] = trajectory.outcome.reward
            end = _fill_tokens(batch, position, trajectory, oldest)
            if batch.routed_experts is not None:
                _fill_routing(batch, position, end, trajectory)
            position, index = end, index + 1
            batch.offsets[index] = end


def check_model(trajectory: Trajectory, facts: EngineFacts) -> None:
    """Check that stored routing rows are of the model that is trained: a run may be resumed with another one.

    Only types and shapes are compared. The session verified text and ids when the rows arrived, and the frame
    has a checksum.

    Raises:
        AlignmentError: When they are not; names the trajectory, what was found and what was expected.
    """
    trace = trajectory.trace
    if trace is None:
        return
    found = trace.rows.shape, trace.rows.dtype, trace.num_experts
    shape = (trajectory.num_tokens - 1, len(facts.moe_layers), facts.top_k)
    expected = shape, routing.id_dtype(facts.num_experts), facts.num_experts
    if found != expected:
        raise AlignmentError(
            f"trajectory {trajectory.trajectory_id}: "
            + "routing of shape {}, {}, {} experts".format(*found)
            + "; expected {}, {}, {}".format(*expected),
            "too_many_rows" if len(trace.rows) > shape[0] else "wrong_shape",
        )
    if trace.moe_layers != facts.moe_layers:
        raise AlignmentError(
            f"trajectory {trajectory.trajectory_id}: routing of the layers {trace.moe_layers}, expected "
            f"{facts.moe_layers}",
            "wrong_layers",
        )


def _fill_tokens(batch: TrainBatch, position: int, trajectory: Trajectory, oldest: int | None) -> int:
    for index, segment in enumerate(trajectory.segments):
        end = position + len(segment.token_ids)
        batch.token_ids[position:end] = segment.token_ids
        if isinstance(segment, Context):
            batch.loss_mask[position:end] = False
            batch.rollout_log_probs[position:end] = 0.0
            batch.weight_versions[position:end] = -1
        else:
            own = index >= trajectory.num_inherited
            batch.loss_mask[position:end] = own and (oldest is None or segment.weight_version >= oldest)
            batch.rollout_log_probs[position:end] = segment.rollout_log_probs
            batch.weight_versions[position:end] = segment.weight_version
        if batch.undone is not None:
            batch.undone[position:end] = isinstance(segment, Sampled) and segment.undone
        position = end
    return position


def _has_undone(trajectory: Trajectory) -> bool:
    return any(isinstance(segment, Sampled) and segment.undone for segment in trajectory.segments)


def _fill_routing(batch: TrainBatch, start: int, end: int, trajectory: Trajectory) -> None:
    """Copy the rows of the fed tokens; the token sampled last was never fed."""
    experts, valid, trace = batch.routed_experts, batch.routing_valid, trajectory.trace
    assert experts is not None
    assert valid is not None
    if trace is None:
        experts[start:end] = 0
        valid[start:end] = False
        return
    experts[start : end - 1] = trace.rows
    experts[end - 1] = 0
    valid[start : end - 1] = trace.valid
    valid[end - 1] = False
