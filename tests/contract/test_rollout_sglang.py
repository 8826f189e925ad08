"""`async-rl rollout` with a real SGLang server that it starts itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "calculator" / "config.yaml"

pytestmark = [pytest.mark.long, pytest.mark.sglang]  # it starts a server of its own


def test_an_untrained_model_writes_trajectories_with_routing_when_nothing_runs_yet(
    calculator: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"model.path={calculator / 'model'}", f"data.path={calculator / 'data' / 'tasks.jsonl'}"]
    assert main(["rollout", str(EXAMPLE), *arguments, "--n", "3", "--json"]) == 0
    captured = capsys.readouterr()
    views = [json.loads(line) for line in captured.out.splitlines()]
    assert len(views) == 3
    for view in views:
        assert view["error"] is None
        assert view["weight_versions"] == [0]
        assert view["trained_tokens"] > 0
        assert view["routing"]["invalid"] == 0
        assert view["log_probs"]["mean"] < -1, "an untrained model is sure of nothing"
    assert "starting an SGLang server" in captured.err
