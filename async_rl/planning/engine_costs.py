"""What the time of engines goes into, by the record of a past run.

An engine does one thing at a time. Of the time between two versions in which it has calls and is not paused,

    seconds = step_s · steps + token_s · tokens + call_s · calls + prefill_s · prefilled + lost · training

with decode steps, sampled tokens, calls that began, prefilled tokens, and seconds in which the trainer
trained. Steps are not recorded: a decoding call gets a token in each of them, so they are tokens over the
mean number of decoding calls.

What a trainer on the same cores takes is fitted first, by turns: those during which it trained took longer
for a token. The other costs are those with which the sum holds best for all versions and engines, by least
squares. A run in which these numbers hardly vary, or only together, cannot tell their costs apart: each cost
is held near its usual proportion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from async_rl.config import Config
from async_rl.planning.past_run import Intervals, PastRun, TurnCalls
from async_rl.planning.workload import Workload, num_engines
from async_rl.types import Float64Array

_SPREAD: Final = (0.5, 0.3, 1.0, 1.0)
"""How far costs are from their usual proportion: its standard deviation, as a share of it."""

_MOST_LOST: Final = 0.9
"""An engine is never taken to stand all the time in which the trainer trains."""

_MIN_VERSIONS: Final = 3
"""Versions at least, whether all their calls are recorded or not."""

_MOMENT_S: Final = 1e-3
"""The least that a call lasts."""

_ROUNDS: Final = 3
"""The spread of the seconds, which says how much the prior counts, is that of the round before."""


class EngineCosts(NamedTuple):
    """What one engine takes, seconds."""

    step_s: float
    """A decode step, whatever the number of its calls."""
    token_s: float
    """Each sampled token."""
    call_s: float
    """Each call that begins, whatever its tokens."""
    prefill_s: float
    """Each prefilled token."""
    lost: float
    """Share of a second that it loses while the trainer trains."""


def fit_engine_costs(past: PastRun, usual: Workload) -> EngineCosts:
    """Fit an engine's costs to a run's calls.

    Args:
        past: The run.
        usual: Says the usual proportion of the costs.
    """
    clock = _unpaused_clock(past)
    engines = [_Turns(past, calls, clock) for calls in by_engine(past.calls).values()]
    lost = _lost_to_training(engines, usual)
    rows = np.concatenate([each.work for each in engines])
    seconds = np.concatenate([each.seconds - lost * each.training_s for each in engines])
    prior = np.array(
        [usual.decode_base_s, usual.decode_per_call_s, usual.prefill_call_s, 1 / usual.prefill_tokens_per_s]
    )
    prior *= seconds.sum() / (rows @ prior).sum()
    costs = prior
    for _ in range(_ROUNDS):
        noise_s = max(float(np.sqrt(np.mean((seconds - rows @ costs) ** 2))), 1e-9)
        held = np.diag(noise_s / np.maximum(prior * _SPREAD, 1e-12))
        costs = _non_negative(np.concatenate([rows, held]), np.concatenate([seconds, held @ prior]))
    step_s, token_s, call_s, prefill_s = costs.tolist()
    return EngineCosts(step_s, token_s, call_s, prefill_s, lost)


def update_waves(config: Config) -> int:
    """Return in how many waves engines are updated."""
    return num_engines(config) if config.weights.rolling else 1


def by_engine(calls: Sequence[TurnCalls]) -> dict[str, list[TurnCalls]]:
    """Return the calls of each engine."""
    found: dict[str, list[TurnCalls]] = {}
    for call in calls:
        found.setdefault(call.engine_id, []).append(call)
    return found


def training_times(past: PastRun) -> tuple[Float64Array, Float64Array]:
    """Return begins and ends of the trainer steps, seconds since 1970."""
    steps = [each for each in past.records if each.step in past.settled_s]
    ends = np.array([past.settled_s[each.step] for each in steps])
    return ends - [each.step_s for each in steps], ends


def _unpaused_clock(past: PastRun) -> Callable[[Float64Array], Float64Array]:
    """Return a clock that stands while updates pause engines."""
    updates = [each for each in past.records if each.step in past.settled_s and each.sync_s]
    publish_s = np.array([each.sync_parts.get("publish", 0.0) for each in updates])
    begins = np.array([past.settled_s[each.step] for each in updates]) + publish_s
    pauses_s = (np.array([each.sync_s for each in updates]) - publish_s) / update_waves(past.config)
    pauses = Intervals(begins, begins + np.maximum(pauses_s, 0.0))
    return lambda moments: moments - pauses.seconds_until(moments)


class _Turns:
    """The turns of one engine, and its work between versions."""

    def __init__(
        self, past: PastRun, calls: Sequence[TurnCalls], clock: Callable[[Float64Array], Float64Array]
    ) -> None:
        first = clock(np.array([c.begin_s - c.waited_s * (c.num_calls > 1) for c in calls]))
        last = np.maximum(clock(np.array([call.end_s for call in calls])), first + _MOMENT_S)
        decoding = np.minimum(first + [call.first_token_s for call in calls], last - _MOMENT_S / 2)
        sampled, times, prefilled = (
            np.array(each, np.float64)
            for each in zip(*((call.sampled, call.num_calls, call.prefilled) for call in calls), strict=True)
        )
        training = Intervals(*(clock(each) for each in training_times(past)))

        whole = (times == 1) & (sampled > 1)
        self.token_s = ((last - decoding) / np.maximum(sampled - 1, 1))[whole]
        """Seconds of a token in each uninterrupted turn."""
        self.sampled = sampled[whole]
        self.calls = np.maximum(1.0, Intervals(decoding, last).mean_number(decoding, last))[whole]
        """Those that decoded meanwhile."""
        self.trained = training.mean_number(decoding, last)[whole]
        """Share of that time in which the trainer trained."""

        settled_s = np.sort([past.settled_s[s] for s in past.steady_steps if s in past.settled_s])
        num_whole = max(_MIN_VERSIONS + 1, int((settled_s <= past.whole_until_s).sum()))
        edges = clock(settled_s[:num_whole])
        begins, ends = edges[:-1], edges[1:]
        # When calls began that updates interrupted is not recorded: some time during the turn.
        fed = np.where(times > 1, last, np.maximum(decoding, first + _MOMENT_S / 2))

        def spread_out(amounts: Float64Array, since: Float64Array, until: Float64Array) -> Float64Array:
            return Intervals(since, until, amounts / (until - since)).seconds_between(begins, ends)

        self.seconds = Intervals(first, last).joined().seconds_between(begins, ends)
        """With calls, between each two versions."""
        self.training_s = training.mean_number(begins, ends) * self.seconds
        tokens = spread_out(sampled, decoding, last)
        decoding_s = Intervals(decoding, last).joined().seconds_between(begins, ends)
        together = spread_out(last - decoding, decoding, last) / np.maximum(decoding_s, _MOMENT_S)
        self.work = np.stack(
            [
                tokens / np.maximum(1.0, together),
                tokens,
                spread_out(times, first, fed),
                spread_out(prefilled, first, fed),
            ],
            axis=1,
        )
        """Steps, tokens, calls and prefilled tokens between each two versions, [versions, 4]."""


def _lost_to_training(engines: Sequence[_Turns], usual: Workload) -> float:
    """Return the share of its time that an engine loses while the trainer trains."""
    usual_s = np.concatenate([usual.decode_base_s + usual.decode_per_call_s * each.calls for each in engines])
    times = np.concatenate([each.token_s for each in engines]) / usual_s
    trained = np.concatenate([each.trained for each in engines])
    weights = np.sqrt(np.concatenate([each.sampled for each in engines]))
    rows = np.stack([np.ones_like(trained), trained], axis=1) * weights[:, None]
    alone, more = _non_negative(rows, times * weights)
    return min(float(more / (alone + more)), _MOST_LOST) if alone + more else 0.0


def _non_negative(rows: Float64Array, targets: Float64Array) -> Float64Array:
    """Return the least-squares solution; components that would fall below 0 are set to it."""
    free = list(range(rows.shape[1]))
    solution = np.zeros(rows.shape[1])
    while free:
        solution[:] = 0.0
        solution[free] = np.linalg.lstsq(rows[:, free], targets, rcond=None)[0]
        if (solution >= 0).all():
            break
        free = [i for i in free if solution[i] > 0]
    return np.maximum(solution, 0.0)
