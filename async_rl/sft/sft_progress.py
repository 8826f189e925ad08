"""Shows the progress of a supervised run: a bar on a terminal, otherwise about twenty lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from async_rl.observability.records import Figure
from async_rl.observability.text_console import TextConsole

_NUM_LINES: Final = 20


class SftProgress:
    """Prints the progress of a supervised run."""

    def __init__(self, console: TextConsole, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Show nothing before the first step."""
        self._console = console
        self._total = total
        self._clock = clock
        self._started_s = clock()
        self._first_step = 0
        self._bar = Bar(
            TextColumn("sft", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("sft", total=total, figures="")

    def print_line(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, soft_wrap=True)

    def show_resumed(self, step: int) -> None:
        """Show that the ranks have started and continue after this step."""
        self._first_step, self._started_s = step, self._clock()
        self._bar.update(self._task, completed=step)
        if step:
            self.print_line(f"resumed after step {step}")
        if self._console.is_interactive:
            self._bar.start()

    def show_step(self, step: int, loss: Figure, validation_loss: Figure, tokens_per_s: float) -> None:
        """Show a finished step."""
        figures = f"loss {_figure(loss)}"
        if validation_loss is not None:
            figures += f"  validation loss {_figure(validation_loss)}"
        figures += f"  {tokens_per_s:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, figures=figures)
        every = max(1, self._total // _NUM_LINES)
        if not self._console.is_interactive and (
            step % every == 0 or step == self._total or validation_loss is not None
        ):
            left_s = (
                (self._clock() - self._started_s) / max(1, step - self._first_step) * (self._total - step)
            )
            self.print_line(f"step {step}/{self._total}  {figures}  {left_s:.0f} s left")

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()


def _figure(value: Figure) -> str:
    return "n/a" if value is None else f"{value:.4f}"
