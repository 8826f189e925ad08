"""A console of rich that prints text as it is: no markup, no control characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from async_rl.runtime.printable import printable


class TextConsole(Console):
    """Parses no string as markup, and shows control characters as escapes, whatever is printed.

    Colours and the cursor are rich's own control codes, which are not text.
    """

    def __init__(self, **options: Any) -> None:
        """Take the options of `rich.console.Console`."""
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a string a renderable; escapes count in its width."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render anything."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def pairs(rows: Sequence[tuple[str, str | Text]]) -> Table:
    """Return names beside their values; a long value goes over several lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(f"  {name}"), Text(value) if isinstance(value, str) else value)
    return table
