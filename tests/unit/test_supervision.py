"""Supervision of tasks: endless services beside a block, and nurseries."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from async_rl.errors import EngineError, ServiceExited, StallError
from async_rl.runtime.supervision import (
    Nursery,
    contained,
    finished,
    first_error,
    observer,
    service_of,
    services,
)


async def forever() -> None:
    await asyncio.Event().wait()


async def test_services_are_cancelled_and_awaited_when_the_block_ends() -> None:
    """One may return when it is told to end."""
    ended = []

    async def loop() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)  # a cleanup that needs the loop once more
            ended.append("loop")

    async def polite() -> None:
        with suppress(asyncio.CancelledError):
            await forever()
        ended.append("polite")

    async with services(loop=loop, polite=polite):
        await asyncio.sleep(0)
    assert sorted(ended) == ["loop", "polite"]


async def test_the_block_is_cancelled_and_fails_when_a_service_fails() -> None:
    async def broken() -> None:
        raise EngineError("gone")

    with pytest.raises(ExceptionGroup) as caught:
        async with services(steady=forever, pool=broken):
            await forever()
    cause = first_error(caught.value)
    assert str(cause) == "gone"
    assert service_of(cause) == "pool"


async def test_the_block_fails_when_a_service_returns_early() -> None:
    async def returns() -> None:
        await asyncio.sleep(0)

    with pytest.raises(ExceptionGroup) as caught:
        async with services(feeder=returns):
            await forever()
    cause = first_error(caught.value)
    assert isinstance(cause, ServiceExited)
    assert "feeder" in str(cause)
    assert service_of(cause) == "feeder"


async def test_an_observer_that_fails_is_logged_and_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    starts = 0

    async def loop() -> None:
        nonlocal starts
        starts += 1
        if starts < 3:
            raise OSError(24, "Too many open files", "/proc/meminfo")
        await forever()

    async with services(status=observer(loop)):
        await asyncio.sleep(60.0)
    assert starts == 3
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "/proc/meminfo" in caplog.text


async def test_an_observer_ends_the_run_by_the_errors_that_are_its_purpose() -> None:
    async def loop() -> None:
        raise StallError("the run is stalled")

    with pytest.raises(ExceptionGroup) as caught:
        async with services(doctor=observer(loop, ends_run_with=(StallError,))):
            await forever()
    assert isinstance(first_error(caught.value), StallError)


async def test_a_nursery_waits_for_its_tasks_and_hands_out_results() -> None:
    async def double(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    async with Nursery() as nursery:
        tasks = [nursery.start_task(f"double {x}", double(x)) for x in (1, 2)]
    assert [task.result() for task in tasks] == [2, 4]


async def test_siblings_are_cancelled_when_a_nursery_task_fails() -> None:
    async def fail() -> None:
        raise EngineError("gone")

    siblings: list[asyncio.Task[None]] = []

    async def block() -> None:
        async with Nursery() as nursery:
            siblings.append(nursery.start_task("sibling", forever()))
            nursery.start_task("failing", fail())

    with pytest.raises(ExceptionGroup) as caught:
        await block()
    assert siblings[0].cancelled()
    assert service_of(first_error(caught.value)) == "failing"


async def test_a_nursery_ends_without_error_when_it_is_cancelled() -> None:
    async with Nursery() as nursery:
        task = nursery.start_task("endless", forever())
        nursery.cancel_tasks()
    assert task.cancelled()


@pytest.mark.parametrize("kind", ["services", "nursery"])
async def test_a_cancellation_is_not_lost_when_the_block_ends_by_an_error_already(kind: str) -> None:
    ending = asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.Future()
        finally:
            ending.set()
            for _ in range(5):
                await asyncio.sleep(0)

    async def block() -> str:
        try:
            if kind == "services":
                async with services(slow=slow_to_end):
                    await asyncio.sleep(0)
                    raise ValueError("the block's own")
            else:
                async with Nursery() as nursery:
                    nursery.start_task("slow", slow_to_end())
                    await asyncio.sleep(0)
                    raise ValueError("the block's own")
        except* ValueError:
            pass
        return "went on"

    task = asyncio.ensure_future(block())
    await ending.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_stays_an_error_when_a_task_of_an_inner_block_fails() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise EngineError("gone")

    async def block() -> None:
        async with services(idle=forever), Nursery(), Nursery() as inner:
            inner.start_task("failing", fail())

    with pytest.raises(ExceptionGroup) as caught:
        await block()
    assert service_of(first_error(caught.value)) == "failing"
    current = asyncio.current_task()
    assert current is not None
    assert current.cancelling() == 0


def test_the_first_error_of_ours_is_found_when_it_is_nested_behind_foreign_ones() -> None:
    ours = EngineError("ours")
    group = ExceptionGroup("a", [OSError("foreign"), ExceptionGroup("b", [ours])])
    assert first_error(group) is ours
    assert str(first_error(ExceptionGroup("a", [OSError("foreign")]))) == "foreign"


async def test_work_is_finished_when_its_awaiting_task_is_cancelled_twice():
    go_on, done = asyncio.Event(), []

    async def give_back() -> None:
        await go_on.wait()
        done.append("given back")

    waiter = asyncio.ensure_future(finished(give_back(), limit_s=60))
    for _ in range(2):
        await asyncio.sleep(0)
        waiter.cancel()
    await asyncio.sleep(0)
    assert not waiter.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert done == ["given back"]


async def test_work_returns_its_result_when_no_task_is_cancelled():
    async def fail() -> None:
        raise ValueError("no")

    async def hang() -> None:
        await asyncio.Event().wait()

    assert await finished(asyncio.sleep(0, "yes"), limit_s=60) == "yes"
    with pytest.raises(ValueError, match="no"):
        await finished(fail(), limit_s=60)
    with pytest.raises(TimeoutError):
        await finished(hang(), limit_s=0.01)


async def swallowing() -> int:
    with suppress(asyncio.CancelledError):
        await forever()
    return 7


async def polling() -> None:
    while True:
        with suppress(BaseException):
            await asyncio.sleep(60)


async def cleaning_up() -> None:
    try:
        await forever()
    finally:
        await asyncio.sleep(2)


async def cancelled_after(limit_s: float, work: Coroutine[Any, Any, Any]) -> tuple[float, list[str]]:
    """Cancel user code after a second; return when it had ended, and what was called."""
    told: list[str] = []
    running = contained(
        work,
        limit_s=limit_s,
        on_cancel=lambda: told.append("cancelled"),
        on_ignored=lambda: told.append("ignored"),
    )
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await running
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return asyncio.get_running_loop().time(), told


@pytest.mark.parametrize(
    ("code", "ended_s", "said"),
    [
        (cleaning_up, 3.0, ["cancelled"]),
        (swallowing, 1.0, ["cancelled", "ignored"]),
        (polling, 6.0, ["cancelled", "ignored"]),
    ],
)
async def test_user_code_ends_with_its_caller_even_when_it_swallows_cancellations(
    code: Callable[[], Coroutine[Any, Any, Any]], ended_s: float, said: list[str]
) -> None:
    assert await cancelled_after(5, code()) == (ended_s, said)
    gc.collect()  # does not resume it once more


def test_a_process_ends_after_user_code_that_catches_everything_was_left() -> None:
    program = """
import asyncio
from async_rl.runtime.supervision import contained

async def poll():
    while True:
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        except BaseException:  # also that there is no event loop any more
            continue

async def main():
    task = asyncio.create_task(contained(poll(), limit_s=0.01))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


async def test_user_code_cleans_up_when_its_caller_is_cancelled_twice() -> None:
    task = asyncio.create_task(cancelled_after(5, cleaning_up()))
    await asyncio.sleep(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.get_running_loop().time() == 3.0


async def exits() -> None:
    sys.exit(3)


async def cancels_its_own_task() -> None:
    task = asyncio.create_task(forever())
    task.cancel()
    await task


@pytest.mark.parametrize(
    ("work", "said"), [(exits, r"called sys\.exit\(3\)"), (cancels_its_own_task, "raised CancelledError")]
)
async def test_user_code_cannot_end_the_event_loop_or_look_cancelled(
    work: Callable[[], Coroutine[Any, Any, None]], said: str
) -> None:
    with pytest.raises(RuntimeError, match=said):
        await contained(work(), limit_s=1)


async def test_user_code_that_never_began_is_closed_when_its_caller_is_cancelled() -> None:
    async def cancel_at_once() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await contained(forever(), limit_s=1)

    task = asyncio.create_task(cancel_at_once())
    with pytest.raises(asyncio.CancelledError):
        await task
