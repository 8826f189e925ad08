from async_rl.data.feeder import Feeder, TaskRetries
from async_rl.data.order import TaskOrder
from async_rl.types import Task

TASKS = [Task(task_id=str(i), messages=[{"role": "user", "content": str(i)}]) for i in range(3)]


def make_feeder(max_retries: int = 0, retry_after: int = 0, **changes) -> Feeder:
    retries = TaskRetries(max_retries=max_retries, retry_after=retry_after)
    arguments = {"tasks": TASKS, "order": TaskOrder(3, seed=0, shuffle=False), "epochs": 1}
    return Feeder(**(arguments | changes), retries=retries)


def drain(feeder: Feeder) -> list[tuple[int, str]]:
    dispatched = []
    while (following := feeder.next_task()) is not None:
        dispatched.append((following[0], following[1].task_id))
    return dispatched


def test_every_task_comes_once_an_epoch():
    assert drain(make_feeder(epochs=2)) == [(0, "0"), (1, "1"), (2, "2"), (3, "0"), (4, "1"), (5, "2")]


def test_positions_that_are_pending_come_first_when_a_run_is_resumed():
    assert drain(make_feeder(epochs=2, start=4, pending=[3, 1])) == [(1, "1"), (3, "0"), (4, "1"), (5, "2")]


def test_a_task_comes_again_after_others_when_it_is_retried():
    feeder = make_feeder(epochs=None, max_retries=2, retry_after=2)
    assert feeder.next_task()[0] == 0
    assert feeder.retries.retry_task(0, "too_stale")
    assert [feeder.next_task()[0] for _ in range(4)] == [1, 2, 0, 3]


def test_a_task_is_retried_no_more_often_than_allowed():
    feeder = make_feeder(max_retries=1)
    assert feeder.retries.may_retry(0)
    assert feeder.retries.retry_task(0, "too_stale")
    assert not feeder.retries.may_retry(0)
    assert not feeder.retries.retry_task(0, "too_stale")
    assert feeder.retries.may_retry(1)


def test_the_end_of_the_data_waits_for_no_retry_that_is_not_due():
    feeder = make_feeder(epochs=1, max_retries=1, retry_after=100)
    assert len(drain(feeder)) == 3
    assert feeder.retries.retry_task(1, "too_stale")
    assert drain(feeder) == [(1, "1")]


def test_retries_come_in_order_after_what_is_pending_from_before_a_restart():
    feeder = make_feeder(epochs=1, start=3, pending=[0, 2], max_retries=1)
    assert feeder.retries.retry_task(1, "too_stale")
    assert drain(feeder) == [(0, "0"), (2, "2"), (1, "1")]
