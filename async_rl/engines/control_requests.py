"""Sends a request again while its engine is busy or this process cannot connect.

For requests that are not calls: reading a version back, pausing, updating. They are few, their caller bounds
their time, and giving one up costs the engine. A call is not repeated: another engine may take it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from async_rl.errors import EngineBusy, LocalShortage

T = TypeVar("T")

_RETRY_S: Final = 0.1
_RETRY_MAX_S: Final = 2.0
"""First and longest pause, unless the engine names one."""


async def wait_out(send_request: Callable[[], Awaitable[T]]) -> T:
    """Retry a request until it is answered, and return the answer.

    Raises:
        EngineError: The request failed for another reason.
    """
    delay_s = _RETRY_S
    while True:
        try:
            return await send_request()
        except EngineBusy as error:
            pause_s = delay_s if error.retry_after_s is None else error.retry_after_s
        except LocalShortage:
            pause_s = delay_s
        await asyncio.sleep(pause_s)
        delay_s = min(2 * delay_s, _RETRY_MAX_S)
