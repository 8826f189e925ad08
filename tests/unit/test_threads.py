"""Work in threads, and signals: nothing is lost when a caller is cancelled or a library interferes."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from async_rl.cli import main as cli
from async_rl.runtime.signals import signal_handlers_kept
from async_rl.runtime.supervision import contained
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


# -- the handler of SIGTERM stays installed although a native library replaces it ---------------------


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
