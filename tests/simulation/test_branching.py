"""Loops that branch, under everything that goes wrong: each token is trained once, each leaf is settled once.

The checker compares trained tokens with what engines returned. A token that two trajectories of a tree train
was trained more often than sampled; an inherited token that is never trained is missed in its ancestors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from async_rl.store.journal import Journal
from async_rl.store.journal_file import JournalledTrajectory
from async_rl.store.ledger import Ledger
from async_rl.types import TrainBatch, root_of
from tests.support.ledgers import audit_ledger
from tests.support.small_run import small_run
from verification.simulation.__main__ import run_seed
from verification.simulation.invariant_checker import InvariantChecker
from verification.simulation.scenario import Ending, Scenario, branching
from verification.simulation.simulate import simulate


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 16), marks=pytest.mark.long)], ids=str)
def test_nothing_is_lost_or_trained_twice_when_loops_branch(seeds: range) -> None:
    outcomes = {seed: run_seed(seed, ("branches",)) for seed in seeds}
    failed = {seed: outcome.violations for seed, outcome in outcomes.items() if outcome.violations}
    assert failed == {}, f"python -m verification.simulation --branches --seeds 1 --start {min(failed)}"


def trees(death: Ending | None = None) -> Scenario:
    """A small run in which every trajectory of three turns branches before two of them."""
    scenario = branching(small_run(3, death=death))
    turn = {"max_new_tokens": 6, "tool_s": 0.2, "in_thread": False, "result": "5 6"}
    turns = [{**turn, "branches": number, "side_by_side": bool(number % 2)} for number in (0, 1, 2)]
    tasks = tuple(replace(task, metadata={"turns": turns, "trouble": None}) for task in scenario.tasks)
    rollout = replace(scenario.config.rollout, max_branches=4)
    return replace(scenario, tasks=tasks, config=replace(scenario.config, rollout=rollout))


class Trained:
    """Trajectories of each batch that a trainer got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[tuple[str, ...]] = []
        trains = InvariantChecker.trains

        def note(checker: InvariantChecker, batch: TrainBatch, version: int, step: int) -> None:
            self.batches.append(batch.trajectory_ids)
            trains(checker, batch, version, step)

        monkeypatch.setattr(InvariantChecker, "trains", note)

    @property
    def sizes(self) -> Counter[int]:
        """How many trajectories the trees had."""
        return Counter(
            size for batch in self.batches for size in Counter(root_of(name) for name in batch).values()
        )


def test_trees_are_whole_when_the_driver_is_killed_while_they_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, journalled = Trained(monkeypatch), set[str]()
    claim = Journal.claim_trajectories

    def note(journal: Journal, states: Mapping[str, JournalledTrajectory], owner_epoch: int) -> None:
        journalled.update(states)
        claim(journal, states, owner_epoch)

    monkeypatch.setattr(Journal, "claim_trajectories", note)
    outcome = simulate(0, tmp_path, scenario=trees("kill"))
    assert outcome.violations == ()
    assert outcome.incarnations[:2] == ("killed", "killed")
    again = journalled & {name for batch in trained.batches for name in batch}
    assert any("." in name for name in again), "a branch continues from the journal"
    assert trained.sizes.keys() == {5}, "a trunk and four branches"
    ledger = Ledger(max(tmp_path.glob("incarnation-*")) / "ledger.sqlite")
    counts = audit_ledger(ledger)
    undone = sum(map(len, trained.batches)) - counts.trained
    assert 0 <= undone <= counts.dropped.get("restart", 0)
    ledger.close()
