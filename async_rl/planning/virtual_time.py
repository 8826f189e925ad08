"""An asyncio loop whose clock jumps to the next timer when nothing is ready: hours pass in milliseconds.

Everything on it is a function of what it is given, so that a run repeats itself: threads work in virtual time
too, and sets of tasks have one order in every process.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, Final, TypeVar

T = TypeVar("T")


_SELECT_EVERY: Final = 64
"""The loop looks at files once in this many turns: hardly anything here comes from a file, and a look
takes 2 µs, 8% of a simulation."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: the time it was asked to wait passes on the loop's clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._num_turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._num_turns += 1
        events = super().select(0) if timeout is None or self._num_turns % _SELECT_EVERY == 0 else []
        if not events:
            if timeout is None:
                raise RuntimeError("deadlock: every task waits, and no timer will wake one")
            self.now_s += timeout
        return events


class NumberedTask(asyncio.Task[Any]):
    """A task whose place in a set is given by its number, not by its address.

    A task group cancels its tasks in the order of a set.
    """

    def __init__(
        self, number: int, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **arguments: Any
    ) -> None:
        self.number = number
        super().__init__(work, **arguments)

    def __hash__(self) -> int:
        return self.number


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop on a clock of its own.

    Work handed to threads runs on the loop itself, whole: at once, or at times that `thread_s` draws, so that
    other tasks come in between as they do in reality.

    Example:
        >>> with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        ...     runner.run(asyncio.sleep(3600))
    """

    def __init__(
        self,
        *,
        begin_s: float = 0.0,
        thread_s: Callable[[], tuple[float, float]] | None = None,
        after_step: Callable[[NumberedTask | None], None] | None = None,
    ) -> None:
        """Start the clock.

        Args:
            begin_s: What the clock shows at first.
            thread_s: Draws, for work handed to a thread, the seconds until it is done and the seconds from
                then until the loop hears of it; None does both at once.
            after_step: Called after each callback, with the task whose turn it was, or None for a timer. What
                it raises beyond `Exception` ends `run_forever`.
        """
        self._jumping = _JumpingSelector()
        self._jumping.now_s = begin_s
        self._thread_s = thread_s
        self._after_step = after_step
        self._num_tasks = 0
        self._at_work: dict[int, Callable[[], None]] = {}
        self._num_works = 0
        super().__init__(self._jumping)
        self.set_task_factory(self._number)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jumping.now_s

    def jump(self, seconds: float) -> None:
        """Let time pass at once, as on a machine that was suspended."""
        self._jumping.now_s += seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Do the work of a thread, on this one."""
        future: asyncio.Future[T] = self.create_future()
        if self._thread_s is None:
            _work(future, func, args)()
            return future
        work_s, delivery_s = self._thread_s()
        self._num_works += 1
        number = self._num_works

        def work() -> None:  # whether anybody still waits or not: a thread cannot be cancelled
            if self._at_work.pop(number, None) is not None:
                self.call_later(delivery_s, _work(future, func, args))

        self._at_work[number] = work
        self.call_later(work_s, work)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Let all threads come to the end of their work; from 3.12 on, Python passes a limit."""
        for work in list(self._at_work.values()):
            work()

    def close(self) -> None:
        """Implements `asyncio.loop.close`; threads still at work come to no end."""
        self._at_work.clear()  # they hold what waits for them
        super().close()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Implements `asyncio.loop.call_soon`."""
        if self._after_step is None:
            return super().call_soon(callback, *args, context=context)
        return super().call_soon(self._step, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Implements `asyncio.loop.call_at`."""
        if self._after_step is None:
            return super().call_at(when, callback, *args, context=context)
        return super().call_at(when, self._step, callback, *args, context=context)

    def _step(self, callback: Callable[..., Any], *args: Any) -> None:
        try:
            callback(*args)
        finally:
            assert self._after_step is not None
            owner = getattr(callback, "__self__", None)  # of a task's step
            self._after_step(owner if isinstance(owner, NumberedTask) else None)

    def _number(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        context: Context | None = None,
    ) -> NumberedTask:
        self._num_tasks += 1
        return NumberedTask(self._num_tasks, work, loop=loop, context=context)


def _work(future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], None]:
    """Do it now; the result calls back to hand in what came of it."""
    result: Any = None
    failure: Exception | None = None
    try:
        result = func(*args)
    except Exception as error:
        failure = error

    def deliver() -> None:
        if future.done():  # the caller no longer waits
            return
        if failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(result)

    return deliver


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
