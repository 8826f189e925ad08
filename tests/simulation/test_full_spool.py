"""Runs whose rollout workers find no space for the frames of finished trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from async_rl.errors import SpoolFull
from async_rl.store.journal import Journal
from async_rl.store.journal_file import JournalledTrajectory
from async_rl.store.trajectory_queue import TrajectoryQueue
from tests.support.small_run import small_run
from verification.simulation.scenario import NODES, Injection, Scenario
from verification.simulation.simulate import SeedOutcome, simulate


def scenario_with(*, workers: int, full_s: float) -> Scenario:
    """A run whose workers have no space from its 300th callback on."""
    scenario = small_run(1)
    rollout = replace(scenario.config.rollout, num_workers=workers)
    full = Injection(step=300, kind="worker_disk_full", engine=0, amount=full_s / 100)
    return replace(scenario, config=replace(scenario.config, rollout=rollout), injections=(full,))


def checked(outcome: SeedOutcome) -> SeedOutcome:
    assert outcome.violations == ()
    assert outcome.faults["worker_disk_full"] > 0
    assert outcome.incarnations[-1] == "finished"
    return outcome


def test_the_run_ends_with_the_cause_when_no_step_will_free_space(tmp_path: Path) -> None:
    outcome = checked(simulate(1, tmp_path, scenario=scenario_with(workers=1, full_s=90.0)))
    assert outcome.incarnations[0] == "failed: SpoolFull: the disk is full"


@pytest.mark.parametrize("journal_dir", [pytest.param(None, marks=pytest.mark.long), "journals"])
def test_attempts_go_on_elsewhere_when_the_disk_of_one_node_is_full(
    tmp_path: Path, journal_dir: str | None
) -> None:
    scenario = scenario_with(workers=2, full_s=0.0)
    queue = replace(scenario.config.queue, spool_dir=NODES, journal_dir=journal_dir)
    full = Injection(step=300, kind="node_disk_full", engine=0, amount=0.99)
    scenario = replace(scenario, config=replace(scenario.config, queue=queue), injections=(full,))
    outcome = simulate(1, tmp_path, scenario=scenario)
    assert outcome.violations == ()
    assert outcome.faults["node_disk_full"] == 1
    assert outcome.incarnations == ("finished",)


@pytest.mark.real
def test_an_attempt_goes_on_from_its_tokens_when_a_step_has_freed_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[SpoolFull] = []
    left: list[int] = []

    async def wait_for_space(self: TrajectoryQueue, shortage: SpoolFull) -> None:
        waits.append(shortage)
        await asyncio.sleep(60.0)

    claim = Journal.claim_trajectories

    def note(journal: Journal, states: Mapping[str, JournalledTrajectory], owner_epoch: int) -> None:
        left.append(sum(state.num_sampled_tokens for state in states.values()))
        claim(journal, states, owner_epoch)

    monkeypatch.setattr(TrajectoryQueue, "wait_for_space", wait_for_space)
    monkeypatch.setattr(Journal, "claim_trajectories", note)
    outcome = checked(simulate(1, tmp_path, scenario=scenario_with(workers=2, full_s=90.0)))
    assert outcome.incarnations == ("finished",)
    assert waits
    assert sum(tokens > 0 for tokens in left) == len(waits)
