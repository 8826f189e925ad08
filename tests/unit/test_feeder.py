from async_rl.data.feeder import Feeder
from async_rl.data.order import TaskOrder
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


def test_a_task_comes_again_after_some_others_when_it_is_retried():
    feeder = make_feeder(epochs=None, max_retries=2, retry_after=2)
    assert feeder.next()[0] == 0
    feeder.retry(0)
    assert [feeder.next()[0] for _ in range(4)] == [1, 2, 0, 3]


def test_a_task_is_retried_no_more_often_than_allowed():
    feeder = make_feeder(max_retries=1)
    assert feeder.may_retry(0)
    feeder.retry(0)
    assert not feeder.may_retry(0)
    assert feeder.may_retry(1)


def test_the_end_of_the_data_waits_for_no_retry_that_is_not_due():
    feeder = make_feeder(epochs=1, max_retries=1, retry_after=100)
    assert len(drain(feeder)) == 3
    feeder.retry(1)
    assert drain(feeder) == [(1, "1")]


def test_retries_come_in_turn_after_what_an_earlier_life_left_pending():
    feeder = make_feeder(epochs=1, start=3, pending=[0, 2], max_retries=1)
    feeder.retry(1)
    assert drain(feeder) == [(0, "0"), (2, "2"), (1, "1")]
