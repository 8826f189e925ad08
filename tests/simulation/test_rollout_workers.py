"""The whole program with agent loops in rollout workers, which are killed, fall silent, and are cancelled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from async_rl.engines.pool import EnginePool
from async_rl.store.journal import Journal
from async_rl.store.journal_file import JournalledTrajectory
from async_rl.store.journal_folders import JournalClaim, JournalReader
from tests.support.small_run import small_run
from verification.simulation.__main__ import run_worker_seed
from verification.simulation.faults import FaultKind
from verification.simulation.scenario import Injection, Scenario, branching
from verification.simulation.simulate import simulate


def with_two_workers(scenario: Scenario) -> Scenario:
    rollout = replace(scenario.config.rollout, num_workers=2, worker_stall_s=3.0)
    return replace(scenario, config=replace(scenario.config, rollout=rollout))


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 8), marks=pytest.mark.long)], ids=str)
def test_nothing_is_lost_stale_or_stuck_when_loops_run_in_workers(seeds: range) -> None:
    outcomes = {seed: run_worker_seed(seed) for seed in seeds}
    failed = {seed: outcome.violations for seed, outcome in outcomes.items() if outcome.violations}
    assert failed == {}, f"python -m verification.simulation --workers --seeds 1 --start {min(failed)}"
    faults = sum((Counter(outcome.faults) for outcome in outcomes.values()), Counter[str]())
    assert faults["kill_worker"] + faults["mute_worker"] > 0


@pytest.mark.parametrize("max_failed_share", [0.5, 1.0])
def test_one_worker_that_lacks_a_package_costs_no_attempt(max_failed_share: float, tmp_path: Path) -> None:
    scenario = with_two_workers(small_run(0))
    rollout = replace(scenario.config.rollout, max_attempts=1, max_failed_share=max_failed_share)
    bad = Injection(step=200, kind="bad_environment_worker", engine=1, amount=0.99)
    config = replace(scenario.config, rollout=rollout)
    outcome = simulate(0, tmp_path, scenario=replace(scenario, config=config, injections=(bad,)))
    assert (outcome.incarnations, outcome.violations) == (("finished",), ())
    assert outcome.faults["bad_environment_worker"] == 1


def test_wrong_messages_cost_their_workers_link_at_most(tmp_path: Path) -> None:
    scenario = with_two_workers(small_run(0))
    wrong = tuple(
        Injection(step=200 + 150 * number, kind="wrong_message", engine=number, amount=number / 12)
        for number in range(12)
    )
    outcome = simulate(0, tmp_path, scenario=replace(scenario, injections=wrong))
    assert (outcome.incarnations, outcome.violations) == (("finished",), ())
    assert outcome.faults["wrong_message"] > 5


def test_trees_go_on_elsewhere_when_workers_die_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken_over: list[JournalledTrajectory] = []
    claim = Journal.claim_trajectories

    def note(journal: Journal, states: Mapping[str, JournalledTrajectory], owner_epoch: int) -> None:
        taken_over.extend(states.values())
        claim(journal, states, owner_epoch)

    monkeypatch.setattr(Journal, "claim_trajectories", note)
    faults: tuple[FaultKind, ...] = ("kill_worker", "mute_worker", "die_in_call")
    scenario = with_two_workers(branching(small_run(3, faults, death="kill")))
    queue = replace(scenario.config.queue, journal_s=0.02)  # branches live for less than a tick
    injections = (replace(each, step=300 * index) for index, each in enumerate(scenario.injections, 1))
    config = replace(scenario.config, queue=queue)
    scenario = replace(scenario, config=config, injections=tuple(injections))  # while sessions sample
    outcome = simulate(0, tmp_path, scenario=scenario)
    assert outcome.violations == ()
    assert outcome.incarnations[-1] == "finished"
    assert any("." in state.trajectory_id and state.num_sampled_tokens for state in taken_over)


def test_attempts_go_on_from_journals_on_their_nodes_when_the_driver_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    read = JournalReader.read_claim

    async def note(
        self: JournalReader, claim: JournalClaim, trajectory_id: str, attempt: int
    ) -> dict[str, JournalledTrajectory]:
        found = await read(self, claim, trajectory_id, attempt)
        left.extend(state.num_sampled_tokens for state in found.values())
        return found

    monkeypatch.setattr(JournalReader, "read_claim", note)
    scenario = with_two_workers(small_run(0, (), death="kill"))
    queue = replace(scenario.config.queue, journal_s=0.02, journal_dir="journals")
    outcome = simulate(0, tmp_path, scenario=replace(scenario, config=replace(scenario.config, queue=queue)))
    assert outcome.violations == ()
    assert outcome.incarnations == ("killed", "killed", "finished")
    assert sum(left) > 0


def test_a_worker_that_reaches_no_engine_is_replaced_and_no_engine_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quarantined: list[str] = []
    monkeypatch.setattr(
        EnginePool, "quarantine_engine", lambda pool, engine_id, *of, **named: quarantined.append(engine_id)
    )
    scenario = with_two_workers(small_run(3))
    isolated = [
        Injection(step=300 * index, kind="isolate_worker", engine=index, amount=0.9) for index in (1, 2)
    ]
    outcome = simulate(0, tmp_path, scenario=replace(scenario, injections=tuple(isolated)))
    assert outcome.violations == ()
    assert outcome.incarnations == ("finished",)
    assert outcome.faults["isolate_worker"] == 2
    assert quarantined == []
