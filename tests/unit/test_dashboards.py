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

MONITORING = Path(__file__).parents[2] / "monitoring"
DASHBOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))


def exposed() -> set[str]:
    """Return the names of all series that a driver serves."""
    names = set()
    for family in Metrics().registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
    return names


def expressions(node: Any) -> Iterator[str]:
    """Yield every query of a dashboard, including those of its variables."""
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
    """Return metric names in a dashboard that no driver serves."""
    # Label values, in quotes, are no metrics.
    named = {
        name
        for text in expressions(shown)
        for name in re.findall(r"\basync_rl_\w+", re.sub(r'"[^"]*"', '""', text))
    }
    return named - exposed()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_names_only_metrics_that_exist(path: Path) -> None:
    shown = json.loads(path.read_text())
    assert unknown(shown) == set()
    assert len(list(expressions(shown))) > 20


def test_dashboard_and_picture_are_what_the_panels_say() -> None:
    assert dashboard.PATH.read_text() == dashboard.written(), "run `make docs`"
    assert picture.PATH.read_text() == picture.picture(), "run `make docs`"


def test_every_metric_is_on_the_dashboard() -> None:
    text = dashboard.PATH.read_text()
    assert {family.name for family in Metrics().registry.collect() if family.name not in text} == set()
