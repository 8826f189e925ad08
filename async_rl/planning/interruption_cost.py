"""What weight updates cost in a config, by arithmetic, and the nearest change that costs less.

Per version, all engines together sample a batch, prefill its prompts, pause for the update and prefill again
what it interrupted; and no answer may be older than the bound:

    T = max(F + O, trainer, L / (max_staleness + 1) + O)    O = P + (u + A / p) / every    rate = batch / T

    F   batch / fluid bound              P   prompts and tool results, prefilled once
    u   pause of an engine               A   tokens that an engine prefills again; 0 in place
    p   prefill speed of an engine       L   seconds of the longest answer

A is the engine's running calls times their mean context (`Workload.mean_context`). A group that was
dispatched just before an update is `every` versions old by then: a bound of L / (T - O) + `every` versions
lets no batch wait for it. Below that bound, rarer updates were found to gain half of what they spare in
prefills (docs/reference/performance.md, "What exact interruption costs").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Final, NamedTuple

from msgspec.structs import replace

from async_rl.config import Config
from async_rl.engine_protocol import InterruptMode
from async_rl.errors import ConfigError
from async_rl.observability.records import StepRecord
from async_rl.planning.workload import (
    WARM_UP,
    Workload,
    calibrate,
    fluid_rate,
    num_engines,
    with_engines,
)

LEAST_GAIN: Final = 1.03
"""A change that gains less is not worth a sentence: seeds differ by 2%."""

_HALF: Final = 0.5
"""What is left of the gain of rarer updates where the bound makes batches wait; see the module."""

_NEAR: Final = 1e-9
"""Versions by which a bound may be missed: rounding."""


class InterruptionCost(NamedTuple):
    """What updates cost in one config."""

    tokens: float
    """Tokens that all engines prefill again at an update."""
    version_s: float
    """Seconds of a version."""
    of_in_place: float
    """Rate over that of the same config with `weights.interrupt: in_place`."""
    longest: float
    """Versions that pass while the longest answer is sampled, if none waits for it."""
    bound: int
    """Least `rollout.max_staleness` at which no batch waits for the longest answers."""


class CheaperUpdates(NamedTuple):
    """A change of the config that raises its rate."""

    config: Config
    """With the change."""
    overrides: tuple[str, ...]
    """The change, as on the command line."""
    gain: float
    """Rate with it over the rate without."""
    price: str
    """What it costs in exchange."""


class _Version(NamedTuple):
    """Times of a version, seconds."""

    again: float
    """Tokens that all engines prefill again at an update."""
    free_s: float
    """The version, if no batch waits for a long answer."""
    still_s: float
    """The part of it in which engines do not decode."""
    longest_s: float
    """The longest answer."""
    bound: int
    """`rollout.max_staleness`."""

    @property
    def version_s(self) -> float:
        """The version."""
        return max(self.free_s, self.longest_s / (self.bound + 1) + self.still_s)


def interruption_cost(config: Config, workload: Workload) -> InterruptionCost:
    """Return what updates cost a job, as the module describes."""
    version = _version(config, workload)
    in_place = _version(config, workload, "in_place")
    longest = version.longest_s / (version.free_s - version.still_s)
    return InterruptionCost(
        tokens=version.again,
        version_s=version.version_s,
        of_in_place=in_place.version_s / version.version_s,
        longest=longest,
        bound=ceil(longest + config.weights.every - _NEAR),
    )


def nearest_change(config: Config, workload: Workload) -> CheaperUpdates | None:
    """Return the exact change that gains most; in place if none gains `LEAST_GAIN`; None if nothing does."""
    if not _interrupts(config):
        return None
    now = interruption_cost(config, workload)
    exact = max(_exact_changes(config, workload, now), key=lambda change: change.gain)
    if exact.gain >= LEAST_GAIN:
        return exact
    if now.of_in_place * LEAST_GAIN > 1:
        return None
    overrides, routing = ["weights.interrupt=in_place"], config.routing
    if routing.from_engine and routing.merge != "splice":
        overrides.append("routing.merge=splice")
        routing = replace(routing, merge="splice")
    kept = replace(config, weights=replace(config.weights, interrupt="in_place"), routing=routing)
    price = "no longer exact, see docs/design/weight-updates.md, Exact or in place"
    return CheaperUpdates(kept, tuple(overrides), 1 / now.of_in_place, price)


def describe_interruption(
    config: Config, workload: Workload, change: CheaperUpdates | None, *, knows_speeds: bool = True
) -> list[str]:
    """Return lines that say what the chosen mode costs, which bound is needed, and what would help.

    Without speeds a rate cannot be told: only what is prefilled, and the bound.
    """
    if not _interrupts(config):
        return []
    bound, mode = config.rollout.max_staleness, config.weights.interrupt
    cost = interruption_cost(config, workload)
    line = f"weights.interrupt {mode} prefills "
    if mode != "in_place":
        batch = config.trainer.groups_per_batch * config.rollout.group_size
        share = cost.tokens / config.weights.every / (batch * workload.expected_tokens)
        line += f"{cost.tokens:,.0f} tokens again at each update, {share:.2f} for each sampled token"
        if knows_speeds:
            line += f": {cost.of_in_place:.2f} of what in_place would reach"
    else:
        line += "nothing again"
        if knows_speeds:
            exact_s = _version(config, workload, "abort").version_s
            line += f"; abort, which is exact, would reach {cost.version_s / exact_s:.2f} of its rate"
    lines = [line]
    if bound < cost.bound:
        lines.append(
            f"the longest answers take {cost.longest:.1f} versions: batches wait for them with "
            f"rollout.max_staleness={bound}, and with {cost.bound} none does"
        )
    if change is not None and knows_speeds:
        lines.append(
            f"{' '.join(change.overrides)} would reach {change.gain:.2f} times the rate: {change.price}"
        )
    return lines


def describe_measured(config: Config, records: Sequence[StepRecord]) -> dict[str, str]:
    """Return the bound that a run's longest answers ask for, and the nearest change that helps, in words.

    Args:
        config: The run's config.
        records: Its steps, of which the later ones say lengths and speeds.

    Returns:
        By the tiles of the run's page that it belongs to: `staleness` and `throughput`.
    """
    longest = max((record.sampled_tokens_max for record in records[-WARM_UP:]), default=0)
    if len(records) <= WARM_UP or not longest or not _interrupts(config):
        return {}
    try:
        config = with_engines(config, num_engines(config))
    except ConfigError:  # engine.urls_file is being written; the page is drawn without remarks
        return {}
    workload = Workload(**calibrate(config, records) | {"max_tokens": longest})
    said, cost = {}, interruption_cost(config, workload)
    if config.rollout.max_staleness < cost.bound:
        said["staleness"] = f"the longest answers ask for {cost.bound}"
    if change := nearest_change(config, workload):
        price = change.price.partition(",")[0]
        said["throughput"] = (
            f"{' '.join(change.overrides)} would reach {change.gain:.2f} times as many ({price})"
        )
    return said


def _exact_changes(config: Config, workload: Workload, now: InterruptionCost) -> Iterator[CheaperUpdates]:
    """Yield the changes that keep log-probs exact: a bound for the longest answers, and rarer updates."""
    bound, every = config.rollout.max_staleness, config.weights.every + 1
    wider = replace(config, rollout=replace(config.rollout, max_staleness=max(bound, now.bound)))
    yield CheaperUpdates(
        wider,
        (f"rollout.max_staleness={wider.rollout.max_staleness}",),
        now.version_s / interruption_cost(wider, workload).version_s,
        "exact; tokens may be older",
    )
    if every <= bound:
        rarer = replace(config, weights=replace(config.weights, every=every))
        cost = interruption_cost(rarer, workload)
        gain = now.version_s / cost.version_s
        if cost.bound > bound:
            gain = 1 + _HALF * (gain - 1)
        yield CheaperUpdates(
            rarer, (f"weights.every={every}",), gain, "exact; tokens are older, within the same bound"
        )


def _interrupts(config: Config) -> bool:
    """Return whether engines generate while weights change: else they wait for the trainer in any mode."""
    return config.rollout.max_staleness > 0 and not config.placement.shared


def _version(config: Config, workload: Workload, interrupt: InterruptMode | None = None) -> _Version:
    """Return the times of a version, with another mode than the config's if one is given."""
    engines, every, bound = num_engines(config), config.weights.every, config.rollout.max_staleness
    in_flight = ceil(config.rollout.max_concurrent_trajectories / engines)
    running = min(config.engine.max_running_requests, in_flight)
    batch = config.trainer.groups_per_batch * config.rollout.group_size
    siblings = config.rollout.group_size if workload.shares_prompts else 1
    once = workload.prompt_tokens / siblings + (workload.turns - 1) * workload.tool_tokens
    keeps = (interrupt or config.weights.interrupt) == "in_place" or not bound
    again = 0.0 if keeps else running * workload.mean_context
    speed, fluid = workload.prefill_tokens_per_s, fluid_rate(engines, running, workload)
    still_s = batch * once / engines / speed + (workload.sync_s + again / speed) / every
    trainer_s = workload.train_s(batch * workload.trajectory_tokens, batch * workload.expected_tokens, fluid)
    if not config.weights.overlap:
        trainer_s += (workload.sync_s + workload.publish_s) / every
    return _Version(
        again=again * engines,
        free_s=max(batch / fluid + still_s, trainer_s),
        still_s=still_s,
        longest_s=workload.max_tokens * workload.step_s(running) + (workload.turns - 1) * workload.tool_s,
        bound=bound,
    )
