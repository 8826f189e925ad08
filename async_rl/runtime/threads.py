"""Blocking functions, called from the event loop: users' in threads of their own, ours to their end."""

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
    """Run work on files in a thread to its end, whatever happens to whoever awaits it.

    Returns:
        Its result and a cancellation that came meanwhile, for the caller to raise once all is in order.

    Raises:
        Exception: What the work raised; the cancellation, if there was one, with that as its cause.
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
    """Call a blocking function in a daemon thread of its own and wait for it.

    Whoever stops waiting (a timeout) leaves the thread to itself.

    Args:
        function: Without arguments.
        name: Of the thread, for a stack dump.

    Raises:
        Exception: What the function raised; `SystemExit` and the like as a `RuntimeError`.
    """
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_OwnThread(name), context.run, function)


class _OwnThread(Executor):
    """A daemon thread for each call.

    Not a pool: a tool or reward that hangs would hold one of its workers for ever, and with it the end of the
    program.
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
