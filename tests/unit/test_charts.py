"""What the page says of a run's figures: charts, verdicts, and that Prometheus' rules say the same."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from msgspec.structs import replace

from async_rl.observability.evaluation_record import Estimate, EvaluationRecord, EvaluationScore
from async_rl.observability.page import verdicts
from async_rl.observability.page.charts import MAX_POINTS, Band, Chart, Series, sections, thinned
from async_rl.observability.page.tiles import sft_tiles, stages, tiles
from async_rl.observability.records import StepRecord
from async_rl.observability.sft_record import SftRecord
from tests.support.finished_run import HOSTILE, MAX_STALENESS, records


def charts_of(steps: list[StepRecord]) -> dict[str, Chart]:
    return {chart.name: chart for section in sections(steps, MAX_STALENESS) for chart in section.charts}


def test_a_chart_has_the_figures_of_its_records() -> None:
    steps = records(30)
    charts = charts_of(steps)
    kl = charts["ppo-kl"]
    assert kl.xs == [float(step.step) for step in steps]
    assert kl.unit == "nats"
    (series,) = kl.series  # no step ran in bypass mode, so its line is left out
    assert series.label == "old - current"
    assert series.values == pytest.approx([step.ppo_kl for step in steps], rel=1e-3)
    staleness = charts["staleness"]
    assert staleness.bound == MAX_STALENESS
    assert staleness.band is not None
    assert staleness.band.high == [step.staleness_p95 for step in steps]


def test_a_line_has_no_value_where_nothing_was_measured() -> None:
    steps = records(20)
    routing = next(s for s in charts_of(steps)["kl-parts"].series if s.label == "routing (probe)")
    assert routing.joined
    assert [i + 1 for i, value in enumerate(routing.values) if value is not None] == [10, 20]


def test_the_parts_of_weight_updates_are_stacked_and_thinned_together() -> None:
    steps = records(3 * MAX_POINTS)
    chart = charts_of(steps)["sync"]
    assert chart.kind == "stacked"
    assert [series.label for series in chart.series] == ["interrupt", "gather", "send", "load", "verify"]
    assert chart.xs == [float(step.step) for step in steps[::3]]
    heights = [sum(values) for values in zip(*(series.values for series in chart.series), strict=True)]
    means = [sum(step.sync_s for step in steps[at : at + 3]) / 3 for at in range(0, len(steps), 3)]
    assert heights == pytest.approx(means, rel=1e-2)


def test_charts_and_sections_without_a_figure_are_left_out() -> None:
    assert sections([], MAX_STALENESS) == []
    old = msgspec.convert({"step": 1, "weight_version": 1, "time_s": 2.0, "reward_mean": 0.5}, StepRecord)
    charts = charts_of([old])
    assert "reward" in charts
    assert not {"kl-parts", "staleness-histogram", "drops"} & charts.keys()


def test_the_histogram_counts_all_trained_trajectories_up_to_the_bound() -> None:
    steps = records(30)
    bars = charts_of(steps)["staleness-histogram"]
    assert bars.kind == "bars"
    assert bars.xs == [0, 1, 2, 3, 4]
    counts = [sum(step.staleness_counts[i] for step in steps) for i in range(5)]
    assert bars.series[0].values == pytest.approx(counts, rel=1e-3)


def test_validation_is_charted_by_weight_version() -> None:
    def score(reward: float) -> EvaluationScore:
        passed = {"1": Estimate(value=reward), "4": Estimate(value=1.0)}
        return EvaluationScore(tasks=8, answers=32, reward=Estimate(value=reward), pass_at=passed)

    evaluations = [
        EvaluationRecord(weight_version=4, status="done", scores={"all": score(0.25), "math": score(0.25)}),
        EvaluationRecord(weight_version=8, status="missing", reason="no engine"),
        (lost := EvaluationRecord(weight_version=10, status="done", asked=4, dropped={"RewardError": 4})),
        EvaluationRecord(weight_version=12, status="done", scores={"all": score(0.75), "math": score(0.75)}),
    ]
    reward, passed = sections([], None, evaluations)[0].charts
    assert (reward.x, reward.xs) == ("version", [4, 12])
    assert [(series.label, series.values) for series in reward.series] == [("math", [0.25, 0.75])]
    assert [(series.label, series.values) for series in passed.series] == [
        ("pass@1", [0.25, 0.75]),
        ("pass@4", [1.0, 1.0]),
    ]
    assert sections([], None, [lost]) == []


def test_a_spike_stays_when_a_long_chart_is_thinned() -> None:
    size = 10_000
    spiked = [0.0] * size
    spiked[6_543] = 9.0
    holed = [None if 10 < i < 20 else 1.0 for i in range(size)]
    holed[8_000] = -3.0
    xs = [float(x) for x in range(size)]
    band = Band(label="b", low=[-1.0] * size, high=[math.nan] * size)
    series = [Series(label="a", values=spiked), Series(label="b", values=holed)]
    thin = thinned(Chart(name="x", title="X", note="n", xs=xs, series=series, band=band))
    assert len(thin.xs) <= 1.1 * MAX_POINTS
    assert thin.xs == sorted(set(thin.xs))
    assert (thin.xs[0], thin.xs[-1]) == (0.0, 9_999.0)
    assert thin.series[0].values[thin.xs.index(6_543.0)] == 9.0
    assert thin.series[1].values[thin.xs.index(8_000.0)] == -3.0
    assert thin.band is not None
    assert set(thin.band.high) == {None}
    assert {len(row) for row in (thin.band.low, *(s.values for s in thin.series))} == {len(thin.xs)}


def test_stages_account_for_all_that_was_dispatched() -> None:
    dropped = {"stale": 9, HOSTILE: 1, "none": 0}
    shown = stages(trained=950, dropped=dropped, queued=10, in_flight=30)
    assert [(stage.label, stage.count, stage.share) for stage in shown] == [
        ("trained", 950, "95%"),
        ("dropped: stale", 9, "1%"),
        (f"dropped: {HOSTILE}", 1, ""),
        ("queued", 10, "1%"),
        ("in flight", 30, "3%"),
    ]
    assert {stage.share for stage in stages(trained=0, dropped={}, queued=0, in_flight=0)} == {""}


# -- what the page says of a run's figures ------------------------------------------------------------


RULES = Path(__file__).parents[2] / "monitoring" / "rules" / "async_rl.yml"


def run(number: int = 20, *, every_s: float = 10.0, **last: float) -> list[StepRecord]:
    """A healthy run, whose last step has other figures."""
    healthy = {
        "reward_mean": 0.5,
        "ppo_kl": 0.002,
        "lag0_log_prob_abs_diff": 1e-3,
        "staleness_mean": 1.0,
        "staleness_max": 2,
        "trajectories": 64,
        "groups": 8,
        "groups_without_signal": 3,
        "wait_s": 1.0,
        "step_s": 3.0,
    }
    return [
        StepRecord(**(healthy | (last if step == number else {})), step=step, weight_version=step,
                   time_s=every_s * step)
        for step in range(1, number + 1)
    ]  # fmt: skip


def words(records: list[StepRecord], bound: int | None = 4) -> dict[str, str | None]:
    return {tile.name: tile.verdict for tile in tiles(records, bound)}


def test_the_throughput_says_what_interruptions_cost_when_updates_flush_caches() -> None:
    def note(*figures: tuple[int, float | None]) -> str:
        steps = [
            replace(record, prefilled_again_tokens=tokens, prefilled_again_s=waited_s)
            for record, (tokens, waited_s) in zip(run(len(figures), every_s=10.0), figures, strict=True)
        ]
        return {tile.name: tile.note for tile in tiles(steps, 4)}["throughput"]

    # Of a version's 10 s, calls waited 2 s; the first of six steps is too old.
    said = note((9999, 9.0), *[(700, 1.0), (900, 3.0)] * 2, (800, 2.0))
    assert said.endswith("updates: 800 prefilled again each, about 0.80 of what in_place would reach")
    assert "0.00 of what" in note((800, 2.0), (800, 12.0))
    for kept in (note((800, 2.0)), note((0, None), (0, None))):
        assert kept == "tokens sampled a second"
    remarks = {"throughput": "weights.every=2 would reach 1.06 times as many", "staleness": "ask for 5"}
    notes = {tile.name: tile.note for tile in tiles(run(), 4, remarks)}
    assert notes["throughput"] == f"tokens sampled a second; {remarks['throughput']}"
    assert notes["staleness"] == "versions; max 2 of 4 allowed; ask for 5"


def test_the_throughput_says_why_it_is_below_plan_when_it_is() -> None:
    def note(**figures: Any) -> str:
        return {tile.name: tile.note for tile in tiles(run(**figures), 4)}["throughput"]

    causes = ("engine-3 decodes a token 2.0 times as slowly as the others", "tools take 8 s, 4 s before")
    assert note(throughput_vs_plan_ratio=0.82, below_plan=causes) == f"18% below plan: {'; '.join(causes)}"
    assert note(throughput_vs_plan_ratio=0.82) == "18% below plan"
    assert note(throughput_vs_plan_ratio=0.9) == "tokens sampled a second"


def test_every_judged_figure_is_healthy_when_no_rule_speaks() -> None:
    assert words(run()) == {
        "reward": "healthy",
        "ppo-kl": "healthy",
        "mismatch": "healthy",
        "staleness": "healthy",
        "throughput": None,
        "trainer-idle": "healthy",
    }


@pytest.mark.parametrize(
    ("tile", "word", "last"),
    [
        ("ppo-kl", "look", {"ppo_kl": -0.2}),
        ("ppo-kl", "look", {"ppo_kl": 0.02}),
        ("ppo-kl", "healthy", {"ppo_kl": 0.009}),  # more than five times the median, and yet small
        ("ppo-kl", "look", {"ppo_kl": float("nan"), "ppo_kl_bypass": 0.2}),
        ("ppo-kl", None, {"ppo_kl": float("nan")}),
        ("staleness", "wrong", {"staleness_max": 5}),
        ("staleness", "healthy", {"staleness_max": 4}),
    ],
)
def test_a_figure_is_judged_by_the_last_step_when_its_rule_is(
    tile: str, word: str | None, last: dict[str, float]
) -> None:
    assert words(run(**last))[tile] == word


def test_rewards_are_wrong_when_nothing_is_learned() -> None:
    records = [*run(5), *(run(1, groups_without_signal=8) * 3)]
    (reward, *_) = tiles(records, 4)
    assert (reward.verdict, reward.note) == ("wrong", "all rewards equal for 24 groups: nothing is learned")


def lasting(minutes: float, **figures: float) -> list[StepRecord]:
    """A healthy run, and then so many minutes with other figures, a step a minute."""
    records = run(60, every_s=60.0)
    last = records[-1].step
    return records + [
        replace(records[0], **figures, step=last + step, time_s=60.0 * (last + step))
        for step in range(1, int(minutes) + 1)
    ]


OLD = {"staleness_mean": 4.0, "staleness_max": 4}
IDLE = {"wait_s": 997.0}
SLOW = {"throughput_vs_plan_ratio": 0.75}


@pytest.mark.parametrize(
    ("tile", "figures", "minutes", "word"),
    [
        ("staleness", OLD, 20, "healthy"),  # the mean of ten minutes is above the share from the 8th on
        ("staleness", OLD, 26, "look"),
        ("trainer-idle", IDLE, 10, "healthy"),
        ("trainer-idle", IDLE, 30, "look"),
        ("throughput", SLOW, 14, "healthy"),
        ("throughput", SLOW, 18, "look"),
        ("throughput", {"throughput_vs_plan_ratio": 0.81}, 60, "healthy"),
        # The mean of an hour has doubled after 20 minutes.
        ("mismatch", {"lag0_log_prob_abs_diff": 4e-3}, 45, "healthy"),
        ("mismatch", {"lag0_log_prob_abs_diff": 4e-3}, 55, "look"),
        ("mismatch", {"lag0_log_prob_abs_diff": 9e-6}, 200, "healthy"),
    ],
)
def test_a_condition_must_hold_for_as_long_as_the_alert_waits(
    tile: str, figures: dict[str, float], minutes: int, word: str
) -> None:
    records = lasting(minutes, **figures)
    assert words(records)[tile] == word
    healthy = replace(run(60)[0], time_s=records[-1].time_s + 7200, throughput_vs_plan_ratio=1.0)
    assert words([*records, healthy])[tile] == "healthy"


def test_a_bound_of_none_or_of_zero_is_not_near() -> None:
    assert words(lasting(40, staleness_mean=0.0, staleness_max=0), 0)["staleness"] == "healthy"
    assert words(lasting(40, **OLD), None)["staleness"] is None


def test_long_steps_are_judged_too() -> None:
    words_of_hours = words(run(1, **OLD, **IDLE) + run(2, every_s=3600.0, **OLD, **IDLE)[1:])
    assert (words_of_hours["staleness"], words_of_hours["trainer-idle"]) == ("look", "look")


def test_a_start_is_not_judged_by_its_first_steps() -> None:
    assert words(run(5, every_s=60.0, **IDLE))["trainer-idle"] == "healthy", (
        "a start waits for its first batches"
    )
    records = lasting(80, lag0_log_prob_abs_diff=4e-3)[58:]
    assert words(records)["mismatch"] == "healthy", "no full hour is better"


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ({}, ("healthy", "healthy")),
        ({"loss": math.nan}, ("wrong", "healthy")),
        ({"loss": None, "grad_norm": None}, ("wrong", "wrong")),  # NaN in metrics.jsonl
        ({"updates_skipped": 1}, ("healthy", "look")),
        ({"updates_skipped": 1, "time_s": 50.0}, ("healthy", "healthy")),
    ],
)
def test_supervised_steps_are_judged_by_what_is_not_finite_or_skipped(
    last: dict[str, Any], words: tuple[str, str]
) -> None:
    step = SftRecord(step=1, weight_version=1, time_s=1000.0, epoch=0, loss=2.0, grad_norm=1.0,
                     learning_rate=1e-5, tokens=10, trained_tokens=5, step_s=1.0,
                     tokens_per_s=10.0)  # fmt: skip
    records = [replace(step, **last)]
    if "time_s" in last:
        records.append(step)
    judged = {tile.name: tile.verdict for tile in sft_tiles(records)}
    assert (judged["loss"], judged["grad-norm"]) == words
    assert {judged[name] for name in ("validation-loss", "learning-rate", "throughput", "epoch")} == {None}


@pytest.mark.parametrize(
    ("alert", "thresholds", "for_s"),
    [
        ("PpoKlSpike", [verdicts.PPO_KL_NATS, verdicts.PPO_KL_LEAST_NATS, verdicts.PPO_KL_FACTOR], 0),
        ("MismatchGrows", [verdicts.MISMATCH_FACTOR, verdicts.MISMATCH_LEAST_NATS], verdicts.MISMATCH_FOR_S),
        # 0: only where there is a bound
        ("StalenessNearBound", [verdicts.STALENESS_SHARE, 0], verdicts.STALENESS_FOR_S),
        ("TrainerIdle", [verdicts.TRAINER_IDLE_SHARE], verdicts.TRAINER_IDLE_FOR_S),
        ("ThroughputBelowPlan", [verdicts.PLAN_RATIO], verdicts.PLAN_FOR_S),
        ("UpdateSkipped", [0], 0),
    ],
)
def test_thresholds_and_durations_are_those_of_the_alert(
    alert: str, thresholds: list[float], for_s: float
) -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    (rule,) = (rule for rule in rules if rule.get("alert") == alert)
    assert rule["labels"]["severity"] == "warning", "which the page shows as `look`"
    compared = re.findall(r"[<>] (?:on \(run\) )?([0-9.e-]+)", rule["expr"])
    assert [float(number) for number in compared] == [float(number) for number in thresholds]
    assert 60 * int(rule.get("for", "0m").removesuffix("m")) == for_s
