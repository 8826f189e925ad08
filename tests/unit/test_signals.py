"""The handler of SIGTERM stays installed although a native library replaces it."""

import asyncio
import ctypes
import os
import signal

from async_rl.runtime.signals import signal_handlers_kept

LIBC = ctypes.CDLL(None)


def native_handler() -> int:
    action = (ctypes.c_size_t * 32)()
    LIBC.sigaction(int(signal.SIGTERM), None, action)
    return action[0]


def replace_handler() -> None:
    """Ignore the signal below Python, which keeps believing in its own handler."""
    LIBC.signal(int(signal.SIGTERM), ctypes.c_void_p(int(signal.SIG_IGN)))
    assert native_handler() == signal.SIG_IGN


async def test_a_signal_arrives_when_a_library_replaces_its_handler_during_the_block() -> None:
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, arrived.set)
    try:
        async with signal_handlers_kept():
            replace_handler()
            while native_handler() == signal.SIG_IGN:  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGTERM)
            await arrived.wait()
            arrived.clear()
            replace_handler()  # at the last moment
        os.kill(os.getpid(), signal.SIGTERM)
        await arrived.wait()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
