"""Settings that change a whole simulated run: what happens in it differs when the setting does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from msgspec.structs import replace

from async_rl.config import apply_override, parse_config, to_builtins
from tests.support.small_run import small_run
from verification.simulation.faults import FaultKind
from verification.simulation.scenario import Ending, Scenario
from verification.simulation.scratch import scratch
from verification.simulation.simulate import simulate


class Conditions(NamedTuple):
    """What goes wrong in a run, so that the setting matters."""

    faults: tuple[FaultKind, ...] = ()
    death: Ending | None = None


_PLAIN: Final = Conditions()
_ENGINES_FAIL: Final = Conditions(("die_in_call", "hang"))

RUNS: Final[dict[str, Conditions]] = {
    "run.seed=9": _PLAIN,
    "run.max_steps=4": _PLAIN,
    "run.drain_s=0": Conditions(death="stop"),
    "data.shuffle=false": _PLAIN,
    "rollout.max_concurrent_trajectories=3": _PLAIN,
    "rollout.max_staleness=1": _PLAIN,
    "rollout.staleness_policy=drop": Conditions(("freeze",)),
    "rollout.trajectory_timeout_s=0.5": _PLAIN,
    "rollout.tool_timeout_s=0.1": _PLAIN,
    "rollout.reward_timeout_s=0.2": _PLAIN,
    "engine.max_restarts=1": _ENGINES_FAIL,
    "engine.max_outage_s=1": Conditions(("step_fails", "checkpoint_fails")),
    "engine.num_engines=3": _PLAIN,
    "engine.max_running_requests=2": _PLAIN,
    "engine.decode_step_s=0.1": _PLAIN,
    "engine.prefill_tokens_per_s=300": _PLAIN,
    "engine.mean_new_tokens=4": _PLAIN,
    "routing.replay=off": _PLAIN,
    "routing.merge=splice": _PLAIN,
    "queue.journal_s=0.5": _PLAIN,
    "weights.transport=tensor": _PLAIN,
    "weights.interrupt=retract": _PLAIN,
    "weights.every=2": _PLAIN,
    "weights.rolling=true": _PLAIN,
    "weights.overlap=true": _PLAIN,
    "weights.verify=checksum": _PLAIN,
    "weights.timeout_s=0.02": _PLAIN,
    "trainer.groups_per_batch=3": _PLAIN,
    "trainer.checkpoint_every=1": _PLAIN,
}
"""Overrides of `small_run`, and the world in which each changes what happens."""


def trace_of(scenario: Scenario) -> str:
    with scratch() as folder:
        return simulate(scenario.seed, Path(folder), scenario=scenario).trace


@functools.cache
def usual_trace(conditions: Conditions) -> str:
    return trace_of(small_run(3, *conditions))


@pytest.mark.long
@pytest.mark.parametrize("override", RUNS)
def test_a_run_changes_with_the_setting(override: str) -> None:
    conditions = RUNS[override]
    usual = small_run(3, *conditions)
    tree = to_builtins(usual.config)
    apply_override(tree, override)
    assert trace_of(replace(usual, config=parse_config(tree))) != usual_trace(conditions)
