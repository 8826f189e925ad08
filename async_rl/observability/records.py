"""The records of a run: a `StepRecord` for each trainer step, and the `Summary` of all steps.

One `StepRecord` is one line of `metrics.jsonl`, one row on the terminal and one update of the gauges; the
`Summary` is `summary.json`. JSON has no NaN: a figure that is not a finite number is written as null and read
back as None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final, TypeGuard

import msgspec

from async_rl.observability.failures import FailureRow
from async_rl.observability.record_log import RecordLog
from async_rl.trainer_protocol import Extreme

Figure = float | None
"""A figure that may be missing: None, NaN and null are equivalent."""


class TrainerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer measures and counts in a step; a mean over nothing is None.

    `figures.STEP_FIGURES` describes those fields of both classes that have a metric or a name in verl.
    """

    step: int
    loss: Figure = None
    ppo_kl: Figure = None
    old_log_prob_abs_diff: Figure = None
    ppo_kl_bypass: Figure = None
    rollout_kl: Figure = None
    rollout_kl_lag0: Figure = None
    rollout_kl_lag1: Figure = None
    rollout_kl_lag2_up: Figure = None
    tokens_lag0: int = 0
    """Trained tokens by versions of lag: a mean over a handful of them says little."""
    tokens_lag1: int = 0
    tokens_lag2_up: int = 0
    tokens_lag_unknown: int = 0
    """Trained tokens whose weights a restart has undone or no engine reported; in no figure by lag."""
    kl_mismatch: Figure = None
    kl_staleness: Figure = None
    kl_routing: Figure = None
    routing_native_abs_diff: Figure = None
    routing_replayed_abs_diff: Figure = None
    routing_probe_tokens: int = 0
    """Tokens of lag 0 in the probe."""
    clip_fraction: Figure = None
    entropy: Figure = None
    grad_norm: Figure = None
    learning_rate: Figure = None
    importance_ratio_mean: Figure = None
    importance_ratio_p1: Figure = None
    importance_ratio_p50: Figure = None
    importance_ratio_p99: Figure = None
    importance_ratio_p999: Figure = None
    effective_sample_share: Figure = None
    importance_truncated_fraction: Figure = None
    importance_rejected_fraction: Figure = None
    groups_without_baseline: Figure = None
    reference_kl: Figure = None
    teacher_kl: Figure = None
    value_loss: Figure = None
    value_explained_variance: Figure = None
    value_clip_fraction: Figure = None
    critic_grad_norm: Figure = None
    updates: int = 0
    """Optimizer steps taken in this step."""
    updates_skipped: int = 0
    log_prob_diff: Figure = None
    log_prob_abs_diff: Figure = None
    lag0_log_prob_abs_diff: Figure = None
    tokens: int = 0
    trained_tokens: int = 0
    routing_rows: int = 0
    routing_rows_invalid: int = 0


class StepRecord(TrainerFigures, frozen=True, kw_only=True):
    """One trainer step. Means are over the batch; times in seconds, `_nats` are natural logarithms."""

    weight_version: int
    """The weight version that this step published."""
    time_s: float
    """Seconds from the first dispatch of this run to the end of the step."""
    reward_mean: Figure = None
    reward_min: Figure = None
    reward_max: Figure = None
    extremes: tuple[Extreme, ...] = ()
    staleness_mean: float = 0.0
    staleness_p50: float = 0.0
    staleness_p95: float = 0.0
    staleness_max: int = 0
    staleness_counts: tuple[int, ...] = ()
    """Trajectories of the batch by staleness, from 0 on."""
    length_ks: Figure = None
    trajectories: int = 0
    groups: int = 0
    groups_without_signal: int = 0
    """Groups of the batch that teach the policy nothing because all rewards that are compared are equal."""
    interrupted: int = 0
    sampled_tokens_mean: Figure = None
    sampled_tokens_min: int = 0
    sampled_tokens_max: int = 0
    masked_tokens: int = 0
    routing_rows_recomputed: int = 0
    wait_s: float = 0.0
    step_s: float = 0.0
    sync_s: float = 0.0
    handover_s: float = 0.0
    """How long the weight update paused the trainer: `sync_s`, or with `weights.overlap` the copy."""
    sync_hidden_s: float = 0.0
    sync_parts: dict[str, float] = {}
    """What it consisted of, seconds: publish, connect, interrupt, gather, send, load, verify."""
    sync_bytes: int = 0
    """What it wrote or sent, bytes."""
    pause_s: float = 0.0
    """Longest time an engine took no requests, beyond the transfer."""
    prefilled_again_tokens: int = 0
    """Tokens that engines prefilled again since the last step, because an update flushed them."""
    prefilled_again_s: Figure = None
    """Mean time that the calls of such tokens, and of others that were lost, waited for their next token."""
    in_flight: int = 0
    queued: int = 0
    dropped: int = 0
    """Dropped since the start of the run, all reasons."""
    dropped_reasons: dict[str, int] = {}
    """The same by reason."""
    engine_idle_share: Figure = None
    tokens_per_s: float = 0.0
    throughput_vs_plan_ratio: Figure = None
    below_plan: tuple[str, ...] = ()
    """Why the last steps are slower than expected, the worst cause first; empty if unknown or not slower."""

    @property
    def lag0_step(self) -> int | None:
        """This step if it trained tokens of the trainer's own version; otherwise it has no mismatch."""
        return self.step if is_finite(self.lag0_log_prob_abs_diff) else None

    @property
    def update_kl(self) -> Figure:
        """`ppo_kl_bypass` where it was measured, else `ppo_kl`."""
        return self.ppo_kl_bypass if is_finite(self.ppo_kl_bypass) else self.ppo_kl

    @property
    def trainer_idle_share(self) -> Figure:
        """Share of the step in which the trainer waited for its batch."""
        seconds = self.wait_s + self.step_s + self.handover_s
        return self.wait_s / seconds if seconds > 0 else None

    @property
    def log_prob_diff_extreme(self) -> Figure:
        """Largest absolute log-prob difference, nats; None when no token was trained."""
        return abs(self.extremes[0].difference) if self.extremes else None


FIGURES: Final = tuple(
    name for name, type_of in TrainerFigures.__annotations__.items() if type_of == "Figure"
)
"""What a trainer measures in a step; a figure may be missing."""

COUNTS: Final = tuple(name for name in TrainerFigures.__struct_fields__ if name not in ("step", *FIGURES))
"""What a trainer counts in a step."""


class TrajectoryCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The state of all dispatched trajectories."""

    dispatched: int
    trained: int
    in_flight: int
    queued: int
    dropped: dict[str, int] = {}

    @property
    def unaccounted(self) -> int:
        """Trajectories that were lost or counted twice; zero in a correct run."""
        settled = self.trained + sum(self.dropped.values())
        return self.dispatched - self.in_flight - self.queued - settled


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a run that its step records do not hold."""

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
    """Share of the trained trajectories that were interrupted and resumed at least once."""
    staleness_max: int
    max_staleness: int
    """The bound from the config."""
    length_ks: Figure
    """Value of the last step; near 0 unless long answers are dropped or delayed disproportionately."""
    masked_share: Figure
    """Share of the sampled tokens of trained trajectories that were too old for the loss."""
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
    groups_without_signal: int = 0
    """Consecutive groups up to the last step that teach nothing, because their rewards are all equal."""
    failures: Sequence[FailureRow] = ()
    """Why attempts did not succeed, with examples."""


WINDOW = 5
"""Steps in `reward_first` and `reward_last`: one batch is too noisy to compare with another."""

NEARLY_PLAN: Final = 0.9
"""From this `throughput_vs_plan_ratio` on a run is as fast as expected, within the noise of a few steps."""

_PACE_STEPS: Final = 10
"""The number of recent steps from which the remaining time is estimated."""

MANY_WITHOUT_SIGNAL: Final = 20
"""Consecutive groups without a signal that no longer are chance: tasks or reward are wrong."""


def summarise(records: Sequence[StepRecord], totals: Totals) -> Summary:
    """Summarise a run. Without records, figures that need a step are None."""
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
        groups_without_signal=count_without_signal(records),
    )


def count_without_signal(records: Sequence[StepRecord]) -> int:
    """Return how many consecutive groups up to the last step teach nothing; 0 if its batch has a signal."""
    without = takewhile(lambda record: record.groups_without_signal == record.groups, reversed(records))
    return sum(record.groups for record in without)


def no_signal(groups: int) -> str:
    """Say that nothing is learned, because this number of consecutive groups had no signal."""
    return (
        f"all rewards equal for {groups} groups: nothing is learned; look at some answers with "
        "`async-rl inspect`, then use easier or harder tasks, more siblings, or a finer reward"
    )


def last_at_equal_versions(records: Sequence[StepRecord]) -> StepRecord | None:
    """Return the last step that measured the engine mismatch; None when no step did.

    A step without tokens of the trainer's own version has none, as when the trainer is the bottleneck.
    """
    return next((record for record in reversed(records) if record.lag0_step is not None), None)


def mean(values: Iterable[Figure]) -> Figure:
    """Mean of the finite values; None when there are none."""
    finite = [value for value in values if is_finite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def is_finite(value: Figure) -> TypeGuard[float]:
    """Whether a figure exists and is finite."""
    return value is not None and math.isfinite(value)


def seconds_left(ends_s: Sequence[float], num_steps: int) -> Figure:
    """Return the time of this number of steps, by the pace of the last ones; None before two have ended."""
    last = ends_s[-_PACE_STEPS - 1 :]
    return (last[-1] - last[0]) / (len(last) - 1) * max(0, num_steps) if len(last) > 1 else None


def step_record_log(path: Path) -> RecordLog[StepRecord]:
    """Open the `metrics.jsonl` of a run."""
    return RecordLog(path, StepRecord, lambda record: record.step)


def _ratio(part: float, whole: float) -> Figure:
    return part / whole if whole > 0 else None
