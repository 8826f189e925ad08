"""Users' blocking functions that compute, in worker processes: neither the interpreter's lock nor a hang of
theirs holds up the run.

A thread cannot be ended and shares the lock; a process that runs past its time is killed, and another one
takes its place.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from async_rl.errors import EnvironmentNotReady
from async_rl.runtime.loading import load_object
from async_rl.runtime.processes import die_with_parent

if TYPE_CHECKING:
    from pebble import ProcessPool

F = TypeVar("F", bound=Callable[..., Any])

_ASKED: Final = "__worker_processes__"
_JOIN_S: Final = 5.0
"""Killed processes are gone at once; this is for the pool's threads on a busy machine."""


def in_processes(count: int) -> Callable[[F], F]:
    """Ask for worker processes for a function; `rollout.rewards.NAME.processes` says otherwise.

    Args:
        count: How many calls may run at a time.

    Example:
        >>> @in_processes(2)
        ... def slow_check(task, completion): ...
    """

    def mark(function: F) -> F:
        setattr(function, _ASKED, count)
        return function

    return mark


def processes_asked(function: Any) -> int:
    """What `in_processes` was told of a function, or 0."""
    return int(getattr(function, _ASKED, 0))


class WorkerProcesses:
    """So many processes that call one function, which is named by its dotted path.

    They start with the first call, import what the path names, and end with `close` or with this process.

    Example:
        >>> workers = WorkerProcesses("my_rewards:slow_check", 2)
        >>> await workers.call(task, completion)
        >>> workers.close()
    """

    def __init__(self, path: str, count: int) -> None:
        """Start nothing yet.

        Args:
            path: `module:function` of a blocking function; arguments and results are pickled.
            count: Of processes.

        Raises:
            EnvironmentNotReady: The package `pebble` is not installed.
        """
        try:
            from pebble import ProcessPool
        except ImportError as error:
            raise EnvironmentNotReady(
                f"{path} is to run in worker processes, which the package pebble manages, and it is not "
                "installed: pip install 'async-rl[rewards]', or set processes to 0"
            ) from error
        self._path = path
        # Not a fork: this process has threads. A worker that hangs would outlive a driver that is killed.
        context = multiprocessing.get_context("spawn")
        self._pool: ProcessPool = ProcessPool(max_workers=count, context=context, initializer=die_with_parent)

    async def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in a worker; cancelled, the worker is killed.

        Raises:
            Exception: What the function raised, or that its process died.
        """
        future = self._pool.schedule(_call, args=[self._path, args, kwargs])
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Kill all workers."""
        self._pool.stop()  # type: ignore[no-untyped-call]
        self._pool.join(timeout=_JOIN_S)


def _call(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In the worker, in its main thread: the function may use signals."""
    return load_object(path, what="function")(*args, **kwargs)
