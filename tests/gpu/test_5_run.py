"""The whole loop on one GPU that engines and trainer share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.models import build

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.sglang, pytest.mark.megatron, pytest.mark.ray]


@pytest.mark.parametrize(
    ("name", "transport", "lora"),
    [
        ("files", "disk", "null"),
        ("handles", "tensor", "null"),
        ("adapters", "disk", "{rank: 16, alpha: 32}"),
    ],
    ids=["files", "handles", "adapters"],
)
def test_a_run_trains_on_one_gpu_in_turns(
    calculator: Path, measure, name: str, transport: str, lora: str
) -> None:
    """A run in which an engine and a trainer time-share one GPU trains within its staleness bound.

    The engine takes weights from files or from the GPU, or adapters beside the model's weights on its host.
    """
    # The example's own model is float32 and has head sizes that fused kernels do not support.
    model = build(calculator / "model-of-gpus", speaks_as=calculator / "model")
    overrides = {
        "run.name": name,
        "run.max_steps": 4,
        "run.dir": str(calculator / "runs"),
        "model.path": str(model),
        "model.dtype": "bfloat16",
        "data.path": str(calculator / "data" / "tasks.jsonl"),
        "engine.num_engines": 1,
        "engine.device": "cuda",
        "engine.extra_args": '["--mem-fraction-static=0.5"]',
        "trainer.device": "cuda",
        "trainer.num_ranks": 1,
        "trainer.layout": "{}",
        "trainer.lora": lora,
        "placement.shared": "true",
        "weights.transport": transport,
    }
    command = [sys.executable, "-m", "async_rl.cli.main", "train", "examples/calculator/config.yaml"]
    command += [f"{key}={value}" for key, value in overrides.items()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    folder = calculator / "runs" / name
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measure("steps", len(records), "")
    measure("pause of the engine, mean", sum(r["pause_s"] for r in records) / len(records), "s")
    measure("hand-over to the engine, mean", sum(r["sync_s"] for r in records) / len(records), "s")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert max(record["staleness_max"] for record in records) <= 2
