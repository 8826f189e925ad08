"""Turns engine calls into a `TrainBatch`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from async_rl.engine_protocol import EngineFacts
from async_rl.routing import id_dtype
from async_rl.types import TrainBatch
from tests.support.engine_calls import Call


def batch_of(calls: Sequence[Call], facts: EngineFacts, *, version: int = 0) -> TrainBatch:
    """Return one trajectory per call, all of one group; rewards alternate, all sampled tokens train."""
    lengths = [len(call.sequence) for call in calls]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    mask, valid = np.zeros(total, bool), np.ones(total, bool)
    log_probs = np.zeros(total, np.float32)
    rows = np.zeros((total, len(facts.moe_layers), facts.top_k), id_dtype(facts.num_experts))
    for call, start, end in zip(calls, offsets[:-1], offsets[1:], strict=True):
        sampled = slice(end - len(call.token_ids), end)
        mask[sampled], log_probs[sampled] = True, call.log_probs
        rows[start : end - 1] = call.trace.rows
    valid[offsets[1:] - 1] = False
    return TrainBatch(
        batch_id="sampled",
        trainer_version=version,
        trajectory_ids=tuple(call.asked.request_id for call in calls),
        group_index=np.zeros(len(calls), np.int32),
        rewards=(np.arange(len(calls)) % 2).astype(np.float32),
        offsets=offsets,
        token_ids=np.concatenate([call.sequence for call in calls]).astype(np.int32),
        loss_mask=mask,
        rollout_log_probs=log_probs,
        weight_versions=np.where(mask, version, -1).astype(np.int32),
        routed_experts=rows,
        routing_valid=valid,
        num_experts=facts.num_experts,
        moe_layers=facts.moe_layers,
    )
