"""Draws the layout of the dashboard for docs/guide/watching.md: its panels with their first lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Final

from monitoring.dashboard import COLUMNS, lines
from monitoring.panels import AT_A_GLANCE, ROWS, Panel

PATH: Final = Path(__file__).parents[1] / "docs" / "images" / "dashboard.svg"

_WIDTH: Final = 1200
_COLUMN: Final = _WIDTH / COLUMNS
_UNIT: Final = 9.0
"""Height of one of Grafana's rows of the grid, pixels."""
_GAP: Final = 4.0
_LINES: Final = 4
"""The most legends in a panel."""
_COLORS: Final = ("#73bf69", "#5794f2", "#f2cc0c", "#ff9830", "#b877d9")


def picture() -> str:
    """The SVG."""
    drawn: list[str] = []
    y = _GAP
    for title, panels in {"": AT_A_GLANCE, **ROWS}.items():
        if title:
            drawn.append(_text(_GAP + 4, y + 17, f"▾ {title}", 14, "#d8d9da", "600"))
            y += 26
        for line in lines(panels):
            height = max(panel.height for _, _, panel in line) * _UNIT
            for column, width, panel in line:
                drawn += _panel(panel, column * _COLUMN + _GAP / 2, y, width * _COLUMN - _GAP, height - _GAP)
            y += height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + _GAP:.0f}" '
            'font-family="Inter, Helvetica, Arial, sans-serif" role="img" '
            'aria-label="Rows and panels of the Grafana dashboard">',
            '<rect width="100%" height="100%" fill="#111217"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def _panel(panel: Panel, x: float, y: float, width: float, height: float) -> Iterator[str]:
    yield (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" '
        'fill="#181b1f" stroke="#2c3235"/>'
    )
    if panel.kind == "stat":
        yield _text(x + width / 2, y + height / 2 + 4, panel.title, 11, "#9fa7b3", anchor="middle")
        return
    yield _text(x + 8, y + 16, panel.title, 12, "#ccccdc")
    for line, (query, color) in enumerate(zip(panel.queries[:_LINES], _COLORS, strict=False)):
        yield _text(x + 8, y + 32 + 11 * line, re.sub(r"[{}]", "", query.legend), 9, color)


def _text(
    x: float, y: float, text: str, size: int, color: str, weight: str = "400", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{color}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    PATH.write_text(picture())
