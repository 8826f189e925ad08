"""Which charts a run has, from its `StepRecord`s: the live page and the report show the same ones. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from markupsafe import Markup

from async_rl.observability.evaluation_record import EVERYTHING, Estimate, EvaluationRecord
from async_rl.observability.page.drawing import Band, Chart, Line, bar_chart, line_chart, smoothed
from async_rl.observability.page.tiles import trainer_idle
from async_rl.observability.records import WINDOW, Figure, StepRecord

RECENT: Final = 20
"""Steps of the second staleness histogram, and rows of the table of steps."""

_MAX_SETS: Final = 6
"""Validation sets that get a line."""

_MAX_REASONS: Final = 5
"""Reasons of drops that get a line of their own, the commonest first."""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Charts that answer one question."""

    name: str
    title: str
    charts: Sequence[Markup]


def sections(
    records: Sequence[StepRecord],
    max_staleness: int | None,
    evaluations: Sequence[EvaluationRecord] = (),
) -> list[Section]:
    """All charts that these records have figures for; sections without any are left out.

    Args:
        records: In the order of their steps.
        max_staleness: The bound, where it is known.
        evaluations: In the order of their versions.
    """
    validated = _validation(evaluations)
    if not records:
        return validated
    steps = [float(record.step) for record in records]
    drawn = [
        Section(
            name=name,
            title=title,
            charts=[markup for chart in charts if (markup := chart(records, steps, max_staleness))],
        )
        for name, title, charts in _SECTIONS
    ]
    first, *others = [section for section in drawn if section.charts]
    return [first, *validated, *others]


def _validation(evaluations: Sequence[EvaluationRecord]) -> list[Section]:
    """Reward and pass@k of the validation sets by weight version; nothing without an evaluation."""
    done = [record for record in evaluations if record.status == "done"]
    if not done:
        return []
    versions = [float(record.weight_version) for record in done]
    sets = sorted({name for record in done for name in record.scores})
    if len(sets) > 1 and len([name for name in sets if "/" not in name]) <= 2:
        sets.remove(EVERYTHING)  # one dataset, and its sources: it is all there is
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
        lines=[
            Line(
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
        floor=0.0,
        ceiling=1.0,
        lines=[
            Line(
                label=f"pass@{k}",
                values=column(whole, lambda record, k=k: record.scores[whole].pass_at.get(k)),  # type: ignore[misc]
                tone=tone,
            )
            for tone, k in enumerate(last.pass_at if last is not None else (), 1)
        ],
    )
    charts = [markup for chart in (reward, passed) if (markup := line_chart(chart, versions))]
    return [Section(name="validation", title="Does it hold on validation?", charts=charts)] if charts else []


# -- the charts --------------------------------------------------------------------------------------------

Drawn = Callable[[Sequence[StepRecord], Sequence[float], int | None], Markup]


def _column(records: Sequence[StepRecord], name: str) -> list[Figure]:
    return [getattr(record, name) for record in records]


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
) -> Drawn:
    """A chart of fields of `StepRecord` as they are.

    Args:
        name: See `Chart`, as title, note, unit, floor and ceiling.
        title: See above.
        note: See above.
        lines: Pairs of field and label.
        unit: See above.
        band: Label, lower and upper field.
        joined: Fields that are measured every few steps only.
        floor: See above.
        ceiling: See above.
        bounded: Whether `max_staleness` is drawn as its limit.
    """

    def draw(records: Sequence[StepRecord], steps: Sequence[float], max_staleness: int | None) -> Markup:
        shown = Chart(
            name=name,
            title=title,
            note=note,
            unit=unit,
            floor=floor,
            ceiling=ceiling,
            bound=max_staleness if bounded else None,
            band=None
            if band is None
            else Band(label=band[0], low=_column(records, band[1]), high=_column(records, band[2])),
            lines=[
                Line(label=label, values=_column(records, field), tone=tone, joined=field in joined)
                for tone, (field, label) in enumerate(lines, 1)
            ],
        )
        return line_chart(shown, steps)

    return draw


def _reward(records: Sequence[StepRecord], steps: Sequence[float], _: int | None) -> Markup:
    rewards = _column(records, "reward_mean")
    chart = Chart(
        name="reward",
        title="Reward",
        note="Rises. Flat from the start: siblings get equal rewards, so there is no advantage.",
        lines=[
            Line(label="batch", values=rewards, faint=True),
            Line(label=f"mean of {WINDOW} steps", values=smoothed(rewards, WINDOW)),
        ],
    )
    return line_chart(chart, steps)


def _idle(records: Sequence[StepRecord], steps: Sequence[float], _: int | None) -> Markup:
    chart = Chart(
        name="idle",
        title="Idle shares",
        note="Trainer idle: more engines or staleness. Engines idle: more ranks or fewer engines.",
        floor=0.0,
        ceiling=1.0,
        lines=[
            Line(label="trainer, of the step", values=[trainer_idle(record) for record in records]),
            Line(label="engines, so far", values=_column(records, "engine_idle_share"), tone=2),
        ],
    )
    return line_chart(chart, steps)


def _drops(records: Sequence[StepRecord], steps: Sequence[float], _: int | None) -> Markup:
    reasons = Counter(records[-1].dropped_reasons).most_common(_MAX_REASONS)
    chart = Chart(
        name="drops",
        title="Dropped",
        note="Trajectories that will never be trained, by reason, since the start.",
        unit="trajectories",
        floor=0.0,
        lines=[
            Line(
                label=reason.replace("_", " "),
                values=[r.dropped_reasons.get(reason, 0) for r in records],
                tone=tone,
            )
            for tone, (reason, _) in enumerate(reasons, 1)
        ],
    )
    return line_chart(chart, steps)


def staleness_counts(records: Sequence[StepRecord]) -> list[int]:
    """Trained trajectories of all the records by staleness, from 0 on."""
    counts = [0] * max((len(record.staleness_counts) for record in records), default=0)
    for record in records:
        for staleness, count in enumerate(record.staleness_counts):
            counts[staleness] += count
    return counts


def _staleness_bars(name: str, title: str, last: int | None) -> Drawn:
    def draw(records: Sequence[StepRecord], _: Sequence[float], max_staleness: int | None) -> Markup:
        counts = staleness_counts(records if last is None else records[-last:])
        if max_staleness is not None:
            counts += [0] * (min(max_staleness, 31) + 1 - len(counts))
        marked = max_staleness if max_staleness is not None and max_staleness < len(counts) else None
        note = (
            "Trained trajectories by versions between their oldest token and the trainer; dashed: the bound."
        )
        return bar_chart(name, title, note, [str(i) for i in range(len(counts))], counts, marked=marked)

    return draw


_SECTIONS: Final[tuple[tuple[str, str, tuple[Drawn, ...]], ...]] = (
    (
        "learning",
        "Is it learning?",
        (
            _reward,
            _lines(
                "ppo-kl",
                "ppo_kl",
                "Small and steady, 1e-4 to 1e-2. Grows step by step: lower the learning rate.",
                ("ppo_kl", "old - current"),
                ("ppo_kl_bypass", "rollout - current (bypass)"),
                unit="nats",
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
                "kl-parts",
                "Parts of the rollout KL",
                "Mismatch: engine against trainer. Staleness: age of the data. Routing: what replay removes.",
                ("kl_mismatch", "mismatch"),
                ("kl_staleness", "staleness"),
                ("kl_routing", "routing (probe)"),
                unit="nats",
                joined=("kl_routing",),
            ),
            _lines(
                "kl-lag",
                "Rollout KL by lag",
                "Rollout minus trainer log-probs: about 0 at lag 0, growing with the versions of lag.",
                ("rollout_kl_lag0", "lag 0"),
                ("rollout_kl_lag1", "lag 1"),
                ("rollout_kl_lag2_up", "lag 2+"),
                unit="nats",
            ),
            _lines(
                "log-prob-diff",
                "Trainer against engine",
                "Mean |Δ log-prob|. Lag 0 is mismatch alone: about 1e-5 in float32, 1e-2 in bfloat16.",
                ("lag0_log_prob_abs_diff", "lag 0"),
                ("log_prob_abs_diff", "all tokens"),
                unit="nats",
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
                "Never above the bound; p95 at the bound for long: more engines, or a larger bound.",
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
                "Standstill is what engines lose beyond the transfer; the aim is 0.1 s.",
                ("sync_s", "whole"),
                ("transfer_s", "transfer"),
                ("pause_s", "standstill"),
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
