"""What a run writes down about itself: a `StepRecord` for each trainer step, and the `Summary` of them all.

One `StepRecord` is one line of `metrics.jsonl`, one row on the terminal and one update of the gauges; the
`Summary` is `summary.json`. JSON has no NaN: a figure that is not a finite number is written as null and read
back as None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeGuard

import msgspec

from async_rl.observability.record_log import RecordLog
from async_rl.trainer_protocol import Extreme

Figure = float | None
"""A figure that may not exist: None, NaN and null are the same."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One trainer step. Means are over the batch; times in seconds, `_nats` are natural logarithms."""

    step: int
    weight_version: int
    """The version that this step published."""
    time_s: float
    """Since the first trajectory of this run was dispatched, at the end of the step."""

    reward_mean: Figure = None
    reward_min: Figure = None
    reward_max: Figure = None
    loss: Figure = None
    ppo_kl: Figure = None
    """Old minus current log-probs, the old ones recomputed by the trainer."""
    ppo_kl_bypass: Figure = None
    """The same where the engine's log-probs stand for the old ones: mismatch and staleness are in it too."""
    rollout_kl: Figure = None
    """Rollout minus the trainer's log-probs at the start of the step; by versions of lag below."""
    rollout_kl_lag0: Figure = None
    rollout_kl_lag1: Figure = None
    rollout_kl_lag2_up: Figure = None
    tokens_lag0: int = 0
    """Trained tokens by versions of lag: a mean over a handful of them says little."""
    tokens_lag1: int = 0
    tokens_lag2_up: int = 0
    kl_mismatch: Figure = None
    """Part of the rollout KL (half the mean squared log-prob difference) that lag 0 has: engine mismatch."""
    kl_staleness: Figure = None
    """What tokens of lag 1 and more have beyond it: staleness."""
    kl_routing: Figure = None
    """What replaying the engine's routing removes from it at lag 0, by a probe; None in steps without one."""
    routing_native_abs_diff: Figure = None
    """Mean absolute trainer minus rollout log-prob of the probe's lag-0 tokens, routed by the trainer."""
    routing_replayed_abs_diff: Figure = None
    """The same with the engine's routing replayed, as it is trained."""
    routing_probe_tokens: int = 0
    """Tokens of lag 0 in the probe."""
    clip_fraction: Figure = None
    entropy: Figure = None
    grad_norm: Figure = None
    learning_rate: Figure = None
    importance_ratio_mean: Figure = None
    importance_ratio_p1: Figure = None
    """Percentiles of exp(trainer - rollout log-prob) over the trained tokens of all ranks, exact."""
    importance_ratio_p50: Figure = None
    importance_ratio_p99: Figure = None
    importance_ratio_p999: Figure = None
    """The 99.9th."""
    effective_sample_share: Figure = None
    """Tokens of equal weight that would carry as much as the weighted ones, over the trained tokens."""
    extremes: tuple[Extreme, ...] = ()
    """Largest absolute log-prob differences first."""
    importance_truncated_fraction: Figure = None
    """Share of the trained tokens whose importance weight `trainer.loss.importance` bounded."""
    importance_rejected_fraction: Figure = None
    """Share of them that is of answers left out by `trainer.loss.reject`."""
    reference_kl: Figure = None
    """Estimated KL divergence from the reference policy; None where there is none."""
    updates: int = 0
    """Optimizer steps taken in this step."""
    updates_skipped: int = 0
    """Those left out: a loss or gradient norm that is not finite, or a spike."""
    log_prob_diff: Figure = None
    """Trainer minus rollout, mean over all trained tokens."""
    log_prob_abs_diff: Figure = None
    lag0_log_prob_abs_diff: Figure = None
    """Mean absolute difference over tokens sampled at the trainer's own version; None when there are none."""

    staleness_mean: float = 0.0
    staleness_p50: float = 0.0
    staleness_p95: float = 0.0
    staleness_max: int = 0
    staleness_counts: tuple[int, ...] = ()
    """Trajectories of the batch by staleness, from 0 on."""
    length_ks: Figure = None
    """Kolmogorov-Smirnov distance of the lengths trained lately from those of all that ended lately."""

    trajectories: int = 0
    interrupted: int = 0
    """Trajectories of the batch that were interrupted and resumed at least once."""
    tokens: int = 0
    sampled_tokens_mean: Figure = None
    """Tokens that the policy wrote, by trajectory."""
    sampled_tokens_min: int = 0
    sampled_tokens_max: int = 0
    trained_tokens: int = 0
    masked_tokens: int = 0
    """Sampled tokens of the batch that were left out of the loss because they are too old."""
    routing_rows: int = 0
    routing_rows_invalid: int = 0

    wait_s: float = 0.0
    """The trainer waited for this batch."""
    step_s: float = 0.0
    sync_s: float = 0.0
    """From the end of the step (with `weights.overlap`: of the copy) to the last engine resumed."""
    handover_s: float = 0.0
    """The trainer stood still for its weights: `sync_s`, or with `weights.overlap` until they were copied."""
    sync_hidden_s: float = 0.0
    """With `weights.overlap`: the part of this step in which the version before was still on its way."""
    transfer_s: float = 0.0
    """The part of `sync_s` in which weights were written, sent or loaded."""
    pause_s: float = 0.0
    """Longest time an engine took no requests, beyond the transfer."""

    in_flight: int = 0
    queued: int = 0
    dropped: int = 0
    """Dropped since the start of the run, all reasons."""
    dropped_reasons: dict[str, int] = {}
    """The same by reason."""
    engine_idle_share: Figure = None
    """Share of the engines' time without any call, since training began."""
    tokens_per_s: float = 0.0
    """Tokens sampled by all engines since the previous record, per second."""

    @property
    def log_prob_diff_extreme(self) -> Figure:
        """Largest absolute log-prob difference, nats; None when no token was trained."""
        return abs(self.extremes[0].difference) if self.extremes else None


class TrajectoryCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Where all dispatched trajectories are."""

    dispatched: int
    trained: int
    in_flight: int
    queued: int
    dropped: dict[str, int] = {}

    @property
    def unaccounted(self) -> int:
        """Zero, or a trajectory was lost or counted twice."""
        settled = self.trained + sum(self.dropped.values())
        return self.dispatched - self.in_flight - self.queued - settled


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What the records of the steps do not say."""

    trajectories: TrajectoryCounts
    rl_seconds: float
    """From the first dispatch to the end of the last step, start-up excluded."""
    sampled_tokens: int
    engine_idle_share: float
    max_staleness: int
    routing_merge: str
    """`replace`, `splice`, or `off` when nothing is replayed."""


class RoutingSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Routing replay of the whole run."""

    merge: str
    rows_checked: int
    rows_invalid: int


class SyncSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Weight updates of the whole run, seconds."""

    mean_s: Figure
    max_s: Figure
    pause_mean_s: Figure
    pause_max_s: Figure


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in one screen, for programs: `summary.json`."""

    reward_first: Figure
    """Mean of the first 5 steps."""
    reward_last: Figure
    """Mean of the last 5 steps."""
    weight_versions: int
    """Published by this run."""
    trajectories: TrajectoryCounts
    interrupted_share: Figure
    """Of the trained trajectories, those interrupted and resumed at least once."""
    staleness_max: int
    max_staleness: int
    """The bound from the config."""
    length_ks: Figure
    """Of the last step; near 0 unless long answers are dropped or delayed out of proportion."""
    masked_share: Figure
    """Of the sampled tokens of trained trajectories, those left out of the loss because they were too old."""
    ppo_kl_mean: Figure
    """None where the engine's log-probs stood for the old ones; the next is not None then."""
    ppo_kl_bypass_mean: Figure
    log_prob_abs_diff_mean: Figure
    """Trainer against rollout at equal versions, mean over the steps, nats."""
    rl_seconds: float
    tokens_per_s: Figure
    """Sampled tokens over `rl_seconds`."""
    routing: RoutingSummary
    trainer_idle_share: Figure
    """Share of `rl_seconds` in which the trainer waited for a batch."""
    engine_idle_share: Figure
    sync: SyncSummary


WINDOW = 5
"""Steps in `reward_first` and `reward_last`: one batch is too noisy to compare with another."""


def summarise(records: Sequence[StepRecord], totals: Totals) -> Summary:
    """Sum up a run. With no records, what needs a step is None."""
    trained = sum(record.trajectories for record in records)
    masked = sum(record.masked_tokens for record in records)
    return Summary(
        reward_first=mean(record.reward_mean for record in records[:WINDOW]),
        reward_last=mean(record.reward_mean for record in records[-WINDOW:]),
        weight_versions=len({record.weight_version for record in records}),
        trajectories=totals.trajectories,
        interrupted_share=_ratio(sum(record.interrupted for record in records), trained),
        staleness_max=max((record.staleness_max for record in records), default=0),
        max_staleness=totals.max_staleness,
        length_ks=records[-1].length_ks if records else None,
        masked_share=_ratio(masked, masked + sum(record.trained_tokens for record in records)),
        ppo_kl_mean=mean(record.ppo_kl for record in records),
        ppo_kl_bypass_mean=mean(record.ppo_kl_bypass for record in records),
        log_prob_abs_diff_mean=mean(record.lag0_log_prob_abs_diff for record in records),
        rl_seconds=totals.rl_seconds,
        tokens_per_s=_ratio(totals.sampled_tokens, totals.rl_seconds),
        routing=RoutingSummary(
            merge=totals.routing_merge,
            rows_checked=sum(record.routing_rows for record in records),
            rows_invalid=sum(record.routing_rows_invalid for record in records),
        ),
        trainer_idle_share=_ratio(sum(record.wait_s for record in records), totals.rl_seconds),
        engine_idle_share=totals.engine_idle_share,
        sync=SyncSummary(
            mean_s=mean(record.sync_s for record in records),
            max_s=max((record.sync_s for record in records), default=None),
            pause_mean_s=mean(record.pause_s for record in records),
            pause_max_s=max((record.pause_s for record in records), default=None),
        ),
    )


def mean(values: Iterable[Figure]) -> Figure:
    """Mean of the finite values; None when there are none."""
    finite = [value for value in values if is_finite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def is_finite(value: Figure) -> TypeGuard[float]:
    """Whether there is a finite number."""
    return value is not None and math.isfinite(value)


def step_record_log(path: Path) -> RecordLog[StepRecord]:
    """Open the `metrics.jsonl` of a run."""
    return RecordLog(path, StepRecord, lambda record: record.step)


def _ratio(part: float, whole: float) -> Figure:
    return part / whole if whole > 0 else None
