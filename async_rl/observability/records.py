"""The records of a run: a `StepRecord` for each trainer step, and the `Summary` of all steps.

One `StepRecord` is one line of `metrics.jsonl`, one row on the terminal and one update of the gauges; the
`Summary` is `summary.json`. JSON has no NaN: a figure that is not a finite number is written as null and read
back as None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Final, TypeGuard

import msgspec

from async_rl.observability.figures import SECONDS, Description, described_fields
from async_rl.observability.record_log import RecordLog
from async_rl.trainer_protocol import Extreme

Figure = float | None
"""A figure that may be missing: None, NaN and null are equivalent."""


class TrainerFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer measures and counts in a step; a mean over nothing is None."""

    step: Annotated[int, Description(tracker="training/global_step")]
    loss: Annotated[
        Figure,
        Description(
            "Policy loss of the last step.",
            bad="Its size says little. Not finite: the update is skipped; more than "
            "`trainer.max_skipped_updates` in a row end the run with `NonFiniteLoss`.",
            tracker="actor/pg_loss",
        ),
    ] = None
    ppo_kl: Annotated[
        Figure,
        Description(
            "Mean of old minus current log-probs over the updates of the last batch after its first.",
            unit="nats",
            bad="Grows step by step: lower `trainer.optimizer.lr`. Spikes: look at `grad_norm` and at"
            " the parts of the rollout KL. With one update per batch (`trainer.updates_per_batch`) there "
            "is none: it would be 0 by construction.",
            tracker="actor/ppo_kl",
        ),
    ] = None
    old_log_prob_abs_diff: Annotated[
        Figure,
        Description(
            "Mean |old - current log-prob| in the first update of a batch, whose weights are those of the "
            "pass that computed the old ones.",
            metric="old_log_prob_abs_diff_nats",
            bad="0, or rounding on GPUs whose kernels add in any order. Larger: the update sees other "
            "routing or other weights than the pass before it. With one update per batch it is measured "
            "every `trainer.loss.check_old_log_probs_every` steps.",
        ),
    ] = None
    ppo_kl_bypass: Annotated[
        Figure,
        Description(
            "`ppo_kl` where the engines' log-probs stand for the old ones.",
            unit="nats",
            bad="Engine mismatch and staleness are in it too: look at `kl_mismatch_nats` and "
            "`kl_staleness_nats` to tell them apart.",
        ),
    ] = None
    rollout_kl: Annotated[
        Figure,
        Description(
            "Rollout minus the trainer's log-probs at the start of the step; by versions of lag below.",
            tracker="rollout_corr/kl",
        ),
    ] = None
    rollout_kl_lag0: Annotated[
        Figure,
        Description(
            "Mean of rollout minus the trainer's log-probs before the last step, by versions of lag "
            "(0, 1, 2+).",
            metric="rollout_kl",
            child={"lag": "0"},
            unit="nats",
            bad="Away from 0 at lag 0: engine and trainer differ at equal weights. Grows with the "
            "lag: staleness; lower `rollout.max_staleness` or the learning rate.",
        ),
    ] = None
    rollout_kl_lag1: Annotated[Figure, Description(metric="rollout_kl", child={"lag": "1"})] = None
    rollout_kl_lag2_up: Annotated[Figure, Description(metric="rollout_kl", child={"lag": "2+"})] = None
    tokens_lag0: Annotated[
        int,
        Description(
            "The last step that trained tokens of the trainer's own version: the engine mismatch is of it.",
            metric="lag0_step",
            bad="Far behind the run's step: the trainer is the bottleneck and all tokens are older than its "
            "weights. Nothing compares engine and trainer at equal weights meanwhile; more ranks, or a "
            "smaller `rollout.max_staleness`.",
            attribute="lag0_step",
            keep_last=True,
        ),
    ] = 0
    """Trained tokens by versions of lag: a mean over a handful of them says little."""
    tokens_lag1: int = 0
    tokens_lag2_up: int = 0
    tokens_lag_unknown: int = 0
    """Trained tokens whose weights a restart has undone or no engine reported; in no figure by lag."""
    kl_mismatch: Annotated[
        Figure,
        Description(
            "Engine mismatch: half the mean squared log-prob difference of tokens sampled at the "
            "trainer's version, in the step `lag0_step`.",
            metric="kl_mismatch_nats",
            bad="A jump: weights did not arrive as they were sent, or routing is replayed wrongly. "
            "Steadily above 1e-3: other kernels or types in the engine; compare `model.dtype`, "
            "look at `kl_routing_nats`.",
            keep_last=True,
        ),
    ] = None
    kl_staleness: Annotated[
        Figure,
        Description(
            "Staleness: what tokens sampled by earlier versions have beyond the engine mismatch.",
            metric="kl_staleness_nats",
            bad="Above 0.01: data is too old for steps of this size; lower `rollout.max_staleness` or"
            " the learning rate.",
        ),
    ] = None
    kl_routing: Annotated[
        Figure,
        Description(
            "Routing: what replaying the engines' routing takes away from the mismatch, by a probe at lag 0.",
            metric="kl_routing_nats",
            bad="Negative: replay makes it worse, so the rows are not those that the engine used; see"
            " docs/design/routing-replay.md. Positive is what `routing.replay` is good for.",
            keep_last=True,
        ),
    ] = None
    routing_native_abs_diff: Annotated[
        Figure,
        Description(
            "Mean absolute trainer minus rollout log-prob of the probe's lag-0 tokens, by routing "
            "(native, replayed).",
            metric="routing_probe_abs_diff_nats",
            child={"routing": "native"},
            bad="`replayed` not below `native`: replay does not help, so the rows are not those of "
            "the calls.",
            keep_last=True,
        ),
    ] = None
    routing_replayed_abs_diff: Annotated[
        Figure,
        Description(
            "The same with the engine's routing replayed, as it is trained.",
            metric="routing_probe_abs_diff_nats",
            child={"routing": "replayed"},
            keep_last=True,
        ),
    ] = None
    routing_probe_tokens: int = 0
    """Tokens of lag 0 in the probe."""
    clip_fraction: Annotated[
        Figure,
        Description(
            "Share of tokens whose ratio the last step clipped.",
            bad="Above 0.2: the policy moves too far in a step, or data is too old.",
            tracker="actor/pg_clipfrac",
        ),
    ] = None
    entropy: Annotated[
        Figure,
        Description(
            "Mean entropy of the policy at the trained tokens.",
            metric="entropy_nats",
            bad="Falls to 0: collapse. Raise `rollout.temperature`, lower the learning rate.",
            tracker="actor/entropy",
        ),
    ] = None
    grad_norm: Annotated[
        Figure,
        Description(
            "Gradient norm of the last step, before clipping.",
            bad="Not finite: the update is skipped, as with `loss`. Spikes: look at "
            "`log_prob_diff_extreme_nats`.",
            tracker="actor/grad_norm",
        ),
    ] = None
    learning_rate: Annotated[
        Figure,
        Description(
            "Learning rate of the last step.",
            bad="Not what the config says after `trainer.optimizer.warmup_steps` steps.",
            tracker="actor/lr",
        ),
    ] = None
    importance_ratio_mean: Annotated[
        Figure,
        Description(
            "Mean of exp(old - rollout) over the last batch, before truncation.",
            bad="Far from 1: data is too old; lower `rollout.max_staleness`.",
        ),
    ] = None
    importance_ratio_p1: Annotated[
        Figure,
        Description(
            "Percentiles of exp(trainer - rollout log-prob) before the step, exact over all ranks "
            "(0.01, 0.5, 0.99, 0.999).",
            metric="importance_ratio",
            child={"quantile": "0.01"},
            bad="The 0.99 near `trainer.loss.importance.high`: the bound bites on more than single tokens.",
        ),
    ] = None
    importance_ratio_p50: Annotated[
        Figure, Description(metric="importance_ratio", child={"quantile": "0.5"})
    ] = None
    importance_ratio_p99: Annotated[
        Figure, Description(metric="importance_ratio", child={"quantile": "0.99"})
    ] = None
    importance_ratio_p999: Annotated[
        Figure, Description("The 99.9th.", metric="importance_ratio", child={"quantile": "0.999"})
    ] = None
    effective_sample_share: Annotated[
        Figure,
        Description(
            "Effective sample size of the truncated importance weights, over the trained tokens.",
            bad="Below 0.5: few tokens carry the gradient; lower `rollout.max_staleness`.",
            tracker="rollout_corr/rollout_is_eff_sample_size",
        ),
    ] = None
    importance_truncated_fraction: Annotated[
        Figure,
        Description(
            "Share of the trained tokens whose importance weight `trainer.loss.importance` bounded.",
            tracker="rollout_corr/rollout_is_ratio_fraction_high",
        ),
    ] = None
    importance_rejected_fraction: Annotated[
        Figure,
        Description(
            "Share of the trained tokens that is of answers left out by `trainer.loss.reject`, and of what "
            "it left of groups without another attempt.",
            bad="Above 0.1: answers are too far from the policy; lower `rollout.max_staleness`, or "
            "look at `kl_mismatch_nats`.",
        ),
    ] = None
    groups_without_baseline: Annotated[
        Figure,
        Description(
            "Groups that added nothing: `trainer.loss.reject` left them fewer than two attempts.",
            unit="groups",
            bad="Above a tenth of `trainer.groups_per_batch`: see `importance_rejected_fraction`.",
        ),
    ] = None
    reference_kl: Annotated[
        Figure,
        Description(
            "Estimated KL divergence from the reference policy; NaN where there is none.",
            metric="reference_kl_nats",
            bad="Grows without end: raise `trainer.loss.kl.coefficient`.",
        ),
    ] = None
    teacher_kl: Annotated[
        Figure,
        Description(
            "Mean log-prob of the policy minus the teacher's at sampled tokens, the reverse KL; NaN without "
            "a teacher.",
            metric="teacher_kl_nats",
            bad="Does not fall: the teacher's signal does not arrive; raise `trainer.optimizer.lr` or "
            "`trainer.loss.teacher.coefficient`.",
        ),
    ] = None
    value_loss: Annotated[
        Figure,
        Description(
            "Mean loss of the critic's values over the updates of the last batch; NaN without a critic.",
            bad="Its scale is half the squared reward's. Grows: lower `trainer.critic.lr`.",
            tracker="critic/vf_loss",
        ),
    ] = None
    value_explained_variance: Annotated[
        Figure,
        Description(
            "Share of the variance of returns that the values before the step explain: 1 is perfect, "
            "0 no better than a constant; NaN without a critic.",
            unit="share",
            bad="At or below 0 after `trainer.critic.warmup_steps`: advantages are no better than rewards. "
            "Raise `trainer.critic.lr`, warm up longer.",
            tracker="critic/vf_explained_var",
        ),
    ] = None
    value_clip_fraction: Annotated[
        Figure,
        Description(
            "Share of tokens whose value the last step clipped.",
            bad="Above 0.2: returns are far from the values for the size of `trainer.critic.value_clip`.",
            tracker="critic/vf_clipfrac",
        ),
    ] = None
    critic_grad_norm: Annotated[
        Figure,
        Description(
            "Gradient norm of the critic in the last step, before clipping.",
            bad="Not finite: its update was skipped; several in a row end the run with `NonFiniteLoss`.",
            tracker="critic/grad_norm",
        ),
    ] = None
    updates: int = 0
    """Optimizer steps taken in this step."""
    updates_skipped: Annotated[
        int,
        Description(
            "Updates left out because the loss or the gradient norm was not finite, or a spike.",
            metric="updates_skipped_total",
            bad="Rises: lower `trainer.optimizer.lr`, and look at the extremes in metrics.jsonl.",
        ),
    ] = 0
    log_prob_diff: Annotated[
        Figure,
        Description(
            "Mean of trainer minus rollout log-prob over all trained tokens.",
            metric="log_prob_diff_nats",
            bad="A steady bias: truncated sampling that is not replayed (`rollout.replay_sampling: false`).",
        ),
    ] = None
    log_prob_abs_diff: Annotated[
        Figure,
        Description(
            "Mean absolute trainer minus rollout log-prob over all trained tokens.",
            metric="log_prob_abs_diff_nats",
            bad="Far above `lag0_log_prob_abs_diff_nats`: staleness.",
        ),
    ] = None
    lag0_log_prob_abs_diff: Annotated[
        Figure,
        Description(
            "The same over tokens sampled at the trainer's own version, in the step `lag0_step`: the "
            "engines' mismatch alone.",
            metric="lag0_log_prob_abs_diff_nats",
            bad="Far above 1e-6 in float32 or 1e-2 in bfloat16: as `kl_mismatch_nats`.",
            keep_last=True,
        ),
    ] = None
    tokens: Annotated[int, Description(tracker="perf/total_num_tokens")] = 0
    trained_tokens: Annotated[
        int,
        Description(
            "Tokens the policy wrote that were trained on.",
            metric="trained_tokens_total",
            bad="Far below `sampled_tokens_total` at the end of a run: work is dropped or masked.",
        ),
    ] = 0
    routing_rows: Annotated[
        int,
        Description(
            "Routing rows checked before training.",
            metric="routing_rows_total",
            bad="0 with `routing.replay: r3`: nothing is replayed.",
        ),
    ] = 0
    routing_rows_invalid: Annotated[
        int,
        Description(
            "Routing rows never reported, so replayed natively by the trainer.",
            metric="routing_rows_invalid_total",
            unit="rows",
            bad="Above 1% of `routing_rows_total`: engines do not report routing; "
            "only servers that async-rl starts for MoE models do.",
        ),
    ] = 0


class StepRecord(TrainerFigures, frozen=True, kw_only=True):
    """One trainer step. Means are over the batch; times in seconds, `_nats` are natural logarithms."""

    weight_version: int
    """The weight version that this step published."""
    time_s: float
    """Seconds from the first dispatch of this run to the end of the step."""
    reward_mean: Annotated[
        Figure,
        Description(
            "Mean reward of the attempts of the last batch.",
            metric="reward",
            bad="Flat from the start: all siblings of a group get the same reward, so there is no "
            "advantage. Easier tasks, more siblings.",
            tracker="critic/rewards/mean",
        ),
    ] = None
    reward_min: Annotated[Figure, Description(tracker="critic/rewards/min")] = None
    reward_max: Annotated[Figure, Description(tracker="critic/rewards/max")] = None
    extremes: Annotated[
        tuple[Extreme, ...],
        Description(
            "Largest absolute trainer minus rollout log-prob of any trained token.",
            metric="log_prob_diff_extreme_nats",
            bad="Jumps alone, with the means where they were: single broken tokens. `extremes` in "
            "`metrics.jsonl` names trajectory, position and lag.",
            attribute="log_prob_diff_extreme",
        ),
    ] = ()
    staleness_mean: float = 0.0
    staleness_p50: float = 0.0
    staleness_p95: float = 0.0
    staleness_max: int = 0
    staleness_counts: tuple[int, ...] = ()
    """Trajectories of the batch by staleness, from 0 on."""
    length_ks: Annotated[
        Figure,
        Description(
            "Kolmogorov-Smirnov distance of trained trajectories' lengths from those of all that ended.",
            bad="Above 0.05: long (or short) answers are lost out of proportion; docs/design/staleness.md.",
        ),
    ] = None
    trajectories: int = 0
    groups: int = 0
    groups_without_signal: int = 0
    """Groups of the batch that teach the policy nothing because all rewards that are compared are equal."""
    interrupted: Annotated[
        int,
        Description(
            "Trajectories of the batch that were interrupted and resumed at least once.",
            tracker="fully_async/partial/total_partial_num",
        ),
    ] = 0
    sampled_tokens_mean: Annotated[
        Figure, Description("Tokens that the policy wrote, by trajectory.", tracker="response_length/mean")
    ] = None
    sampled_tokens_min: Annotated[int, Description(tracker="response_length/min")] = 0
    sampled_tokens_max: Annotated[int, Description(tracker="response_length/max")] = 0
    masked_tokens: Annotated[
        int,
        Description(
            "Sampled tokens of trained trajectories that were too old to be trained on.",
            metric="masked_tokens_total",
            bad="A large share of `sampled_tokens_total`: raise `rollout.max_staleness`.",
        ),
    ] = 0
    routing_rows_recomputed: Annotated[
        int,
        Description(
            "Routing rows that a recovery, or an engine short of memory, computed anew after the sampling.",
            metric="routing_rows_recomputed_total",
            unit="rows",
            bad="Above 1% of `routing_rows_total`: engines die often, trajectories end without an answer, or "
            "engines have too little memory (`engine_retractions_total`).",
        ),
    ] = 0
    wait_s: Annotated[
        float,
        Description(
            "Time the trainer waited for a batch before a step.",
            metric="batch_wait_seconds",
            buckets=SECONDS,
            bad="Long: the engines are the bottleneck. More engines, or a larger `rollout.max_staleness`.",
            tracker="timing_s/gen",
        ),
    ] = 0.0
    step_s: Annotated[
        float,
        Description(
            "Duration of a trainer step.",
            metric="train_step_seconds",
            buckets=SECONDS,
            bad="Longer than the rollouts of a batch take: the trainer is the bottleneck.",
            tracker="timing_s/update_actor",
        ),
    ] = 0.0
    sync_s: Annotated[
        float,
        Description(
            "From the end of the step (with `weights.overlap`: of the copy) to the last engine resumed.",
            tracker="timing_s/param_sync",
        ),
    ] = 0.0
    handover_s: float = 0.0
    """How long the weight update paused the trainer: `sync_s`, or with `weights.overlap` the copy."""
    sync_hidden_s: Annotated[
        float,
        Description(
            "Time in which weights were on their way to the engines while the trainer trained on.",
            metric="weight_sync_hidden_seconds_total",
            bad="Does not rise with `weights.overlap`: the trainer waits for batches, not for weight "
            "updates.",
        ),
    ] = 0.0
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
    engine_idle_share: Annotated[
        Figure,
        Description(
            "Share of the engines' time without any call, since the start of training.",
            metric="engine_idle_ratio",
            unit="share",
            bad="High: rollouts wait for the trainer. More ranks, or fewer engines.",
        ),
    ] = None
    tokens_per_s: Annotated[
        float,
        Description(
            "Tokens sampled per second over the last step.",
            metric="tokens_per_second",
            unit="tokens per second",
            bad="Falls: engines are down, idle, or answers have become long.",
        ),
    ] = 0.0

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


STEP_FIGURES: Final = described_fields(StepRecord)
"""The description of each field of `StepRecord` that has one."""

FIGURES: Final = tuple(
    name
    for name, type_of in TrainerFigures.__annotations__.items()
    if re.match(r"(Annotated\[)?Figure", type_of)
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


WINDOW = 5
"""Steps in `reward_first` and `reward_last`: one batch is too noisy to compare with another."""

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
