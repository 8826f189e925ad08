"""Blocking functions of users, called without handing them our threads."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


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
