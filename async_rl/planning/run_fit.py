"""Fits the speeds of a simulation to the record of a past run, to predict the run under other settings.

```
 PastRun ─► regression: costs of steps, tokens, calls; trainer's share ──┐
        ─► means: steps, updates, waits of tools and rewards ────────────┴► FittedRun
                            simulate it as it was, compare, correct ◄──┘
```

**Shared machines.** Where engines and trainer share cores, as on a laptop, each slows the others down, and
how much depends on the settings. The record says it: engines decode both while the trainer trains and while
it waits (`engine_costs`). If an engine loses the share x of its time to a trainer that trains, R ranks add
x / (1 - x) to the engine's times. By symmetry an engine adds 1/R of it to every other engine, and all engines
that much to the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from async_rl.config import Config, SGLangEngines
from async_rl.observability.records import StepRecord
from async_rl.planning.engine_costs import by_engine, fit_engine_costs, training_times, update_waves
from async_rl.planning.past_run import Intervals, PastRun, RecordedTasks, TurnCalls
from async_rl.planning.planned_job import MakeTasks, PlannedRun, Sharing, SimulatedRun, simulate_run
from async_rl.planning.workload import Workload, num_engines

SIMULATIONS: Final = 2
"""Of a fit: what calls take beside an engine's time is what the first one leaves."""

_SLOW: Final = 1.3
"""How many times as long as the others an engine takes that is named as slow."""

_MIN_CALLS: Final = 20
"""Fewer calls of an engine say little: one long prompt would name it."""

_ON_CPU: Final = Workload(
    decode_base_s=0.012, decode_per_call_s=0.002, prefill_call_s=0.003, prefill_tokens_per_s=10_000.0
)
"""The usual proportion on CPUs, where the cores that compute also stream each call's tokens. Measured with
the quickstart's engines, between 16 and 60 running calls."""

_LEAST_S: Final = 1e-6
"""The least that the prefill of a token takes: a fit may find nothing."""

_ABORT_ON_CPU_S: Final = 0.005
"""What an update takes for each running call that it aborts, where the record has none. Measured likewise."""


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a run was in its steady state, recorded or simulated. Shares are of the time."""

    versions_per_s: float
    trajectories_per_s: float
    """Trained."""
    tokens_per_s: float
    """Sampled and trained."""
    trainer_waits: float
    """Share in which the trainer waited for a batch."""
    trainer_trains: float
    trainer_syncs: float
    """Share in which weight updates paused the trainer."""
    calls_running: float
    """Mean number of running calls of an engine."""
    staleness_mean: float
    staleness_max: int
    interrupted: float
    """Share of the trained trajectories that were interrupted and resumed."""


class FittedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A past run as a simulation knows it."""

    past: PastRun
    workload: Workload
    sharing: Sharing
    recorded: RunFigures
    simulated: RunFigures
    """The run's own settings, simulated."""


def figures_of(
    records: Sequence[StepRecord],
    num_warm_up: int,
    call_s: float,
    engines: int,
    *,
    scale: int = 1,
    coarsen: int = 1,
) -> RunFigures:
    """Compute the figures of a run's steps after the warm-up.

    Args:
        records: All its steps.
        num_warm_up: The number of steps that are left out, at least 1.
        call_s: Seconds of all calls in engines, during the steps that are left.
        engines: The number of engines.
        scale: Real tokens for each recorded one.
        coarsen: Real trajectories for each recorded one.
    """
    steady = records[num_warm_up:]
    seconds = steady[-1].time_s - records[num_warm_up - 1].time_s
    trajectories = sum(each.trajectories for each in steady)
    return RunFigures(
        versions_per_s=len(steady) / seconds,
        trajectories_per_s=trajectories * coarsen / seconds,
        tokens_per_s=sum(each.trained_tokens for each in steady) * scale * coarsen / seconds,
        trainer_waits=sum(each.wait_s for each in steady) / seconds,
        trainer_trains=sum(each.step_s for each in steady) / seconds,
        trainer_syncs=sum(each.handover_s for each in steady) / seconds,
        calls_running=call_s * coarsen / seconds / engines,
        staleness_mean=sum(each.staleness_mean for each in steady) / len(steady),
        staleness_max=max(each.staleness_max for each in steady),
        interrupted=sum(each.interrupted for each in steady) / trajectories,
    )


def fit_run(
    past: PastRun, how: PlannedRun, *, on_step: Callable[[int], None] = lambda step: None
) -> FittedRun:
    """Fit a simulation to a past run.

    Args:
        past: The run.
        how: How long its simulations are.
        on_step: Called with the number of each simulated step.
    """
    workload, sharing = _first_fit(past)
    run = simulate_past(past, past.config, workload, sharing, how, on_step=on_step)
    workload = replace(workload, call_steps=_call_steps(past, run))
    run = simulate_past(past, past.config, workload, sharing, how, on_step=on_step)
    return FittedRun(
        past=past,
        workload=workload,
        sharing=sharing,
        recorded=recorded_figures(past),
        simulated=simulated_figures(run, past.config, workload, how),
    )


class SlowEngine(NamedTuple):
    """An engine that is much slower than the others at one part of its work."""

    engine_id: str
    part: Literal["decodes a token", "sends a first token"]
    times: float
    """How many times as long as the others it takes."""
    share: float
    """Its share of the calls."""

    def __str__(self) -> str:
        """Say so."""
        return f"{self.engine_id} {self.part} {self.times:.1f} times as slowly as the others"


def slow_engines(calls: Sequence[TurnCalls]) -> list[SlowEngine]:
    """Return the engines that are much slower than the others, at decoding or at first tokens.

    An engine is compared with the median of the others, over at least `_MIN_CALLS` calls of each.
    """
    parts: dict[Literal["decodes a token", "sends a first token"], Callable[[list[TurnCalls]], float]] = {
        "decodes a token": lambda some: decode_seconds(some) / sum(call.sampled for call in some),
        "sends a first token": lambda some: (
            sum(c.first_token_s for c in some) / sum(c.num_calls for c in some)
        ),
    }
    known = {name: some for name, some in by_engine(calls).items() if name and len(some) >= _MIN_CALLS}
    found = []
    for part, seconds_of in parts.items():
        seconds = {name: seconds_of(some) for name, some in known.items()}
        for name, own in sorted(seconds.items()):
            others = [each for other, each in seconds.items() if other != name]
            usual = float(np.median(others)) if others else 0.0
            if usual > 0 and own > _SLOW * usual:
                found.append(SlowEngine(name, part, own / usual, len(known[name]) / len(calls)))
    return found


def _call_steps(past: PastRun, run: SimulatedRun) -> float:
    """Return what a call takes beside prefill and decode steps, in decode steps.

    Engines do not need all of the recorded time until a first token. The rest is that of HTTP, tokenizing and
    waits for steps that have begun. It grows with the steps: on a CPU, where an engine's processes share
    cores, it was 4.7 steps of 39 ms with 14 calls and 5.8 steps of 86 ms with 59. Calls that updates
    interrupted also waited for those.
    """
    used = run.usage
    first_token_s = fmean([call.first_token_s for call in past.calls if call.num_calls == 1] or [0.0])
    step_s = used.decode_s / used.decoded_tokens / run.scale
    return max(0.0, first_token_s - used.first_token_s / used.calls) / step_s


def recorded_figures(past: PastRun) -> RunFigures:
    """Return the figures of a past run."""
    records, warm_up = past.records, past.num_warm_up
    begin, end = (past.settled_s.get(records[i].step) for i in (warm_up - 1, -1))
    if begin is None or end is None:  # the archive has only the newest trajectories
        begin, end = min(past.settled_s.values()), max(past.settled_s.values())
    end = max(past.whole_until_s, (begin + end) / 2)
    calls = Intervals([call.begin_s for call in past.calls], [call.end_s for call in past.calls])
    call_s = float(calls.seconds_between(np.array([begin]), np.array([end]))[0])
    seconds = records[-1].time_s - records[warm_up - 1].time_s
    number = call_s / max(end - begin - _outages_s(past, begin, end), 1e-9)
    return figures_of(records, warm_up, number * seconds, num_engines(past.config))


def _outages_s(past: PastRun, begin: float, end: float) -> float:
    """Return the seconds between two moments in which the run had ended and not begun again."""
    known = [each for each in past.records if begin <= past.settled_s.get(each.step, 0.0) <= end]
    if not known:
        return 0.0
    passed_s = past.settled_s[known[-1].step] - past.settled_s[known[0].step]
    return max(0.0, passed_s - (known[-1].time_s - known[0].time_s))


def simulated_figures(run: SimulatedRun, config: Config, workload: Workload, how: PlannedRun) -> RunFigures:
    """Return the figures of a simulated run."""
    used = run.usage
    call_s = used.first_token_s + used.decode_s + used.beside_s
    engines = num_engines(config)
    return figures_of(run.records, how.warmup, call_s, engines, scale=run.scale, coarsen=how.coarsen)


def simulate_past(
    past: PastRun,
    config: Config,
    workload: Workload,
    sharing: Sharing,
    how: PlannedRun,
    *,
    on_step: Callable[[int], None] = lambda step: None,
) -> SimulatedRun:
    """Simulate a past run's trajectories under these settings."""
    tasks = recorded_tasks(past, config, workload, how)
    return simulate_run(config, workload, how, tasks, sharing, on_step=on_step)


def recorded_tasks(past: PastRun, config: Config, workload: Workload, how: PlannedRun) -> MakeTasks:
    """Return what makes a past run's trajectories the tasks of a simulation."""
    group_size = config.rollout.group_size
    return lambda scale: RecordedTasks(past.trajectories, workload, scale, how.seed, group_size)


def _first_fit(past: PastRun) -> tuple[Workload, Sharing]:
    """Fit what the record says without a simulation."""
    config, steady = past.config, past.records[past.num_warm_up :]
    on_cpu = isinstance(config.engine, SGLangEngines) and config.engine.device == "cpu"
    costs = fit_engine_costs(past, _ON_CPU if on_cpu else Workload())
    sharing, alone = Sharing(), 1.0
    if on_cpu:
        by_trainer = costs.lost / (1 - costs.lost)
        each = by_trainer / config.trainer.num_ranks
        engines = num_engines(config)
        sharing = Sharing(by_trainer=by_trainer, by_engine=each, of_trainer=each * engines)
        alone = 1 + each * (engines - 1)  # the record has all of them
    busy = _busy_shares(past)
    alone_s = sum(each.step_s for each in steady) / (1 + sharing.of_trainer * busy)
    updates = [each for each in steady if each.sync_s] or steady
    update_s = fmean(each.sync_s for each in updates)
    publish_s, interrupt_s = (  # `interrupt` is of one wave, `sync_s` of all waves
        fmean(each.sync_parts.get(part, 0.0) for each in updates) for part in ("publish", "interrupt")
    )
    waves = update_waves(config)
    pause_s = max(0.0, update_s - publish_s) / waves
    abort_call_s = _ABORT_ON_CPU_S if on_cpu else 0.0
    if config.weights.interrupt == "abort":
        abort_call_s = interrupt_s / max(1.0, recorded_figures(past).calls_running)
        pause_s = max(0.0, pause_s - interrupt_s)
    trajectories = past.trajectories
    turns = [turn for each in trajectories for turn in each.turns]
    sampled = [each.sampled for each in trajectories]
    return (
        Workload(
            prompt_tokens=max(each.turns[0].read for each in trajectories),
            tool_tokens=max(turn.read for turn in turns),
            turns=max(len(each.turns) for each in trajectories),
            mean_tokens=float(np.mean(sampled)),
            max_tokens=max(sampled),
            sigma=0.0,
            decode_base_s=costs.step_s / alone,
            decode_per_call_s=costs.token_s / alone,
            prefill_call_s=costs.call_s / alone,
            prefill_tokens_per_s=alone / max(costs.prefill_s, _LEAST_S),
            train_tokens_per_s=sum(each.tokens for each in steady) / alone_s,
            sync_s=pause_s,
            publish_s=publish_s,
            abort_call_s=abort_call_s,
            cache_tokens=config.engine.max_total_tokens,
            snapshot_s=fmean(each.handover_s for each in updates) if config.weights.overlap else 0.0,
        ),
        sharing,
    )


def _busy_shares(past: PastRun) -> float:
    """Return the share of the trainer steps' time in which an engine has calls, a mean over engines."""
    begins, ends = training_times(past)
    shares = [
        Intervals([c.begin_s for c in calls], [c.end_s for c in calls]).joined().mean_number(begins, ends)
        for calls in by_engine(past.calls).values()
    ]
    return float(np.average(np.mean(shares, axis=0), weights=ends - begins))


def decode_seconds(calls: Sequence[TurnCalls]) -> float:
    """Return the seconds of calls after their first tokens."""
    return sum(call.end_s - call.begin_s - call.first_token_s for call in calls)
