"""The shipped dashboards name only metrics that exist, and load."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_rl.observability.metrics import Metrics
from monitoring import dashboard, picture
from monitoring.panels import TRAINER

MONITORING = Path(__file__).parents[2] / "monitoring"
DASHBOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))


def exposed() -> set[str]:
    """Returns the names of all series that a driver serves."""
    names = set()
    for family in Metrics().registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
    return names


def expressions(node: Any) -> Iterator[str]:
    """Yields every query of a dashboard, including those of its variables."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "definition") or (key == "query" and isinstance(value, str)):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from expressions(value)


def unknown(shown: Any) -> set[str]:
    """Returns metric names in a dashboard that no driver serves."""
    # Label values, in quotes, are no metrics.
    named = {
        name
        for text in expressions(shown)
        for name in re.findall(r"\basync_rl_\w+", re.sub(r'"[^"]*"', '""', text))
    }
    return named - exposed()


def panels(shown: Any) -> list[Any]:
    return [inner for panel in shown["panels"] for inner in (panel, *panel.get("panels", []))]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_names_only_metrics_that_exist(path: Path) -> None:
    shown = json.loads(path.read_text())
    assert unknown(shown) == set()
    assert len(list(expressions(shown))) > 20


def test_an_unknown_metric_is_seen() -> None:
    shown = {"panels": [{"targets": [{"expr": "rate(async_rl_rewards_total[5m]) / async_rl_reward"}]}]}
    assert unknown(shown) == {"async_rl_rewards_total"}


def test_a_histogram_is_not_a_series_of_its_own() -> None:
    assert unknown({"expr": "async_rl_staleness_versions"}) == {"async_rl_staleness_versions"}
    assert unknown({"expr": "async_rl_staleness_versions_bucket"}) == set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_panels_have_ids_of_their_own_and_say_what_they_show(path: Path) -> None:
    shown = panels(json.loads(path.read_text()))
    ids = [panel["id"] for panel in shown]
    assert len(set(ids)) == len(ids)
    assert [p["title"] for p in shown if p["type"] != "row" and not p.get("description")] == []


def test_the_dashboard_has_a_row_for_each_part() -> None:
    rows = [panel["title"] for panel in dashboard.dashboard()["panels"] if panel["type"] == "row"]
    assert rows == ["Flow", "Evaluation", "Staleness", "Engines", "Weights", "Routing", "Trainer", "Health"]


def test_dashboard_and_picture_are_what_the_panels_say() -> None:
    assert dashboard.PATH.read_text() == dashboard.written(), "run `make docs`"
    assert picture.PATH.read_text() == picture.picture(), "run `make docs`"


def test_panels_fill_their_rows_and_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard.dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    lines = {y for _, y in taken}
    assert lines == set(range(len(lines)))
    assert {sum((x, y) in taken for x in range(24)) for y in lines} == {24}


def test_each_panel_tells_the_help_of_its_metrics() -> None:
    (panel,) = [p for p in dashboard.dashboard()["panels"] if p["title"] == "Tokens"]
    assert "`async_rl_sampled_tokens_total`: Tokens sampled by engines." in panel["description"]


def test_the_dashboard_says_what_a_spike_of_each_kl_means() -> None:
    said = {panel.title: panel.says for panel in TRAINER}
    assert "A spike:" in said["ppo_kl"]
    for part in ("A spike of mismatch:", "Of staleness:", "Of routing:"):
        assert part in said["Parts of the KL"]


def test_every_metric_is_on_the_dashboard() -> None:
    text = (MONITORING / "grafana" / "dashboards" / "async_rl.json").read_text()
    missing = {family.name for family in Metrics().registry.collect() if family.name not in text}
    assert missing == set()
