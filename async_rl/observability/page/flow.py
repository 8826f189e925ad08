"""Where all dispatched trajectories are, as ribbons from the left to each stage. Pure; see `drawing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from markupsafe import Markup

from async_rl.observability.page.drawing import WIDTH

_ROW_PX: Final = 30
"""Height of a stage of the flow: room for its label."""

_TOP_PX: Final = 24
"""Above the stages, for the sum."""

_LONGEST_REASON: Final = 18
"""Characters that a label of the flow has room for on a phone."""


def flow_chart(*, in_flight: int, queued: int, trained: int, dropped: Mapping[str, int]) -> Markup:
    """Draw where all dispatched trajectories are: a ribbon from the left to the stage that each is in.

    What ends in a stage further to the right went through those before it.
    """
    ends: list[tuple[str, int, float, int]] = [("trained", trained, 0.5, 2)]
    ends += [
        (f"✕ {_shortened(reason)}", count, 0.5, 5)
        for reason, count in sorted(dropped.items(), key=lambda item: -item[1])
        if count
    ]
    ends += [("queued", queued, 0.34, 3), ("in flight", in_flight, 0.18, 1)]
    total, largest = sum(count for _, count, _, _ in ends), max(1, *(count for _, count, _, _ in ends))
    height = _TOP_PX + _ROW_PX * len(ends)
    # A ribbon is as wide as its share of the largest, and never too thin to be seen.
    widths = [max(3.0, count / largest * (_ROW_PX - 10)) if count else 0.0 for _, count, _, _ in ends]
    begin = _TOP_PX + (_ROW_PX - widths[0]) / 2
    shapes = [
        Markup('<rect class="stage" x="0" width="12" y="{:.1f}" height="{:.1f}"/>').format(
            begin - 2, sum(widths) + 4
        )
    ]
    labels = [Markup('<text y="13">dispatched <tspan class="count">{:,}</tspan></text>').format(total)]
    for i, ((label, count, x, tone), width) in enumerate(zip(ends, widths, strict=True)):
        middle = _TOP_PX + _ROW_PX * (i + 0.5)
        if count:
            shapes.append(_ribbon(label, count, tone, begin, middle - width / 2, width, x * WIDTH))
        share = f" · {count / total:.0%}" if total and count / total >= 0.005 else ""
        labels.append(
            Markup(
                '<text x="{:.0f}%" dx="10" y="{:.0f}" class="{}">{} '
                '<tspan class="count">{:,}</tspan>{}</text>'
            ).format(x * 100, middle + 4, "" if count else "none", label, count, share)
        )
        begin += width
    spoken = ", ".join(f"{label.replace('✕', 'dropped:')} {count:,}" for label, count, _, _ in ends)
    return Markup(
        '<figure class="flow"><svg role="img" aria-label="dispatched {:,}: {}" viewBox="0 0 1000 {h}" '
        'height="{h}" preserveAspectRatio="none">{}</svg><svg class="labels" height="{h}" aria-hidden="true">'
        "{}</svg></figure>"
    ).format(total, spoken, Markup("").join(shapes), Markup("").join(labels), h=height)


def _ribbon(label: str, count: int, tone: int, begin: float, end: float, width: float, x: float) -> Markup:
    """From `begin` at the left to `end` at `x`, and a bar where it ends."""
    bend = x / 2
    path = (
        f"M12 {begin:.1f}C{bend:.0f} {begin:.1f} {bend:.0f} {end:.1f} {x:.0f} {end:.1f}v{width:.1f}"
        f"C{bend:.0f} {end + width:.1f} {bend:.0f} {begin + width:.1f} 12 {begin + width:.1f}z"
    )
    return Markup(
        '<path class="ribbon t{tone}" d="{path}"><title>{label}: {count:,}</title></path>'
        '<rect class="bar t{tone}" x="{x:.0f}" width="10" y="{end:.1f}" height="{width:.1f}"/>'
    ).format(tone=tone, path=path, label=label, count=count, x=x, end=end, width=width)


def _shortened(reason: str) -> str:
    text = reason.replace("_", " ")
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 1]}…"
