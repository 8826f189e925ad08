"""The last step in six figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from async_rl.observability.page.drawing import compact
from async_rl.observability.records import WINDOW, Figure, StepRecord, is_finite, mean


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """One figure in large print."""

    name: str
    label: str
    value: str
    note: str


def tiles(records: Sequence[StepRecord], max_staleness: int | None) -> list[Tile]:
    """How the last step was, in six figures; none before the first step."""
    if not records:
        return []
    last = records[-1]
    bypass = is_finite(last.ppo_kl_bypass)
    bound = "" if max_staleness is None else f" of {max_staleness} allowed"
    start = mean(record.reward_mean for record in records[:WINDOW])
    now = mean(record.reward_mean for record in records[-WINDOW:])
    return [
        Tile(
            name="reward",
            label="reward",
            value=compact(last.reward_mean),
            note=f"{compact(start)} → {compact(now)} so far",
        ),
        Tile(
            name="ppo-kl",
            label="ppo_kl_bypass" if bypass else "ppo_kl",
            value=compact(last.ppo_kl_bypass if bypass else last.ppo_kl),
            note=f"nats; clipped {_percent(last.clip_fraction)} of tokens",
        ),
        Tile(
            name="mismatch",
            label="mismatch",
            value=compact(last.lag0_log_prob_abs_diff),
            note="nats, mean |Δ log-prob| at equal versions",
        ),
        Tile(
            name="staleness",
            label="staleness p95",
            value=f"{last.staleness_p95:.0f}",
            note=f"versions; max {last.staleness_max}{bound}",
        ),
        Tile(
            name="throughput",
            label="throughput",
            value=compact(last.tokens_per_s),
            note="tokens sampled a second",
        ),
        Tile(
            name="trainer-idle",
            label="trainer idle",
            value=_percent(trainer_idle(last)),
            note=f"waited {last.wait_s:.1f} s for its batch",
        ),
    ]


def _percent(share: Figure) -> str:
    return f"{share:.0%}" if is_finite(share) else "n/a"


def trainer_idle(record: StepRecord) -> Figure:
    """Share of a step in which the trainer waited for its batch."""
    seconds = record.wait_s + record.step_s + record.handover_s
    return record.wait_s / seconds if seconds > 0 else None
