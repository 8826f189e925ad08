"""Tests small runs in which one kind of fault recurs and what the invariant checker reports of a wrong batch.

`verification/mutants` proves that the checker notices what is broken: its mutants of the queue, the session
and the weight updates make these tests fail, each with the expected report.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from async_rl.types import TrainBatch
from tests.support.small_run import small_run
from verification.simulation.faults import FaultKind
from verification.simulation.invariant_checker import InvariantChecker, reward_source
from verification.simulation.scenario import Ending, draw
from verification.simulation.simulate import simulate


class Small(NamedTuple):
    """Describes what goes wrong in a run, and how it handles interruptions."""

    faults: tuple[FaultKind, ...] = ()
    death: Ending | None = None
    interrupt: str = "abort"
    merge: str = "replace"


RUNS = {
    "plain": Small(),
    "spliced": Small(merge="splice"),
    "in_place": Small(interrupt="in_place", merge="splice"),
    "dies": Small(("die_in_call", "disconnect")),
    "nan": Small(("nan", "disconnect", "nan", "die")),
    "no_op": Small(("no_op_update",)),
    "no_files": Small(("no_files",) * 5),
    "disk_full": Small(("disk_full",) * 4),
    "slow_payload": Small(("slow_payload",) * 6),
    "retract": Small(("retract",) * 6, interrupt="retract"),
    "retract_in_place": Small(("retract",) * 6, interrupt="in_place", merge="splice"),
    "unreadable_files": Small(("unreadable_file",) * 12, "kill"),
    "unwritable_disk": Small(("unwritable_disk",), "kill"),
    "second_driver": Small(("second_driver",), "kill"),
    "skewed_versions": Small(("skewed_versions",) * 6),
    "killed": Small(death="kill"),
    "power_cut": Small(death="power_cut"),
    "killed_after_rollbacks": Small(("die_in_call", "nan", "disconnect", "step_fails"), "kill"),
    "stopped": Small(("step_fails", "publish_fails"), "stop"),
}


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 8), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("name", RUNS)
def test_a_small_run_holds_what_is_promised(name: str, seeds: range, tmp_path: Path) -> None:
    what = RUNS[name]
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        scenario = small_run(seed, what.faults, what.death, interrupt=what.interrupt, merge=what.merge)
        outcome = simulate(seed, folder, scenario=scenario)
        assert not outcome.violations, "\n".join(outcome.violations)
        assert what.death or outcome.incarnations == ("finished",)


def batch_of(version: int, sampled_at: int) -> TrainBatch:
    return TrainBatch(
        batch_id="batch",
        trainer_version=version,
        trajectory_ids=("a",),
        group_index=np.zeros(1, np.int32),
        rewards=np.zeros(1, np.float32),
        offsets=np.array([0, 2]),
        token_ids=np.array([5, 6], np.int32),
        loss_mask=np.array([False, True]),
        rollout_log_probs=np.zeros(2, np.float32),
        weight_versions=np.array([-1, sampled_at], np.int32),
        routed_experts=None,
        routing_valid=None,
    )


def test_the_checker_reports_it_when_a_trajectory_is_trained_twice() -> None:
    checker = InvariantChecker(draw(0))
    checker.trains(batch_of(0, 0), 0, 1)
    assert not any("again" in violation for violation in checker.violations)
    checker.trains(batch_of(1, 1), 1, 2)
    assert "step 2 trains again what step 1 has: ['a']" in checker.violations


@pytest.mark.parametrize("too_much", [0, 1])
def test_the_checker_reports_it_when_a_token_is_too_old(too_much: int) -> None:
    scenario = draw(0)
    checker = InvariantChecker(scenario)
    version = scenario.config.rollout.max_staleness + too_much
    checker.trains(batch_of(version, 0), version, version + 1)
    late = f"trajectory a: a token of version 0 is trained at {version}"
    assert (late in checker.violations) == bool(too_much)


@pytest.mark.parametrize(("held", "waited_s"), [(False, 0.0), (False, 1.5), (True, 0.0)])
def test_the_checker_reports_it_when_a_loop_reaches_its_limit_while_engines_are_held(
    held: bool, waited_s: float
) -> None:
    scenario = draw(3002)  # the clock jumped, then the loop raised CancelledError before a turn of any task
    limit_s = scenario.config.rollout.trajectory_timeout_s
    checker = InvariantChecker(scenario)
    source = reward_source.set("trajectory a")
    checker.engines_serve(True)
    limit = checker.attempt_begins(limit_s - waited_s)
    checker.engines_serve(not held)
    checker.now = lambda: limit_s - waited_s
    checker.attempt_cancelled(limit, 0.0)
    reward_source.reset(source)
    early = f"trajectory a reached its limit of {limit_s} s in 0.00 s in which an engine served"
    assert checker.violations == ([early] if held else [])
