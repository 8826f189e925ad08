"""The files around the dashboard: Prometheus' config, alert rules, Docker Compose, provisioning."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.test_dashboards import exposed

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
