"""The record of a step: its batch, what the trainer made of it, how its weights went to the engines."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from async_rl.observability.records import COUNTS, FIGURES, StepRecord, TrajectoryCounts
from async_rl.queue.packing import TakenBatch
from async_rl.trainer_protocol import StepResult
from async_rl.weights.weight_sync import SyncReport


class StepDone(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step that is done, whose weights are to be brought to the engines. Times in seconds."""

    batch: TakenBatch
    result: StepResult
    wait_s: float
    """For the batch."""
    step_s: float
    sync_hidden_s: float
    """Of the sync before; see `StepRecord`."""


def record_of(
    done: StepDone,
    report: SyncReport,
    *,
    counts: TrajectoryCounts,
    time_s: float,
    tokens_per_s: float,
    length_ks: float | None,
    engine_idle_share: float,
) -> StepRecord:
    """What is written down of a step; the figures that are not its own are as of its end."""
    batch, result = done.batch, done.result
    measured: dict[str, Any] = {name: result.metrics.get(name) for name in FIGURES}
    measured |= {name: int(result.metrics.get(name, 0)) for name in COUNTS}
    return StepRecord(
        step=result.step,
        weight_version=report.weight_version,
        time_s=time_s,
        reward_mean=float(np.mean(batch.rewards)),
        reward_min=min(batch.rewards),
        reward_max=max(batch.rewards),
        **measured,
        extremes=result.extremes,
        staleness_mean=float(np.mean(batch.staleness)),
        staleness_p50=float(np.percentile(batch.staleness, 50)),
        staleness_p95=float(np.percentile(batch.staleness, 95)),
        staleness_max=max(batch.staleness),
        staleness_counts=tuple(np.bincount(batch.staleness).tolist()),
        length_ks=length_ks,
        trajectories=len(batch.trajectory_ids),
        interrupted=sum(1 for resumes in batch.resumes if resumes),
        sampled_tokens_mean=float(np.mean(batch.sampled_lengths)),
        sampled_tokens_min=min(batch.sampled_lengths),
        sampled_tokens_max=max(batch.sampled_lengths),
        masked_tokens=batch.num_masked_tokens,
        wait_s=done.wait_s,
        step_s=done.step_s,
        sync_s=report.total_s,
        handover_s=report.handover_s,
        sync_hidden_s=done.sync_hidden_s,
        transfer_s=report.publish_s + report.transfer_s,
        pause_s=report.pause_s,
        in_flight=counts.in_flight,
        queued=counts.queued,
        dropped=sum(counts.dropped.values()),
        dropped_reasons=counts.dropped,
        engine_idle_share=engine_idle_share,
        tokens_per_s=tokens_per_s,
    )
