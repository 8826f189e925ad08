"""Writes the Grafana dashboard from `panels.py`: `python -m monitoring.dashboard` (`make docs` does it)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final

from async_rl.observability.metrics import PREFIX, Metrics, declared
from monitoring.panels import AT_A_GLANCE, ROWS, Panel

PATH: Final = Path(__file__).parent / "grafana" / "dashboards" / "async_rl.json"

COLUMNS: Final = 24
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it (schema version 39, Grafana 11 and later)."""
    return {
        "uid": "async-rl",
        "title": "async_rl",
        "description": "One run, from rollouts to trainer. docs/guide/watching.md says what to do about it.",
        "tags": ["async_rl"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,  # the cross-hair of one panel shows in all
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_data_source(), _run(), _window()]},
        "annotations": {"list": list(_annotations())},
        "links": [
            {"type": "link", "title": title, "url": url, "icon": "external link", "targetBlank": True}
            for title, url in (("Prometheus: alerts", "http://127.0.0.1:9090/alerts"),)
        ],
        "panels": list(_panels()),
    }


def _data_source() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _run() -> dict[str, Any]:
    definition = "label_values(async_rl_trainer_weight_version, run)"
    return {
        "name": "run",
        "type": "query",
        "label": "Run",
        "description": "run.name of its config",
        "datasource": _SOURCE,
        "definition": definition,
        "query": {"query": definition, "refId": "run"},
        "refresh": 2,  # when the range of time changes: a new run appears without a reload
        "sort": 1,
    }


def _window() -> dict[str, Any]:
    choices = ("1m", "5m", "15m", "1h")
    return {
        "name": "window",
        "type": "custom",
        "label": "Over the last",
        "description": "What rates, means and quantiles are taken over: longer than a few trainer steps",
        "query": ",".join(choices),
        "options": [{"text": c, "value": c, "selected": c == "5m"} for c in choices],
        "current": {"text": "5m", "value": "5m"},
    }


def _annotations() -> Iterator[dict[str, Any]]:
    for name, color, expr, text in (
        ("Alerts", "red", 'ALERTS{alertstate="firing", run="$run"}', "{{alertname}}"),
        (
            "Trainer restarts",
            "orange",
            'changes(async_rl_trainer_restarts_total{run="$run"}[1m]) > 0',
            "trainer restarted",
        ),
    ):
        yield {
            "name": name,
            "enable": True,
            "datasource": _SOURCE,
            "iconColor": color,
            "expr": expr,
            "titleFormat": text,
            "step": "30s",
        }


def _panels() -> Iterator[dict[str, Any]]:
    """The panels at a glance, then each row's, from left to right and from top to bottom."""
    numbers, y = count(1), 0
    helps = {
        PREFIX + name: f"{description.help} {description.bad}".strip()
        for name, description in declared(Metrics).items()
    }
    for title, panels in {"": AT_A_GLANCE, **ROWS}.items():
        if title:
            place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
            yield {"type": "row", "title": title, "id": next(numbers), "gridPos": place, "panels": []}
            y += 1
        for line in lines(panels):
            for x, width, panel in line:
                place = {"h": panel.height, "w": width, "x": x, "y": y}
                yield {**_panel(panel, helps), "id": next(numbers), "gridPos": place}
            y += max(panel.height for _, _, panel in line)


def lines(panels: Sequence[Panel]) -> Iterator[list[tuple[int, int, Panel]]]:
    """Panels side by side, with their place and width in columns; the last of a line takes what is left."""
    line: list[tuple[int, int, Panel]] = []
    x = 0
    for panel in panels:
        if x + panel.width > COLUMNS:
            yield _filled(line)
            line, x = [], 0
        line.append((x, panel.width, panel))
        x += panel.width
    yield _filled(line)


def _filled(line: list[tuple[int, int, Panel]]) -> list[tuple[int, int, Panel]]:
    x, _, panel = line[-1]
    return [*line[:-1], (x, COLUMNS - x, panel)]


def _panel(panel: Panel, helps: dict[str, str]) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": _description(panel, helps),
        "datasource": _SOURCE,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                **({"format": "heatmap"} if panel.kind == "heatmap" else {}),
            }
            for index, query in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": list(_overrides(panel))},
        "options": _OPTIONS[panel.kind],
    }


def _description(panel: Panel, helps: dict[str, str]) -> str:
    """What to make of it, and what each metric is and means."""
    named = re.findall(r"\basync_rl_\w+", " ".join(query.expr for query in panel.queries))
    lines = {}
    for name in named:
        family = next(
            (n for n in (name, re.sub(r"_(total|bucket|sum|count)$", "", name)) if n in helps), None
        )
        if family:
            lines[family] = f"- `{family}`: {helps[family]}"
    return "\n".join([panel.says, "", *lines.values()]).strip()


def _defaults(panel: Panel) -> dict[str, Any]:
    base = "transparent" if panel.kind == "timeseries" else "green" if panel.limits else "text"
    steps = [{"value": None, "color": base}, *({"value": v, "color": c} for v, c in panel.limits)]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": steps},
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
    }
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineInterpolation": "smooth",
            "lineWidth": 2,
            "fillOpacity": 40 if panel.stacked else 10,
            "gradientMode": "opacity",
            "showPoints": "never",
            "spanNulls": True,  # a gauge between two runs, a mean between two steps
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if panel.limits else "off"},
        }
    elif panel.kind == "state-timeline":
        defaults["custom"] = {"fillOpacity": 70, "lineWidth": 0}
    if not panel.below_zero and panel.kind == "timeseries":
        defaults["min"] = 0
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    return defaults


def _overrides(panel: Panel) -> Iterator[dict[str, Any]]:
    for legend, color in panel.colors.items():
        yield {
            "matcher": {"id": "byName", "options": legend},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": color}}],
        }


_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "timeseries": {
        "legend": {
            "displayMode": "list",
            "placement": "bottom",
            "showLegend": True,
            "calcs": ["lastNotNull"],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "center",
        "textMode": "value",
    },
    "heatmap": {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 64, "exponent": 0.5},
        "filterValues": {"le": 1e-9},  # empty cells stay empty
        "yAxis": {"unit": "none", "decimals": 0},
        "tooltip": {"mode": "single", "yHistogram": True},
        "legend": {"show": False},
    },
    "state-timeline": {
        "showValue": "never",
        "mergeValues": True,
        "rowHeight": 0.8,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False},
        "tooltip": {"mode": "single"},
    },
}


def written() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(written())
