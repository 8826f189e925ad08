"""Call blocking functions from the event loop: user functions in their own threads, file work to its end."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from async_rl.runtime.waits import waiting

R = TypeVar("R")


async def run_uncancellable(
    threads: Executor, work: Callable[[], R]
) -> tuple[R, asyncio.CancelledError | None]:
    """Run file work in a thread to its end, even if the caller is cancelled.

    Returns:
        The result, and a cancellation that arrived meanwhile, which the caller raises when its state is
        consistent.

    Raises:
        Exception: The error of the work. If a cancellation arrived, it is raised with that error as its
        cause.
    """
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
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_OwnThread(name), context.run, function)


class _OwnThread(Executor):
    """An executor with one daemon thread per call.

    A pool would not do: a tool or reward that hangs would occupy a worker for ever and keep the program from
    ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def work() -> None:
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

        threading.Thread(target=work, name=self._name, daemon=True).start()
        return future
