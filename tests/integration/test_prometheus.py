"""Prometheus itself checks the rules, finds and scrapes a run, and has data for every dashboard query."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.cli.train import train
from async_rl.config import Config
from async_rl.engines import repair
from async_rl.engines.sglang.server import free_port
from async_rl.observability import endpoints
from async_rl.observability.console_report import RunProgress
from async_rl.observability.loop_watchdog import LoopWatchdog
from async_rl.observability.records import Summary
from async_rl.rollout.rewards import reward_calls
from async_rl.run import doctor, entry
from async_rl.weights import checksums
from monitoring.dashboard import dashboard
from tests.support.environment import program
from tests.support.recorded_series import INTERVAL_S, RecordedSeries
from tests.support.troubled_run import TroubledCluster, settings
from tests.unit.test_monitoring import expressions

NO_VALUES = ("async_rl_hand_over_", "async_rl_length_ks", "async_rl_throughput_vs_plan_")
"""Metrics without values in this run: it shares no devices, trains too few trajectories, and is short."""

pytestmark = [
    pytest.mark.needs("prometheus"),
    pytest.mark.timeout(600),  # events end the run, at any speed of the machine
]

HEALTHY_RUNS = sorted((Path(__file__).parents[1] / "support" / "healthy_runs").glob("*.json.gz"))

NEED_HOURS = {
    "run:async_rl_lag0_log_prob_abs_diff_nats:mean1h",
    "MismatchGrows",
    "DiskFilling",
    "WeightUpdateSlower",
}
"""Rules that compare hours, which this run does not last; promtool tests them."""

ROOT = Path(__file__).parents[2]
RULES = ROOT / "monitoring" / "rules"

SCRAPES = 12
"""Steps after the last fault, so that scrapes see regular steps."""

MAX_SCRAPES = 1000
"""A run that is scraped so often will not show what is missing."""


def promtool(*words: str | Path) -> None:
    done = subprocess.run(
        [program("promtool"), *words], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_config_and_rules_are_accepted() -> None:
    promtool("check", "config", ROOT / "monitoring" / "prometheus.yml")  # names the rules


@pytest.mark.real
@pytest.mark.parametrize(("hours", "interval"), [(False, "1m"), (True, "5m")])
def test_each_alert_fires_when_it_must_and_not_before(hours: bool, interval: str, tmp_path: Path) -> None:
    """Cases that last hours are evaluated less often than others, because each evaluation takes time."""
    tree = yaml.safe_load((RULES / "tests" / "async_rl.yml").read_text())
    cases = [case for case in tree["tests"] if (case["name"].partition(":")[0] in NEED_HOURS) == hours]
    assert cases
    changed = {"rule_files": [str(RULES / "async_rl.yml")], "evaluation_interval": interval, "tests": cases}
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(tree | changed))
    promtool("test", "rules", tmp_path / "cases.yml")


@pytest.mark.real
@pytest.mark.parametrize("path", HEALTHY_RUNS, ids=lambda path: path.name)
def test_no_alert_fires_in_a_healthy_run(path: Path, tmp_path: Path) -> None:
    """Real runs, recorded by `python -m tests.support.recorded_series`: engines, trainer and trackers."""
    recorded = RecordedSeries.read(path)
    assert recorded.scrapes * INTERVAL_S > 900
    names = {series.partition("{")[0] for series in recorded.values}
    assert {"async_rl_tracker_steps_lost_total", "async_rl_open_descriptors"} < names
    assert recorded.alerts(tmp_path) == ""


class Server:
    """A running Prometheus server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, what: str, **arguments: Any) -> Any:
        query = urllib.parse.urlencode(arguments)
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{what}?{query}", timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            with error:
                pytest.fail(f"{arguments}: {error.read().decode()}")


@contextmanager
def prometheus(folder: Path) -> Iterator[Server]:
    """Return the shipped config with shorter intervals."""
    shutil.copytree(ROOT / "monitoring", folder / "monitoring")
    (folder / "runs" / ".prometheus").mkdir(parents=True)  # as `make prometheus` does
    config = yaml.safe_load((folder / "monitoring" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "300ms", "scrape_timeout": "300ms", "evaluation_interval": "300ms"}
    (folder / "monitoring" / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    process = subprocess.Popen(
        [
            program("prometheus"),
            f"--config.file={folder}/monitoring/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        log = []
        try:
            for line in process.stderr:
                log.append(line)
                if "Server is ready to receive web requests" in line:
                    break
            else:
                pytest.fail("".join(log))
            yield Server(f"http://{address}")
        finally:
            process.terminate()
            process.communicate(timeout=30)


class Scraped:
    """The data that Prometheus has at the end of a finished run."""

    def __init__(self, server: Server, begin_s: float) -> None:
        self.server, self.begin_s = server, begin_s
        # The last time with both a scrape and the rules: on a slow machine, scrapes may fail.
        both = "run:async_rl_unaccounted_trajectories:sum and on (run) async_rl_trajectories_queued"
        last = f"max_over_time(timestamp({both})[1h:300ms])"
        (found,) = server.ask("query", query=last)["result"]
        self.end_s = float(found["value"][1])

    def values(self, expr: str, *, nan: bool = False) -> list[float]:
        """Return the values of the expression at that moment; NaN only on request."""
        found = self.server.ask("query", query=expr, time=self.end_s)["result"]
        return [float(f["value"][1]) for f in found if nan or f["value"][1] != "NaN"]


@pytest.fixture(scope="module")
def scraped(calculator: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("scraped")
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings(calculator, folder)))
    generate, seen, scrapes, begin_s = endpoints.generate_latest, 0, 0, time.time()
    missing: list[bytes] = []

    async def launch(config: Config, run_dir: Path, stop: asyncio.Event, progress: RunProgress) -> Summary:
        cluster = TroubledCluster(config)

        def counted(registry: Any) -> bytes:
            nonlocal seen, scrapes, missing
            text = generate(registry)
            seen, scrapes = seen + 1, scrapes + cluster.scraped(text)
            missing = cluster.missing
            if scrapes > SCRAPES or seen > MAX_SCRAPES:
                stop.set()
            return text

        patch.setattr(endpoints, "generate_latest", counted)
        return await entry.run(config, run_dir, stop, cluster)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch, prometheus(folder) as server:
        patch.setattr(repair, "RESTART_DELAY_MAX_S", 0.2)
        patch.setattr(reward_calls, "FIRST_DELAY_S", 0.0)
        patch.setattr(checksums, "WATCH_EVERY", 2)
        patch.setattr(doctor, "LOOK_S", 0.1)
        patch.setattr(doctor, "LoopWatchdog", partial(LoopWatchdog, blocked_s=0.2))
        assert train(path, [], launch) == 0
        assert not missing
        yield Scraped(server, begin_s)


@pytest.mark.real
def test_prometheus_finds_the_run_by_its_name(scraped: Scraped) -> None:
    (series,) = scraped.server.ask("query", query="up", time=scraped.end_s)["result"]
    assert series["metric"]["job"] == "async_rl"
    assert series["metric"]["run"] == "troubled"
    assert series["value"][1] == "1"


def in_grafana(expr: str) -> str:
    """Return the expression that Grafana sends for a query of the dashboard or of a variable."""
    # The troubles may be more than a minute old at the end of the run, on a slow machine.
    filled = expr.replace("$run", "troubled").replace("$window", "1h").replace("[1m]", "[1h]")
    return re.sub(r"^label_values\((\S+), (\w+)\)$", r"count by (\2) (\1)", filled)


@pytest.mark.real
def test_every_query_of_the_dashboard_has_data(scraped: Scraped) -> None:
    queries = [
        in_grafana(expr) for expr in expressions(dashboard()) if "async_rl" in expr or "ALERTS" in expr
    ]
    assert len(queries) > 80
    without = [
        query for query in queries if not scraped.values(query, nan=any(name in query for name in NO_VALUES))
    ]
    assert without == []


@pytest.mark.real
def test_every_expression_of_the_rules_has_data(scraped: Scraped) -> None:
    groups = yaml.safe_load((RULES / "async_rl.yml").read_text())["groups"]
    exprs = [
        rule["expr"]
        for group in groups
        for rule in group["rules"]
        if rule.get("alert", rule.get("record")) not in NEED_HOURS
    ]
    # An alert that does not fire has no value: query the truth of its comparisons instead.
    asked = [re.sub(r"(\s(?:==|!=|>|<)) ", r"\1 bool ", expr) for expr in exprs]
    assert [expr for expr in asked if not scraped.values(expr)] == []


@pytest.mark.real
def test_an_engine_that_died_raises_its_alert(scraped: Scraped) -> None:
    firing = scraped.server.ask("query", query='ALERTS{alertstate="firing"}', time=scraped.end_s)["result"]
    assert "EngineQuarantined" in {alert["metric"]["alertname"] for alert in firing}
    rules = [rule for group in scraped.server.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"]: rule["lastError"] for rule in rules if rule.get("lastError")} == {}


@pytest.mark.real
def test_trajectories_are_all_accounted_for_at_every_scrape(scraped: Scraped) -> None:
    (series,) = scraped.server.ask(
        "query_range",
        query="run:async_rl_unaccounted_trajectories:sum",
        start=scraped.begin_s,
        end=scraped.end_s,
        step=0.3,
    )["result"]
    assert len(series["values"]) >= SCRAPES
    assert {value for _, value in series["values"]} == {"0"}
