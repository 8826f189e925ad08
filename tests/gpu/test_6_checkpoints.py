"""Checkpoints that a GPU wrote, read without one and by other layers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu import device
from tests.gpu.models import build
from tests.support.layer_specs import stored_tensors
from tests.support.tiny_model import build_tiny_deepseek_v3, build_tiny_dense, build_tiny_glm4_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import started, trainer_config, weights

pytestmark = [
    pytest.mark.proof(needs="trainer", seconds=120, value=35),
    pytest.mark.filterwarnings("ignore:::megatron"),
]

MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen3_moe": partial(build, num_layers=2),
    "deepseek_v3": partial(
        build_tiny_deepseek_v3,
        num_layers=2,
        hidden_size=256,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=128,
    ),
    "glm4_moe": partial(
        build_tiny_glm4_moe,
        num_layers=2,
        hidden_size=256,
        intermediate_size=512,
        head_dim=64,
        moe_intermediate_size=128,
    ),
    "qwen3": lambda path: build_tiny_dense(
        path, "qwen3", hidden_size=256, intermediate_size=512, head_dim=64
    ),
}
"""Of head sizes and widths that GPU kernels support."""


@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_of_the_gpu_is_exported_without_it_and_read_by_other_layers(
    kind: str, tmp_path: Path, measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What TransformerEngine's layers wrote is exported on the CPU and read by Megatron's, bit for bit."""
    model = MODELS[kind](tmp_path / "model")
    config = trainer_config(model, dtype="bfloat16", replay=False, require_transformer_engine=False)
    batches = [random_batch(seed, layers=2, routing=False) for seed in range(2)]
    stored, norms = {}, {}
    for name, fused, source in (("first", True, None), ("plain", False, "first"), ("fused", True, "plain")):
        fused = device.take_layers(monkeypatch, fused)
        with started(config, source and tmp_path / source) as worker:
            layers = {type(module).__name__ for module in worker.model.chunks[0].modules()}
            assert ("TELayerNormColumnParallelLinear" in layers) == fused
            if source is None:
                worker.train_on(batches[0], 1)
                published = {key: tensor.cpu() for key, tensor in weights(worker).items()}
            worker.save_checkpoint(str(tmp_path / name), {})
            assert worker.saved_checkpoint(wait=True).failure is None
            stored[name] = stored_tensors(tmp_path / name / "step_00000001")
            norms[name] = worker.train_on(batches[1], 2).metrics["grad_norm"]
    for name in ("plain", "fused"):
        assert stored[name].keys() == stored["first"].keys()
        assert [key for key, at in stored["first"].items() if not torch.equal(stored[name][key], at)] == []
        measure(f"gradient norm of the next step, {name} layers", norms[name] / norms["first"], "(ratio)")
    assert norms["plain"] == pytest.approx(norms["first"], rel=0.1)
    assert norms["fused"] == pytest.approx(norms["first"], rel=0.01)

    out, begin = tmp_path / "exported", time.monotonic()
    command = [sys.executable, "-m", "async_rl.cli.main", "export"]
    done = subprocess.run(
        [*command, "--checkpoint", str(tmp_path / "first"), "--out", str(out)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measure("export on the CPU", time.monotonic() - begin, "s")
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == published.keys()
    assert [key for key, tensor in published.items() if not torch.equal(exported[key], tensor)] == []
