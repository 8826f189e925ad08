"""Draws by difficulty: pools that follow success rates, gates, and what a restart continues from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.config import Config, CurriculumConfig
from async_rl.data.curriculum import Curriculum, TaskProgress
from async_rl.errors import ConfigError
from async_rl.observability.metrics import Metrics, value_of
from async_rl.run.curriculum_order import CurriculumOrder, opening_positions, result_lag
from async_rl.runtime import yaml12
from async_rl.store.ledger import DrawnTask, Ledger
from async_rl.types import Task
from tests.support.pages import blocks
from tests.support.run_config import config_with
from tests.support.trajectories import roll_back

POOLS = [
    {"name": "hard", "up_to": 0.25, "weight": 1.0},
    {"name": "medium", "up_to": 0.75, "weight": 4.0},
    {"name": "easy", "up_to": 1.0, "weight": 0.0},
]


def make_config(**curriculum: Any) -> Config:
    data = {"path": "tasks", "curriculum": {"pools": POOLS, **curriculum}}
    return config_with(
        model={"path": "m"},
        data=data,
        trainer={"groups_per_batch": 2},
        rollout={"max_staleness": 1, "group_size": 4},
        evaluation={"pass_reward": 0.5},
    )


def curriculum_of(**changes: Any) -> CurriculumConfig:
    found = make_config(**changes).data.curriculum
    assert found is not None
    return found


def make_curriculum(size: int, *, opens_at: Sequence[float] | None = None, **changes: Any) -> Curriculum:
    return Curriculum(curriculum_of(**changes), [f"t{i}" for i in range(size)], seed=0, opens_at=opens_at)


def test_tasks_are_drawn_as_often_as_the_weights_of_their_pools_say() -> None:
    curriculum = make_curriculum(40, unseen_weight=2.0)
    for task in range(30):  # ten of each pool, and ten that were never seen
        curriculum.add_result(task, scored=4, passed=(0, 2, 4)[task % 3])
    assert curriculum.sizes == {"unseen": 10, "hard": 10, "medium": 10, "easy": 10}
    pools = Counter(curriculum.pool_of(curriculum.draw(position)) for position in range(7000))
    assert pools["easy"] == 0
    for pool, weight in (("unseen", 2), ("hard", 1), ("medium", 4)):
        assert pools[pool] == pytest.approx(1000 * weight, rel=0.1)


def test_the_task_of_a_pool_that_was_drawn_longest_ago_comes_first() -> None:
    curriculum = make_curriculum(5)
    rounds = [[curriculum.draw(5 * number + i) for i in range(5)] for number in range(3)]
    assert sorted(rounds[0]) == list(range(5))
    assert rounds[0] == rounds[1] == rounds[2]
    in_order = Curriculum(curriculum_of(), ["a", "b", "c"], seed=0, shuffle=False)
    assert [in_order.draw(position) for position in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize(("memory", "pool"), [(0.0, "easy"), (0.5, "medium"), (1.0, "medium")])
def test_a_task_changes_its_pool_when_its_rate_does(memory: float, pool: str) -> None:
    curriculum = make_curriculum(1, memory=memory)
    curriculum.add_result(0, scored=4, passed=0)
    assert curriculum.pool_of(0) == "hard"
    curriculum.add_result(0, scored=4, passed=4)
    assert curriculum.pool_of(0) == pool


def test_each_task_comes_once_in_the_warm_up() -> None:
    curriculum = make_curriculum(10, warm_up=20)
    for task in range(5):
        curriculum.add_result(task, scored=4, passed=4)  # its pool has the weight 0
    assert sorted(curriculum.draw(position) for position in range(10)) == list(range(10))
    assert sorted(curriculum.draw(position) for position in range(10, 20)) == list(range(10))
    assert {curriculum.draw(position) for position in range(20, 40)} == {5, 6, 7, 8, 9}


def test_tasks_of_weight_0_are_drawn_when_there_are_no_others() -> None:
    curriculum = make_curriculum(3)
    for task in range(3):
        curriculum.add_result(task, scored=4, passed=4)
    assert {curriculum.draw(position) for position in range(3)} == {0, 1, 2}


def test_the_gate_lets_in_tasks_at_their_draw_or_when_no_other_is_left() -> None:
    curriculum = make_curriculum(4, opens_at=[0, 3, 3, 1e9])
    assert [curriculum.draw(position) for position in range(3)] == [0, 0, 0]
    assert {curriculum.draw(position) for position in range(3, 6)} == {0, 1, 2}
    assert 3 not in {curriculum.draw(position) for position in range(6, 30)}
    closed = make_curriculum(2, opens_at=[500, 400])
    assert closed.draw(0) == 1


def progress_of(curriculum: Curriculum, size: int) -> list[tuple[int, TaskProgress]]:
    known = (curriculum.progress_of(task) for task in range(size))
    return [(i, TaskProgress(scored=k.scored, passed=k.passed, drawn=k.drawn)) for i, k in enumerate(known)]


@settings(max_examples=30, deadline=None)
@given(
    results=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 4)), max_size=60),
    restart=st.integers(0, 60),
    gated=st.booleans(),
)
def test_a_restart_at_any_draw_changes_nothing(
    results: list[tuple[int, int]], restart: int, gated: bool
) -> None:
    size = 12
    opens_at = [float(3 * task) for task in range(size)] if gated else None
    whole = make_curriculum(size, opens_at=opens_at)
    other = make_curriculum(size, opens_at=opens_at)
    for position in range(60):
        if position == restart:
            other = Curriculum(
                curriculum_of(),
                [f"t{i}" for i in range(size)],
                seed=0,
                opens_at=opens_at,
                progress=progress_of(other, size),
            )
        assert whole.draw(position) == other.draw(position)
        assert sum(whole.sizes.values()) <= size
        if position < len(results):
            task, passed = results[position]
            whole.add_result(task, 4, passed)
            other.add_result(task, 4, passed)
    assert sum(map(len, whole._members)) <= 3 * size + 60, "entries that describe no task are discarded"


TASKS = [Task(task_id=f"t{i}", messages=[{"role": "user", "content": "x" * 100 * i}]) for i in range(6)]


def settle(ledger: Ledger, position: int, passed: int) -> None:
    """Let the group at a position end with a result."""
    ledger.record_result(f"g{position}", 4, passed, lag=8)
    ledger.record_dropped([f"g{position}-0"], "no_signal")


def dispatch(ledger: Ledger, order: CurriculumOrder, position: int) -> int:
    task = order.task_at(position)
    ledger.record_dispatch(f"g{position}", TASKS[task].task_id, position, [f"g{position}-0"], version=0)
    return task


def test_draws_count_a_result_after_the_lag_whenever_it_comes(tmp_path: Path) -> None:
    config, early = make_config(), Ledger(tmp_path / "early.sqlite")
    assert result_lag(config) == 8
    late = Ledger(tmp_path / "late.sqlite")
    orders = [CurriculumOrder(config, TASKS, ledger, Metrics()) for ledger in (early, late)]
    both = list(zip((early, late), orders, strict=True))
    for position in range(8):
        tasks = {dispatch(ledger, order, position) for ledger, order in both}
        assert len(tasks) == 1
        settle(early, position, passed=4)
    for position in (5, 2, 7, 0, 1, 6, 3, 4):
        settle(late, position, passed=4)
    for position in range(8, 20):
        assert orders[0].curriculum.sizes == orders[1].curriculum.sizes
        assert dispatch(early, orders[0], position) == dispatch(late, orders[1], position)
    assert orders[0].curriculum.sizes["easy"] == 6
    early.close()
    late.close()


def test_a_new_process_goes_on_with_the_draws_and_results_of_the_ledger(tmp_path: Path) -> None:
    path, metrics = tmp_path / "ledger.sqlite", Metrics()
    ledger = Ledger(path)
    order = CurriculumOrder(make_config(), TASKS, ledger, metrics)
    drawn = [dispatch(ledger, order, position) for position in range(12)]
    for position in range(6):
        settle(ledger, position, passed=position % 5)
    not_dispatched = order.task_at(12)  # killed in between
    ledger.close()

    again = Ledger(path)
    roll_back(again, 0)
    resumed = CurriculumOrder(make_config(), TASKS, again, metrics)
    assert resumed.task_at(12) == not_dispatched
    assert [resumed.task_at(position) for position in range(6, 12)] == drawn[6:]
    assert resumed.curriculum.sizes == order.curriculum.sizes
    for pool, size in order.curriculum.sizes.items():
        assert value_of(metrics.curriculum_tasks.labels(pool)) == size
    again.close()


def test_a_position_that_is_dispatched_again_keeps_its_task_and_its_first_result(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    order = CurriculumOrder(make_config(), TASKS, ledger, Metrics())
    task = dispatch(ledger, order, 0)
    ledger.record_result("g0", 4, 0, lag=8)
    ledger.record_dropped(["g0-0"], "restart")
    assert order.task_at(0) == task
    ledger.close()

    again = Ledger(path)
    roll_back(again, 0)
    order = CurriculumOrder(make_config(), TASKS, again, Metrics())
    assert order.task_at(0) == task
    again.record_dispatch("h0", TASKS[task].task_id, 0, ["h0-0"], version=0)
    again.record_result("h0", 4, 4, lag=8)
    again.record_dropped(["h0-0"], "no_signal")
    for position in range(1, 9):
        dispatch(again, order, position)
    known = order.curriculum.progress_of(task)
    assert (known.scored, known.passed) == (4, 0)
    again.flush()
    assert DrawnTask(TASKS[task].task_id, 4, 0, known.drawn) in again.drawn_tasks()
    again.close()


def opens_late(task: Task, draws: float = 5.0) -> float:
    return draws * (task.task_id > "t2")


def no_number(task: Task) -> Any:
    return task.task_id


def raises(task: Task) -> float:
    raise KeyError(task.task_id)


def test_a_gate_is_a_function_of_the_task() -> None:
    gate = f"{__name__}:opens_late"
    assert opening_positions(curriculum_of(gate=gate), TASKS) == [0, 0, 0, 5, 5, 5]
    assert opening_positions(curriculum_of(gate=gate, gate_args={"draws": 7}), TASKS)[3] == 7
    by_length = curriculum_of(gate="agent_loops.gates:by_length", gate_args={"first": 200, "per_draw": 10})
    assert opening_positions(by_length, TASKS) == [0, 0, 0, 10, 20, 30]


def test_the_example_of_the_guide_is_what_it_says() -> None:
    page, heading = "guide/own-task.md", "### Curricula"
    (text,), (code,) = blocks(page, "yaml", heading), blocks(page, "python", heading)
    tree = yaml12.load(text)
    curriculum = config_with(**tree).data.curriculum
    assert curriculum is not None
    assert curriculum.pools == CurriculumConfig().pools
    assert opening_positions(curriculum, TASKS) == [0, 0, 0, 0, 0, 200]
    found: dict[str, Any] = {}
    exec(code, found)
    task = Task(task_id="a", messages=[], metadata={"level": "hard"})
    assert found["by_level"](task, later=100) == 200


@pytest.mark.parametrize(
    ("gate", "told"),
    [
        (f"{__name__}:no_number", "returned 't0' for the task t0; expected a number of draws"),
        (f"{__name__}:raises", "raised KeyError: 't0', for the task t0"),
        (f"{__name__}:missing", "missing"),
    ],
)
def test_a_gate_that_cannot_be_used_is_an_error(gate: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        opening_positions(curriculum_of(gate=gate), TASKS)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pools": []}, "up_to is"),
        ({"pools": [{"name": "a", "up_to": 0.5, "weight": 1}]}, "expected ascending success rates"),
        ({"pools": [POOLS[2], POOLS[0]]}, "expected ascending success rates"),
        ({"pools": [{**POOLS[0], "name": "easy"}, POOLS[2]]}, "expected different ones"),
        ({"pools": [{**POOLS[2], "name": "unseen", "weight": 1}]}, "expected different ones"),
        ({"pools": [POOLS[2]]}, "all weights are 0"),
    ],
)
def test_pools_that_make_no_sense_are_an_error(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_config(**changes)


def test_weights_of_datasets_exclude_a_curriculum() -> None:
    datasets = [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 2.0}]
    with pytest.raises(ConfigError, match="set only one of them"):
        config_with(model={"path": "m"}, data={"datasets": datasets, "curriculum": {}})
