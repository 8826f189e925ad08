"""What driver and rollout workers cost a planned job, and how many workers a config has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_rl.cli.main import main
from async_rl.cli.plan import (
    frame_nodes,
    process_bottleneck,
    queue_remark,
    requested_workers,
    scaled_job,
    workers_remark,
)
from async_rl.config import parse_config
from async_rl.errors import ConfigError
from async_rl.planning.planned_job import JobPlan
from async_rl.planning.process_costs import (
    MAX_LOAD,
    CostRow,
    ProcessCosts,
    fit_costs,
    process_load,
    read_costs,
)
from async_rl.planning.workload import Workload
from tests.simulation.test_loop import make_config
from tests.support.run_config import config_with

ALONE = ProcessCosts(
    workers=0,
    tokens_per_event=8,
    driver_us_a_token=4.0,
    driver_ms_a_trajectory=1.0,
    driver_idle=0.02,
    worker_us_a_token=4.0,
    worker_ms_a_trajectory=0.0,
)
APART = msgspec.structs.replace(ALONE, workers=8, driver_us_a_token=0.01, driver_ms_a_trajectory=0.3)
LONG = Workload(mean_tokens=8192)


def row(tokens: int, trajectories: int, cpu_s: float, workers: int = 1) -> CostRow:
    return CostRow(
        workers=workers,
        streams=64,
        answer_tokens=tokens // trajectories,
        tokens_per_event=8.0,
        driver_us_a_token=1e6 * cpu_s / tokens,
        driver_ms_a_trajectory=1e3 * cpu_s / trajectories,
        worker_tokens_per_s=250_000.0,
        driver_idle=0.02,
        seconds=10.0,
        tokens=tokens,
        trajectories=trajectories,
        steps=1,
        driver_cpu_s=cpu_s,
        worker_cpu_s=1.0,
        late_share=0.0,
    )


def job(engines: int, tokens_per_engine: float = 6_000.0) -> JobPlan:
    """A plan of engines with 128 slots; only its rates count."""
    values = {
        name: [] if name == "staleness" else 0 for name in JobPlan.__struct_fields__ if name != "bottleneck"
    }
    tokens_per_s = engines * tokens_per_engine
    rates = {
        "engines": engines,
        "slots": 128,
        "tokens_per_s": tokens_per_s,
        "trajectories_per_s": tokens_per_s / 8000,
    }
    return JobPlan(**(values | rates))


def test_the_fit_finds_the_line_that_rows_lie_on() -> None:
    rows = [row(512 * n, n, 512 * n * 3e-6 + n * 1e-3) for n in (100, 400)]
    rows.append(row(32768 * 10, 10, 32768 * 10 * 3e-6 + 10 * 1e-3))
    (found,) = fit_costs(rows)
    assert found.driver_us_a_token == pytest.approx(3.0)
    assert found.driver_ms_a_trajectory == pytest.approx(1.0)
    assert found.worker_us_a_token == pytest.approx(4.0)
    assert found.worker_ms_a_trajectory == pytest.approx(0.0, abs=1e-6)


def timed_row(tokens: int, trajectories: int, worker_s: float) -> CostRow:
    costs = row(tokens, trajectories, 0.1)
    return msgspec.structs.replace(costs, worker_tokens_per_s=tokens / worker_s)


def test_a_workers_time_is_divided_into_tokens_and_trajectories() -> None:
    sizes = ((512, 700), (8192, 100))
    rows = [timed_row(length * n, n, length * n * 7e-6 + n * 1.4e-3) for length, n in sizes]
    (found,) = fit_costs(rows)
    assert found.worker_us_a_token == pytest.approx(7.0)
    assert found.worker_ms_a_trajectory == pytest.approx(1.4)


def test_a_worker_is_requested_when_the_driver_alone_would_be_too_busy() -> None:
    load = process_load(job(64), LONG, [ALONE, APART], 0)
    assert process_bottleneck(load, LONG).startswith("The driver: it would need 1.")
    assert workers_remark(load) == ""
    load = process_load(job(1), LONG, [ALONE, APART], 0)
    assert "No rollout workers" in workers_remark(load)
    assert process_bottleneck(load, LONG) == ""


def test_the_shipped_costs_name_the_driver_of_2048_engines_but_not_of_1024() -> None:
    load = process_load(job(1024, 6_200.0), LONG, read_costs(), 256)
    assert load.driver_load < MAX_LOAD
    load = process_load(job(2048, 6_200.0), LONG, read_costs(), 512)
    assert MAX_LOAD < load.driver_load < 1
    assert process_bottleneck(load, LONG).startswith("The driver:")


@pytest.mark.parametrize("engines", [1, 4, 5, 16, 1024])
def test_a_plan_requests_as_many_workers_as_auto_has(engines: int) -> None:
    one = config_with("engine.max_running_requests=128", "rollout.max_concurrent_trajectories=128")
    job, _ = scaled_job(one, LONG, engines, grow=False)
    requested = requested_workers(job)
    assert requested == job.num_workers
    assert requested == (0 if engines <= 4 else -(-engines * 128 // 512))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("driver_us_a_token", 1.0, "The driver:"),
        ("driver_ms_a_trajectory", 10.0, "The driver:"),
        ("worker_us_a_token", 1_000.0, "The rollout workers:"),
        ("worker_ms_a_trajectory", 1_000.0, "The rollout workers:"),
    ],
)
def test_the_bottleneck_changes_when_a_cost_is_raised(field: str, value: float, said: str) -> None:
    plan = job(1024)
    assert process_bottleneck(process_load(plan, LONG, [APART], 256), LONG) == ""
    raised = msgspec.structs.replace(APART, **{field: value})
    assert process_bottleneck(process_load(plan, LONG, [raised], 256), LONG).startswith(said)


def test_network_and_disk_are_named_when_routing_rows_fill_them() -> None:
    rows = msgspec.structs.replace(LONG, routing_row_bytes=100_000, disk_bytes_per_s=1e15)
    assert process_bottleneck(process_load(job(1024), rows, [APART], 256), rows).startswith("The network:")
    rows = msgspec.structs.replace(rows, disk_bytes_per_s=2e9, network_bytes_per_s=1e15)
    assert process_bottleneck(process_load(job(1024), rows, [APART], 256), rows).startswith("The disk")


def test_frames_on_nodes_share_their_disks_and_the_limit_of_each() -> None:
    overrides = "engine.num_engines=64", "queue.max_bytes=1048576"
    shared, spread = config_with(*overrides), config_with(*overrides, "queue.spool_dir=/scratch")
    assert frame_nodes(shared, LONG, 16) == 1
    assert frame_nodes(spread, LONG, 16) == 16
    assert frame_nodes(spread, msgspec.structs.replace(LONG, engines_per_node=8), 16) == 8
    rows = msgspec.structs.replace(LONG, routing_row_bytes=600)
    one, eight = (process_load(job(64), rows, [APART], 16, frame_nodes=nodes) for nodes in (1, 8))
    assert one.disk_bytes_per_s == pytest.approx(8 * eight.disk_bytes_per_s)
    slow = msgspec.structs.replace(
        rows, network_bytes_per_s=1e15, disk_bytes_per_s=2 * eight.disk_bytes_per_s
    )
    assert process_bottleneck(one, slow).startswith("The disk of the run folder")
    assert process_bottleneck(eight, slow) == ""
    full = msgspec.structs.replace(job(64), queue_bytes_peak=4 << 20)
    assert "queue.max_bytes" in queue_remark(full, shared)
    assert queue_remark(full, spread, 8) == ""


@pytest.mark.parametrize("text", ["", "[]", '[{"workers": 1}]'])
def test_a_file_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="driver_scale"):
        read_costs(path)


# -- how many rollout workers a config has ------------------------------------------------------------


ONE_MACHINE = {"ray_address": None}
CLUSTER = {"ray_address": "auto"}
ELSEWHERE = ["http://127.0.0.1:30000", "http://gpu-7:30000"]


def sections(
    placement: dict[str, Any], engine: dict[str, Any], workers: int | str, trajectories: int
) -> dict[str, Any]:
    return {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "placement": placement,
        "engine": engine,
        "rollout": {"num_workers": workers, "max_concurrent_trajectories": trajectories},
    }


@pytest.mark.parametrize(
    ("placement", "engine", "workers", "trajectories", "number", "reason"),
    [
        (ONE_MACHINE, {}, "auto", 512, 0, "on one machine the driver itself runs up to 512"),
        (ONE_MACHINE, {}, "auto", 513, 2, "one per 512 of 513 concurrent trajectories"),
        (CLUSTER, {}, "auto", 16, 1, "one per 512 of 16"),
        (CLUSTER, {}, "auto", 1024, 2, "one per 512 of 1024"),
        (CLUSTER, {"urls": ELSEWHERE}, "auto", 1024, 0, "engine.urls has a loopback address"),
        (CLUSTER, {"urls": ELSEWHERE[1:]}, "auto", 1024, 2, "one per 512"),
        (CLUSTER, {"kind": "simulated"}, "auto", 1024, 0, "engine.kind is simulated"),
        (CLUSTER, {}, 0, 1024, 0, "as rollout.num_workers says"),
        (ONE_MACHINE, {}, 3, 16, 3, "as rollout.num_workers says"),
    ],
)
def test_auto_has_workers_where_the_driver_alone_would_not_do(
    placement: dict[str, Any],
    engine: dict[str, Any],
    workers: int | str,
    trajectories: int,
    number: int,
    reason: str,
) -> None:
    config = parse_config(sections(placement, engine, workers, trajectories))
    assert config.num_workers == number
    assert config.workers.reason.startswith(reason)


@pytest.mark.parametrize(
    ("placement", "text", "number", "reason"),
    [
        (CLUSTER, "http://gpu-7:30000\nhttp://[::1]:30000  # here\n", 0, "engine.urls_file has a"),
        (CLUSTER, "http://gpu-7:30000\n# http://127.0.0.1:30000\n", 2, "one per 512"),
        (CLUSTER, None, 2, "one per 512"),
        (ONE_MACHINE, "http://127.0.0.1:30000\n", 2, "one per 512"),
    ],
)
def test_auto_has_no_workers_where_the_file_of_urls_has_a_loopback_address(
    tmp_path: Path, placement: dict[str, Any], text: str | None, number: int, reason: str
) -> None:
    path = tmp_path / "servers.txt"
    if text is not None:
        path.write_text(text)
    config = parse_config(sections(placement, {"urls_file": str(path)}, "auto", 1024))
    assert config.num_workers == number
    assert config.workers.reason.startswith(reason)


def test_the_number_of_workers_stays_when_the_file_of_urls_changes(tmp_path: Path) -> None:
    path = tmp_path / "servers.txt"
    path.write_text("http://gpu-7:30000\n")
    config = parse_config(sections(CLUSTER, {"urls_file": str(path)}, "auto", 1024))
    assert config.num_workers == 2
    path.write_text("http://127.0.0.1:30000\n")
    assert config.num_workers == 2


def test_workers_are_refused_with_simulated_engines(
    calculator: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(calculator, tmp_path)
    (tmp_path / "config.yaml").write_text(
        f"{{model: {{path: {config.model.path}}}, data: {{path: {config.data.path}}}}}"
    )
    assert main(["check", str(tmp_path / "config.yaml"), "engine.kind=simulated", "rollout.num_workers=2"])
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "rollout.num_workers is 2, and engine.kind is simulated" in line
    assert "set rollout.num_workers=auto or engine.kind=sglang" in line
