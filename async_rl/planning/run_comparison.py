"""Says what a run should reach by an earlier part of it, and which parts of it became slower since.

```
 record of an earlier window ─┬─► simulation with the present engines, all healthy ─► expected tokens/s
                              └─► `TimeParts` ─┐
 record of the last steps ──────► `TimeParts` ─┴─► causes, worst first
```

All parts are compared in seconds for each trained token. What a token takes longer, and neither the trainer's
steps nor the updates do, is lost in the rollouts. It is divided between their parts in proportion to how
much each of them grew in the life of a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from async_rl.planning.past_run import PastRun
from async_rl.planning.planned_job import PlannedRun
from async_rl.planning.run_fit import (
    SlowEngine,
    decode_seconds,
    fit_run,
    recorded_figures,
    simulate_past,
    simulated_figures,
    slow_engines,
)
from async_rl.planning.workload import num_engines, with_engines

_NAMED: Final = 0.2
"""The least share of the lost time at which a part is named."""

_MAX_NAMED: Final = 3
"""A sentence holds no more."""

_GREW: Final = 1.1
"""How many times as large as before a part must be: less is the noise of a few steps."""


class TimeParts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of some steps went."""

    tokens_per_s: float
    """Trained."""
    step_s: float
    """Seconds of trainer steps for each trained token."""
    handover_s: float
    """Seconds for each step in which weight updates paused the trainer."""
    step_tokens: float
    """Trained tokens of a step."""
    in_flight: float
    """Trajectories in flight at the ends of steps."""
    tools_s: float
    """Seconds of tools for each trajectory."""
    rewards_s: float
    """Seconds of its rewards for each trajectory."""
    first_tokens_s: float
    """Seconds until first tokens for each trajectory."""
    token_s: float
    """Seconds of decoding for each token."""
    answer_tokens: float
    """Tokens that the policy writes for each trajectory."""


def parts_of(past: PastRun) -> TimeParts:
    """Return where the time of a run went in its steady state."""
    steady, number = past.records[past.num_warm_up :], len(past.trajectories)
    seconds = steady[-1].time_s - past.records[past.num_warm_up - 1].time_s
    tokens = sum(record.trained_tokens for record in steady)
    calls = [call for each in past.trajectories for call in each.calls]
    sampled = sum(each.sampled for each in past.trajectories)
    return TimeParts(
        tokens_per_s=tokens / seconds,
        step_s=sum(record.step_s for record in steady) / max(1, tokens),
        handover_s=sum(record.handover_s for record in steady) / len(steady),
        step_tokens=tokens / len(steady),
        in_flight=sum(record.in_flight for record in steady) / len(steady),
        tools_s=sum(turn.wait_s for each in past.trajectories for turn in each.turns[:-1]) / number,
        rewards_s=sum(each.turns[-1].wait_s for each in past.trajectories) / number,
        first_tokens_s=sum(call.first_token_s for call in calls) / number,
        token_s=decode_seconds(calls) / max(1, sampled),
        answer_tokens=max(1.0, sampled / number),
    )


def expected_rate(past: PastRun, engines: int, how: PlannedRun) -> float:
    """Return the trained tokens per second that a run should reach.

    It is what the run recorded, times the ratio of two simulations: with this number of engines, none of
    which is much slower than the others, and as it was.

    Args:
        past: An earlier window of the run.
        engines: The number of engines that serve now.
        how: How long its simulations are.

    Raises:
        ConfigError: A simulated run ends early.
    """
    config, recorded = past.config, recorded_figures(past)
    slow = {each.engine_id for each in slow_engines(past.calls)}
    if not slow and engines == num_engines(config):
        return recorded.tokens_per_s
    config = with_engines(config, engines)
    fitted = fit_run(past, how)
    best = fitted
    if slow:
        best = fit_run(replace(past, calls=[c for c in past.calls if c.engine_id not in slow]), how)
    run = simulate_past(past, config, best.workload, best.sharing, how)
    rate = simulated_figures(run, config, best.workload, how).tokens_per_s
    return recorded.tokens_per_s * rate / fitted.simulated.tokens_per_s


def causes_of(before: TimeParts, now: TimeParts, expected: float, slow: Sequence[SlowEngine]) -> list[str]:
    """Return why a run trains fewer tokens per second than expected, the worst part first.

    Args:
        before: The parts in the earlier window.
        now: The parts in the last steps.
        expected: The tokens per second that the run should train.
        slow: The engines that are slower than the others now.
    """
    lost = 1 / max(now.tokens_per_s, 1e-9) - 1 / expected
    if lost <= 0:
        return []
    causes = []
    trainer = max(0.0, now.step_s - before.step_s)
    if now.step_s > _GREW * before.step_s:
        causes.append(
            (
                trainer,
                f"trainer steps take {now.step_s / max(before.step_s, 1e-9):.1f} times as long for a token",
            )
        )
    updates = max(0.0, now.handover_s - before.handover_s) / max(1.0, now.step_tokens)
    if now.handover_s > _GREW * before.handover_s:
        causes.append(
            (
                updates,
                f"weight updates pause the trainer {_seconds(now.handover_s, before.handover_s, 'a step')}",
            )
        )
    rollouts = _rollout_causes(before, now, slow)
    growth = sum(seconds for seconds, _ in rollouts)
    left = max(0.0, lost - trainer - updates)
    causes += [(left * seconds / growth, text) for seconds, text in rollouts]
    causes.sort(reverse=True)
    return [text for seconds, text in causes if seconds >= _NAMED * lost][:_MAX_NAMED]


def _rollout_causes(before: TimeParts, now: TimeParts, slow: Sequence[SlowEngine]) -> list[tuple[float, str]]:
    """Return what grew in the life of a trajectory: seconds for each of its tokens, and a text."""
    answer, fixed_s = now.answer_tokens, before.tools_s + before.rewards_s + before.first_tokens_s
    life_s = (now.tools_s + now.rewards_s + now.first_tokens_s) / answer + now.token_s
    found = [
        (
            (now.tools_s - before.tools_s) / answer,
            f"tools take {_seconds(now.tools_s, before.tools_s, 'of a trajectory')}",
        ),
        (
            (now.rewards_s - before.rewards_s) / answer,
            f"rewards take {_seconds(now.rewards_s, before.rewards_s, 'of a trajectory')}",
        ),
        (
            fixed_s * (1 / answer - 1 / before.answer_tokens),
            f"answers have {answer:,.0f} tokens, {before.answer_tokens:,.0f} before: the rest of a "
            "trajectory's time brings fewer",
        ),
        (
            life_s * (before.in_flight / max(1.0, now.in_flight) - 1),
            f"{now.in_flight:,.0f} trajectories are in flight, {before.in_flight:,.0f} before: the staleness "
            "bound or stragglers hold others back",
        ),
    ]
    for part, own_s, growth_s, text in (
        (
            "sends a first token",
            now.first_tokens_s / answer,
            (now.first_tokens_s - before.first_tokens_s) / answer,
            f"first tokens take {_seconds(now.first_tokens_s, before.first_tokens_s, 'of a trajectory')}",
        ),
        (
            "decodes a token",
            now.token_s,
            now.token_s - before.token_s,
            f"decoding a token takes {now.token_s / max(before.token_s, 1e-9):.1f} times as long"
            f"{_longer(before, now)}",
        ),
    ):
        engines = [each for each in slow if each.part == part]
        more = sum(each.share * (each.times - 1) for each in engines)
        if engines:
            text = " and ".join(str(each) for each in engines[:_MAX_NAMED])
        # An engine that was slow before has cost as much all the time.
        found.append((max(growth_s, own_s * more / (1 + more)), text))
    return [(seconds, text) for seconds, text in found if seconds > (_GREW - 1) * life_s / _GREW]


def _longer(before: TimeParts, now: TimeParts) -> str:
    """Return that answers have become longer, if they have: each of their tokens reads more context."""
    if now.answer_tokens <= _GREW * before.answer_tokens:
        return ""
    return f" (answers have {now.answer_tokens:,.0f} tokens, {before.answer_tokens:,.0f} before)"


def _seconds(now: float, before: float, of: str) -> str:
    return f"{now:.2g} s {of}, {before:.2g} s before"
