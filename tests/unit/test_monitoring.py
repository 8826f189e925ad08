"""What monitoring ships: rules and alerts, dashboards that name only metrics that exist, services."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.observability.metrics import Metrics
from monitoring import dashboard, picture

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "monitoring"


def load(path: str) -> Any:
    return yaml.safe_load((MONITORING / path).read_text())


RULES = [rule for group in load("rules/async_rl.yml")["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
CASES = load("rules/tests/async_rl.yml")["tests"]
COMPOSE = load("docker-compose.yml")
SERVICES = COMPOSE["services"]


# -- Prometheus --


def test_rules_name_only_metrics_that_exist_and_use_what_they_record() -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    named = {name for rule in RULES for name in re.findall(r"\b(?:\w+:)?async_rl_[\w:]+", rule["expr"])}
    # The job's name, in quotes, is no metric.
    assert {name for name in named if ":" in name} == recorded
    assert {name for name in named if ":" not in name} - exposed() == set()


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_bad_it_is_and_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook"}
    assert "{{ $labels.run }}" in rule["annotations"]["summary"]
    page, _, section = rule["annotations"]["runbook"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.M)
    assert section in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert name in headings


def test_every_alert_is_in_the_table_of_the_docs() -> None:
    rows = re.findall(
        r"^\| \[`(\w+)`\]\(troubleshooting\.md#(\w+)\)", (ROOT / "docs/guide/watching.md").read_text(), re.M
    )
    assert sorted(name for name, _ in rows) == sorted(ALERTS)
    assert [(name, anchor) for name, anchor in rows if anchor != name.lower()] == []


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_is_tested_to_fire_and_to_be_silent(name: str) -> None:
    cases = [case for case in CASES if case["name"].split(":")[0] == name]
    seen = [bool(check["exp_samples"]) for case in cases for check in case["promql_expr_test"]]
    assert set(seen) == {True, False}
    fired = {s["labels"] for c in cases for check in c["promql_expr_test"] for s in check["exp_samples"]}
    assert fired == {f'{{alertname="{name}"}}'}


# -- Docker Compose: there is no Docker in CI, so that what it would refuse is looked at here --


def test_services_are_pinned_and_reached_from_this_machine_with_a_password_only() -> None:
    assert all(re.search(r":v?\d+\.\d+\.\d+$", service["image"]) for service in SERVICES.values())
    assert {service["network_mode"] for service in SERVICES.values()} == {"host"}  # no port is published
    assert "--web.listen-address=127.0.0.1:9090" in SERVICES["prometheus"]["command"]
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    password = environment["GF_SECURITY_ADMIN_PASSWORD"]
    assert re.fullmatch(r"\$\{GRAFANA_PASSWORD:\?[^}]+\}", password)  # compose refuses to start without it


def test_make_monitor_draws_a_password_that_only_its_user_can_read(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    file = tmp_path / ".tools/grafana.env"

    def make_monitor() -> str:
        subprocess.run(["make", ".tools/grafana.env"], cwd=tmp_path, check=True, capture_output=True)
        assert file.stat().st_mode & 0o777 == 0o600
        return file.read_text()

    password = make_monitor()
    assert re.fullmatch(r"GRAFANA_PASSWORD=[0-9a-f]{32}\n", password)
    assert make_monitor() == password  # Grafana keeps the first one
    file.unlink()
    assert make_monitor() != password


def test_mounts_are_read_only_and_exist() -> None:
    mounts = [m.split(":") for service in SERVICES.values() for m in service["volumes"]]
    assert sorted(mount[0] for mount in mounts if not mount[0].startswith(".")) == sorted(COMPOSE["volumes"])
    ours = [mount for mount in mounts if mount[0].startswith(".")]
    assert {mount[2] for mount in ours} == {"ro"}
    missing = [mount[0] for mount in ours if not (MONITORING / mount[0]).exists()]
    assert set(missing) <= {"../runs/.prometheus"}  # made by `make monitor`


# -- the shipped dashboards name only metrics that exist ----------------------------------------------


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
