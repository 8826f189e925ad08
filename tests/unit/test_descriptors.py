"""The limit of open files is raised at the start and checked against what the config needs."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_rl.config import Config, parse_config
from async_rl.errors import EnvironmentNotReady
from async_rl.run import descriptor_needs
from async_rl.run.descriptor_needs import check_descriptors
from async_rl.run.descriptor_needs import descriptor_needs as needs_of
from tests.support.run_config import config_with


def two_engines(**rollout: Any) -> Config:
    return config_with("engine.num_engines=2", rollout=rollout)


def run_limited(soft: int, hard: int, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )


def test_the_soft_limit_is_raised_when_a_command_starts() -> None:
    code = (
        "import resource\n"
        "from async_rl.cli.main import main\n"
        "main(['schema'])\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    assert run_limited(256, 2000, code).stdout.splitlines()[-1] == "2000"


@pytest.mark.real
def test_a_config_is_refused_in_one_sentence_when_the_limit_is_too_low(
    calculator: Path, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"run: {{name: r, dir: {tmp_path}}}\n"
        f"model: {{path: {calculator / 'model'}, dtype: float32}}\n"
        f"data: {{path: {calculator / 'data' / 'tasks.jsonl'}}}\n"
        "rollout: {max_concurrent_trajectories: 2000, num_workers: 0,\n"
        "  max_new_tokens: 64, max_context_tokens: 256}\n"
    )
    code = f"import sys; from async_rl.cli.main import main; sys.exit(main(['check', {str(config)!r}]))"
    done = run_limited(512, 1024, code)
    assert done.returncode == 3, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "2000 for calls to engines" in line
    assert "the limit is 1024: raise the hard limit" in line
    done = run_limited(512, 4096, code)
    assert done.returncode == 0, done.stderr
    assert "file descriptors: at most " in done.stdout
    assert " of 4096" in done.stdout


def test_agents_count_in_the_driver_or_in_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop:
        descriptors_per_trajectory = 6

    alone = needs_of(two_engines(max_concurrent_trajectories=100), (Loop(), object()))
    assert alone.driver["agents"] == 600
    assert alone.worker == {}
    shared = needs_of(two_engines(max_concurrent_trajectories=100, num_workers=3), (Loop(),))
    assert shared.driver["agents"] == 0
    assert shared.worker["agents"] == 6 * 50  # of two workers, while the third one is missing
    assert (shared.driver["calls to engines"], shared.worker["calls to engines"]) == (0, 50)
    monkeypatch.setattr(descriptor_needs, "raise_descriptor_limit", lambda: 500)
    with pytest.raises(EnvironmentNotReady, match="each rollout worker needs up to 956"):
        check_descriptors(two_engines(max_concurrent_trajectories=100, num_workers=1), (Loop(),))


def test_what_a_config_needs_follows_from_its_settings() -> None:
    needs = needs_of(two_engines(max_concurrent_trajectories=50, max_branches=3)).driver
    assert (needs["calls to engines"], needs["calls to models"], needs["engines"]) == (200, 0, 6)
    assert needs["the queue"] == 8  # however many groups are outstanding: their files are closed
    assert needs_of(two_engines(num_workers=5)).driver["rollout workers"] == 20


def test_judges_and_teachers_count_where_sessions_are() -> None:
    tree = {
        "model": {"path": "m"},
        "data": {"path": "d.jsonl", "validation": [{"path": "v.jsonl"}]},
        "engine": {"num_engines": 2},
        "evaluation": {"max_concurrent": 20},
        "models": {
            "judge": {"path": "j", "num_engines": 4},
            "other": {"path": "k", "urls": ["http://127.0.0.1:1", "http://127.0.0.1:2"]},
        },
    }
    alone = needs_of(parse_config(tree | {"rollout": {"max_concurrent_trajectories": 100}}))
    assert alone.driver["engines"] == 3 * (2 + 4 + 2)
    assert alone.driver["calls to models"] == 100 + 20
    rollout = {"max_concurrent_trajectories": 100, "num_workers": 3}
    shared = needs_of(parse_config(tree | {"rollout": rollout}))
    assert (shared.driver["calls to models"], shared.worker["calls to models"]) == (0, 50)
