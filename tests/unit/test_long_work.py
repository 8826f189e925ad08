"""What a command shows of work that takes long, on a terminal and elsewhere."""

from __future__ import annotations

import io

from async_rl.observability.long_work import LongWork, show_progress
from async_rl.observability.text_console import TextConsole


class Work:
    """Work whose time passes as a test says, and what is shown of it."""

    def __init__(self, total: int | None, *, terminal: bool = False) -> None:
        self.now_s = 0.0
        self.file = io.StringIO()
        console = TextConsole(file=self.file, force_terminal=terminal, width=100, color_system=None)
        self.shown = LongWork("reading it", "rows", total, console=console, clock=lambda: self.now_s)

    def show(self, *moments: tuple[float, int]) -> list[str]:
        with self.shown:
            for self.now_s, done in moments:
                self.shown.show_done(done)
        return self.file.getvalue().splitlines()


def test_nothing_is_shown_when_work_is_short() -> None:
    assert Work(100).show((0.0, 0), (4.9, 99)) == []
    assert Work(100, terminal=True).show((0.0, 0), (0.9, 99)) == []


def test_lines_are_seconds_apart_and_rarer_later_when_there_is_no_terminal() -> None:
    every_second = [(float(second), 10 * second) for second in range(3601)]
    lines = Work(36_000).show(*every_second)
    assert lines[:2] == [
        "reading it: 50 of 36,000 rows after 5 s",
        "reading it: 100 of 36,000 rows after 10 s",
    ]
    assert 40 < len(lines) < 80
    assert Work(None).show((5.0, 1234)) == ["reading it: 1,234 rows after 5 s"]


def test_a_bar_is_shown_and_removed_when_there_is_a_terminal() -> None:
    text = "".join(Work(100, terminal=True).show((0.0, 0), (1.0, 20), (2.0, 40)))
    assert "reading it" in text
    assert "\x1b[?25h" in text, "the cursor is back"


def test_items_are_yielded_in_order_when_their_progress_is_shown() -> None:
    assert list(show_progress("abc", "reading it", "letters")) == ["a", "b", "c"]
