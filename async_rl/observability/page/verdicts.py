"""Judges a run's figures by the alert rules that its step records can decide, so that a look is enough. Pure.

A warning is `look`, a critical alert `wrong`, and `healthy` means that no rule speaks. Rewards without a
signal are `wrong` too. The thresholds are those of `monitoring/rules/async_rl.yml`, which a test compares;
rules that need other metrics are Prometheus' alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from statistics import median
from typing import Final, Literal, NamedTuple

from async_rl.observability.records import (
    MANY_WITHOUT_SIGNAL,
    WINDOW,
    Figure,
    StepRecord,
    count_without_signal,
    is_finite,
    mean,
)

Word = Literal["healthy", "look", "wrong"]


class Verdict(NamedTuple):
    """What to think of a figure."""

    word: Word
    reason: str = ""
    """Why it is not healthy, in a few words."""


PPO_KL_NATS: Final = 0.1
PPO_KL_LEAST_NATS: Final = 0.01
PPO_KL_FACTOR: Final = 5
"""`PpoKlSpike`: above the first, or above the second and this many times the median of the last hour."""

MISMATCH_FACTOR: Final = 2
MISMATCH_LEAST_NATS: Final = 1e-5
"""`MismatchGrows`: the mean of the last hour is above this many times that of the day's best hour, and above
the second."""

STALENESS_SHARE: Final = 0.9
"""`StalenessNearBound`: the mean staleness is above this share of the bound."""

TRAINER_IDLE_SHARE: Final = 0.95
"""`TrainerIdle`: the trainer waits more than this share of its time."""

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
    hours: dict[int, list[Figure]] = {}
    for record in _since(records, 24 * _HOUR_S):
        if is_finite(record.lag0_log_prob_abs_diff):
            hour = int((records[-1].time_s - record.time_s) // _HOUR_S)
            hours.setdefault(hour, []).append(record.lag0_log_prob_abs_diff)
    if not hours:
        return None
    now, best = mean(hours.get(0, ())) or 0.0, min(mean(values) or 0.0 for values in hours.values())
    if now > MISMATCH_FACTOR * best and now > MISMATCH_LEAST_NATS:
        return Verdict("look", f"{now / max(best, 1e-30):.1f} times that of the best hour")
    return HEALTHY


def judge_staleness(records: Sequence[StepRecord], bound: int | None) -> Verdict | None:
    """Judge the age of what is trained; None if the bound is unknown."""
    if bound is None:
        return None
    if records[-1].staleness_max > bound:
        return Verdict("wrong", f"above the bound of {bound}: please report it")
    recent = list(_since(records, _QUARTER_S))
    trained = max(1, sum(record.trajectories for record in recent))
    old = sum(record.staleness_mean * record.trajectories for record in recent) / trained
    if bound and len(recent) >= WINDOW and old > STALENESS_SHARE * bound:
        return Verdict("look", f"{old:.1f} on average, nearly the bound of {bound}")
    return HEALTHY


def judge_trainer_idle(records: Sequence[StepRecord]) -> Verdict:
    """Judge how much of its time the trainer waits."""
    recent = list(_since(records, _QUARTER_S))
    waited, worked = sum(record.wait_s for record in recent), sum(record.step_s for record in recent)
    if len(recent) >= WINDOW and waited > TRAINER_IDLE_SHARE * (waited + worked):
        return Verdict("look", "rollouts are slower than the trainer")
    return HEALTHY


def _kl(record: StepRecord) -> float | None:
    kl = record.ppo_kl_bypass if is_finite(record.ppo_kl_bypass) else record.ppo_kl
    return abs(kl) if is_finite(kl) else None


def _since(records: Sequence[StepRecord], seconds: float) -> Iterator[StepRecord]:
    """Yield the records of the last seconds, the newest first."""
    begin_s = records[-1].time_s - seconds
    return takewhile(lambda record: record.time_s >= begin_s, reversed(records))
