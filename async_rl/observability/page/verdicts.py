"""Judges a run's figures by the alert rules that its step records can decide, so that a look is enough. Pure.

A warning is `look`, a critical alert `wrong`, and `healthy` means that no rule speaks. Rewards without a
signal are `wrong` too, and so are figures of supervised training that are not finite. Thresholds, and how
long a condition must hold, are those of `monitoring/rules/async_rl.yml`, which a test compares; rules that
need other metrics are Prometheus' alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import takewhile
from statistics import median
from typing import Final, Literal, NamedTuple, TypeVar

import numpy as np

from async_rl.observability.panels import PPO_KL_NATS
from async_rl.observability.records import (
    MANY_WITHOUT_SIGNAL,
    NEARLY_PLAN,
    StepRecord,
    count_without_signal,
    is_finite,
)
from async_rl.observability.sft_record import SftRecord
from async_rl.types import BoolArray, Float64Array

R = TypeVar("R", StepRecord, SftRecord)
Word = Literal["healthy", "look", "wrong"]


class Verdict(NamedTuple):
    """What to think of a figure."""

    word: Word
    reason: str = ""
    """Why it is not healthy, in a few words."""


PPO_KL_LEAST_NATS: Final = 0.01
PPO_KL_FACTOR: Final = 5
"""`PpoKlSpike`: above `PPO_KL_NATS`, or above the first and this many times the median of the last hour."""

MISMATCH_FACTOR: Final = 2
MISMATCH_LEAST_NATS: Final = 1e-5
MISMATCH_FOR_S: Final = 1800.0
"""`MismatchGrows`: the mean of the last hour is above this many times that of the day's best hour, and above
the second, for this long."""

STALENESS_SHARE: Final = 0.9
STALENESS_FOR_S: Final = 900.0
"""`StalenessNearBound`: the mean staleness is above this share of the bound for this long."""

TRAINER_IDLE_SHARE: Final = 0.95
TRAINER_IDLE_FOR_S: Final = 900.0
"""`TrainerIdle`: the trainer waits more than this share of its time for this long."""

PLAN_RATIO: Final = 0.8
PLAN_FOR_S: Final = 900.0
"""`ThroughputBelowPlan`: the throughput is below this share of what is expected for this long."""

_TEN_MINUTES_S: Final = 600.0
_HOUR_S: Final = 3600.0
_QUARTER_S: Final = 900.0
HEALTHY: Final = Verdict("healthy")


def judge_reward(records: Sequence[StepRecord]) -> Verdict:
    """Judge whether rewards can teach anything."""
    if (groups := count_without_signal(records)) >= MANY_WITHOUT_SIGNAL:
        return Verdict("wrong", f"all rewards equal for {groups} groups: nothing is learned")
    return HEALTHY


def judge_ppo_kl(records: Sequence[StepRecord]) -> Verdict | None:
    """Judge how far the last step moved the policy; None if it was not measured."""
    last = _kl(records[-1])
    if last is None:
        return None
    past = [kl for record in _since(records, _HOUR_S) if (kl := _kl(record)) is not None]
    if last > PPO_KL_NATS or (last > PPO_KL_LEAST_NATS and last > PPO_KL_FACTOR * median(past)):
        return Verdict("look", "a step moved the policy too far")
    return HEALTHY


def judge_mismatch(records: Sequence[StepRecord]) -> Verdict | None:
    """Judge how trainer and engines differ at equal weights; None if nothing has measured it."""
    recent, times_s = _of_windows(records, 25 * _HOUR_S, MISMATCH_FOR_S)
    nats = np.array([record.lag0_log_prob_abs_diff for record in recent], float)
    measured = np.isfinite(nats)
    if not measured.any():
        return None
    num = _window_sums(times_s, measured, _HOUR_S)
    means = _window_sums(times_s, np.where(measured, nats, 0.0), _HOUR_S) / np.maximum(1, num)
    full = (num > 0) & (times_s - records[0].time_s >= _HOUR_S)  # the mean of a few steps is noisy
    growth = means / np.maximum(1e-30, np.minimum.accumulate(np.where(full, means, np.inf)))
    holds = full & (means > MISMATCH_LEAST_NATS) & (growth > MISMATCH_FACTOR)
    if _has_held(times_s, holds, MISMATCH_FOR_S):
        return Verdict("look", f"{growth[-1]:.1f} times that of the best hour")
    return HEALTHY


def judge_staleness(records: Sequence[StepRecord], bound: int | None) -> Verdict | None:
    """Judge the age of what is trained; None if the bound is unknown."""
    if bound is None:
        return None
    if records[-1].staleness_max > bound:
        return Verdict("wrong", f"above the bound of {bound}: please report it")
    recent, times_s = _of_windows(records, _TEN_MINUTES_S, STALENESS_FOR_S)
    trained = np.array([record.trajectories for record in recent], float)
    versions = trained * [record.staleness_mean for record in recent]
    old = _window_sums(times_s, versions, _TEN_MINUTES_S) / np.maximum(
        1, _window_sums(times_s, trained, _TEN_MINUTES_S)
    )
    if bound and _has_held(times_s, old > STALENESS_SHARE * bound, STALENESS_FOR_S):
        return Verdict("look", f"{old[-1]:.1f} on average, nearly the bound of {bound}")
    return HEALTHY


def judge_trainer_idle(records: Sequence[StepRecord]) -> Verdict:
    """Judge how much of its time the trainer waits."""
    recent, times_s = _of_windows(records, _QUARTER_S, TRAINER_IDLE_FOR_S)
    waited = _window_sums(times_s, np.array([record.wait_s for record in recent]), _QUARTER_S)
    worked = _window_sums(times_s, np.array([record.step_s for record in recent]), _QUARTER_S)
    if _has_held(times_s, waited > TRAINER_IDLE_SHARE * (waited + worked), TRAINER_IDLE_FOR_S):
        return Verdict("look", "rollouts are slower than the trainer")
    return HEALTHY


def judge_throughput(records: Sequence[StepRecord]) -> Verdict | None:
    """Judge the throughput by what is expected of the run; None if nothing is expected yet.

    The reason says how far below it is, and why, also before the alert fires.
    """
    ratio = records[-1].throughput_vs_plan_ratio
    if not is_finite(ratio):
        return None
    recent, times_s = _of_windows(records, 1.0, PLAN_FOR_S)
    ratios = np.array([record.throughput_vs_plan_ratio for record in recent], float)
    word: Word = "look" if _has_held(times_s, ratios < PLAN_RATIO, PLAN_FOR_S) else "healthy"
    return Verdict(word, below_plan(records[-1]))


def below_plan(record: StepRecord) -> str:
    """Return `18% below plan: ` and why; empty if a step is as fast as expected, or nothing is expected."""
    ratio = record.throughput_vs_plan_ratio
    if not is_finite(ratio) or ratio >= NEARLY_PLAN:
        return ""
    causes = "; ".join(record.below_plan)
    return f"{1 - ratio:.0%} below plan" + (f": {causes}" if causes else "")


def judge_sft_loss(records: Sequence[SftRecord]) -> Verdict:
    """Judge the loss of the last supervised step."""
    return HEALTHY if is_finite(records[-1].loss) else Verdict("wrong", "it is not finite")


def judge_sft_gradient(records: Sequence[SftRecord]) -> Verdict:
    """Judge the last gradient, and whether updates were skipped, as `UpdateSkipped` does."""
    if not is_finite(records[-1].grad_norm):
        return Verdict("wrong", "it is not finite")
    if skipped := sum(record.updates_skipped for record in _since(records, _QUARTER_S)):
        return Verdict("look", f"{skipped} updates skipped in a quarter of an hour")
    return HEALTHY


def _of_windows(
    records: Sequence[StepRecord], window_s: float, for_s: float
) -> tuple[Sequence[StepRecord], Float64Array]:
    """Return the steps that `_has_held` looks at and those of the window before each, and their times."""

    def num_until(time_s: float) -> int:
        return bisect_right(records, time_s, key=lambda record: record.time_s)

    first = max(0, num_until(records[-1].time_s - for_s) - 1)
    recent = records[num_until(records[first].time_s - window_s) :]
    return recent, np.array([record.time_s for record in recent])


def _window_sums(times_s: Float64Array, figures: Float64Array | BoolArray, window_s: float) -> Float64Array:
    """Return the sum of a figure over the window that ends at each step."""
    sums = np.concatenate([[0.0], np.cumsum(figures)])
    return np.asarray(sums[1:] - sums[np.searchsorted(times_s, times_s - window_s, side="right")])


def _has_held(times_s: Float64Array, holds: BoolArray, for_s: float) -> bool:
    """Return whether a condition holds at the last step, and has at each step since `for_s` ago."""
    since = int(np.searchsorted(times_s, times_s[-1] - for_s, side="right")) - 1
    return since >= 0 and bool(holds[since:].all())


def _kl(record: StepRecord) -> float | None:
    kl = record.update_kl
    return abs(kl) if is_finite(kl) else None


def _since(records: Sequence[R], seconds: float) -> Iterator[R]:
    """Yield the records of the last seconds, the newest first."""
    begin_s = records[-1].time_s - seconds
    return takewhile(lambda record: record.time_s >= begin_s, reversed(records))
