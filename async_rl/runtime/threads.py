"""Call blocking functions from the event loop: user functions in their own threads, file work to its end.

```
run_uncancellable(threads, work)   file work, to its end even if the caller is cancelled
run_to_end(work)                   the same, for a caller whose state is consistent then
call_in_thread(function)           user code: its own daemon thread
call_until_cancelled(...)          work of a start: a cancelled caller does not wait for it, nor does the exit
```
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar

from async_rl.runtime.shortages import wait_out_shortage
from async_rl.runtime.waits import waiting

R = TypeVar("R")


async def run_uncancellable(
    threads: Executor | None, work: Callable[[], R]
) -> tuple[R, asyncio.CancelledError | None]:
    """Run file work in a thread to its end, even if the caller is cancelled.

    It is repeated while there is no descriptor or no space for it, as `wait_out_shortage` says.

    Args:
        threads: Where to run it; None for the event loop's own threads.
        work: Takes no arguments. An attempt that fails has had no effect, or the next one knows of it.

    Returns:
        The result, and a cancellation that arrived meanwhile, which the caller raises when its state is
        consistent.

    Raises:
        Exception: The error of the work. If a cancellation arrived, it is raised with that error as its
        cause.
    """
    return await wait_out_shortage(lambda: _run_once_uncancellable(threads, work))


async def run_to_end(work: Callable[[], R]) -> R:
    """Run file work as `run_uncancellable` does, and raise a cancellation that arrived meanwhile."""
    result, cancelled = await run_uncancellable(None, work)
    if cancelled is not None:
        raise cancelled
    return result


async def _run_once_uncancellable(
    threads: Executor | None, work: Callable[[], R]
) -> tuple[R, asyncio.CancelledError | None]:
    future = asyncio.get_running_loop().run_in_executor(threads, work)
    cancelled = None
    while not future.done():
        try:
            with waiting("disk"):
                await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    try:
        return future.result(), cancelled
    except Exception as error:
        if cancelled is None:
            raise
        raise cancelled from error


async def call_in_thread(function: Callable[[], Any], *, name: str) -> Any:
    """Call a blocking function in its own daemon thread and wait for it.

    If the caller stops waiting (a timeout), the thread runs on by itself.

    Args:
        function: Takes no arguments.
        name: The thread's name, for stack dumps.

    Raises:
        Exception: The error of the function; `SystemExit` and the like become a `RuntimeError`.
    """
    return await start_in_thread(function, name=name)


def start_in_thread(function: Callable[[], Any], *, name: str) -> asyncio.Future[Any]:
    """Start what `call_in_thread` waits for: a caller that shields the future gets late results too."""
    context = contextvars.copy_context()
    return asyncio.get_running_loop().run_in_executor(_OwnThread(name), context.run, function)


async def call_until_cancelled(function: Callable[[], R], *, name: str, thread: Executor | None = None) -> R:
    """Call a blocking function of the start; if the caller is cancelled, the thread runs on by itself.

    `exit_despite_threads` then ends the process, because the interpreter cannot be finalized below native
    code that still runs.

    Args:
        function: Takes no arguments.
        name: The thread's name, for stack dumps.
        thread: Where to call it: an executor with daemon threads; None for a thread of its own.
    """
    call: Future[None] = Future()

    def work() -> R:
        call.set_running_or_notify_cancel()
        try:
            return function()
        finally:
            call.set_result(None)

    try:
        return await asyncio.get_running_loop().run_in_executor(thread or _OwnThread(name), work)
    except asyncio.CancelledError:
        _left_running.append(call)
        raise


def exit_despite_threads(code: int) -> None:
    """When the interpreter exits, end the process at once if calls of `call_until_cancelled` were left."""

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    if any(call.running() for call in _left_running):
        atexit.register(end)  # runs before all earlier ones, such as Ray's, which would wait for the call


_left_running: list[Future[None]] = []
"""Calls whose callers were cancelled."""


class LastingThread(Executor):
    """An executor with one daemon thread, which lasts as long as the process."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._calls.get()()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Implement `Executor.submit`."""
        future: Future[Any] = Future()
        self._calls.put(lambda: _fulfil(future, function, *args, **kwargs))
        return future


class _OwnThread(Executor):
    """An executor with one daemon thread per call.

    A pool would not do: a tool or reward that hangs would occupy a worker for ever and keep the program from
    ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        threading.Thread(
            target=lambda: _fulfil(future, function, *args, **kwargs), name=self._name, daemon=True
        ).start()
        return future


def _fulfil(future: Future[Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Call a function and give its result or its error to the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        # SystemExit and the like end the call, not the run; StopIteration cannot cross an await.
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
            return
        failure = RuntimeError(f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        future.set_exception(failure)
    else:
        future.set_result(result)
