"""Describes each figure of a run once: what it is, its unit, and what a bad value looks like.

```
 journal_bytes = gauge("Size of the journal ...", bad="...")            an attribute of a class of `metrics`
 STEP_FIGURES = {"entropy": Description("Mean entropy ...", bad="...")}          a field of `StepRecord`
      │
      ├─► the Prometheus instrument and its help text (`metrics.Instruments`)
      ├─► the value of the instrument after each step (`Metrics.observe_step`)
      ├─► the name in trackers (`trackers.names`)
      ├─► the descriptions of Grafana's panels (`monitoring.dashboard`)
      └─► `docs/reference/metrics.md` (`cli.metrics_reference`)
```
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal, cast

import msgspec
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
"""Buckets from the wake-up of a loop to a large trainer step."""

_UNITS: Final = {
    **{unit: unit for unit in ("bytes", "seconds", "tokens", "nats", "versions", "rows", "share")},
    **{"version": "versions", "step": "steps", "fraction": "share"},
}
"""Units by the last word of a metric's name."""


class Description(msgspec.Struct, frozen=True):
    """What one figure is, and how it appears outside of the code that measures it."""

    help: str = ""
    """One sentence: what a value is."""
    bad: str = ""
    """What a bad value looks like and what to do about it."""
    metric: str = ""
    """Name of its Prometheus instrument without the prefix, if that is not the attribute's or field's."""
    unit: str = ""
    """Unit of a value, if the name does not end in it; empty for a bare number."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram."""
    start: float = math.nan
    """What a gauge without labels reads until it is first set: NaN, as 0 would look like a measurement."""
    child: dict[str, str] = {}
    """For a field of a record: its labels, by name. The first field of an instrument describes it."""
    attribute: str = ""
    """For a field of a record: the attribute to observe, if not the field itself."""
    keep_last: bool = False
    """Whether the gauge keeps its last value in steps without one, as for a probe."""
    tracker: str = ""
    """verl's name of the same figure; empty for `async_rl/<field>`."""

    @property
    def kind(self) -> Literal["gauge", "counter", "histogram"]:
        """The kind of its instrument: counters end in `_total`, and histograms have buckets."""
        if self.metric.endswith("_total"):
            return "counter"
        return "histogram" if self.buckets else "gauge"

    def named(self, metric: str) -> Description:
        """Return the description of an instrument with this name, which may end in its unit."""
        word = metric.removesuffix("_total").rpartition("_")[2]
        return replace(
            self,
            metric=metric,
            unit=self.unit or _UNITS.get(word, ""),
            labels=self.labels or tuple(self.child),
        )

    def make(self, name: str, registry: CollectorRegistry) -> Gauge | Counter | Histogram:
        """Create the instrument and register it under its full name."""
        if self.kind == "counter":
            return Counter(name, self.help, self.labels, registry=registry)
        if self.kind == "histogram":
            return Histogram(name, self.help, self.labels, buckets=self.buckets, registry=registry)
        made = Gauge(name, self.help, self.labels, registry=registry)
        if not self.labels:
            made.set(self.start)
        return made


def gauge(text: str, *labels: str, bad: str, unit: str = "", start: float = math.nan) -> Gauge:
    """Declare a value that goes up and down; `start` is what it reads until it is first set."""
    return cast(Gauge, Description(text, bad, unit=unit, labels=labels, start=start))


def counter(text: str, *labels: str, bad: str, unit: str = "") -> Counter:
    """Declare a counter; its name ends in `_total`."""
    return cast(Counter, Description(text, bad, unit=unit, labels=labels))


def histogram(
    text: str, *labels: str, bad: str, unit: str = "", buckets: Sequence[float] = SECONDS
) -> Histogram:
    """Declare a distribution."""
    return cast(Histogram, Description(text, bad, unit=unit, labels=labels, buckets=tuple(buckets)))


STEP_FIGURES: Final = {
    name: described.named(described.metric or name) if described.bad or described.child else described
    for name, described in {
        "step": Description(tracker="training/global_step"),
        "loss": Description(
            "Policy loss of the last step.",
            bad="Its size says little. Not finite: the update is skipped; more than "
            "four in a row end the run with `NonFiniteLoss`.",
            tracker="actor/pg_loss",
        ),
        "ppo_kl": Description(
            "Mean of old minus current log-probs over the updates of the last batch after its first.",
            unit="nats",
            bad="Grows step by step: lower `trainer.optimizer.lr`. Spikes: look at `grad_norm` and at"
            " the parts of the rollout KL. With one update per batch (`trainer.updates_per_batch`) there "
            "is none: it would be 0 by construction.",
            tracker="actor/ppo_kl",
        ),
        "old_log_prob_abs_diff": Description(
            "Mean |old - current log-prob| in the first update of a batch, whose weights are those of the "
            "pass that computed the old ones.",
            metric="old_log_prob_abs_diff_nats",
            bad="0, or rounding on GPUs whose kernels add in any order. Larger: the update sees other "
            "routing or other weights than the pass before it. With one update per batch it is measured "
            "every `trainer.loss.check_old_log_probs_every` steps.",
        ),
        "ppo_kl_bypass": Description(
            "`ppo_kl` where the engines' log-probs stand for the old ones.",
            unit="nats",
            bad="Engine mismatch and staleness are in it too: look at `kl_mismatch_nats` and "
            "`kl_staleness_nats` to tell them apart.",
        ),
        "rollout_kl": Description(
            "Rollout minus the trainer's log-probs at the start of the step; by versions of lag below.",
            tracker="rollout_corr/kl",
        ),
        "rollout_kl_lag0": Description(
            "Mean of rollout minus the trainer's log-probs before the last step, by versions of lag "
            "(0, 1, 2+).",
            metric="rollout_kl",
            child={"lag": "0"},
            unit="nats",
            bad="Away from 0 at lag 0: engine and trainer differ at equal weights. Grows with the "
            "lag: staleness; lower `rollout.max_staleness` or the learning rate.",
        ),
        "rollout_kl_lag1": Description(metric="rollout_kl", child={"lag": "1"}),
        "rollout_kl_lag2_up": Description(metric="rollout_kl", child={"lag": "2+"}),
        "tokens_lag0": Description(
            "The last step that trained tokens of the trainer's own version: the engine mismatch is of it.",
            metric="lag0_step",
            bad="Far behind the run's step: the trainer is the bottleneck and all tokens are older than its "
            "weights. Nothing compares engine and trainer at equal weights meanwhile; more ranks, or a "
            "smaller `rollout.max_staleness`.",
            attribute="lag0_step",
            keep_last=True,
        ),
        "kl_mismatch": Description(
            "Engine mismatch: half the mean squared log-prob difference of tokens sampled at the "
            "trainer's version, in the step `lag0_step`.",
            metric="kl_mismatch_nats",
            bad="A jump: weights did not arrive as they were sent, or routing is replayed wrongly. "
            "Steadily above 1e-3: other kernels or types in the engine; compare `model.dtype`, "
            "look at `kl_routing_nats`.",
            keep_last=True,
        ),
        "kl_staleness": Description(
            "Staleness: what tokens sampled by earlier versions have beyond the engine mismatch.",
            metric="kl_staleness_nats",
            bad="Above 0.01: data is too old for steps of this size; lower `rollout.max_staleness` or"
            " the learning rate.",
        ),
        "kl_routing": Description(
            "Routing: what replaying the engines' routing takes away from the mismatch, by a probe at lag 0.",
            metric="kl_routing_nats",
            bad="Negative: replay makes it worse, so the rows are not those that the engine used; see"
            " docs/design/routing-replay.md. Positive is what `routing.replay` is good for.",
            keep_last=True,
        ),
        "routing_native_abs_diff": Description(
            "Mean absolute trainer minus rollout log-prob of the probe's lag-0 tokens, by routing "
            "(native, replayed).",
            metric="routing_probe_abs_diff_nats",
            child={"routing": "native"},
            bad="`replayed` not below `native`: replay does not help, so the rows are not those of "
            "the calls.",
            keep_last=True,
        ),
        "routing_replayed_abs_diff": Description(
            "The same with the engine's routing replayed, as it is trained.",
            metric="routing_probe_abs_diff_nats",
            child={"routing": "replayed"},
            keep_last=True,
        ),
        "clip_fraction": Description(
            "Share of tokens whose ratio the last step clipped.",
            bad="Above 0.2: the policy moves too far in a step, or data is too old.",
            tracker="actor/pg_clipfrac",
        ),
        "entropy": Description(
            "Mean entropy of the policy at the trained tokens.",
            metric="entropy_nats",
            bad="Falls to 0: collapse. Raise `rollout.temperature`, lower the learning rate.",
            tracker="actor/entropy",
        ),
        "grad_norm": Description(
            "Gradient norm of the last step, before clipping.",
            bad="Not finite: the update is skipped, as with `loss`. Spikes: look at "
            "`log_prob_diff_extreme_nats`.",
            tracker="actor/grad_norm",
        ),
        "learning_rate": Description(
            "Learning rate of the last step.",
            bad="Not what the config says after `trainer.optimizer.warmup_steps` steps.",
            tracker="actor/lr",
        ),
        "importance_ratio_mean": Description(
            "Mean of exp(old - rollout) over the last batch, before truncation.",
            bad="Far from 1: data is too old; lower `rollout.max_staleness`.",
        ),
        "importance_ratio_p1": Description(
            "Percentiles of exp(trainer - rollout log-prob) before the step, exact over all ranks "
            "(0.01, 0.5, 0.99, 0.999).",
            metric="importance_ratio",
            child={"quantile": "0.01"},
            bad="The 0.99 near `trainer.loss.importance.high`: the bound bites on more than single tokens.",
        ),
        "importance_ratio_p50": Description(metric="importance_ratio", child={"quantile": "0.5"}),
        "importance_ratio_p99": Description(metric="importance_ratio", child={"quantile": "0.99"}),
        "importance_ratio_p999": Description(
            "The 99.9th.", metric="importance_ratio", child={"quantile": "0.999"}
        ),
        "effective_sample_share": Description(
            "Effective sample size of the truncated importance weights, over the trained tokens.",
            bad="Below 0.5: few tokens carry the gradient; lower `rollout.max_staleness`.",
            tracker="rollout_corr/rollout_is_eff_sample_size",
        ),
        "importance_truncated_fraction": Description(
            "Share of the trained tokens whose importance weight `trainer.loss.importance` bounded.",
            tracker="rollout_corr/rollout_is_ratio_fraction_high",
        ),
        "importance_rejected_fraction": Description(
            "Share of the trained tokens that is of answers left out by `trainer.loss.reject`, and of what "
            "it left of groups without another attempt.",
            bad="Above 0.1: answers are too far from the policy; lower `rollout.max_staleness`, or "
            "look at `kl_mismatch_nats`.",
        ),
        "groups_without_baseline": Description(
            "Groups that added nothing: `trainer.loss.reject` left them fewer than two attempts.",
            unit="groups",
            bad="Above a tenth of `trainer.groups_per_batch`: see `importance_rejected_fraction`.",
        ),
        "reference_kl": Description(
            "Estimated KL divergence from the reference policy; NaN where there is none.",
            metric="reference_kl_nats",
            bad="Grows without end: raise `trainer.loss.kl.coefficient`.",
        ),
        "teacher_kl": Description(
            "Mean log-prob of the policy minus the teacher's at sampled tokens, the reverse KL; NaN without "
            "a teacher.",
            metric="teacher_kl_nats",
            bad="Does not fall: the teacher's signal does not arrive; raise `trainer.optimizer.lr` or "
            "`trainer.loss.teacher.coefficient`.",
        ),
        "value_loss": Description(
            "Mean loss of the critic's values over the updates of the last batch; NaN without a critic.",
            bad="Its scale is half the squared reward's. Grows: lower `trainer.critic.lr`.",
            tracker="critic/vf_loss",
        ),
        "value_explained_variance": Description(
            "Share of the variance of returns that the values before the step explain: 1 is perfect, "
            "0 no better than a constant; NaN without a critic.",
            unit="share",
            bad="At or below 0 after `trainer.critic.warmup_steps`: advantages are no better than rewards. "
            "Raise `trainer.critic.lr`, warm up longer.",
            tracker="critic/vf_explained_var",
        ),
        "value_clip_fraction": Description(
            "Share of tokens whose value the last step clipped.",
            bad="Above 0.2: returns are far from the values for the size of `trainer.critic.value_clip`.",
            tracker="critic/vf_clipfrac",
        ),
        "critic_grad_norm": Description(
            "Gradient norm of the critic in the last step, before clipping.",
            bad="Not finite: its update was skipped; several in a row end the run with `NonFiniteLoss`.",
            tracker="critic/grad_norm",
        ),
        "updates_skipped": Description(
            "Updates left out because the loss or the gradient norm was not finite, or a spike.",
            metric="updates_skipped_total",
            bad="Rises: lower `trainer.optimizer.lr`, and look at the extremes in metrics.jsonl.",
        ),
        "log_prob_diff": Description(
            "Mean of trainer minus rollout log-prob over all trained tokens.",
            metric="log_prob_diff_nats",
            bad="A steady bias: truncated sampling that is not replayed (`rollout.replay_sampling: false`).",
        ),
        "log_prob_abs_diff": Description(
            "Mean absolute trainer minus rollout log-prob over all trained tokens.",
            metric="log_prob_abs_diff_nats",
            bad="Far above `lag0_log_prob_abs_diff_nats`: staleness.",
        ),
        "lag0_log_prob_abs_diff": Description(
            "The same over tokens sampled at the trainer's own version, in the step `lag0_step`: the "
            "engines' mismatch alone.",
            metric="lag0_log_prob_abs_diff_nats",
            bad="Far above 1e-6 in float32 or 1e-2 in bfloat16: as `kl_mismatch_nats`.",
            keep_last=True,
        ),
        "tokens": Description(tracker="perf/total_num_tokens"),
        "trained_tokens": Description(
            "Tokens the policy wrote that were trained on.",
            metric="trained_tokens_total",
            bad="Far below `sampled_tokens_total` at the end of a run: work is dropped or masked.",
        ),
        "routing_rows": Description(
            "Routing rows checked before training.",
            metric="routing_rows_total",
            bad="0 with `routing.replay: r3`: nothing is replayed.",
        ),
        "routing_rows_invalid": Description(
            "Routing rows never reported, so replayed natively by the trainer.",
            metric="routing_rows_invalid_total",
            unit="rows",
            bad="Above 1% of `routing_rows_total`: engines do not report routing; "
            "only servers that async-rl starts for MoE models do.",
        ),
        "reward_mean": Description(
            "Mean reward of the attempts of the last batch.",
            metric="reward",
            bad="Flat from the start: all siblings of a group get the same reward, so there is no "
            "advantage. Easier tasks, more siblings.",
            tracker="critic/rewards/mean",
        ),
        "reward_min": Description(tracker="critic/rewards/min"),
        "reward_max": Description(tracker="critic/rewards/max"),
        "extremes": Description(
            "Largest absolute trainer minus rollout log-prob of any trained token.",
            metric="log_prob_diff_extreme_nats",
            bad="Jumps alone, with the means where they were: single broken tokens. `extremes` in "
            "`metrics.jsonl` names trajectory, position and lag.",
            attribute="log_prob_diff_extreme",
        ),
        "length_ks": Description(
            "Kolmogorov-Smirnov distance of trained trajectories' lengths from those of all that ended.",
            bad="Above 0.05: long (or short) answers are lost out of proportion; docs/design/staleness.md.",
        ),
        "interrupted": Description(
            "Trajectories of the batch that were interrupted and resumed at least once.",
            tracker="fully_async/partial/total_partial_num",
        ),
        "sampled_tokens_mean": Description(
            "Tokens that the policy wrote, by trajectory.", tracker="response_length/mean"
        ),
        "sampled_tokens_min": Description(tracker="response_length/min"),
        "sampled_tokens_max": Description(tracker="response_length/max"),
        "masked_tokens": Description(
            "Sampled tokens of trained trajectories that were too old to be trained on.",
            metric="masked_tokens_total",
            bad="A large share of `sampled_tokens_total`: raise `rollout.max_staleness`.",
        ),
        "routing_rows_recomputed": Description(
            "Routing rows that a recovery, or an engine short of memory, computed anew after the sampling.",
            metric="routing_rows_recomputed_total",
            unit="rows",
            bad="Above 1% of `routing_rows_total`: engines die often, trajectories end without an answer, or "
            "engines have too little memory (`engine_retractions_total`).",
        ),
        "wait_s": Description(
            "Time the trainer waited for a batch before a step.",
            metric="batch_wait_seconds",
            buckets=SECONDS,
            bad="Long: the engines are the bottleneck. More engines, or a larger `rollout.max_staleness`.",
            tracker="timing_s/gen",
        ),
        "step_s": Description(
            "Duration of a trainer step.",
            metric="train_step_seconds",
            buckets=SECONDS,
            bad="Longer than the rollouts of a batch take: the trainer is the bottleneck.",
            tracker="timing_s/update_actor",
        ),
        "sync_s": Description(
            "From the end of the step (with `weights.overlap`: of the copy) to the last engine resumed.",
            tracker="timing_s/param_sync",
        ),
        "sync_hidden_s": Description(
            "Time in which weights were on their way to the engines while the trainer trained on.",
            metric="weight_sync_hidden_seconds_total",
            bad="Does not rise with `weights.overlap`: the trainer waits for batches, not for weight "
            "updates.",
        ),
        "engine_idle_share": Description(
            "Share of the engines' time without any call, since the start of training.",
            metric="engine_idle_ratio",
            unit="share",
            bad="High: rollouts wait for the trainer. More ranks, or fewer engines.",
        ),
        "tokens_per_s": Description(
            "Tokens sampled per second over the last step.",
            metric="tokens_per_second",
            unit="tokens per second",
            bad="Falls: engines are down, idle, or answers have become long.",
        ),
        "throughput_vs_plan_ratio": Description(
            "Trained tokens per second of the last five steps, over what an earlier window of the run, and "
            "a simulation with the engines that serve now, let expect; NaN until there is a window.",
            bad="Below 0.8: the run has become slower than it was. The page, and `below_plan` in "
            "`metrics.jsonl`, name engines, tools, rewards, steps or updates that changed most.",
        ),
    }.items()
}
"""The figures of a step by the field of `StepRecord` that holds them.

A field without `bad` and `child` has no instrument, and one that is not here is in trackers as
`async_rl/<field>`.
"""
