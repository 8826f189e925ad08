"""Computes the six figures of the last step, and the stages in which the dispatched trajectories are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from async_rl.observability.formatting import format_percent
from async_rl.observability.page.verdicts import (
    Verdict,
    Word,
    judge_mismatch,
    judge_ppo_kl,
    judge_reward,
    judge_sft_gradient,
    judge_sft_loss,
    judge_staleness,
    judge_trainer_idle,
)
from async_rl.observability.records import (
    WINDOW,
    Figure,
    StepRecord,
    is_finite,
    last_at_equal_versions,
    mean,
)
from async_rl.observability.sft_record import SftRecord

_COMPACT: Final = ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e4, "k", 1e3))
"""The smallest value for each unit suffix."""


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, shown in large type."""

    name: str
    label: str
    value: str
    note: str
    verdict: Word | None = None
    """None if no alert rule is about the figure, or it was not measured."""


def _judged(tile: Tile, verdict: Verdict | None) -> Tile:
    """Return a tile with its verdict, and the reason in place of the note."""
    if verdict is None:
        return tile
    return msgspec.structs.replace(tile, verdict=verdict.word, note=verdict.reason or tile.note)


def tiles(records: Sequence[StepRecord], max_staleness: int | None) -> list[Tile]:
    """Return the six figures of the last step; none before the first step."""
    if not records:
        return []
    last, measured = records[-1], last_at_equal_versions(records)
    bypass = is_finite(last.ppo_kl_bypass)
    kl = last.ppo_kl_bypass if bypass else last.ppo_kl
    bound = "" if max_staleness is None else f" of {max_staleness} allowed"
    start = mean(record.reward_mean for record in records[:WINDOW])
    now = mean(record.reward_mean for record in records[-WINDOW:])
    shown = [
        Tile(
            name="reward",
            label="reward",
            value=compact(last.reward_mean),
            note=f"{compact(start)} → {compact(now)}, means of the first and last {WINDOW} steps",
        ),
        Tile(
            name="ppo-kl",
            label="ppo_kl_bypass" if bypass else "ppo_kl",
            value=compact(kl) if is_finite(kl) else "none",
            note=f"nats; clipped {format_percent(last.clip_fraction)} of tokens"
            if is_finite(kl)
            else "measured with several updates per batch",
        ),
        Tile(
            name="mismatch",
            label="mismatch",
            value=compact(None if measured is None else measured.lag0_log_prob_abs_diff),
            note="nats, mean |Δ log-prob| at equal versions"
            + (f", step {measured.step}" if measured and measured is not last else ""),
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
            value=format_percent(last.trainer_idle_share),
            note=f"waited {last.wait_s:.1f} s for its batch",
        ),
    ]
    verdicts = {
        "reward": judge_reward(records),
        "ppo-kl": judge_ppo_kl(records),
        "mismatch": judge_mismatch(records),
        "staleness": judge_staleness(records, max_staleness),
        "trainer-idle": judge_trainer_idle(records),
    }
    return [_judged(tile, verdicts.get(tile.name)) for tile in shown]


def sft_tiles(records: Sequence[SftRecord]) -> list[Tile]:
    """Return the figures of the last step of a supervised run; none before the first step."""
    if not records:
        return []
    last = records[-1]
    start, now = (mean(r.loss for r in part) for part in (records[:WINDOW], records[-WINDOW:]))
    validated = [record for record in records if record.validation_loss is not None]
    best = min((r.validation_loss for r in validated if is_finite(r.validation_loss)), default=None)
    shown = [
        Tile(
            name="loss",
            label="loss",
            value=compact(last.loss),
            note=f"nats; {compact(start)} → {compact(now)}, means of the first and last {WINDOW} steps",
        ),
        Tile(
            name="validation-loss",
            label="validation loss",
            value=compact(validated[-1].validation_loss) if validated else "none",
            note=f"nats after step {validated[-1].step}; best {compact(best)}"
            if validated
            else "sft.validation names no file",
        ),
        Tile(name="grad-norm", label="gradient norm", value=compact(last.grad_norm), note="before clipping"),
        Tile(
            name="learning-rate",
            label="learning rate",
            value=compact(last.learning_rate),
            note=f"peak {compact(max(record.learning_rate for record in records))}",
        ),
        Tile(
            name="throughput",
            label="throughput",
            value=compact(last.tokens_per_s),
            note="tokens trained a second, prompts included",
        ),
        Tile(
            name="epoch",
            label="epoch",
            value=str(last.epoch + 1),
            note=f"{compact(sum(record.trained_tokens for record in records))} tokens trained on",
        ),
    ]
    verdicts = {"loss": judge_sft_loss(records), "grad-norm": judge_sft_gradient(records)}
    return [_judged(tile, verdicts.get(tile.name)) for tile in shown]


class FlowStage(msgspec.Struct, frozen=True, kw_only=True):
    """The number of dispatched trajectories in one stage."""

    label: str
    count: int
    share: str
    """The share of all dispatched trajectories, `97%`; empty if it rounds to 0."""
    tone: int
    """The stage's colour, `--t1` … `--t6` of `page.css`."""


def stages(*, trained: int, dropped: Mapping[str, int], queued: int, in_flight: int) -> list[FlowStage]:
    """Return the stages of all dispatched trajectories: trained, dropped by reason, queued or in flight."""
    reasons = sorted(dropped.items(), key=lambda item: -item[1])
    places = [
        ("trained", trained, 2),
        *((f"dropped: {reason.replace('_', ' ')}", count, 5) for reason, count in reasons if count),
        ("queued", queued, 3),
        ("in flight", in_flight, 1),
    ]
    total = max(1, sum(count for _, count, _ in places))
    return [
        FlowStage(
            label=label,
            count=count,
            share=f"{count / total:.0%}" if count / total >= 0.005 else "",
            tone=tone,
        )
        for label, count, tone in places
    ]


def compact(value: Figure, digits: int = 3) -> str:
    """Return a figure in a few characters: `0.0123`, `1.2e-5`, `12.3k`, `n/a`."""
    if not is_finite(value):
        return "n/a"
    size = abs(value)
    for least, letter, unit in _COMPACT:
        if size >= least:
            return f"{value / unit:.{digits}g}{letter}"
    if size and size < 1e-3:
        return f"{value:.{max(0, digits - 2)}e}".replace("e-0", "e-")
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
