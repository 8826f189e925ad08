"""The handler of SIGTERM stays installed although a native library replaces it."""

import asyncio
import ctypes
import os
import signal
from types import SimpleNamespace

import pytest

from async_rl.cli import main as cli
from async_rl.runtime.signals import signal_handlers_kept
from async_rl.runtime.supervision import contained

LIBC = ctypes.CDLL(None)


def native_handler() -> int:
    action = (ctypes.c_size_t * 32)()
    LIBC.sigaction(int(signal.SIGTERM), None, action)
    return action[0]


def replace_handler() -> None:
    """Ignore the signal below Python, which keeps believing in its own handler."""
    LIBC.signal(int(signal.SIGTERM), ctypes.c_void_p(int(signal.SIG_IGN)))
    assert native_handler() == signal.SIG_IGN


@pytest.mark.real_time  # signals wake the real loop
async def test_a_signal_arrives_when_a_library_replaces_its_handler_during_the_block() -> None:
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, arrived.set)
    try:
        # Bounded here: pytest's own limit may end a busy loop inside the event loop, which swallows it.
        async with asyncio.timeout(30):
            with signal_handlers_kept():
                replace_handler()
                while native_handler() == signal.SIG_IGN:  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.001)
                os.kill(os.getpid(), signal.SIGTERM)
                await arrived.wait()
                arrived.clear()
                replace_handler()  # at the last moment
            os.kill(os.getpid(), signal.SIGTERM)
            await arrived.wait()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _waits_after_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.Event().wait()


@pytest.mark.parametrize("in_users_code", [False, True])
def test_sigterm_unwinds_any_command(monkeypatch: pytest.MonkeyPatch, in_users_code: bool) -> None:
    cleaned = []

    async def work() -> None:
        try:
            await (contained(_waits_after_sigterm(), limit_s=1) if in_users_code else _waits_after_sigterm())
        finally:
            cleaned.append("its servers and files")

    command = SimpleNamespace(
        name="serve", summary="serves", details="", add_options=id, run=lambda parsed: asyncio.run(work())
    )
    monkeypatch.setattr(cli, "COMMANDS", [command])
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["serve"]) == 143
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) is before
