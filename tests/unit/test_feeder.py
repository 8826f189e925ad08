from async_rl.rollout.dataset import TaskOrder
from async_rl.rollout.feeder import Feeder
from async_rl.types import Task

TASKS = [Task(task_id=str(i), messages=[{"role": "user", "content": str(i)}]) for i in range(3)]


def make_feeder(**changes) -> Feeder:
    arguments = {"tasks": TASKS, "order": TaskOrder(3, seed=0, shuffle=False), "epochs": 1} | changes
    return Feeder(**arguments)


def drain(feeder: Feeder) -> list[tuple[int, str]]:
    given = []
    while (following := feeder.next()) is not None:
        given.append((following[0], following[1].task_id))
    return given


def test_every_task_comes_once_an_epoch():
    assert drain(make_feeder(epochs=2)) == [(0, "0"), (1, "1"), (2, "2"), (3, "0"), (4, "1"), (5, "2")]


def test_positions_that_are_pending_come_first_when_a_run_is_resumed():
    assert drain(make_feeder(epochs=2, start=4, pending=[3, 1])) == [(1, "1"), (3, "0"), (4, "1"), (5, "2")]


def test_data_never_ends_when_epochs_are_not_set():
    feeder = make_feeder(epochs=None)
    assert [feeder.next()[0] for _ in range(10)] == list(range(10))
