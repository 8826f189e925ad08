"""Supervision of tasks: endless services beside a block, and nurseries."""

from __future__ import annotations

import asyncio

import pytest

from async_rl.errors import EngineError, ServiceExited
from async_rl.runtime.supervision import Nursery, finished, first_error, service_of, services


async def forever() -> None:
    await asyncio.Event().wait()


async def test_services_are_cancelled_and_awaited_when_the_block_ends() -> None:
    ended = []

    async def loop() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)  # a cleanup that needs the loop once more
            ended.append("loop")

    async with services(loop=loop):
        await asyncio.sleep(0)
    assert ended == ["loop"]


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


async def test_a_service_may_return_when_it_is_told_to_end() -> None:
    returned = asyncio.Event()

    async def polite() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            returned.set()

    async with services(polite=polite):
        await asyncio.sleep(0)
    assert returned.is_set()


async def test_services_end_when_the_block_raises() -> None:
    cancelled = asyncio.Event()

    async def loop() -> None:
        try:
            await forever()
        finally:
            cancelled.set()

    async def block() -> None:
        async with services(loop=loop):
            await asyncio.sleep(0)
            raise ValueError("of the block")

    with pytest.raises(ExceptionGroup) as caught:
        await block()
    assert str(first_error(caught.value)) == "of the block"
    assert service_of(first_error(caught.value)) is None
    assert cancelled.is_set()


async def test_a_nursery_waits_for_its_tasks_and_hands_out_results() -> None:
    async def double(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    async with Nursery() as nursery:
        tasks = [nursery.start_task(f"double {x}", double(x)) for x in (1, 2)]
        assert nursery.running_tasks == ["double 1", "double 2"]
    assert [task.result() for task in tasks] == [2, 4]
    assert nursery.running_tasks == []


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


async def test_the_innermost_name_is_kept_when_services_are_nested() -> None:
    async def fail() -> None:
        raise EngineError("gone")

    async def outer() -> None:
        try:
            async with services(inner=fail):
                await forever()
        except ExceptionGroup as group:
            raise first_error(group) from None

    with pytest.raises(ExceptionGroup) as caught:
        async with services(outer=outer):
            await forever()
    assert service_of(first_error(caught.value)) == "inner"


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
