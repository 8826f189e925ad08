"""Work in threads that a cancellation must not cut short."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from async_rl.runtime.threads import run_uncancellable


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
