"""Blocking functions of users, called without handing them our threads."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any


async def call_in_thread(function: Callable[[], Any], *, name: str) -> Any:
    """Call a blocking function in a daemon thread of its own and wait for it.

    Not in a pool: a tool or reward that hangs would hold one of its workers for ever, and with it the end of
    the program. Whoever stops waiting (a timeout) leaves the thread to itself.

    Args:
        function: Without arguments.
        name: Of the thread, for a stack dump.

    Raises:
        Exception: What the function raised; `SystemExit` and the like as a `RuntimeError`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def deliver(result: Any, error: BaseException | None) -> None:
        if not done.done():  # nobody waits any more after a timeout
            done.set_result((result, error))

    def work() -> None:
        result, failure = None, None
        try:
            result = context.run(function)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(deliver, result, failure)

    context = contextvars.copy_context()
    threading.Thread(target=work, name=name, daemon=True).start()
    result, failure = await done
    if failure is None:
        return result
    if isinstance(failure, Exception):
        raise failure
    # SystemExit and the like end the call, not the run.
    raise RuntimeError(f"{type(failure).__name__}: {failure}") from failure
