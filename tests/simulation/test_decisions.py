"""The digest of decisions follows what a run decides and ignores what things are called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from async_rl.store import trajectory_queue
from async_rl.store.packing import pack_groups
from async_rl.store.trajectory_queue import TrajectoryQueue
from tests.support.small_run import small_run
from verification.simulation import simulate
from verification.simulation.scenario import Scenario
from verification.simulation.simulate import SeedOutcome

Change = Callable[[pytest.MonkeyPatch], None]


def run(folder: Path, scenario: Scenario) -> SeedOutcome:
    folder.mkdir()
    outcome = simulate.simulate(scenario.seed, folder, scenario=scenario)
    assert outcome.incarnations == ("finished",)
    assert outcome.tokens
    return outcome


def troubled_run() -> Scenario:
    scenario = small_run(3, ("die_in_call", "hang"))
    rollout = replace(scenario.config.rollout, max_staleness=1, staleness_policy="drop")
    return replace(scenario, config=replace(scenario.config, rollout=rollout))


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> SeedOutcome:
    return run(tmp_path_factory.mktemp("troubled") / "run", troubled_run())


def swap_in_batch(patch: pytest.MonkeyPatch) -> None:
    """Groups are packed, trained and settled in the opposite order."""

    def pack(version: int, groups: Any, **rules: Any) -> Any:
        return pack_groups(version, dict(reversed(groups.items())), **rules)

    patch.setattr(trajectory_queue, "pack_groups", pack)


def drop_one(patch: pytest.MonkeyPatch) -> None:
    """The third group is dropped when it is put."""

    async def put(self: TrajectoryQueue, group: Any) -> None:
        puts.append(group.group_id)
        if len(puts) == 3:
            self.groups.drop_group(group.group_id, "error")
        else:
            await original(self, group)

    puts: list[str] = []
    original = TrajectoryQueue.put_group
    patch.setattr(TrajectoryQueue, "put_group", put)


@pytest.mark.parametrize("change", [swap_in_batch, drop_one])
def test_it_changes_with_a_decision(
    change: Change, troubled: SeedOutcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change(monkeypatch)
    assert run(tmp_path / "after", troubled_run()).decisions != troubled.decisions
