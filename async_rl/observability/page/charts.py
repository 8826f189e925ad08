"""Computes the data of each panel from a run's `StepRecord`s; `static/charts.js` draws them.

```
 panels, StepRecords ──sections──► Section ─► Chart ─► Series (label, values)   as JSON, to page and report
```

uPlot 1.6 draws them (MIT, 51 KB, in `static/`), the library behind Grafana's time series panels. It makes no
request and uses no `eval`, so it runs under the page's Content-Security-Policy. Every report carries the
library: Chart.js is 4 times larger, Vega with Vega-Lite 15 times, ECharts and Plotly's basic bundle 22 times.
Vega also compiles its expressions with `Function`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, Literal

import msgspec

from async_rl.observability.evaluation_record import (
    EVERYTHING,
    Estimate,
    EvaluationRecord,
    EvaluationScore,
)
from async_rl.observability.panels import SFT_PANELS, STEP_PANELS, VALIDATION, Panel, PanelGroup
from async_rl.observability.records import WINDOW, Figure, StepRecord, is_finite, mean
from async_rl.observability.sft_record import SftRecord

MAX_POINTS: Final = 300
"""Approximate number of points in a chart, more than it has pixels. Thinning keeps minima and maxima."""

_MAX_SETS: Final = 6
"""The largest number of validation sets that get a line."""

_MAX_REASONS: Final = 5
"""The largest number of drop reasons that get their own line, the most frequent first."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a chart, with a value for each x; a missing value leaves a gap."""

    label: str
    values: Sequence[Figure]
    tone: int = 1
    """The line's colour, `--t1` … `--t6` of `page.css`."""
    faint: bool = False
    """Whether the line is drawn faintly, behind the others."""
    joined: bool = False
    """Whether the line is drawn across gaps, for values that are measured every few steps only."""


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """The area between two lines, in the colour of the first series."""

    label: str
    low: Sequence[Figure]
    high: Sequence[Figure]


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """One chart with its data."""

    name: str
    """A stable name for links and tests: `ppo-kl`."""
    title: str
    note: str
    """One sentence on what is good or what a bad value means."""
    xs: Sequence[float]
    series: Sequence[Series]
    x: str = "step"
    """The name of the x axis: what `xs` counts."""
    kind: Literal["lines", "bars", "stacked"] = "lines"
    """stacked: bars, each series on top of those before."""
    band: Band | None = None
    unit: str = ""
    bound: float | None = None
    """A limit, drawn as a dashed line."""
    floor: Figure = None
    """The y axis includes this value."""
    ceiling: Figure = None


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A group of charts that answer one question."""

    name: str
    title: str
    charts: Sequence[Chart]


def sections(
    records: Sequence[StepRecord],
    max_staleness: int | None,
    evaluations: Sequence[EvaluationRecord] = (),
) -> list[Section]:
    """Return all charts that these records have values for; empty sections are left out.

    Args:
        records: The step records in the order of their steps.
        max_staleness: The staleness bound, None if it is unknown.
        evaluations: The evaluations in the order of their versions.
    """
    learning, *others = [
        _section(group, _step_charts(group, records, max_staleness)) for group in STEP_PANELS
    ]
    return [section for found in (learning, _validation(evaluations), *others) for section in found]


def sft_sections(records: Sequence[SftRecord]) -> list[Section]:
    """Return the charts of a supervised run that these records have values for."""
    found = [_section(group, _step_charts(group, records, None)) for group in SFT_PANELS]
    return [section for each in found for section in each]


def _section(group: PanelGroup, charts: Iterable[Chart]) -> list[Section]:
    """Return a section with the charts that have a value; none if no chart has one."""
    shown = [thinned(chart) for chart in map(_without_empty_series, charts) if chart.series]
    return [Section(name=group.name, title=group.title, charts=shown)] if shown else []


def _without_empty_series(chart: Chart) -> Chart:
    kept = [series for series in chart.series if any(map(is_finite, series.values))]
    return msgspec.structs.replace(chart, series=kept)


def thinned(chart: Chart) -> Chart:
    """Return a chart thinned to about `MAX_POINTS` points, with values of four digits.

    Each stretch keeps the lowest and the highest value of every line; the first and last point stay. Of
    stacked bars, whose parts belong together, each stretch keeps the means.
    """
    if chart.kind == "stacked":
        every = -(-len(chart.xs) // MAX_POINTS)
        starts = range(0, len(chart.xs), every)

        def means(values: Sequence[Figure]) -> list[Figure]:
            return [_rounded(mean(values[at : at + every])) for at in starts]

        series = [msgspec.structs.replace(one, values=means(one.values)) for one in chart.series]
        return msgspec.structs.replace(chart, xs=[chart.xs[at] for at in starts], series=series)
    rows = [series.values for series in chart.series]
    rows += [] if chart.band is None else [chart.band.low, chart.band.high]
    size = len(chart.xs)
    kept = set(range(size))
    if size > MAX_POINTS:
        num_stretches = max(1, MAX_POINTS // (2 * len(rows)))
        kept = {0, size - 1}
        for i in range(num_stretches):
            stretch = range(i * size // num_stretches, (i + 1) * size // num_stretches)
            for row in rows:
                if finite := [(value, at) for at in stretch if is_finite(value := row[at])]:
                    kept |= {min(finite)[1], max(finite)[1]}
    order = sorted(kept)

    def chosen(values: Sequence[Figure]) -> list[Figure]:
        return [_rounded(values[at]) for at in order]

    band = chart.band
    if band is not None:
        band = Band(label=band.label, low=chosen(band.low), high=chosen(band.high))
    return msgspec.structs.replace(
        chart,
        xs=[chart.xs[at] for at in order],
        series=[msgspec.structs.replace(series, values=chosen(series.values)) for series in chart.series],
        band=band,
    )


def _rounded(value: Figure) -> Figure:
    return float(f"{value:.4g}") if is_finite(value) else None


def smoothed(values: Sequence[Figure], window: int) -> list[Figure]:
    """Return the mean of each value and the ones before it; None where all of them are None."""
    return [mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]


def _validation(evaluations: Sequence[EvaluationRecord]) -> list[Section]:
    """Return charts of the validation sets' scores by weight version; none without an evaluation."""
    done = [record for record in evaluations if record.scores]
    if not done:
        return []
    versions = [float(record.weight_version) for record in done]
    sets = sorted({name for record in done for name in record.scores})
    if len(sets) > 1 and len([name for name in sets if "/" not in name]) <= 2:
        sets.remove(EVERYTHING)  # one dataset and its sources: the total says nothing more
    sets = sets[:_MAX_SETS]

    def column(name: str, figure: Callable[[EvaluationScore], Estimate | None]) -> list[Figure]:
        found = [figure(record.scores[name]) if name in record.scores else None for record in done]
        return [None if estimate is None else estimate.value for estimate in found]

    whole = EVERYTHING if all(EVERYTHING in record.scores for record in done) else sets[0]
    last = done[-1].scores.get(whole)
    rewards = {name: column(name, lambda score: score.reward) for name in sets}
    passed = {
        f"pass@{k}": column(whole, lambda score, k=k: score.pass_at.get(k))  # type: ignore[misc]
        for k in (last.pass_at if last is not None else ())
    }
    charts = (
        _chart(panel, versions, _series(columns), x="version")
        for panel, columns in zip(VALIDATION.panels, (rewards, passed), strict=True)
    )
    return _section(VALIDATION, charts)


def _step_charts(
    group: PanelGroup, records: Sequence[StepRecord | SftRecord], max_staleness: int | None
) -> Iterator[Chart]:
    """Yield the charts of a group's panels; none without a step."""
    for panel in group.panels if records else ():
        if panel.kind == "histogram":
            yield _histogram(panel, records, max_staleness)
            continue
        columns = {label: _column(records, field) for field, label in panel.lines.items()}
        series = _series(columns, joined=panel.joined)
        if panel.kind == "smoothed":
            first, *others = series
            mean = Series(label=f"mean of {WINDOW} steps", values=smoothed(first.values, WINDOW))
            # What is measured beside each step's value is measured every few steps only.
            others = [msgspec.structs.replace(other, joined=True) for other in others]
            series = [msgspec.structs.replace(first, faint=True), mean, *others]
        elif panel.kind == "by reason":
            series = _series(_by_reason(records, *panel.lines))
        elif panel.kind == "stacked":
            series = _series(_by_part(records, *panel.lines))
        yield _chart(
            panel,
            [float(record.step) for record in records],
            series,
            kind="stacked" if panel.kind == "stacked" else "lines",
            bound=max_staleness if panel.bounded else None,
            band=None if panel.band is None else _band(records, *panel.band),
        )


def _chart(panel: Panel, xs: Sequence[float], series: Sequence[Series], **more: Any) -> Chart:
    """Return the chart of a panel with its data."""
    shared = {name: getattr(panel, name) for name in ("name", "title", "note", "unit", "floor", "ceiling")}
    return Chart(xs=xs, series=series, **shared, **more)


def _series(columns: Mapping[str, Sequence[Figure]], *, joined: bool = False) -> list[Series]:
    return [
        Series(label=label, values=values, tone=tone, joined=joined)
        for tone, (label, values) in enumerate(columns.items(), 1)
    ]


def _column(records: Sequence[StepRecord | SftRecord], name: str) -> list[Figure]:
    return [getattr(record, name) for record in records]


def _band(records: Sequence[StepRecord | SftRecord], label: str, low: str, high: str) -> Band:
    return Band(label=label, low=_column(records, low), high=_column(records, high))


def _by_reason(records: Sequence[StepRecord | SftRecord], field: str) -> dict[str, list[Figure]]:
    """Return the entries of a field that counts by reason, the most frequent ones."""
    reasons = Counter(getattr(records[-1], field)).most_common(_MAX_REASONS)
    return {
        reason.replace("_", " "): [float(getattr(record, field).get(reason, 0)) for record in records]
        for reason, _ in reasons
    }


def _by_part(records: Sequence[StepRecord | SftRecord], field: str) -> dict[str, list[Figure]]:
    """Return the entries of a field that divides a sum into parts, in the order of the first records."""
    names = dict.fromkeys(name for record in records for name in getattr(record, field))
    return {name: [getattr(record, field).get(name, 0.0) for record in records] for name in names}


def _histogram(panel: Panel, records: Sequence[StepRecord | SftRecord], max_staleness: int | None) -> Chart:
    """Return the trained trajectories by staleness, from 0 on to the bound."""
    ((field, label),) = panel.lines.items()
    columns = zip_longest(
        *(getattr(r, field) for r in records[-(panel.last_steps or len(records)) :]), fillvalue=0
    )
    counts = [float(sum(column)) for column in columns]
    if any(counts) and max_staleness is not None:
        counts += [0.0] * (min(max_staleness, 31) + 1 - len(counts))
    series = _series({label: counts} if any(counts) else {})
    return _chart(panel, [float(at) for at in range(len(counts))], series, kind="bars", x="staleness")
