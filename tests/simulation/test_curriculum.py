"""Runs that draw tasks by difficulty: a restart changes no draw, whatever it interrupts."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from async_rl.config import CurriculumConfig, PoolConfig
from async_rl.run.curriculum_order import CurriculumOrder
from async_rl.types import Completion, Task
from tests.support.small_run import small_run
from verification.simulation.__main__ import run_seed
from verification.simulation.scenario import Ending, Scenario
from verification.simulation.simulate import simulate

STEPS = 18
POOLS = [
    PoolConfig(name="hard", up_to=0.4, weight=1.0),
    PoolConfig(name="easy", up_to=1.0, weight=3.0),
]


def passes_if_easy(task: Task, completion: Completion) -> float:
    """The same for all attempts at a task, however they are interrupted."""
    return float(zlib.crc32(task.task_id.encode()) % 3 > 0)


def always_passes(task: Task, completion: Completion) -> float:
    return 1.0


def drawn_run(death: Ending | None = None, reward: str = "passes_if_easy", **curriculum: object) -> Scenario:
    scenario = small_run(3, death=death)
    settings = CurriculumConfig(pools=POOLS, **curriculum)
    config = scenario.config
    config = replace(
        config,
        run=replace(config.run, max_steps=STEPS),
        data=replace(config.data, curriculum=settings),
        rollout=replace(config.rollout, reward=f"{__name__}:{reward}"),
    )
    drawn = scenario.tasks
    tasks = tuple(replace(drawn[index % len(drawn)], task_id=f"task-{index}") for index in range(30))
    return replace(scenario, config=config, tasks=tasks)


@contextmanager
def draws_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, int]]:
    """Collect the task of each position; a position that is asked for again has the same."""
    draws: dict[int, int] = {}
    task_at = CurriculumOrder.task_at

    def note(order: CurriculumOrder, position: int) -> int:
        task = task_at(order, position)
        assert draws.setdefault(position, task) == task, f"position {position} is drawn anew"
        return task

    with monkeypatch.context() as patched:
        patched.setattr(CurriculumOrder, "task_at", note)
        yield draws


def draw_tasks(scenario: Scenario, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], int]:
    """Simulate a run; return the tasks of its positions, and the number of its incarnations."""
    folder.mkdir()
    with draws_of(monkeypatch) as draws:
        outcome = simulate(scenario.seed, folder, scenario=scenario)
    assert outcome.violations == ()
    assert sorted(draws) == list(range(len(draws)))
    return [draws[position] for position in range(len(draws))], len(outcome.incarnations)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The draws of a run that nothing interrupts."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        whole, incarnations = draw_tasks(drawn_run(), tmp_path_factory.mktemp("draws") / "whole", monkeypatch)
    assert incarnations == 1
    return whole


@pytest.mark.parametrize("death", ["kill", "kill_on_disk", "cancel", "stop", "power_cut"])
def test_a_run_draws_the_same_when_it_was_interrupted(
    death: Ending, uninterrupted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted, incarnations = draw_tasks(drawn_run(death), tmp_path / "interrupted", monkeypatch)
    assert incarnations == 3
    common = min(len(uninterrupted), len(interrupted))
    assert common >= 2 * STEPS
    assert interrupted[:common] == uninterrupted[:common]


def test_draws_follow_the_results(
    uninterrupted: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_rate = uninterrupted
    all_alike, _ = draw_tasks(drawn_run(reward="always_passes"), tmp_path / "alike", monkeypatch)
    uniform, _ = draw_tasks(drawn_run(warm_up=1000), tmp_path / "uniform", monkeypatch)
    assert by_rate != all_alike
    assert sorted(uniform[:30]) == list(range(30)), "with equal weights each task comes once before any again"
    hard = {index for index in range(30) if zlib.crc32(f"task-{index}".encode()) % 3 == 0}
    again = [task for position, task in enumerate(by_rate) if task in by_rate[:position]]
    assert len(again) >= 10
    assert sum(task in hard for task in again) < len(again) * len(hard) / 30


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 60), marks=pytest.mark.long)], ids=str)
def test_nothing_is_lost_when_a_seed_decides_what_goes_wrong(seeds: range) -> None:
    outcomes = {seed: run_seed(seed, ("curriculum",)) for seed in seeds}
    failed = {seed: outcome.violations for seed, outcome in outcomes.items() if outcome.violations}
    assert failed == {}, f"python -m verification.simulation --curriculum --seeds 1 --start {min(failed)}"
