"""Work in threads that a cancellation must not cut short."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from async_rl.runtime.threads import run_uncancellable


@pytest.mark.real_time  # the work waits in a thread
async def test_work_is_waited_for_and_its_result_kept_when_its_caller_is_cancelled() -> None:
    began, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def work() -> int:
        loop.call_soon_threadsafe(began.set)
        assert may_end.wait(10)
        return 5

    async def caller() -> tuple[int, asyncio.CancelledError | None]:
        with ThreadPoolExecutor(1) as threads:
            return await run_uncancellable(threads, work)

    task = asyncio.create_task(caller())
    await began.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    result, cancelled = await task
    assert result == 5
    assert isinstance(cancelled, asyncio.CancelledError)


async def test_work_is_done_again_when_the_process_has_no_descriptor_for_a_while() -> None:
    attempts = 0

    def work() -> int:
        nonlocal attempts
        attempts += 1
        if attempts < 20:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return attempts

    with ThreadPoolExecutor(1) as threads:
        assert await run_uncancellable(threads, work) == (20, None)


@pytest.mark.parametrize(("number", "is_tried_again"), [(errno.EMFILE, True), (errno.EIO, False)])
async def test_a_lasting_shortage_is_an_error_and_other_errors_are_raised_at_once(
    number: int, is_tried_again: bool
) -> None:
    def work() -> None:
        nonlocal attempts
        attempts += 1
        raise OSError(number, os.strerror(number))

    attempts = 0
    with ThreadPoolExecutor(1) as threads, pytest.raises(OSError, match=os.strerror(number)):
        await run_uncancellable(threads, work)
    assert (attempts > 1) is is_tried_again
