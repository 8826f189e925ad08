"""Selects the charts of a run and computes their data from its `StepRecord`s; `static/charts.js` draws them.

```
 StepRecords ──sections──► Section ─► Chart ─► Series (label, values)   as JSON, to live page and report
```

uPlot 1.6 draws them (MIT, 51 KB, in `static/`), the library behind Grafana's time series panels. It makes no
request and uses no `eval`, so it runs under the page's Content-Security-Policy. Every report carries the
library: Chart.js is 4 times larger, Vega with Vega-Lite 15 times, ECharts and Plotly's basic bundle 22 times.
Vega also compiles its expressions with `Function`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

import msgspec

from async_rl.observability.evaluation_record import EVERYTHING, Estimate, EvaluationRecord
from async_rl.observability.page.tiles import trainer_idle
from async_rl.observability.records import WINDOW, Figure, StepRecord, is_finite, mean
from async_rl.observability.sft_record import SftRecord

RECENT: Final = 20
"""Number of steps in the second staleness histogram and of rows in the table of steps."""

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
    kind: Literal["lines", "bars"] = "lines"
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
        _section(name, title, (make(records, max_staleness) for make in makers)) if records else []
        for name, title, makers in _SECTIONS
    ]
    return [section for found in (learning, _validation(evaluations), *others) for section in found]


def sft_sections(records: Sequence[SftRecord]) -> list[Section]:
    """Return the charts of a supervised run that these records have values for."""
    found = [
        _section(name, title, (make(records, None) for make in makers)) if records else []
        for name, title, makers in _SFT_SECTIONS
    ]
    return [section for each in found for section in each]


def _section(name: str, title: str, charts: Iterable[Chart]) -> list[Section]:
    """Return a section with the charts that have a value; none if no chart has one."""
    shown = [thinned(chart) for chart in map(_without_empty_series, charts) if chart.series]
    return [Section(name=name, title=title, charts=shown)] if shown else []


def _without_empty_series(chart: Chart) -> Chart:
    kept = [series for series in chart.series if any(map(is_finite, series.values))]
    return msgspec.structs.replace(chart, series=kept)


def thinned(chart: Chart, most: int = MAX_POINTS) -> Chart:
    """Return a chart thinned to about `most` points, with values of four digits.

    Each stretch keeps the lowest and the highest value of every line; the first and last point stay.
    """
    rows = [series.values for series in chart.series]
    rows += [] if chart.band is None else [chart.band.low, chart.band.high]
    size = len(chart.xs)
    kept = set(range(size))
    if size > most:
        num_stretches = max(1, most // (2 * len(rows)))
        kept = {0, size - 1}
        for i in range(num_stretches):
            stretch = range(i * size // num_stretches, (i + 1) * size // num_stretches)
            for row in rows:
                if finite := [(value, at) for at in stretch if is_finite(value := row[at])]:
                    kept |= {min(finite)[1], max(finite)[1]}
    order = sorted(kept)

    def chosen(values: Sequence[Figure]) -> list[Figure]:
        return [float(f"{value:.4g}") if is_finite(value := values[at]) else None for at in order]

    band = chart.band
    if band is not None:
        band = Band(label=band.label, low=chosen(band.low), high=chosen(band.high))
    return msgspec.structs.replace(
        chart,
        xs=[chart.xs[at] for at in order],
        series=[msgspec.structs.replace(series, values=chosen(series.values)) for series in chart.series],
        band=band,
    )


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

    def column(name: str, figure: Callable[[EvaluationRecord], Estimate | None]) -> list[Figure]:
        found = [figure(record) if name in record.scores else None for record in done]
        return [None if estimate is None else estimate.value for estimate in found]

    whole = EVERYTHING if all(EVERYTHING in record.scores for record in done) else sets[0]
    last = done[-1].scores.get(whole)
    reward = Chart(
        name="validation-reward",
        title="Validation reward",
        note="Mean over tasks, by set. Falls while the training reward rises: the policy fits its tasks.",
        x="version",
        xs=versions,
        series=[
            Series(
                label=name,
                values=column(name, lambda record, name=name: record.scores[name].reward),  # type: ignore[misc]
                tone=tone,
            )
            for tone, name in enumerate(sets, 1)
        ],
    )
    passed = Chart(
        name="validation-pass",
        title="pass@k",
        note="Share of tasks that one of k answers solves, all sets. A large k falls: the policy narrows.",
        x="version",
        xs=versions,
        floor=0.0,
        ceiling=1.0,
        series=[
            Series(
                label=f"pass@{k}",
                values=column(whole, lambda record, k=k: record.scores[whole].pass_at.get(k)),  # type: ignore[misc]
                tone=tone,
            )
            for tone, k in enumerate(last.pass_at if last is not None else (), 1)
        ],
    )
    return _section("validation", "Does it hold on validation?", (reward, passed))


# -- the charts --------------------------------------------------------------------------------------------

ChartMaker = Callable[[Sequence[Any], int | None], Chart]
"""Gets the `StepRecord`s or `SftRecord`s and the staleness bound."""


def _column(records: Sequence[StepRecord | SftRecord], name: str) -> list[Figure]:
    return [getattr(record, name) for record in records]


def _steps(records: Sequence[StepRecord | SftRecord]) -> list[float]:
    return [float(record.step) for record in records]


def _lines(
    name: str,
    title: str,
    note: str,
    *lines: tuple[str, str],
    unit: str = "",
    band: tuple[str, str, str] | None = None,
    joined: tuple[str, ...] = (),
    floor: Figure = None,
    ceiling: Figure = None,
    bounded: bool = False,
) -> ChartMaker:
    """Return a chart of fields of the records, unchanged.

    Args:
        name: The chart's name; title, note, unit, floor and ceiling are fields of `Chart`, too.
        title: Its heading.
        note: One sentence on what is good or bad.
        lines: Pairs of field and label.
        unit: The unit of the values.
        band: Label, lower and upper field.
        joined: Fields that are measured every few steps only.
        floor: A value that the y axis includes.
        ceiling: The y axis ends there unless a value is higher.
        bounded: Whether `max_staleness` is drawn as its limit.
    """

    def make(records: Sequence[StepRecord | SftRecord], max_staleness: int | None) -> Chart:
        return Chart(
            name=name,
            title=title,
            note=note,
            unit=unit,
            floor=floor,
            ceiling=ceiling,
            bound=max_staleness if bounded else None,
            xs=_steps(records),
            band=None
            if band is None
            else Band(label=band[0], low=_column(records, band[1]), high=_column(records, band[2])),
            series=[
                Series(label=label, values=_column(records, field), tone=tone, joined=field in joined)
                for tone, (field, label) in enumerate(lines, 1)
            ],
        )

    return make


def _reward(records: Sequence[StepRecord], _: int | None) -> Chart:
    rewards = _column(records, "reward_mean")
    return Chart(
        name="reward",
        title="Reward",
        note="Rises. Flat from the start: siblings get equal rewards, so there is no advantage.",
        xs=_steps(records),
        series=[
            Series(label="batch", values=rewards, faint=True),
            Series(label=f"mean of {WINDOW} steps", values=smoothed(rewards, WINDOW)),
        ],
    )


def _idle(records: Sequence[StepRecord], _: int | None) -> Chart:
    return Chart(
        name="idle",
        title="Idle shares",
        note="Trainer idle: more engines or staleness. Engines idle: more ranks or fewer engines.",
        floor=0.0,
        ceiling=1.0,
        xs=_steps(records),
        series=[
            Series(label="trainer, of the step", values=[trainer_idle(record) for record in records]),
            Series(label="engines, whole run", values=_column(records, "engine_idle_share"), tone=2),
        ],
    )


def _drops(records: Sequence[StepRecord], _: int | None) -> Chart:
    reasons = Counter(records[-1].dropped_reasons).most_common(_MAX_REASONS)
    return Chart(
        name="drops",
        title="Dropped",
        note="Trajectories that will never be trained, by reason, since the start.",
        unit="trajectories",
        floor=0.0,
        xs=_steps(records),
        series=[
            Series(
                label=reason.replace("_", " "),
                values=[float(record.dropped_reasons.get(reason, 0)) for record in records],
                tone=tone,
            )
            for tone, (reason, _) in enumerate(reasons, 1)
        ],
    )


def staleness_counts(records: Sequence[StepRecord]) -> list[int]:
    """Return the number of trained trajectories by staleness, from 0 on, over all records."""
    counts = [0] * max((len(record.staleness_counts) for record in records), default=0)
    for record in records:
        for staleness, count in enumerate(record.staleness_counts):
            counts[staleness] += count
    return counts


def _staleness_bars(name: str, title: str, last: int | None) -> ChartMaker:
    def make(records: Sequence[StepRecord], max_staleness: int | None) -> Chart:
        counts = staleness_counts(records if last is None else records[-last:])
        if any(counts) and max_staleness is not None:
            counts += [0] * (min(max_staleness, 31) + 1 - len(counts))
        return Chart(
            name=name,
            title=title,
            note="Trained trajectories by age of their oldest token in versions, from 0 to the bound.",
            unit="trajectories",
            kind="bars",
            x="staleness",
            floor=0.0,
            xs=[float(staleness) for staleness in range(len(counts))],
            series=[Series(label="trajectories", values=[float(count) for count in counts])]
            if any(counts)
            else [],
        )

    return make


_SECTIONS: Final[tuple[tuple[str, str, tuple[ChartMaker, ...]], ...]] = (
    (
        "learning",
        "Is it learning?",
        (
            _reward,
            _lines(
                "ppo-kl",
                "ppo_kl",
                "Small and steady, 1e-4 to 1e-2. A spike: the updates of a batch moved the policy far, look "
                "at the gradient norm. Grows step by step: lower the learning rate.",
                ("ppo_kl", "old - current"),
                ("ppo_kl_bypass", "rollout - current (bypass)"),
                unit="nats",
            ),
            _lines(
                "kl-parts",
                "Parts of the rollout KL",
                "A spike of mismatch: damaged weights or wrong rows. Of staleness: data is too old. Of "
                "routing: replay removes more; below 0 the rows are wrong.",
                ("kl_mismatch", "mismatch"),
                ("kl_staleness", "staleness"),
                ("kl_routing", "routing (probe)"),
                unit="nats",
                joined=("kl_mismatch", "kl_staleness", "kl_routing"),
            ),
            _lines(
                "entropy",
                "Entropy",
                "Falls slowly. Towards 0: collapse; raise the temperature, lower the learning rate.",
                ("entropy", "entropy"),
                unit="nats",
                floor=0.0,
            ),
            _lines(
                "grad-norm", "Gradient norm", "Steady; before clipping.", ("grad_norm", "norm"), floor=0.0
            ),
            _lines(
                "clip-fraction",
                "Clipped tokens",
                "Share of tokens; above about 0.2 the policy moves too far in a step.",
                ("clip_fraction", "share"),
                floor=0.0,
            ),
            _lines("loss", "Policy loss", "No target of its own; a jump is worth a look.", ("loss", "loss")),
        ),
    ),
    (
        "off-policy",
        "Where does the KL come from?",
        (
            _lines(
                "kl-lag",
                "Rollout KL by lag",
                "Rollout minus trainer log-probs: about 0 at lag 0, growing with the versions of lag.",
                ("rollout_kl_lag0", "lag 0"),
                ("rollout_kl_lag1", "lag 1"),
                ("rollout_kl_lag2_up", "lag 2+"),
                unit="nats",
                joined=("rollout_kl_lag0",),
            ),
            _lines(
                "log-prob-diff",
                "Trainer against engine",
                "Mean |Δ log-prob|. Lag 0 is mismatch alone: about 1e-5 in float32, 1e-2 in bfloat16.",
                ("lag0_log_prob_abs_diff", "lag 0"),
                ("log_prob_abs_diff", "all tokens"),
                unit="nats",
                joined=("lag0_log_prob_abs_diff",),
                floor=0.0,
            ),
            _lines(
                "routing",
                "Routing replay, by probe",
                "The engine's routing replayed should lie below the trainer's own.",
                ("routing_replayed_abs_diff", "replayed"),
                ("routing_native_abs_diff", "native"),
                unit="nats",
                joined=("routing_replayed_abs_diff", "routing_native_abs_diff"),
                floor=0.0,
            ),
            _lines(
                "ratio",
                "Importance ratio",
                "Close around 1; far from it the data is too old.",
                ("importance_ratio_p50", "median"),
                ("importance_ratio_p99", "p99"),
                ("importance_ratio_p999", "p99.9"),
                band=("p1 to p99", "importance_ratio_p1", "importance_ratio_p99"),
            ),
            _lines(
                "ess",
                "Effective sample size",
                "Share of the trained tokens; 1 on-policy, below about 0.5 few tokens decide the step.",
                ("effective_sample_share", "share"),
                floor=0.0,
                ceiling=1.0,
            ),
        ),
    ),
    (
        "staleness",
        "How old and how long is the data?",
        (
            _lines(
                "staleness",
                "Staleness by step",
                "Never above the bound; p95 at the bound for long: fewer engines, or more ranks.",
                ("staleness_mean", "mean"),
                ("staleness_max", "max"),
                unit="versions",
                band=("p50 to p95", "staleness_p50", "staleness_p95"),
                floor=0.0,
                bounded=True,
            ),
            _staleness_bars("staleness-histogram", "Staleness, whole run", None),
            _staleness_bars("staleness-recent", f"Staleness, last {RECENT} steps", RECENT),
            _lines(
                "lengths",
                "Sampled tokens",
                "Of a trajectory. Grows or shrinks with the policy; upper edge at the limit: cut answers.",
                ("sampled_tokens_mean", "mean"),
                unit="tokens",
                band=("shortest to longest", "sampled_tokens_min", "sampled_tokens_max"),
                floor=0.0,
            ),
            _lines(
                "length-bias",
                "Length bias",
                "Distance of trained lengths from all that ended; above 0.05 long answers get lost.",
                ("length_ks", "KS distance"),
                floor=0.0,
            ),
        ),
    ),
    (
        "speed",
        "Is it fast?",
        (
            _lines(
                "throughput",
                "Throughput",
                "Tokens sampled by all engines; falls with longer contexts and with engines lost.",
                ("tokens_per_s", "sampled"),
                unit="tokens/s",
                floor=0.0,
            ),
            _idle,
            _lines(
                "step-time",
                "A step's time",
                "Waiting for the batch, training on it, bringing the weights to the engines.",
                ("wait_s", "wait"),
                ("step_s", "step"),
                ("sync_s", "sync"),
                unit="s",
                floor=0.0,
            ),
            _lines(
                "sync",
                "Weight sync",
                "Pause time is what engines lose beyond the transfer; the aim is 0.1 s.",
                ("sync_s", "whole"),
                ("transfer_s", "transfer"),
                ("pause_s", "pause"),
                unit="s",
                floor=0.0,
            ),
            _lines(
                "outstanding",
                "In flight and queued",
                "Queued at its bound: rollouts wait for the trainer. None queued: it waits for them.",
                ("in_flight", "in flight"),
                ("queued", "queued"),
                unit="trajectories",
                floor=0.0,
            ),
            _drops,
        ),
    ),
)


def _sft_loss(records: Sequence[SftRecord], _: int | None) -> Chart:
    losses = _column(records, "loss")
    return Chart(
        name="sft-loss",
        title="Loss",
        note="Falls. Validation rises while the batch's falls: the model memorises; fewer epochs.",
        unit="nats",
        xs=_steps(records),
        series=[
            Series(label="batch", values=losses, faint=True),
            Series(label=f"mean of {WINDOW} steps", values=smoothed(losses, WINDOW)),
            Series(label="validation", values=_column(records, "validation_loss"), tone=2, joined=True),
        ],
    )


_SFT_SECTIONS: Final[tuple[tuple[str, str, tuple[ChartMaker, ...]], ...]] = (
    (
        "learning",
        "Is it learning?",
        (
            _sft_loss,
            _lines(
                "grad-norm", "Gradient norm", "Steady; before clipping.", ("grad_norm", "norm"), floor=0.0
            ),
            _lines(
                "learning-rate",
                "Learning rate",
                "As sft.lr, its warm-up and its decay say.",
                ("learning_rate", "rate"),
                floor=0.0,
            ),
        ),
    ),
    (
        "speed",
        "Is it fast?",
        (
            _lines(
                "throughput",
                "Throughput",
                "Tokens of a batch, prompts included, over the time of its step.",
                ("tokens_per_s", "tokens"),
                unit="tokens/s",
                floor=0.0,
            ),
            _lines(
                "step-time",
                "A step's time",
                "Of forward, backward and update.",
                ("step_s", "step"),
                unit="s",
                floor=0.0,
            ),
        ),
    ),
)
