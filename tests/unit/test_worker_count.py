"""How many rollout workers a config has, and what `async-rl check` says about that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.cli.main import main
from async_rl.config import parse_config
from tests.simulation.test_loop import make_config

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
