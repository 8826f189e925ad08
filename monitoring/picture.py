"""Draws the layout of the dashboard for docs/guide/watching.md; the curves are made up."""

from __future__ import annotations

import math
import random
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
    chance = random.Random(panel.title)
    left, top, right, bottom = x + 8, y + 24, x + width - 8, y + height - 8
    if panel.kind == "stat":
        yield _text(x + width / 2, y + 14, panel.title, 11, "#9fa7b3", anchor="middle")
        yield (
            f'<rect x="{x + width / 2 - 22:.1f}" y="{y + 20:.1f}" width="44" height="7" rx="3" '
            f'fill="{_COLORS[0]}"/>'
        )
        return
    yield _text(left, y + 16, panel.title, 12, "#ccccdc")
    if panel.kind == "heatmap":
        size = (right - left) / 24
        for column in range(24):
            for row in range(4):
                shade = chance.random() * (0.9 - 0.2 * abs(row - 1))
                yield (
                    f'<rect x="{left + column * size:.1f}" y="{bottom - (row + 1) * 9:.1f}" '
                    f'width="{size - 1:.1f}" height="8" fill="#5794f2" opacity="{max(0.05, shade):.2f}"/>'
                )
    elif panel.kind == "state-timeline":
        for row in range(2):
            cut = left + (right - left) * chance.uniform(0.3, 0.8)
            for start, end, color in (
                (left, cut, _COLORS[0]),
                (cut, cut + 16, "#e02f44"),
                (cut + 16, right, _COLORS[0]),
            ):
                yield (
                    f'<rect x="{start:.1f}" y="{top + row * 16:.1f}" width="{end - start:.1f}" height="12" '
                    f'fill="{color}" opacity="0.75"/>'
                )
    else:
        for index in range(min(len(panel.queries), 4)):
            yield _curve(chance, left, top, right, bottom, _COLORS[index])
        for _, color in panel.limits[:1]:
            yield (
                f'<path d="M{left:.1f} {top:.1f}H{right:.1f}" stroke="{color}" stroke-dasharray="6 4" '
                'opacity="0.7"/>'
            )


def _curve(chance: random.Random, left: float, top: float, right: float, bottom: float, color: str) -> str:
    """A walk that stays in its box."""
    level, phase = chance.uniform(0.25, 0.75), chance.uniform(0, 6)
    points = []
    for step in range(41):
        level = min(0.95, max(0.05, level + chance.uniform(-0.06, 0.06)))
        share = min(1.0, max(0.0, level + 0.08 * math.sin(step / 5 + phase)))
        points.append(f"{left + (right - left) * step / 40:.1f} {bottom - (bottom - top) * share:.1f}")
    return f'<polyline points="{", ".join(points)}" fill="none" stroke="{color}" stroke-width="1.5"/>'


def _text(
    x: float, y: float, text: str, size: int, color: str, weight: str = "400", anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{color}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    PATH.write_text(picture())
