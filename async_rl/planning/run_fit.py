"""Fits the speeds of a simulation to the record of a past run, to predict the run under other settings.

```
 PastRun ─► regression: decode step over running calls, trainer's share ─┐
        ─► means: steps, updates, waits of tools and rewards ────────────┴► FittedRun
                                 simulate it as it was, compare, correct ◄──┘ twice
```

**Shared machines.** Where engines and trainer share cores, as on a laptop, each slows the others down, and
how much depends on the settings. The record says it: engines decode both while the trainer trains and while
it waits. A turn of n tokens with r running calls on its engine takes

    n (base + slope · r + extra · t)        t: share of its time in which the trainer trained

by least squares over all turns. The slope is kept near its usual proportion to the base, because a run in
which r hardly varies cannot tell them apart. extra / (base + slope · r) is what R trainer ranks add. By
symmetry an engine adds 1/R of it to every other engine, and all engines that much to the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from async_rl.config import Config, SGLangEngines
from async_rl.observability.records import StepRecord
from async_rl.planning.past_run import Intervals, PastRun, RecordedTasks, TurnCalls
from async_rl.planning.planned_job import PlannedRun, Sharing, SimulatedRun, simulate_run
from async_rl.planning.workload import Workload, num_engines
from async_rl.types import Float64Array

CORRECTIONS: Final = 3
"""Simulations after which the cost of a call is corrected: the third correction is a few percent."""

_PRIOR: Final = 0.1
"""Weight of the usual proportion of base and slope, relative to all turns of the record."""

_SLOW: Final = 1.3
"""How many times as long as the others an engine takes that is named as slow."""

_MIN_CALLS: Final = 20
"""Fewer calls of an engine say little: one long prompt would name it."""

_ON_CPU: Final = Workload(decode_base_s=0.012, decode_per_call_s=0.0012)
"""The usual proportion on CPUs, where the cores that compute also stream each call's token. Measured with the
quickstart's engines, between 2 and 16 running calls."""


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
    first_token_s = sum(call.first_token_s for call in past.calls) / sum(c.num_calls for c in past.calls)
    decode_s = decode_seconds(past.calls) / sum(call.sampled for call in past.calls)
    run = simulate_past(past, past.config, workload, sharing, how, on_step=on_step)
    for _ in range(CORRECTIONS):
        workload = _corrected(workload, run, first_token_s=first_token_s, decode_s=decode_s)
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
    by_engine = {name: some for name, some in _by_engine(calls).items() if name and len(some) >= _MIN_CALLS}
    found = []
    for part, seconds_of in parts.items():
        seconds = {name: seconds_of(some) for name, some in by_engine.items()}
        for name, own in sorted(seconds.items()):
            others = [each for other, each in seconds.items() if other != name]
            usual = float(np.median(others)) if others else 0.0
            if usual > 0 and own > _SLOW * usual:
                found.append(SlowEngine(name, part, own / usual, len(by_engine[name]) / len(calls)))
    return found


def _corrected(workload: Workload, run: SimulatedRun, *, first_token_s: float, decode_s: float) -> Workload:
    """Return speeds that bring a simulation closer to the record.

    What engines do not need of the recorded time until a first token is that of HTTP, tokenizing and waits
    for steps that have begun. It is fitted in decode steps: on a CPU, where an engine's processes share
    cores, it was 4.7 steps of 39 ms with 14 calls and 5.8 steps of 86 ms with 59. If engines need more than
    was recorded, prefills are faster than they were taken to be.

    Args:
        workload: The speeds of the simulation.
        run: The simulation.
        first_token_s: Recorded seconds until the first token of a call.
        decode_s: Recorded seconds of a call for each of its tokens.
    """
    used = run.usage
    slower = decode_s / (used.decode_s / used.decoded_tokens / run.scale)
    in_engine_s = used.first_token_s / used.calls
    faster = max(1.0, in_engine_s / first_token_s)
    beside_s = max(0.0, first_token_s - in_engine_s)
    call_steps = beside_s / decode_s
    if used.beside_s:
        call_steps = workload.call_steps * beside_s / (used.beside_s / used.calls)
    return replace(
        workload,
        decode_base_s=workload.decode_base_s * slower,
        decode_per_call_s=workload.decode_per_call_s * slower,
        prefill_base_s=workload.prefill_base_s / faster,
        prefill_tokens_per_s=workload.prefill_tokens_per_s * faster,
        call_steps=call_steps,
    )


def recorded_figures(past: PastRun) -> RunFigures:
    """Return the figures of a past run."""
    records, warm_up = past.records, past.num_warm_up
    begin, end = (past.settled_s.get(records[i].step) for i in (warm_up - 1, -1))
    if begin is None or end is None:  # the archive has only the newest trajectories
        begin, end = min(past.settled_s.values()), max(past.settled_s.values())
    calls = Intervals([call.begin_s for call in past.calls], [call.end_s for call in past.calls])
    number = float(calls.mean_number(np.array([begin]), np.array([end]))[0])
    seconds = records[-1].time_s - records[warm_up - 1].time_s
    return figures_of(records, warm_up, number * seconds, num_engines(past.config))


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
    return simulate_run(
        config,
        workload,
        how,
        lambda scale: RecordedTasks(past.trajectories, workload, scale, how.seed, config.rollout.group_size),
        sharing,
        on_step=on_step,
    )


def _first_fit(past: PastRun) -> tuple[Workload, Sharing]:
    """Fit what the record says without a simulation."""
    config, steady = past.config, past.records[past.num_warm_up :]
    training = Intervals(*_training_times(past))
    on_cpu = isinstance(config.engine, SGLangEngines) and config.engine.device == "cpu"
    base_s, per_call_s, by_trainer = _fit_decode(past.calls, training, _ON_CPU if on_cpu else Workload())
    sharing = Sharing()
    if on_cpu:
        each = by_trainer / config.trainer.num_ranks
        engines = num_engines(config)
        sharing = Sharing(by_trainer=by_trainer, by_engine=each, of_trainer=each * engines)
        alone = 1 + each * (engines - 1)  # the record has all of them
        base_s, per_call_s = base_s / alone, per_call_s / alone
    busy = _busy_shares(past)
    alone_s = sum(each.step_s for each in steady) / (1 + sharing.of_trainer * busy)
    updates_s = sum(each.sync_s for each in steady) / len(steady)
    publish_s = sum(each.sync_parts.get("publish", 0.0) for each in steady) / len(steady)
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
            decode_base_s=base_s,
            decode_per_call_s=per_call_s,
            prefill_base_s=base_s,  # a pass of the model, as a decode step is
            prefill_tokens_per_s=_prefill_rate(past.calls),
            train_tokens_per_s=sum(each.tokens for each in steady) / alone_s,
            sync_s=max(0.0, updates_s - publish_s),
            publish_s=publish_s,
            snapshot_s=_mean_handover(steady) if config.weights.overlap else 0.0,
        ),
        sharing,
    )


def _mean_handover(steady: Sequence[StepRecord]) -> float:
    return sum(each.handover_s for each in steady) / len(steady)


def _training_times(past: PastRun) -> tuple[list[float], list[float]]:
    """Return begins and ends of the trainer steps, seconds since 1970."""
    steps = [(each, past.settled_s[each.step]) for each in past.records if each.step in past.settled_s]
    return [end - each.step_s for each, end in steps], [end for _, end in steps]


def _busy_shares(past: PastRun) -> float:
    """Return the share of the trainer steps' time in which an engine has calls, a mean over engines."""
    begins, ends = (np.array(each) for each in _training_times(past))
    shares = [
        Intervals([c.begin_s for c in calls], [c.end_s for c in calls]).joined().mean_number(begins, ends)
        for calls in _by_engine(past.calls).values()
    ]
    return float(np.average(np.mean(shares, axis=0), weights=ends - begins))


def _by_engine(calls: Sequence[TurnCalls]) -> dict[str, list[TurnCalls]]:
    found: dict[str, list[TurnCalls]] = {}
    for call in calls:
        found.setdefault(call.engine_id, []).append(call)
    return found


def _fit_decode(
    calls: Sequence[TurnCalls], training: Intervals, usual: Workload
) -> tuple[float, float, float]:
    """Return base and slope of a decode step, seconds, and what a training trainer adds, as a share."""
    seconds, tokens, running, trained = (
        np.concatenate(each)
        for each in zip(
            *(_decode_rows(of_engine, training) for of_engine in _by_engine(calls).values()), strict=True
        )
    )
    mean_s, at = seconds.sum() / tokens.sum(), float(np.average(running, weights=tokens))
    slower = mean_s / (usual.decode_base_s + usual.decode_per_call_s * at)
    prior = np.array([usual.decode_base_s, usual.decode_per_call_s, 0.0]) * slower
    rows = np.stack([np.ones_like(running), running, trained], axis=1)
    weights = np.sqrt(tokens)
    missing = (seconds / tokens - rows @ prior) * weights
    # The slope may leave the prior only as far as the turns, which differ by their own spread, demand it.
    held = np.diag([0.0, np.sqrt(_PRIOR * tokens.sum()) * at, 0.0])
    change = _non_negative(
        np.concatenate([rows * weights[:, None], held]), np.concatenate([missing, np.zeros(3)]), -prior
    )
    base_s, per_call_s, extra_s = prior + change
    return float(base_s), float(per_call_s), float(extra_s / (base_s + per_call_s * at))


def _decode_rows(
    calls: Sequence[TurnCalls], training: Intervals
) -> tuple[Float64Array, Float64Array, Float64Array, Float64Array]:
    """Return seconds, tokens, running calls and trainer's share of each uninterrupted turn on an engine."""
    on_engine = Intervals([call.begin_s for call in calls], [call.end_s for call in calls])
    whole = [call for call in calls if call.num_calls == 1 and call.sampled > 1]
    begins = np.array([call.begin_s + call.first_token_s for call in whole])
    ends = np.array([call.end_s for call in whole])
    tokens = np.array([float(call.sampled - 1) for call in whole])
    return (
        ends - begins,
        tokens,
        np.maximum(1.0, on_engine.mean_number(begins, ends)),
        training.mean_number(begins, ends),
    )


def _non_negative(rows: Float64Array, targets: Float64Array, least: Float64Array) -> Float64Array:
    """Return the least-squares solution; components that would fall below their least value are set to it."""
    fixed: dict[int, float] = {}
    while True:
        free = [i for i in range(rows.shape[1]) if i not in fixed]
        solution = np.array([fixed.get(i, 0.0) for i in range(rows.shape[1])])
        if free:
            solution[free] = np.linalg.lstsq(rows[:, free], targets - rows @ solution, rcond=None)[0]
        below = [i for i in free if solution[i] < least[i]]
        if not below:
            return solution
        fixed |= {i: float(least[i]) for i in below}


def _prefill_rate(calls: Sequence[TurnCalls]) -> float:
    """Return the tokens per second of prefills, from how the time until first tokens grows with them."""
    whole = [call for call in calls if call.num_calls == 1]
    fed = np.array([float(call.prefilled) for call in whole])
    first_s = np.array([call.first_token_s for call in whole])
    spread = fed - fed.mean()
    slope = float(spread @ first_s / max(spread @ spread, 1e-9))
    noise = float(np.std(first_s) / np.sqrt(max(spread @ spread, 1e-9)))
    if slope <= 2 * noise:  # indistinguishable from nothing
        return 1e6
    return 1 / slope


def decode_seconds(calls: Sequence[TurnCalls]) -> float:
    """Return the seconds of calls after their first tokens."""
    return sum(call.end_s - call.begin_s - call.first_token_s for call in calls)
