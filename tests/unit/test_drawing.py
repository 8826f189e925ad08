"""Charts as inline SVG: right figures at right places, and nothing that anybody says becomes markup."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from async_rl.observability.page.drawing import (
    Band,
    Chart,
    Line,
    bar_chart,
    compact,
    line_chart,
    smoothed,
    thinned,
    ticks,
)
from async_rl.observability.page.flow import flow_chart
from tests.support.finished_run import HOSTILE


def parsed(markup: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<body>{markup}</body>")


def by_class(root: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [element for element in root.iter() if name in (element.get("class") or "").split()]


def chart(*lines: Line, **more: object) -> Chart:
    return Chart(name="x", title="X", note="n", lines=lines, **more)


def test_a_line_goes_from_edge_to_edge_and_higher_figures_stand_higher() -> None:
    drawn = chart(Line(label="a", values=[0.0, 1.0, 0.5]), floor=0.0, ceiling=1.0)
    (line,) = by_class(parsed(line_chart(drawn, [1, 2, 3])), "line")
    assert line.get("d") == "M0 1000L500 0 1000 500"
    assert line.get("data-xs") == "1 2 3"
    assert line.get("data-ys") == "0 1 0.5"


def test_a_line_has_a_gap_where_there_is_no_figure_and_goes_over_it_when_joined() -> None:
    values = [1.0, None, math.nan, 0.0]
    lines = (Line(label="gap", values=values), Line(label="joined", values=values, joined=True))
    gap, joined = by_class(parsed(line_chart(chart(*lines, floor=0.0, ceiling=1.0), [0, 1, 2, 3])), "line")
    assert gap.get("d") == "M0 0h0M1000 1000h0"
    assert joined.get("d") == "M0 0L1000 1000"


def test_the_bound_is_within_the_plot_when_all_figures_are_below_it() -> None:
    drawn = chart(Line(label="a", values=[0.0, 1.0]), floor=0.0, bound=4.0)
    root = parsed(line_chart(drawn, [1, 2]))
    (bound,) = by_class(root, "bound")
    assert 0 < float(bound.get("y1") or 0) < 100
    assert "bound 4" in "".join(root.itertext())


def test_a_spike_stays_when_a_long_run_is_thinned() -> None:
    points = [(float(x), 0.0) for x in range(10_000)]
    points[6_543] = (6543.0, 9.0)
    kept = thinned(points)
    assert len(kept) <= 300
    assert (6543.0, 9.0) in kept
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert kept == sorted(kept)


def test_nothing_is_drawn_when_there_is_no_figure() -> None:
    assert line_chart(chart(Line(label="a", values=[None, math.nan])), [1, 2]) == ""
    band = Band(label="b", low=[0.0, 0.0], high=[1.0, 1.0])
    assert line_chart(chart(Line(label="a", values=[None, None]), band=band), [1, 2]) == ""
    assert bar_chart("x", "X", "n", ["0", "1"], [0, 0], marked=None) == ""


@pytest.mark.parametrize("values", [[2.0], [0.0, 0.0], [-5.0, -5.0], [1e-12, 3e-12], [1e15, -1e15]])
def test_a_chart_is_drawn_within_its_plot_whatever_its_range(values: list[float]) -> None:
    root = parsed(line_chart(chart(Line(label="a", values=values)), list(range(len(values)))))
    (line,) = by_class(root, "line")
    numbers = (line.get("d") or "").replace("M", "").replace("L", " ").replace("h0", "").split()
    assert all(0 <= float(number) <= 1000 for number in numbers)


def test_bars_are_shares_of_the_whole_and_say_their_counts() -> None:
    root = parsed(bar_chart("s", "S", "n", ["0", "1", "2"], [30, 60, 10], marked=1))
    bars = by_class(root, "bar")
    assert [bar.get("height") for bar in bars] == ["500", "1000", "167"]
    assert bars[1].findtext("title") == "1: 60 (60.0%)"
    assert [line.get("x1") for line in by_class(root, "bound")] == ["667"]


def test_the_flow_accounts_for_all_that_was_dispatched() -> None:
    root = parsed(
        flow_chart(in_flight=30, queued=10, trained=950, dropped={"stale": 9, "lost": 1, "none": 0})
    )
    text = " ".join("".join(root.itertext()).split())
    for shown in (
        "dispatched 1,000",
        "trained 950 · 95%",
        "✕ stale 9",
        "✕ lost 1",
        "queued 10",
        "in flight 30",
    ):
        assert shown in text
    assert len(by_class(root, "ribbon")) == 5
    (figure,) = [element for element in root.iter() if element.get("role") == "img"]
    assert (figure.get("aria-label") or "").startswith("dispatched 1,000: trained 950, dropped: stale 9")


def test_a_flow_is_drawn_when_nothing_has_been_dispatched() -> None:
    root = parsed(flow_chart(in_flight=0, queued=0, trained=0, dropped={}))
    assert "dispatched 0" in "".join(root.itertext())
    assert by_class(root, "ribbon") == []


def test_what_anybody_says_stays_text() -> None:
    band = Band(label=HOSTILE, low=[0.0, 0.0], high=[1.0, 1.0])
    drawn = [
        line_chart(Chart(name="x", title=HOSTILE, note=HOSTILE, unit=HOSTILE, band=band,
                         lines=[Line(label=HOSTILE, values=[1.0, 2.0])]), [1, 2]),
        bar_chart("s", HOSTILE, HOSTILE, [HOSTILE], [1], marked=None),
        flow_chart(in_flight=1, queued=0, trained=0, dropped={HOSTILE: 2}),
    ]  # fmt: skip
    for markup in drawn:
        tags = {element.tag for element in parsed(markup).iter()}
        assert not tags & {"img", "script"}
        assert "<img" not in markup


def test_ticks_are_round_and_few() -> None:
    assert ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1.0]
    assert ticks(0.0, 0.0023) == pytest.approx([0, 0.001, 0.002])
    assert ticks(3, 3) == [3]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (0, "0"),
        (0.123456, "0.123"),
        (1.5e-5, "1.5e-5"),
        (1234, "1,234"),
        (11_830, "11.8k"),
        (2.5e6, "2.5M"),
        (-0.002, "-0.002"),
    ],
)
def test_a_figure_is_compact(value: float | None, text: str) -> None:
    assert compact(value) == text


def test_smoothing_leaves_out_what_is_no_figure() -> None:
    assert smoothed([1.0, None, 3.0, math.nan], 2) == [1.0, 1.0, 3.0, 3.0]
    assert smoothed([None], 5) == [None]
