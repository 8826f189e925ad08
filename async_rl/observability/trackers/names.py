"""Names the figures of a step for trackers: verl's name where it has one, else `async_rl/<field>`.

One table for all trackers, so that one chart can compare runs of both frameworks.

Source: verl, `verl/trainer/ppo/metric_utils.py` and `rollout_corr_helper.py`, and the `timing_s` and
`fully_async` keys of its fully-async trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, get_origin, get_type_hints

from async_rl.config import Config, SGLangEngines
from async_rl.observability.evaluation_record import EvaluationRecord
from async_rl.observability.figures import STEP_FIGURES
from async_rl.observability.records import Figure, StepRecord, is_finite

FIELDS: Final[Mapping[str, str]] = {
    described.tracker: field for field, described in STEP_FIGURES.items() if described.tracker
}
"""verl's name → the field of `StepRecord` that is the same."""


class Derived(NamedTuple):
    """Computes a figure from several fields."""

    of: Callable[[StepRecord, int], Figure]
    """Computes a figure from several fields and the number of devices."""
    says: str


def _step_s(record: StepRecord) -> float:
    return record.wait_s + record.step_s + record.sync_s


DERIVED: Final[Mapping[str, Derived]] = {
    "timing_s/step": Derived(lambda r, _: _step_s(r), "`wait_s + step_s + sync_s`"),
    "perf/time_per_step": Derived(lambda r, _: _step_s(r), "the same"),
    "perf/throughput": Derived(
        lambda r, devices: _ratio(r.tokens, _step_s(r) * devices),
        "`tokens` over the time of the step, for each trainer rank and each device of an engine",
    ),
    "fully_async/trainer/idle_ratio": Derived(
        lambda r, _: _ratio(r.wait_s, _step_s(r)), "`wait_s` over the time of the step"
    ),
    "fully_async/partial/partial_ratio": Derived(
        lambda r, _: _ratio(r.interrupted, r.trajectories), "`interrupted` over `trajectories`"
    ),
    "async_rl/log_prob_diff_extreme": Derived(
        lambda r, _: r.log_prob_diff_extreme, "largest absolute difference in `extremes`"
    ),
}


def _own(*kinds: type | None) -> tuple[str, ...]:
    """Fields that verl has no name for, of such types; None: of any that is not a collection."""
    types = get_type_hints(StepRecord)
    origins = {
        name: get_origin(types[name]) for name in StepRecord.__struct_fields__ if name not in FIELDS.values()
    }
    collections = (tuple, dict)
    return tuple(
        name for name, origin in origins.items() if (origin if origin in collections else None) in kinds
    )


OWN: Final = _own(None)
"""Fields that are logged as `async_rl/<field>`."""

OWN_BY_KEY: Final = _own(dict)
"""Fields whose entries are logged as `async_rl/<field>/<key>`."""


def figures(record: StepRecord, devices: int) -> dict[str, float]:
    """Return the figures of a step for trackers: finite numbers only.

    Args:
        record: The record of the step.
        devices: As `count_devices` says.
    """
    found: dict[str, Figure] = {name: getattr(record, field) for name, field in FIELDS.items()}
    found |= {name: derived.of(record, devices) for name, derived in DERIVED.items()}
    found |= {f"async_rl/{field}": getattr(record, field) for field in OWN}
    for field in OWN_BY_KEY:
        found |= {f"async_rl/{field}/{key}": value for key, value in getattr(record, field).items()}
    return {name: float(value) for name, value in found.items() if is_finite(value)}


def evaluation_figures(record: EvaluationRecord) -> dict[str, float]:
    """What trackers are given of an evaluation: for each set its reward and pass@k, as verl names them."""
    found: dict[str, Figure] = {"val-aux/weight_version": record.weight_version}
    for name, score in record.scores.items():
        found[f"val-core/{name}/reward/mean"] = score.reward.value
        found |= {f"val-core/{name}/pass@{k}": estimate.value for k, estimate in score.pass_at.items()}
        found |= {f"val-aux/{name}/{part}/mean": value for part, value in score.parts.items()}
        found[f"val-aux/{name}/tokens/mean"] = score.tokens_mean
        found[f"val-aux/{name}/truncated_share"] = score.truncated_share
    return {name: float(value) for name, value in found.items() if is_finite(value)}


def count_devices(config: Config) -> int:
    """Trainer ranks, and the devices of all engines that a run starts with."""
    engine = config.engine
    if isinstance(engine, SGLangEngines):
        return config.trainer.num_ranks + (len(engine.urls) or engine.num_engines) * engine.tp_size
    return config.trainer.num_ranks + engine.num_engines


def _ratio(part: float, whole: float) -> Figure:
    return part / whole if whole > 0 else None
