"""Computes the six figures of the last step, and the stages in which the dispatched trajectories are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from async_rl.observability.formatting import compact, format_percent
from async_rl.observability.page.verdicts import (
    Verdict,
    Word,
    judge_mismatch,
    judge_ppo_kl,
    judge_reward,
    judge_sft_gradient,
    judge_sft_loss,
    judge_staleness,
    judge_throughput,
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


class Tile(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, shown in large type."""

    name: str
    label: str
    value: str
    note: str
    verdict: Word | None = None
    """None if no alert rule is about the figure, or it was not measured."""


def _tile(name: str, label: str, value: str, note: str, verdict: Verdict | None = None) -> Tile:
    """Return a tile; the reason of its verdict takes the place of the note."""
    if verdict is None:
        return Tile(name=name, label=label, value=value, note=note)
    return Tile(name=name, label=label, value=value, note=verdict.reason or note, verdict=verdict.word)


def tiles(
    records: Sequence[StepRecord],
    max_staleness: int | None,
    remarks: Mapping[str, str] = MappingProxyType({}),
) -> list[Tile]:
    """Return the six figures of the last step; none before the first step.

    Args:
        records: All steps.
        max_staleness: The staleness bound, None if it is unknown.
        remarks: What else the notes of tiles say, by name.
    """
    if not records:
        return []
    last, measured = records[-1], last_at_equal_versions(records)
    kl = last.update_kl
    kl_note = f"nats; clipped {format_percent(last.clip_fraction)} of tokens"
    bound = "" if max_staleness is None else f" of {max_staleness} allowed"
    older = f", step {measured.step}" if measured and measured is not last else ""
    return [
        _tile(
            "reward",
            "reward",
            compact(last.reward_mean),
            _first_and_last([record.reward_mean for record in records]),
            judge_reward(records),
        ),
        _tile(
            "ppo-kl",
            "ppo_kl_bypass" if is_finite(last.ppo_kl_bypass) else "ppo_kl",
            compact(kl) if is_finite(kl) else "none",
            kl_note if is_finite(kl) else "measured with several updates per batch",
            judge_ppo_kl(records),
        ),
        _tile(
            "mismatch",
            "mismatch",
            compact(None if measured is None else measured.lag0_log_prob_abs_diff),
            f"nats, mean |Δ log-prob| at equal versions{older}",
            judge_mismatch(records),
        ),
        _tile(
            "staleness",
            "staleness p95",
            f"{last.staleness_p95:.0f}",
            f"versions; max {last.staleness_max}{bound}{_and(remarks.get('staleness'))}",
            judge_staleness(records, max_staleness),
        ),
        _tile(
            "throughput",
            "throughput",
            compact(last.tokens_per_s),
            _throughput_note(records) + _and(remarks.get("throughput")),
            judge_throughput(records),
        ),
        _tile(
            "trainer-idle",
            "trainer idle",
            format_percent(last.trainer_idle_share),
            f"waited {last.wait_s:.1f} s for its batch",
            judge_trainer_idle(records),
        ),
    ]


def _and(remark: str | None) -> str:
    return f"; {remark}" if remark else ""


def _throughput_note(records: Sequence[StepRecord]) -> str:
    """Return what updates cost in the last steps: prefills of what they interrupted, none with `in_place`.

    Each call waits once per update for its next token, so what is left of its time is about the share of the
    throughput that keeping the cache would reach.
    """
    note, recent = "tokens sampled a second", records[-WINDOW - 1 :]
    again = mean(record.prefilled_again_tokens for record in recent[1:])
    waited_s = mean(record.prefilled_again_s for record in recent[1:])
    if not again or waited_s is None:
        return note
    version_s = (recent[-1].time_s - recent[0].time_s) / (len(recent) - 1)
    of_in_place = max(0.0, 1 - waited_s / version_s) if version_s > 0 else 0.0
    return (
        f"{note}; updates: {compact(again)} prefilled again each, about {of_in_place:.2f} of what in_place "
        "would reach"
    )


def sft_tiles(records: Sequence[SftRecord]) -> list[Tile]:
    """Return the figures of the last step of a supervised run; none before the first step."""
    if not records:
        return []
    last = records[-1]
    validated = [record for record in records if record.validation_loss is not None]
    value, note = "none", "sft.validation names no file"
    if validated:
        best = min((r.validation_loss for r in validated if is_finite(r.validation_loss)), default=None)
        value = compact(validated[-1].validation_loss)
        note = f"nats after step {validated[-1].step}; best {compact(best)}"
    losses = f"nats; {_first_and_last([record.loss for record in records])}"
    norm, rate, tokens_per_s = (
        compact(each) for each in (last.grad_norm, last.learning_rate, last.tokens_per_s)
    )
    peak = compact(max(record.learning_rate for record in records))
    trained = compact(sum(record.trained_tokens for record in records))
    return [
        _tile("loss", "loss", compact(last.loss), losses, judge_sft_loss(records)),
        _tile("validation-loss", "validation loss", value, note),
        _tile("grad-norm", "gradient norm", norm, "before clipping", judge_sft_gradient(records)),
        _tile("learning-rate", "learning rate", rate, f"peak {peak}"),
        _tile("throughput", "throughput", tokens_per_s, "tokens trained a second, prompts included"),
        _tile("epoch", "epoch", str(last.epoch_number), f"{trained} tokens trained on"),
    ]


def _first_and_last(values: Sequence[Figure]) -> str:
    """Return how a figure has changed over the run."""
    first, last = mean(values[:WINDOW]), mean(values[-WINDOW:])
    return f"{compact(first)} → {compact(last)}, means of the first and last {WINDOW} steps"


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
