"""Run users' compute-bound functions in worker processes, so that neither the GIL nor a hang delays the run.

A thread cannot be killed and shares the GIL. A process that exceeds its time is killed and replaced.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, Final, TypeVar

from async_rl.errors import EnvironmentNotReady
from async_rl.runtime.loading import load_object
from async_rl.runtime.processes import die_with_parent
from async_rl.runtime.user_processes import become_scope, scope_mark

if TYPE_CHECKING:
    from pebble import ProcessPool

F = TypeVar("F", bound=Callable[..., Any])

_ASKED: Final = "__worker_processes__"
_MAX_POOLS: Final = 2
"""How many pools a call is tried in. One that kills its worker at once looks as if it had waited, so it may
run twice."""
_LOOK_S: Final = 1.0
"""How often a call looks whether its pool has given up."""
_JOIN_S: Final = 5.0
"""Killed processes end at once; the pool's threads may take longer on a busy machine."""


def in_processes(count: int) -> Callable[[F], F]:
    """Request worker processes for a function; `rollout.rewards.NAME.processes` overrides the number.

    Args:
        count: Number of calls that may run at a time.

    Example:
        >>> @in_processes(2)
        ... def slow_check(task, completion): ...
    """

    def mark(function: F) -> F:
        setattr(function, _ASKED, count)
        return function

    return mark


def processes_asked(function: Any) -> int:
    """Return the number of processes that `in_processes` requested for a function, or 0."""
    return int(getattr(function, _ASKED, 0))


class WorkerProcesses:
    """A fixed number of processes that call one function, named by its dotted path.

    They start with the first call, import the function, and end with `close` or with this process.
    """

    def __init__(self, path: str, count: int) -> None:
        """Create the pool; processes start with the first call.

        Args:
            path: `module:function` of a blocking function; arguments and results are pickled.
            count: Number of processes.

        Raises:
            EnvironmentNotReady: The package `pebble` is not installed.
        """
        try:
            import pebble  # noqa: F401
        except ImportError as error:
            raise EnvironmentNotReady(
                f"{path} requests worker processes, which need the package pebble, and it is not installed: "
                "run `pip install -e '.[rewards]'` in async_rl's checkout, or set processes to 0"
            ) from error
        self._path = path
        self._count = count
        self._pool: ProcessPool | None = None
        self._is_closed = False

    async def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in a worker; a cancellation kills the worker.

        Raises:
            Exception: The error of the function, or the death of its process.
        """
        # pebble gives a pool up when a worker dies that runs no call, and with it the calls that wait.
        for number in range(_MAX_POOLS):
            if self._pool is not None and not self._pool.active:
                broken, self._pool = self._pool, None
                await asyncio.to_thread(_end_pool, broken)
            if self._pool is None:
                self._pool = _new_pool(self._count)
            pool = self._pool
            try:
                return await _call_in_pool(pool, [self._path, args, kwargs])
            except BrokenProcessPool as error:
                if pool.active:  # the function's own error
                    raise
                if self._is_closed or number == _MAX_POOLS - 1:
                    raise ChildProcessError(f"the worker processes of {self._path} have ended") from error
        raise AssertionError("the last pool returns or raises")

    def close(self) -> None:
        """Kill all workers. Calls that are left fail."""
        self._is_closed = True
        if self._pool is not None:
            _end_pool(self._pool)


async def _call_in_pool(pool: ProcessPool, arguments: list[Any]) -> Any:
    """Call a function in one of the processes of a pool.

    Raises:
        BrokenProcessPool: The pool has given up. It may have forgotten a call that it was just given.
    """
    try:
        future = pool.schedule(_call, args=arguments)
    except RuntimeError as error:  # since it was asked whether it is active
        raise BrokenProcessPool(str(error)) from error
    answer = asyncio.wrap_future(future)
    try:
        while not (await asyncio.wait([answer], timeout=_LOOK_S))[0]:
            if not pool.active:
                raise BrokenProcessPool("the pool has forgotten a call")
        return answer.result()
    finally:
        answer.cancel()


def _end_pool(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join(timeout=_JOIN_S)


def _new_pool(count: int) -> ProcessPool:
    from pebble import ProcessPool

    # Not a fork, because this process has threads.
    context = multiprocessing.get_context("spawn")
    return ProcessPool(max_workers=count, context=context, initializer=_join, initargs=[scope_mark()])


def _join(mark: str) -> None:
    """Let a hung worker not outlive a killed driver, and what a worker starts not outlive the worker."""
    die_with_parent()
    become_scope(mark)


def _call(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run in the worker's main thread, so that the function may use signals."""
    return load_object(path, what="function")(*args, **kwargs)
