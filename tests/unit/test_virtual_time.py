"""The loop in virtual time, as Python ends it."""

from __future__ import annotations

from async_rl.planning.virtual_time import VirtualTimeLoop


def test_threads_end_their_work_when_python_sets_a_limit_as_from_3_12_on() -> None:
    loop = VirtualTimeLoop(thread_s=lambda: (3600.0, 0.0))
    done: list[str] = []
    future = loop.run_in_executor(None, done.append, "work")
    loop.run_until_complete(loop.shutdown_default_executor(300.0))
    loop.run_until_complete(future)
    loop.close()
    assert (done, loop.time()) == (["work"], 0.0)
