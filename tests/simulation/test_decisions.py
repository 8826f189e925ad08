"""The digest of decisions follows what a run decides and ignores what things are called."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_rl.data.feeder import Feeder
from async_rl.planning.virtual_time import NumberedTask
from async_rl.queue.ledger import Ledger
from async_rl.queue.packing import Packer
from async_rl.queue.trajectory_queue import TrajectoryQueue
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.runtime.supervision import Nursery
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SeedOutcome:
    """A run in which nothing is changed."""
    return run(tmp_path_factory.mktemp("undisturbed") / "run", small_run(3))


def troubled_run() -> Scenario:
    scenario = small_run(3, ("die_in_call", "hang"))
    return msgspec.structs.replace(scenario, config=with_bound(scenario, 1, "drop"))


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> SeedOutcome:
    return run(tmp_path_factory.mktemp("troubled") / "run", troubled_run())


def rename_tasks(patch: pytest.MonkeyPatch) -> None:
    """Every task but those of trajectories, which the simulation knows by name, is called otherwise."""

    def make(self: NumberedTask, number: int, work: Any, *, name: str | None = None, **options: Any) -> None:
        known = name is not None and name.startswith("trajectory ")
        original(self, number, work, name=name if known else f"another {name}", **options)

    original = NumberedTask.__init__
    patch.setattr(NumberedTask, "__init__", make)


def rename_trajectories(patch: pytest.MonkeyPatch) -> None:
    """The tasks of trajectories are called `rollout ...`."""

    def start(self: Nursery, name: str, work: Any) -> asyncio.Task[Any]:
        return original(self, name.replace("trajectory ", "rollout "), work)

    original = Nursery.start_task
    patch.setattr(Nursery, "start_task", start)


def rename_reasons(patch: pytest.MonkeyPatch) -> None:
    def drop(self: Ledger, trajectory_ids: Any, reason: str, **options: Any) -> None:
        original(self, trajectory_ids, f"{reason}, in other words", **options)

    original = Ledger.drop_trajectories
    patch.setattr(Ledger, "drop_trajectories", drop)


@pytest.mark.parametrize("renaming", [rename_tasks, rename_trajectories, rename_reasons])
def test_it_stays_when_names_change(
    renaming: Change, troubled: SeedOutcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    renaming(monkeypatch)
    assert run(tmp_path / "after", troubled_run()).decisions == troubled.decisions


def test_the_trace_does_not_stay(
    undisturbed: SeedOutcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rename_trajectories(monkeypatch)
    assert run(tmp_path / "after", small_run(3)).trace != undisturbed.trace


def with_bound(scenario: Scenario, max_staleness: int, staleness_policy: str) -> Any:
    rollout = scenario.config.rollout
    rollout = msgspec.structs.replace(rollout, max_staleness=max_staleness, staleness_policy=staleness_policy)
    return msgspec.structs.replace(scenario.config, rollout=rollout)


def test_it_changes_with_the_staleness_bound(undisturbed: SeedOutcome, tmp_path: Path) -> None:
    other = msgspec.structs.replace(small_run(3), config=with_bound(small_run(3), 1, "wait"))
    assert run(tmp_path / "1", other).decisions != undisturbed.decisions


def swap_in_batch(patch: pytest.MonkeyPatch) -> None:
    """Groups are packed, trained and settled in the opposite order."""

    def pack(self: Packer, version: int, groups: Any) -> Any:
        return original(self, version, groups[::-1])

    original = Packer.pack_groups
    patch.setattr(Packer, "pack_groups", pack)


def admit_another_task(patch: pytest.MonkeyPatch) -> None:
    """The second position is dispatched before the first."""

    def following(self: Feeder) -> Any:
        if held:
            return held.pop()
        result = original(self)
        if result is None or result[0] > 0:
            return result
        held.append(result)
        return original(self)

    held: list[Any] = []
    original = Feeder.next_task
    patch.setattr(Feeder, "next_task", following)


def label_a_version_off(patch: pytest.MonkeyPatch) -> None:
    """A group counts as sampled by version 0, and nothing else changes."""

    def dispatch(
        self: Ledger, group_id: str, task_id: str, position: int, trajectory_ids: Any, version: int
    ) -> None:
        original(self, group_id, task_id, position, trajectory_ids, 0)

    original = Ledger.dispatch_group
    patch.setattr(Ledger, "dispatch_group", dispatch)


def sample_less(patch: pytest.MonkeyPatch) -> None:
    """Every call may sample one token less."""

    async def generate(self: RolloutSession, *, max_new_tokens: int | None = None, **options: Any) -> Any:
        return await original(self, max_new_tokens=(max_new_tokens or 60) - 1, **options)

    original = RolloutSession.generate
    patch.setattr(RolloutSession, "generate", generate)


def drop_one(patch: pytest.MonkeyPatch) -> None:
    """The third group is dropped when it is put."""

    async def put(self: TrajectoryQueue, group: Any) -> None:
        puts.append(group.group_id)
        if len(puts) == 3:
            self.drop_group(group.group_id, "error")
        else:
            await original(self, group)

    puts: list[str] = []
    original = TrajectoryQueue.put_group
    patch.setattr(TrajectoryQueue, "put_group", put)


@pytest.mark.parametrize(
    "change",
    [
        swap_in_batch,
        admit_another_task,
        label_a_version_off,
        sample_less,
        drop_one,
    ],
)
def test_it_changes_with_a_decision(
    change: Change, undisturbed: SeedOutcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    change(monkeypatch)
    assert run(tmp_path / "after", small_run(3)).decisions != undisturbed.decisions
