"""The whole loop on one GPU that engines and trainer share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

from tests.gpu import device
from tests.gpu.machine import ROOT
from tests.gpu.models import active_parameters, build

pytestmark = pytest.mark.proof(needs="trainer engine ray", seconds=300)
STEPS = 4


@pytest.mark.parametrize(
    ("name", "transport", "lora"),
    [
        pytest.param("files", "disk", "null", marks=pytest.mark.proof(value=50)),
        pytest.param("handles", "tensor", "null", marks=pytest.mark.proof(value=100)),
        pytest.param("adapters", "disk", "{rank: 16, alpha: 32}", marks=pytest.mark.proof(value=85)),
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
        "run.max_steps": STEPS,
        "run.dir": calculator / "runs",
        "model.path": model,
        "model.dtype": "bfloat16",
        "data.path": calculator / "data" / "tasks.jsonl",
        "engine.num_engines": 1,
        "engine.device": device.DEVICE,
        "engine.extra_args": device.sized("[--mem-fraction-static=0.5]", "[]"),
        "routing.probe_every": 1,
        "trainer.device": device.DEVICE,
        "trainer.num_ranks": 1,
        "trainer.layout": "{}",
        "trainer.lora": lora,
        "placement.shared": "true",
        "weights.transport": transport,
    }
    command = [sys.executable, "-m", "async_rl.cli.main", "train", "examples/calculator/config.yaml"]
    command += [f"{key}={value}" for key, value in overrides.items()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
    lines = (calculator / "runs" / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]

    def mean(field: str) -> float:
        return fmean(record[field] for record in records if record[field] is not None)

    last = records[-1]
    measure("reward of the last step", last["reward_mean"], "")
    measure("engine mismatch, replayed", mean("routing_replayed_abs_diff"), "nats")
    measure("engine mismatch, routed by the trainer", mean("routing_native_abs_diff"), "nats")
    measure("trained, last step", last["tokens_per_s"], "tokens/s")
    measure("pause of the engine, mean", mean("pause_s"), "s")
    measure("hand-over to the engine, mean", mean("sync_s"), "s")
    flops = 6 * active_parameters(model) * last["tokens"]
    measure("of the GPU's products, last step (MFU)", device.share_of_peak(flops / last["step_s"]), "%")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert max(record["staleness_max"] for record in records) <= 2
