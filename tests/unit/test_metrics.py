"""The values of instruments, and the two endpoints over HTTP."""

from __future__ import annotations

import json
import math
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from async_rl.cli import metrics_reference
from async_rl.errors import EnvironmentNotReady
from async_rl.observability.discovery import announced
from async_rl.observability.endpoints import serve
from async_rl.observability.evaluation_record import Estimate, EvaluationRecord, EvaluationScore
from async_rl.observability.figures import STEP_FIGURES
from async_rl.observability.metrics import Metrics, declared, observe_all
from async_rl.observability.records import StepRecord
from async_rl.observability.trackers.names import DERIVED, FIELDS

PACKAGE = Path(__file__).parents[2] / "async_rl"


@asynccontextmanager
async def served(metrics: Metrics, state: str = "ok") -> AsyncIterator[str]:
    async with serve(metrics, "127.0.0.1", 0, lambda: {"status": state, "step": 7}) as url:
        yield url


async def fetch(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as client, client.get(url) as response:
        return response.status, await response.text()


@pytest.mark.real_time
async def test_metrics_are_served_as_text_that_prometheus_parses() -> None:
    metrics = Metrics()
    metrics.trajectories_dropped_total.labels(reason="stale").inc(2)
    metrics.staleness_versions.observe(3)
    metrics.reward.set(math.nan)
    async with served(metrics) as url:
        status, text = await fetch(f"{url}/metrics")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert status == 200
    assert samples["async_rl_trajectories_dropped_total", "stale"] == 2
    assert samples["async_rl_staleness_versions_bucket", "2.0"] == 0
    assert samples["async_rl_staleness_versions_bucket", "3.0"] == 1
    assert math.isnan(samples[("async_rl_reward",)])


@pytest.mark.real_time
@pytest.mark.parametrize(("state", "status"), [("ok", 200), ("overdue", 200), ("stalled", 503)])
async def test_health_answers_by_the_state_of_the_run(state: str, status: int) -> None:
    async with served(Metrics(), state) as url:
        answer = await fetch(f"{url}/health")
    assert answer[0] == status
    assert '"step": 7' in answer[1]


@pytest.mark.real_time
async def test_the_remedy_is_named_when_the_port_is_taken() -> None:
    async with served(Metrics()) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(EnvironmentNotReady, match=r"set metrics\.port"):
            await serve(Metrics(), "127.0.0.1", port, dict).__aenter__()


def test_every_figure_of_a_step_reaches_its_instrument() -> None:
    values = {
        name: float(number)
        for number, (name, figure) in enumerate(STEP_FIGURES.items(), start=2)
        if figure.metric and not figure.attribute
    }
    metrics = Metrics()
    metrics.observe_step(StepRecord(**({"step": 1, "weight_version": 1, "time_s": 1.0} | values)))
    assert len(values) > 30
    for name, value in values.items():
        figure = STEP_FIGURES[name]
        sample = f"async_rl_{figure.metric}" + ("_sum" if figure.kind == "histogram" else "")
        assert metrics.registry.get_sample_value(sample, figure.child) == value, name


def test_every_declared_metric_is_observed_and_documented() -> None:
    descriptions = declared(Metrics)
    assert len(descriptions) == len(list(Metrics().registry.collect()))
    code = "".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    of_steps = {figure.metric for figure in STEP_FIGURES.values()}
    page = metrics_reference.markdown()
    assert "<br>**" not in page
    for name, description in descriptions.items():
        assert name in of_steps or re.search(rf"\.{name}\b", code), name
        assert description.help, name
        assert description.bad, name
        assert re.search(rf"^\| `{name}[`{{]", page, re.MULTILINE), name
    for name in (*FIELDS, *DERIVED):
        assert f"\n| `{name}` | " in page


def test_the_page_of_metrics_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
    assert page.read_text() == metrics_reference.markdown(), "run `make docs`"


def test_the_mismatch_keeps_its_last_value_and_step_when_no_token_is_of_the_trainers_version() -> None:
    measured = StepRecord(
        step=7, weight_version=7, time_s=1.0, kl_mismatch=6e-7, lag0_log_prob_abs_diff=1e-3, kl_staleness=0.1
    )
    without = StepRecord(step=8, weight_version=8, time_s=2.0, kl_mismatch=math.nan)
    restarted = Metrics()
    restarted.restore(8, [measured, without], [])
    running = Metrics()
    running.observe_step(measured)
    running.observe_step(without)
    for metrics in (running, restarted):
        value = metrics.registry.get_sample_value
        assert value("async_rl_kl_mismatch_nats") == 6e-7
        assert value("async_rl_lag0_log_prob_abs_diff_nats") == 1e-3
        assert value("async_rl_lag0_step") == 7


def test_gauges_are_no_measurement_when_nothing_was_measured_yet() -> None:
    metrics = Metrics()
    zeros = {
        sample.name
        for family in metrics.registry.collect()
        for sample in family.samples
        if family.type == "gauge" and not math.isnan(sample.value)
    }
    counted_from_zero = {"trajectories_in_flight", "trajectories_queued", "journal_bytes"}
    assert zeros == {f"async_rl_{name}" for name in counted_from_zero}


def test_gauges_read_what_the_last_record_says_when_a_run_is_resumed() -> None:
    record = StepRecord(
        step=7, weight_version=7, time_s=1.0, reward_mean=0.5, tokens_per_s=20.0, importance_ratio_p99=1.5
    )
    scores = {"all": EvaluationScore(tasks=2, answers=4, reward=Estimate(value=0.25))}
    done = EvaluationRecord(weight_version=6, status="done", scores=scores)
    metrics = Metrics()
    metrics.restore(7, [record], [done, EvaluationRecord(weight_version=7, status="missing")])
    value = metrics.registry.get_sample_value
    assert value("async_rl_trainer_weight_version") == 7
    assert (value("async_rl_reward"), value("async_rl_tokens_per_second")) == (0.5, 20.0)
    assert value("async_rl_importance_ratio", {"quantile": "0.99"}) == 1.5
    assert value("async_rl_evaluation_weight_version") == 6
    assert value("async_rl_evaluation_reward", {"set": "all"}) == 0.25
    assert value("async_rl_evaluations_total", {"result": "done"}) is None, "a counter counts this process"
    metrics.restore(0, [], [])  # the checkpoint of step 7 was damaged
    assert value("async_rl_trainer_weight_version") == 0
    assert math.isnan(value("async_rl_reward") or 0.0)


def test_values_observed_together_count_as_if_observed_one_by_one() -> None:
    together, single = Metrics(), Metrics()
    bounds = [float(labels["le"]) for _, labels, _ in samples(together) if "le" in labels][:-1]
    assert len(bounds) > 3
    lengths = [*bounds, bounds[0] + 1, bounds[-1] + 1, 0, 0]
    observe_all(together.trajectory_tokens, lengths)
    for length in lengths:
        single.trajectory_tokens.observe(length)
    assert samples(together) == samples(single)


def samples(metrics: Metrics) -> list[tuple[str, dict[str, str], float]]:
    families = metrics.trajectory_tokens.collect()
    return [(s.name, s.labels, s.value) for f in families for s in f.samples if "created" not in s.name]


# -- the target file of a run for Prometheus ----------------------------------------------------------


def told(folder: Path) -> Any:
    return json.loads((folder / "run.json").read_text())


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_is_found_while_it_lasts(tmp_path: Path, fails: bool) -> None:
    folder = tmp_path / "targets"
    with suppress(KeyError), announced("http://127.0.0.1:9464", "run", folder):
        assert told(folder) == [{"targets": ["127.0.0.1:9464"], "labels": {"run": "run"}}]
        assert os.listdir(folder) == ["run.json"]
        if fails:
            raise KeyError
    assert os.listdir(folder) == []


def test_others_may_read_it_when_the_umask_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "targets"
    before = os.umask(0o077)
    try:
        with announced("http://127.0.0.1:9464", "run", folder):
            assert folder.stat().st_mode & 0o777 == 0o755
            assert (folder / "run.json").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("url", "target"),
    [("http://[::1]:9464", "[::1]:9464"), ("http://[::]:9464", f"{socket.gethostname()}:9464")],
)
def test_the_target_is_an_address_that_can_be_reached(tmp_path: Path, url: str, target: str) -> None:
    with announced(url, "run", tmp_path):
        assert told(tmp_path)[0]["targets"] == [target]


def test_another_runs_file_stays_when_it_has_taken_the_name(tmp_path: Path) -> None:
    with announced("http://127.0.0.1:1", "run", tmp_path):
        with announced("http://127.0.0.1:2", "run", tmp_path):
            pass
        assert not (tmp_path / "run.json").exists()
        (tmp_path / "run.json").write_text("another's")
    assert (tmp_path / "run.json").read_text() == "another's"


def test_the_remedy_is_named_when_the_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(EnvironmentNotReady, match=r"metrics\.targets_dir"),
        announced("http://127.0.0.1:1", "run", tmp_path / "file"),
    ):
        pass
