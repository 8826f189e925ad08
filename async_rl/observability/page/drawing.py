"""Charts as inline SVG that fit any width: lines and bars. Pure.

A chart has no width of its own. Shapes stand in an `<svg>` that is stretched (`preserveAspectRatio="none"`,
strokes that do not scale), labels beside it at percentages, so that the same markup is right on a phone and
on a wide screen, without a script. Colours are classes (`t1` … `t6`), which `page.css` defines for light and
dark. All text goes through `Markup.format`, which escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from markupsafe import Markup

from async_rl.observability.records import Figure, is_finite, mean

Place = Callable[[float, float], tuple[int, int]]
"""Where a point stands in the plot, in units of the stretched shapes."""

WIDTH: Final = 1000
"""Of the stretched shapes, in their own units; heights are per mille of the plot."""

MAX_POINTS: Final = 300
"""Of a line: more than a chart has pixels for. Minima and maxima of what is left out stay."""

_COMPACT: Final = ((1e9, "G"), (1e6, "M"), (1e4, "k"))


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a chart, a value for each x; where there is none the line has a gap."""

    label: str
    values: Sequence[Figure]
    tone: int = 1
    faint: bool = False
    joined: bool = False
    """Whether it goes on straight over gaps: for what is measured every few steps only."""


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """The area between two lines."""

    label: str
    low: Sequence[Figure]
    high: Sequence[Figure]
    tone: int = 1


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """What a line chart shows."""

    name: str
    """Stable, for links and tests: `ppo-kl`."""
    title: str
    note: str
    """One sentence: what is good, or what a bad value means."""
    lines: Sequence[Line]
    band: Band | None = None
    unit: str = ""
    bound: float | None = None
    """A limit that is drawn as a dashed line."""
    floor: Figure = None
    """The y axis reaches down to it at least."""
    ceiling: Figure = None

    def values(self) -> list[float]:
        """All finite figures of it."""
        rows = [line.values for line in self.lines]
        if self.band is not None:
            rows += [self.band.low, self.band.high]
        return [value for row in rows for value in row if is_finite(value)]


def compact(value: Figure, digits: int = 3) -> str:
    """A figure in a few characters: `0.0123`, `1.2e-05`, `12.3k`, `n/a`."""
    if not is_finite(value):
        return "n/a"
    size = abs(value)
    for scale, letter in _COMPACT:
        if size >= scale:
            divisor = scale / 10 if letter == "k" else scale
            return f"{value / divisor:.{digits}g}{letter}"
    if size and size < 1e-3:
        return f"{value:.{max(0, digits - 2)}e}".replace("e-0", "e-")
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Round numbers within a range, at most so many."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        power * factor for factor in (1, 2, 2.5, 5, 10, 20) if (high - low) / (power * factor) <= most
    )
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def thinned(points: Sequence[tuple[float, float]], most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most so many points: of each stretch its lowest and its highest, and the first and last of all."""
    if len(points) <= most:
        return list(points)
    num_stretches = (most - 2) // 2
    inner = points[1:-1]
    kept = [points[0]]
    for i in range(num_stretches):
        stretch = inner[i * len(inner) // num_stretches : (i + 1) * len(inner) // num_stretches]
        extremes = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(extremes)
    return [*kept, points[-1]]


def line_chart(chart: Chart, xs: Sequence[float]) -> Markup:
    """Draw a chart over its x values (trainer steps); nothing when there is no finite figure in it."""
    if not any(is_finite(value) for line in chart.lines for value in line.values):
        return Markup("")  # a band alone is what records of older versions leave
    values = chart.values()
    low, high = _range(chart, values)
    x_low, x_high = xs[0], xs[-1]

    def place(x: float, y: float) -> tuple[int, int]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return round(across * WIDTH), round((high - y) / (high - low) * 1000)

    y_ticks = ticks(low, high)
    grid = Markup("").join(
        Markup('<line class="grid" x1="0" x2="1000" y1="{0}" y2="{0}"/>').format(place(x_low, tick)[1])
        for tick in y_ticks
    )
    shapes = [grid]
    if chart.band is not None:
        shapes.append(_area(chart.band, xs, place))
    if chart.bound is not None:
        y = place(x_low, chart.bound)[1]
        shapes.append(Markup('<line class="bound" x1="0" x2="1000" y1="{0}" y2="{0}"/>').format(y))
    shapes += [_path(line, xs, place) for line in chart.lines if any(map(is_finite, line.values))]
    return Markup(
        '<figure class="chart" id="chart-{name}"><figcaption><h3>{title}{unit}</h3><p>{note}</p></figcaption>'
        '{legend}<div class="plot">{y_axis}<svg class="shapes" role="img" aria-label="{label}" '
        'viewBox="0 0 1000 1000" preserveAspectRatio="none">{shapes}</svg>{x_axis}</div></figure>'
    ).format(
        name=chart.name,
        title=chart.title,
        unit=Markup(" <small>{}</small>").format(chart.unit) if chart.unit else "",
        note=chart.note,
        legend=_legend(chart),
        y_axis=_y_axis(y_ticks, [place(x_low, tick)[1] for tick in y_ticks]),
        label=_spoken(chart, xs),
        shapes=Markup("").join(shapes),
        x_axis=_x_axis(x_low, x_high),
    )


def bar_chart(
    name: str, title: str, note: str, labels: Sequence[str], counts: Sequence[float], *, marked: int | None
) -> Markup:
    """Draw counts as bars side by side, as shares of their sum; nothing when all are zero.

    Args:
        name: See `Chart`.
        title: Heading.
        note: See `Chart`.
        labels: Under the bars.
        counts: Their sizes.
        marked: Index of the bar after which the bound is drawn, where there is one.
    """
    total = sum(counts)
    if not total:
        return Markup("")
    shares = [count / total for count in counts]
    top, each = max(shares), WIDTH / len(shares)
    y_ticks = ticks(0, top)
    shapes = [
        Markup('<line class="grid" x1="0" x2="1000" y1="{0}" y2="{0}"/>').format(round(1000 - t / top * 1000))
        for t in y_ticks
    ]
    for i, share in enumerate(shares):
        height = share / top * 1000
        shapes.append(
            Markup(
                '<rect class="bar t1" x="{:.1f}" width="{:.1f}" y="{:.0f}" height="{:.0f}">'
                "<title>{}: {:,.0f} ({:.1%})</title></rect>"
            ).format((i + 0.1) * each, each * 0.8, 1000 - height, height, labels[i], counts[i], share)
        )
    if marked is not None:
        x = (marked + 1) * each
        shapes.append(
            Markup('<line class="bound" x1="{0:.0f}" x2="{0:.0f}" y1="0" y2="1000"/>').format(min(x, 998))
        )
    every = math.ceil(len(labels) / 12)
    x_labels = Markup("").join(
        Markup('<text x="{:.2f}%" y="14" text-anchor="middle">{}</text>').format(
            (i + 0.5) / len(labels) * 100, text
        )
        for i, text in enumerate(labels)
        if i % every == 0
    )
    spoken = ", ".join(f"{text}: {share:.0%}" for text, share in zip(labels, shares, strict=True))
    positions = [round(1000 - t / top * 1000) for t in y_ticks]
    return Markup(
        '<figure class="chart" id="chart-{}"><figcaption><h3>{}</h3><p>{}</p></figcaption>'
        '<div class="plot">{}<svg class="shapes" role="img" aria-label="{}" viewBox="0 0 1000 1000" '
        'preserveAspectRatio="none">{}</svg><svg class="x-axis" aria-hidden="true">{}</svg></div></figure>'
    ).format(
        name,
        title,
        note,
        _y_axis(y_ticks, positions, percent=True),
        spoken,
        Markup("").join(shapes),
        x_labels,
    )


def _range(chart: Chart, values: Sequence[float]) -> tuple[float, float]:
    """From the lowest to the highest figure, with a little room, so that no line runs along the edge."""
    low, high = min(values), max(values)
    if chart.bound is not None:
        high = max(high, chart.bound)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    bottom, top = low - room, high + room
    if chart.floor is not None and low >= chart.floor:
        bottom = chart.floor
    if chart.ceiling is not None and high <= chart.ceiling:
        top = chart.ceiling
    return bottom, max(top, math.nextafter(bottom, math.inf))


def _points(line: Line, xs: Sequence[float]) -> list[list[tuple[float, float]]]:
    """The stretches of a line that have figures, thinned together."""
    finite = [(x, y) for x, y in zip(xs, line.values, strict=True) if is_finite(y)]
    kept = set(thinned(finite))
    stretches: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(xs, line.values, strict=True):
        if not is_finite(y):
            if stretches[-1] and not line.joined:
                stretches.append([])
        elif (x, y) in kept:
            stretches[-1].append((x, y))
    return [stretch for stretch in stretches if stretch]


def _path(line: Line, xs: Sequence[float], place: Place) -> Markup:
    stretches = _points(line, xs)
    drawn = []
    for stretch in stretches:
        (x, y), *rest = (place(*point) for point in stretch)
        # A point of its own is a line of no length, which round caps make a dot.
        drawn.append(f"M{x} {y}" + ("L" + " ".join(f"{x} {y}" for x, y in rest) if rest else "h0"))
    flat = [point for stretch in stretches for point in stretch]
    return Markup('<path class="line t{}{}" d="{}" data-label="{}" data-xs="{}" data-ys="{}"/>').format(
        line.tone,
        " faint" if line.faint else "",
        "".join(drawn),
        line.label,
        " ".join(f"{x:g}" for x, _ in flat),
        " ".join(compact(y, 4) for _, y in flat),
    )


def _area(band: Band, xs: Sequence[float], place: Place) -> Markup:
    rows = [
        (x, low, high)
        for x, low, high in zip(xs, band.low, band.high, strict=True)
        if is_finite(low) and is_finite(high)
    ]
    if not rows:
        return Markup("")
    upper = thinned([(x, high) for x, _, high in rows])
    lower = thinned([(x, low) for x, low, _ in rows])
    outline = [place(*point) for point in (*upper, *reversed(lower))]
    path = "M" + "L".join(f"{x} {y}" for x, y in outline) + "z"
    return Markup('<path class="band t{}" d="{}"/>').format(band.tone, path)


def _legend(chart: Chart) -> Markup:
    items = []
    if chart.band is not None:
        items.append(Markup('<li class="t{} area">{}</li>').format(chart.band.tone, chart.band.label))
    for line in chart.lines:
        last = next((value for value in reversed(line.values) if is_finite(value)), None)
        if last is not None and not line.faint:
            items.append(
                Markup('<li class="t{}">{} <b>{}</b></li>').format(line.tone, line.label, compact(last))
            )
    if chart.bound is not None:
        items.append(Markup('<li class="limit">bound <b>{}</b></li>').format(compact(chart.bound)))
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))


def _y_axis(marks: Sequence[float], positions: Sequence[int], *, percent: bool = False) -> Markup:
    labels = Markup("").join(
        Markup('<text x="100%" y="{:.1f}%" dy="4" text-anchor="end">{}</text>').format(
            position / 10, f"{mark:.0%}" if percent else compact(mark)
        )
        for mark, position in zip(marks, positions, strict=True)
    )
    return Markup('<svg class="y-axis" aria-hidden="true">{}</svg>').format(labels)


def _x_axis(low: float, high: float) -> Markup:
    marks = [low] if low == high else [low, (low + high) // 2, high]
    labels = []
    for mark in dict.fromkeys(marks):
        across = (mark - low) / (high - low) * 100 if high > low else 50.0
        anchor = "start" if across == 0 else "end" if across == 100 else "middle"
        labels.append(
            Markup('<text x="{:.2f}%" y="14" text-anchor="{}">{:g}</text>').format(across, anchor, mark)
        )
    return Markup('<svg class="x-axis" aria-hidden="true">{}</svg>').format(Markup("").join(labels))


def _spoken(chart: Chart, xs: Sequence[float]) -> str:
    """What a screen reader says of a chart."""
    said = []
    for line in chart.lines:
        finite = [value for value in line.values if is_finite(value)]
        if finite and not line.faint:
            span = f"from {compact(min(finite))} to {compact(max(finite))}"
            said.append(f"{line.label} last {compact(finite[-1])}, {span}")
    return f"{chart.title}, steps {xs[0]:g} to {xs[-1]:g}: " + "; ".join(said)


def smoothed(values: Sequence[Figure], window: int) -> list[Figure]:
    """Mean of each value and the ones before it; None where all of them are."""
    return [mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]
