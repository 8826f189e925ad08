"""Shows how far long work is, so that a command that takes minutes does not look as if it hung."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from async_rl.observability.formatting import format_duration
from async_rl.observability.text_console import TextConsole

_LINE_EVERY_S: Final = 5.0
"""When the first line is printed where there is no terminal, and how often one is at most."""

_MAX_LINES_SHARE: Final = 0.1
"""The next line comes after this share of the time so far, so that work of hours does not fill a log."""

_BAR_AFTER_S: Final = 1.0
_BAR_EVERY_S: Final = 0.1

T = TypeVar("T")


class LongWork:
    """Shows how much of a piece of work is done: a bar on a terminal, elsewhere a line now and then.

    Work of less than a second shows nothing on a terminal, and of less than five elsewhere.
    """

    def __init__(
        self,
        title: str,
        unit: str,
        total: int | None = None,
        *,
        console: TextConsole | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show nothing yet.

        Args:
            title: What is being done.
            unit: What is counted.
            total: How many there are in all; None if that is not known.
            console: Where it is shown; None takes stderr, which no program reads as a result.
            clock: Monotonic seconds.
        """
        self._title, self._unit, self._total, self._clock = title, unit, total, clock
        self._console = console or TextConsole(stderr=True)
        self._began_s = clock()
        self._next_s = self._began_s + (_BAR_AFTER_S if self._console.is_interactive else _LINE_EVERY_S)
        self._bar: Progress | None = None

    def __enter__(self) -> LongWork:
        """Show nothing yet."""
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()

    def show_done(self, number: int, figures: str = "", *, at_once: bool = False) -> None:
        """Show how many are done, with figures; unless `at_once`, not if something was shown just now."""
        now_s = self._clock()
        if now_s < self._next_s and not at_once:
            return
        elapsed_s = now_s - self._began_s
        if self._console.is_interactive:
            self._next_s = now_s + _BAR_EVERY_S
            self._show_bar(number, figures)
            return
        self._next_s = now_s + max(_LINE_EVERY_S, _MAX_LINES_SHARE * elapsed_s)
        of_all = "" if self._total is None else f" of {self._total:,}"
        line = f"{self._title}: {number:,}{of_all} {self._unit} after {format_duration(elapsed_s)}"
        self._console.print(", ".join(filter(None, (line, figures))), soft_wrap=True)

    def _show_bar(self, number: int, figures: str) -> None:
        if self._bar is None:
            self._bar = Progress(
                TextColumn(self._title, markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(self._unit, markup=False),
                TextColumn("{task.fields[figures]}", markup=False),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.add_task(self._title, total=self._total, figures=figures)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=number, figures=figures)


def show_progress(items: Iterable[T], title: str, unit: str) -> Iterator[T]:
    """Yield items, and show how many have been taken if that takes long."""
    with LongWork(title, unit) as work:
        for number, item in enumerate(items):
            work.show_done(number)
            yield item
