"""Speeds of models on GPUs by the roofline model: by hand, for published models, and as a plan takes them."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from async_rl.cli.main import main
from async_rl.cli.plan import computed_speeds, workload_for
from async_rl.config import LayoutConfig, load_config
from async_rl.planning.hardware import (
    DEVICES,
    GpuPeaks,
    ModelShape,
    decode_s,
    pipeline_idle,
    prefill_s,
    shape_of,
    speeds_on,
    train_s,
    training_passes,
)
from async_rl.planning.workload import Workload
from tests.support.run_config import config_with
from trainer.memory.dimensions import dimensions_of, parameters_of, weights_of_token

ROOT = Path(__file__).parents[2]
MODELS = sorted((ROOT / "tests" / "support" / "model_configs").glob("*.json"))

DEVICE = GpuPeaks(flops_per_s=2e14, memory_bytes_per_s=1.25e12)
"""With the shares that are reached: 1e14 FLOPs and 1e12 bytes per second."""
DENSE = ModelShape(dense=10**9, attention=10**5, kv=1000, kv_heads=4)
MOE = ModelShape(dense=10**8, expert=10**6, moe_layers=10, experts=4, top_k=2)


@pytest.mark.parametrize(
    ("gpus", "calls", "context", "seconds"),
    [
        (1, 10, 1000, 2 * (1e9 + 10 * 1000 * 1000) / 1e12),
        (2, 10, 1000, 2 * (1e9 + 10 * 1000 * 1000) / 2 / 1e12),
        (8, 10, 1000, 2 * (1e9 / 8 + 10 * 1000 * 1000 / 4) / 1e12),  # two GPUs share a head of the cache
        (1, 1000, 0, 2 * 1000 * 1e9 / 1e14),  # as many calls are limited by arithmetic
        (2, 1000, 100, 2 * 1000 * (1e9 + 100 * 1e5) / 2 / 1e14),
    ],
)
def test_a_decode_step_reads_weights_and_cache_or_computes(
    gpus: int, calls: int, context: int, seconds: float
) -> None:
    assert decode_s(DENSE, DEVICE, gpus, calls, context) == pytest.approx(seconds)


def test_a_decode_step_reads_the_experts_that_some_call_needs() -> None:
    # Of four experts one call has two; the second has two more than the first in a half of both.
    for calls, experts in ((1, 2), (2, 3), (100, 4)):
        read = 1e8 + 10 * experts * 1e6
        assert MOE.read_by(calls) == pytest.approx(read)
        assert decode_s(MOE, DEVICE, 1, calls, 0) == pytest.approx(2 * read / 1e12)
    assert MOE.of_token == 1e8 + 10 * 2 * 1e6


def test_a_prefill_computes_or_reads_each_weight_once_for_many_tokens() -> None:
    assert prefill_s(DENSE, DEVICE, 1, 1000) == pytest.approx(2 * (1e9 + 500 * 1e5) / 1e14)
    assert prefill_s(DENSE, DEVICE, 4, 1000) == pytest.approx(2 * (1e9 + 500 * 1e5) / 4 / 1e14)
    sparse = ModelShape(dense=0, expert=10**6, moe_layers=1, experts=1000, top_k=1)
    assert prefill_s(sparse, DEVICE, 1, 0) == pytest.approx(2 * 1e9 / 1e12 / 8192, rel=1e-3)


def test_a_trained_token_takes_its_passes_and_the_pipelines_idle_time() -> None:
    one = 2 * (1e9 + 1000 * 1e5) / 1e14
    assert train_s(DENSE, DEVICE, 4, 1000, passes=3) == pytest.approx(3 * one / 4)
    assert train_s(DENSE, DEVICE, 4, 1000, passes=4, idle=0.5) == pytest.approx(4 * one * 1.5 / 4)


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        ([], 3),
        (["trainer.recompute=full"], 4),
        (["trainer.updates_per_batch=2"], 4),  # and a pass for old log-probs
        (["trainer.epochs_per_batch=2", "trainer.recompute=offload"], 9),
        (["trainer.lora={}"], 2),
        (["trainer.loss.kl.coefficient=0.1"], 4),
        (["trainer.loss.advantages=gae"], 7),
    ],
)
def test_passes_of_a_trained_token_are_those_of_the_settings(overrides: list[str], passes: int) -> None:
    assert training_passes(config_with(*overrides)) == passes


def test_stages_are_idle_while_a_pipeline_fills_and_empties() -> None:
    trainer = {"num_ranks": 16, "layout": {"pp": 4, "tp": 2}, "micro_batch_tokens": 1000}
    # Two replicas have five micro-batches each; then in each of two updates two and a half.
    assert pipeline_idle(config_with(trainer=trainer), 10_000) == pytest.approx(3 / 5)
    assert pipeline_idle(config_with("trainer.updates_per_batch=2", trainer=trainer), 10_000) == 3 / 2.5
    assert pipeline_idle(config_with("trainer.layout.pp=1", trainer=trainer), 10_000) == 0


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_weights_of_a_token_are_those_that_the_trainer_counts(path: Path) -> None:
    model = json.loads(path.read_text())
    dimensions = dimensions_of(model)
    parameters = sum(map(sum, parameters_of(dimensions, LayoutConfig(), 0)))
    shape = shape_of(model, parameters)
    assert shape.of_token == pytest.approx(weights_of_token(dimensions), rel=1e-3)  # and norms
    assert shape.read_by(1) == pytest.approx(shape.of_token)
    embedding = model["vocab_size"] * model["hidden_size"]
    everything = parameters - embedding * (not model.get("tie_word_embeddings"))
    assert shape.read_by(1e9) == pytest.approx(everything)


def test_cache_and_attention_are_those_of_grouped_and_of_latent_attention() -> None:
    by_name = {path.stem: json.loads(path.read_text()) for path in MODELS}
    grouped = shape_of(by_name["qwen3_30b_a3b"], 0)
    assert (grouped.kv, grouped.kv_heads) == (48 * 2 * 4 * 128, 4)
    assert grouped.attention == 48 * 32 * (128 + 128)
    latent = shape_of(by_name["deepseek_v3"], 0)
    assert (latent.kv, latent.kv_heads) == (61 * (512 + 64), 1)
    assert latent.attention == 61 * 128 * (128 + 64 + 128)


def test_the_line_of_decode_steps_meets_them_at_all_and_at_half_of_the_slots() -> None:
    config = config_with(
        engine={"kind": "sglang", "tp_size": 2, "max_running_requests": 8}, trainer={"num_ranks": 4}
    )
    workload = Workload(prompt_tokens=500, mean_tokens=1000, max_tokens=1000, sigma=0)
    assert workload.mean_context == 1000
    found = speeds_on(DEVICE, MOE, config, workload)
    for calls in (4, 8):
        step_s = found["decode_base_s"] + calls * found["decode_per_call_s"]
        assert step_s == pytest.approx(decode_s(MOE, DEVICE, 2, calls, 1000))
    assert 1 / found["prefill_tokens_per_s"] == pytest.approx(prefill_s(MOE, DEVICE, 2, 1000))
    assert 1 / found["train_tokens_per_s"] == pytest.approx(train_s(MOE, DEVICE, 4, 1000, passes=3))


def test_a_step_limited_by_arithmetic_has_no_part_that_is_below_zero() -> None:
    config = config_with(engine={"kind": "sglang", "max_running_requests": 600})
    found = speeds_on(DEVICE, DENSE, config, Workload(prompt_tokens=1, mean_tokens=2, max_tokens=2, sigma=0))
    assert found["decode_base_s"] >= 0
    full_s = found["decode_base_s"] + 600 * found["decode_per_call_s"]
    assert full_s == pytest.approx(decode_s(DENSE, DEVICE, 1, 600, 2))


def test_the_mean_context_is_that_of_answers_seen_at_any_time() -> None:
    workload = Workload(prompt_tokens=10, mean_tokens=100, sigma=0.8, max_tokens=300, turns=3, tool_tokens=7)
    generator = random.Random(0)
    lengths = [workload.answer_tokens(generator) for _ in range(100_000)]
    expected = sum(length**2 for length in lengths) / 2 / sum(lengths)
    assert workload.mean_context == pytest.approx(10 + 7 + expected, rel=0.01)
    assert workload.expected_tokens == pytest.approx(sum(lengths) / len(lengths), rel=0.01)


def recipe(name: str, folder: Path) -> list[str]:
    shutil.copy(ROOT / "tests" / "support" / "model_configs" / "qwen3_4b.json", folder / "config.json")
    return [str(ROOT / "examples" / "gpu" / name / "config.yaml"), f"model.path={folder}"]


def test_a_plan_takes_the_speeds_of_the_hardware_unless_they_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["engine.max_running_requests=4", "rollout.max_concurrent_trajectories=4", "rollout.group_size=2"]
    words = [*recipe("qwen3_4b_1gpu", tmp_path), *small, "trainer.groups_per_batch=2"]
    quick = ["--versions", "1", "--warmup", "1", "--json"]

    def planned(*more: str) -> dict[str, Any]:
        assert main(["plan", *words, *more, *quick]) == 0
        (plan,) = json.loads(capsys.readouterr().out)["plans"]
        workload: dict[str, Any] = plan["workload"]
        return workload

    config = load_config(Path(words[0]), words[1:])
    usual, h100 = Workload(), planned()
    names = ("decode_base_s", "decode_per_call_s", "prefill_tokens_per_s", "train_tokens_per_s")
    wanted = computed_speeds(config, workload_for(config, None, {}), "H100")
    assert {name: h100[name] for name in names} == pytest.approx(wanted)
    h200 = planned("--hardware", "H200", "--prefill-tokens-per-s", "7")
    assert h200["prefill_tokens_per_s"] == 7
    ratio = DEVICES["H100"].memory_bytes_per_s / DEVICES["H200"].memory_bytes_per_s
    assert h200["decode_base_s"] == pytest.approx(h100["decode_base_s"] * ratio)
    assert main(["plan", *words, "model.path=/nowhere", "--hardware", "H200"]) == 2
    assert "there is no folder '/nowhere'" in capsys.readouterr().err
    for other in ("model.path=/nowhere", "engine.device=cpu"):
        found = planned(other, "placement.shared=false", "weights.transport=disk", "trainer.device=cuda")
        assert {name: found[name] for name in names} == {name: getattr(usual, name) for name in names}
