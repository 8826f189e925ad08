"""Measures the effect of routing replay between a real engine and a real trainer on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.engines.model_facts import load_facts
from benchmarks import routing_replay as replaying
from benchmarks.real_parts import Mismatch, make_batch, random_prompts
from tests.gpu.device import sized
from tests.gpu.models import build, serving

pytestmark = [
    pytest.mark.proof(needs="trainer engine", seconds=240, value=70),
    pytest.mark.filterwarnings("ignore:::megatron"),
]


async def test_replay_brings_the_trainer_nearer_to_the_engine(tmp_path: Path, measure) -> None:
    """With the engine's experts replayed, the trainer's log-probs are closer to the engine's."""
    model = build(tmp_path / "model")
    async with serving(model, tmp_path) as engine:
        answers = await replaying.sample(engine, random_prompts(sized(32, 16), seed=0), sized(48, 24))
    batch = make_batch(answers, 0, load_facts(model))
    differences = replaying.differences(model, batch, "bfloat16", ("off", "r3", "rows+1"))
    found = {name: Mismatch.of(values) for name, values in differences.items()}
    measure("log-probs apart, routed by the trainer", found["off"].mean_abs, "nats")
    measure("log-probs apart, replayed", found["r3"].mean_abs, "nats")
    measure("log-probs apart, rows shifted by one", found["rows+1"].mean_abs, "nats")
    assert found["r3"].mean_abs < found["off"].mean_abs
    assert found["r3"].k3 < found["off"].k3
    assert found["rows+1"].mean_abs > 2 * found["off"].mean_abs
