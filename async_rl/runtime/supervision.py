"""Structured concurrency: every task has a parent. Only this module starts asyncio tasks.

```
services(feeder=…, sync=…)   run endless loops beside a block; one that fails or returns fails the block
observer(loop)               a service that only observes: when it fails, it is logged and starts again
cut_by(stop)                 a block that ends with `StoppedAtStart` as soon as an event is set
run_together(works)          run several works to their ends, and return their results
Nursery()                    a block that owns the tasks started in it and ends when they have ended
finished(work)               run work to its end even if the caller is cancelled
contained(work)              run user code, which ends when its caller is cancelled, whatever it catches
```

`services`, `cut_by` and `Nursery` end as a `TaskGroup` does: the first failure cancels the siblings and
leaves the block in an exception group. `first_error` returns the cause inside the group, `service_of` the
loop or task it came from.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from async_rl.errors import AsyncRLError, ServiceExited, StoppedAtStart
from async_rl.runtime.waits import acting, sleep_idle, waiting

log = logging.getLogger(__name__)

T = TypeVar("T")

_NOTE = "in service "

END_LIMIT_S: Final = 120.0
"""Services that were cancelled may wait for the end of processes, on nodes that do not answer for 80 s."""

_OBSERVE_AGAIN_S: Final = 5.0
"""Seconds after which an observer that failed starts again."""


@asynccontextmanager
async def services(**loops: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run endless loops while the block runs; a loop that fails or returns fails the block.

    When the block ends, the loops are cancelled and awaited.

    Raises:
        ExceptionGroup: Holds the first failure, marked with its service's name; `ServiceExited` if a loop
            returned.
    """
    closing = False

    async def supervise(name: str, loop: Callable[[], Awaitable[None]]) -> None:
        with acting("service", name):
            await loop()
        if not closing:
            raise ServiceExited(f"{name} returned while the run was still going")

    with ExitStack() as ending:
        async with Nursery() as group:
            tasks = [group.start_task(name, supervise(name, loop)) for name, loop in loops.items()]
            try:
                yield
            finally:
                closing = True
                for task in tasks:
                    task.cancel()
                ending.enter_context(waiting("drain", limit_s=END_LIMIT_S))


def observer(
    loop: Callable[[], Awaitable[None]], *, ends_run_with: tuple[type[Exception], ...] = ()
) -> Callable[[], Awaitable[None]]:
    """Return a service of a loop that only observes the run: its failures do not end the run.

    Each failure is logged, and the loop starts again a few seconds later.

    Args:
        loop: The endless loop.
        ends_run_with: The errors by which the loop ends the run on purpose.
    """

    async def run() -> None:
        while True:
            try:
                return await loop()
            except ends_run_with:
                raise
            except Exception as error:
                failed = getattr(loop, "__qualname__", repr(loop))
                log.exception("%s failed and starts again: %s: %s", failed, type(error).__name__, error)
            await sleep_idle(_OBSERVE_AGAIN_S)

    return run


@asynccontextmanager
async def cut_by(stop: asyncio.Event) -> AsyncIterator[None]:
    """Cancel the block as soon as `stop` is set: the start of a run has nothing to save.

    Raises:
        ExceptionGroup: Holds `StoppedAtStart`.
    """

    async def watch() -> None:
        await stop.wait()
        raise StoppedAtStart("the run was stopped while it was starting")

    async with services(stop=watch):
        yield


def was_stopped_at_start(error: BaseException) -> bool:
    """Whether an error, or one in an exception group, is that a signal ended the start."""
    return any(isinstance(leaf, StoppedAtStart) for leaf in _leaves(error))


async def run_together(works: Iterable[tuple[str, Coroutine[Any, Any, T]]]) -> list[T]:
    """Run works at the same time, and return their results in order; the first error cancels the others.

    Args:
        works: With the names of their tasks.

    Raises:
        Exception: The first error.
    """
    try:
        async with Nursery() as nursery:
            tasks = [nursery.start_task(name, work) for name, work in works]
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return [task.result() for task in tasks]


async def finished(work: Coroutine[Any, Any, T], *, limit_s: float) -> T:
    """Run work to its end even if the caller is cancelled meanwhile; the cancellation is raised afterwards.

    Use it to release what must not be kept: a process, a tool's state.

    Args:
        work: Runs in a task of its own.
        limit_s: The work is cancelled after this time.

    Raises:
        TimeoutError: The work took longer than `limit_s`.
        CancelledError: The caller was cancelled. The outcome of the work is then dropped.
    """

    async def limited() -> T:
        async with asyncio.timeout(limit_s):
            return await work

    task = asyncio.create_task(limited())
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it as never retrieved
    raise cancelled


async def contained(
    work: Coroutine[Any, Any, T],
    *,
    limit_s: float,
    on_cancel: Callable[[], None] = lambda: None,
    on_ignored: Callable[[], None] = lambda: None,
) -> T:
    """Run a user's coroutine so that it ends when the caller is cancelled, even if it catches everything.

    It runs in a task of its own with the name of the caller's, so that a cancellation that it swallows, or
    raises by itself, stays inside.

    Args:
        work: The user's coroutine.
        limit_s: How long it may take to clean up after a cancellation; then it is never resumed again, nor
            freed.
        on_cancel: Called before it is cancelled, to take away what it could go on with.
        on_ignored: Called when it did not end by its cancellation: it returned, raised something else, or
            took longer than `limit_s`.

    Raises:
        Exception: The error of the coroutine. `SystemExit`, and a `CancelledError` while the caller was not
            cancelled, become a `RuntimeError`.
        CancelledError: The caller was cancelled. The outcome of the coroutine is then dropped.
    """
    driven = _Droppable(work)

    async def run() -> T:
        try:
            return await driven
        except SystemExit as error:  # would end the event loop
            raise RuntimeError(f"called sys.exit({error.code!r})") from error

    task = asyncio.create_task(run(), name=_current_task().get_name())
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        if not task.done():
            on_cancel()
            task.cancel()
            with waiting("clean-up", limit_s=limit_s):
                await _wait_through_cancellations(task, limit_s)
            if not (ended := task.done()):
                driven.drop()
                task.cancel()
                await _wait_through_cancellations(task, None)
                # Freeing it would resume it once more, and code that catches everything might never return.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
            if not (ended and task.cancelled()):
                on_ignored()
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it as never retrieved
        raise
    finally:
        if not driven.dropped:
            work.close()  # it has ended, or never began
    try:
        if task.cancelled():
            raise RuntimeError("raised CancelledError, though nothing had cancelled it")
        return task.result()
    finally:
        del task  # its error holds this frame, a cycle that would keep the work


async def _wait_through_cancellations(task: asyncio.Task[Any], limit_s: float | None) -> None:
    """Wait for a task, at most so long, on behalf of a caller that is cancelled already."""
    clock = asyncio.get_running_loop().time
    until_s = None if limit_s is None else clock() + limit_s
    while not task.done() and (until_s is None or clock() < until_s):
        try:
            await asyncio.wait([task], timeout=None if until_s is None else until_s - clock())
        except asyncio.CancelledError:
            continue


class _Droppable(Awaitable[T]):
    """Awaits a coroutine until it ends, or until it is dropped and its task is cancelled once more."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.work = work
        """The coroutine, which a look at where tasks wait follows."""
        self.dropped = False

    def drop(self) -> None:
        """Let the next cancellation end the wait without resuming the coroutine."""
        self.dropped = True

    def __await__(self) -> Generator[Any, Any, T]:
        resume: Callable[[], Any] = partial(self.work.send, None)
        while True:
            try:
                awaited = resume()
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                value = yield awaited
            except BaseException as error:
                if self.dropped:
                    raise
                resume = partial(self.work.throw, error)
            else:
                resume = partial(self.work.send, value)


class Nursery(asyncio.TaskGroup):
    """A block that owns tasks: it ends when all have ended, and a failed task cancels the others.

    The error of a failed task is marked with the task's name. A cancellation from outside that arrives while
    the block ends because of an error is kept: CPython before 3.13 drops it (`asyncio.TaskGroup.__aexit__`),
    so that the code that handles the error continues as if it had not been cancelled.
    """

    _parent_cancel_requested: bool
    _tasks: set[asyncio.Task[Any]]

    def start_task(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that belongs to the block and mark its failure with the name.

        Raises:
            RuntimeError: The block has ended, or is ending because a task failed.
        """
        return self.create_task(work, name=name)

    def cancel_tasks(self) -> None:
        """Cancel every running task; the block then ends without an error."""
        for task in self._tasks:
            task.cancel()

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        """Called once for each task: a further callback of each would cost another turn of the event loop."""
        _mark(task)
        super()._on_task_done(task)

    async def __aenter__(self) -> Self:
        self._cancelled_before = _current_task().cancelling()
        return await super().__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        settled = self._parent_cancel_requested
        try:
            await super().__aexit__(kind, error, traceback)
        except BaseExceptionGroup as errors:
            task = _current_task()
            if self._parent_cancel_requested and not settled and sys.version_info < (3, 13):
                task.uncancel()  # the group requested it when a task failed while the block was waiting
            if task.cancelling() > self._cancelled_before:
                raise asyncio.CancelledError from errors
            raise


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def first_error(error: BaseException) -> BaseException:
    """Return the cause inside nested exception groups: the first `AsyncRLError`, else the first exception."""
    leaves = list(_leaves(error))
    return next((leaf for leaf in leaves if isinstance(leaf, AsyncRLError)), leaves[0])


def service_of(error: BaseException) -> str | None:
    """Return the name of the innermost service or task that an exception came from."""
    notes = getattr(error, "__notes__", ())  # PEP 678: the attribute exists once a note was added
    return next((note.removeprefix(_NOTE) for note in notes if note.startswith(_NOTE)), None)


def _mark(task: asyncio.Task[Any]) -> None:
    """Add the task's name to its exception, which the group raises later."""
    if not task.cancelled() and (error := task.exception()) is not None:
        error.add_note(_NOTE + task.get_name())


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
