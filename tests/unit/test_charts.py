"""The data of charts: each chart holds its figures, and charts without figures are left out."""

from __future__ import annotations

import math

import msgspec
import pytest

from async_rl.observability.evaluation_record import Estimate, EvaluationRecord, EvaluationScore
from async_rl.observability.page.charts import MAX_POINTS, Band, Chart, Series, sections, thinned
from async_rl.observability.page.tiles import stages
from async_rl.observability.records import StepRecord
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
