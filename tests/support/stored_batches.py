"""Stores trajectories in a spool and takes batches of them, as the queue does."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from async_rl.codec import Frame
from async_rl.engine_protocol import EngineFacts
from async_rl.store import frames
from async_rl.store.frames import read_trajectories
from async_rl.store.spool import Spool
from async_rl.types import (
    StoredRouting,
    StoredTrajectory,
    TakenBatch,
    TokenSpan,
    TrainBatch,
    Trajectory,
)
from tests.support.trajectories import MadeGroup


def store_trajectory(folder: Path, trajectory: Trajectory) -> StoredTrajectory:
    """Write a trajectory into a folder."""
    (stored,) = Spool(folder, None).store_tree([trajectory])
    return stored


def taken_batch(
    folder: Path,
    groups: Sequence[MadeGroup],
    version: int,
    batch_id: str = "batch",
    facts: EngineFacts | None = None,
    oldest: int | None = None,
) -> TakenBatch:
    """Store groups in a folder and make a batch of them."""
    spool = Spool(folder, None)
    stored = [spool.store_tree(group.trajectories) for group in groups]
    return TakenBatch(
        batch_id=batch_id,
        trainer_version=version,
        group_ids=tuple(group.group_id for group in groups),
        group_index=tuple(index for index, group in enumerate(stored) for _ in group),
        trajectories=tuple(trajectory for group in stored for trajectory in group),
        masked_below=oldest,
        num_experts=0 if facts is None else facts.num_experts,
        moe_layers=() if facts is None else facts.moe_layers,
        top_k=0 if facts is None else facts.top_k,
    )


def store_batch(folder: Path, batch: TrainBatch) -> TakenBatch:
    """Store each trajectory of a batch that was made in memory, and return references to them."""
    folder.mkdir(parents=True, exist_ok=True)
    trajectories = []
    unknown = np.zeros(batch.num_tokens, np.bool_) if batch.lag_unknown is None else batch.lag_unknown
    for index, name in enumerate(batch.trajectory_ids):
        part = slice(int(batch.offsets[index]), int(batch.offsets[index + 1]))
        fed = slice(part.start, part.stop - 1)
        columns = {
            frames.TOKEN_IDS: batch.token_ids[part],
            frames.ROLLOUT_LOG_PROBS: batch.rollout_log_probs[part],
        }
        if batch.sampling_mask is not None:
            mask = batch.sampling_mask[part]
            columns |= {frames.MASK_COUNTS: mask.counts, frames.MASK_TOKEN_IDS: mask.token_ids}
        routing = None
        if batch.routed_experts is not None and batch.routing_valid is not None:
            rows, valid = batch.routed_experts[fed], batch.routing_valid[fed]
            columns |= {frames.ROUTED_EXPERTS: rows, frames.ROUTING_VALID: valid}
            routing = StoredRouting(
                shape=rows.shape,
                dtype=rows.dtype.name,
                num_experts=batch.num_experts,
                moe_layers=batch.moe_layers,
                num_invalid=int((~valid).sum()),
                num_recomputed=0,
            )
        frame = Frame(frames.TrajectoryColumns(trajectory_id=name, columns=columns))
        (folder / name).write_bytes(b"".join(frame.buffers()))
        origins = zip(
            batch.weight_versions[part].tolist(),
            batch.loss_mask[part].tolist(),
            unknown[part].tolist(),
            strict=True,
        )
        spans = [
            TokenSpan(
                length=len(list(tokens)),
                weight_version=version,
                inherited=version >= 0 and not is_trained,
                lag_unknown=is_unknown,
            )
            for (version, is_trained, is_unknown), tokens in groupby(origins)
        ]
        trajectories.append(
            StoredTrajectory(
                trajectory_id=name,
                group_id=str(batch.group_index[index]),
                task_id="task",
                path=str(folder / name),
                nbytes=frame.nbytes,
                checksum=frame.checksum,
                spans=tuple(spans),
                reward=float(batch.rewards[index]),
                stop_reason="completed",
                routing=routing,
            )
        )
    rows_of_all = batch.routed_experts
    return TakenBatch(
        batch_id=batch.batch_id,
        trainer_version=batch.trainer_version,
        group_ids=tuple(dict.fromkeys(map(str, batch.group_index))),
        group_index=tuple(batch.group_index.tolist()),
        trajectories=tuple(trajectories),
        num_experts=batch.num_experts,
        moe_layers=batch.moe_layers,
        top_k=0 if rows_of_all is None else rows_of_all.shape[2],
    )


def assemble_batch(
    groups: Sequence[MadeGroup],
    version: int,
    batch_id: str,
    facts: EngineFacts | None = None,
    oldest: int | None = None,
) -> TrainBatch:
    """Store groups, make a batch of them and read all of it, as a single trainer rank does."""
    with tempfile.TemporaryDirectory() as folder:
        return read_trajectories(taken_batch(Path(folder), groups, version, batch_id, facts, oldest))
