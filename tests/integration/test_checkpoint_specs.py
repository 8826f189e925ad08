"""Checkpoints have one set of names: what either layer spec wrote continues under the other, bit for bit.

TransformerEngine's layers are emulated (`tests/support/emulated_te`), so that Megatron-Core's own classes of
that spec say what their parameters are called, and both specs compute the same.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from async_rl.cli.main import main
from async_rl.config import LayoutConfig
from tests.support import tiny_model
from tests.support.emulated_layers import spawn_with_transformer_engine
from tests.support.layer_specs import (
    layers_of,
    stored_tensors,
    unfused_config,
)
from tests.support.train_batches import random_batch
from tests.support.trainers import differing, started, trainer_config, weights
from trainer.megatron import cpu, shards
from trainer.megatron.bridge import HFBridge
from trainer.megatron.process_groups import start_process_groups, stop_process_groups

pytestmark = [
    pytest.mark.real,
    pytest.mark.megatron,
    pytest.mark.timeout(600),  # a process imports everything
]

SPECS = ("local", "transformer_engine")
MODELS = {
    "qwen3_moe": lambda path: tiny_model.build_tiny_qwen3_moe(
        path, num_layers=2, dense_layers=(0,), num_experts=4
    ),
    "deepseek_v3": lambda path: tiny_model.build_tiny_deepseek_v3(path, num_layers=2),
    "deepseek_v3 without q_lora_rank": lambda path: tiny_model.build_tiny_deepseek_v3(
        path, num_layers=2, q_lora_rank=None
    ),
    "glm4_moe": lambda path: tiny_model.build_tiny_glm4_moe(path, num_layers=2),
    "qwen2_moe": lambda path: tiny_model.build_tiny_qwen2_moe(path, num_layers=2, dense_layers=(0,)),
    "mixtral": tiny_model.build_tiny_mixtral,
    "qwen3": tiny_model.build_tiny_qwen3,
    "llama": lambda path: tiny_model.build_tiny_dense(path, "llama"),
    "qwen2": lambda path: tiny_model.build_tiny_dense(path, "qwen2"),
}
TRAINED = ("qwen3_moe", "deepseek_v3")
"""They have every kind of layer: dense, with experts, with shared experts, with latent attention."""

FIGURES = ("loss", "grad_norm", "entropy", "value_loss", "critic_grad_norm")


def config_of(model: Path, **trainer):
    return trainer_config(
        model,
        dtype="bfloat16",
        replay=False,
        loss={"advantages": "gae"},
        critic={"lr": 1e-3},
        # The norm is a sum over parameters in another order, which would scale all gradients.
        optimizer={"lr": 1e-3, "clip_grad": 100.0},
        **trainer,
    )


def batch(seed: int):
    return random_batch(seed, layers=2, routing=False)


def names_of(model: Path, spec: str) -> dict:
    """Names and shapes of parameters in checkpoints, and what Megatron calls them and its extra states."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    with layers_of(spec):
        fused = cpu.fuses_layers(torch.bfloat16)
        fields = unfused_config(LayoutConfig(), "none", False, fused=fused)
        chunks = HFBridge(str(model), torch.bfloat16, **fields).build_chunks()
    stored = {part.key: tuple(part.global_shape) for part in shards.parameter_parts(chunks)}
    given = list(nested_values(chunks[0].sharded_state_dict(metadata={"singleton_local_shards": True})))
    return {
        "stored": stored,
        "megatron": [each.key for each in given if not isinstance(each, ShardedObject)],
        "extra": [each.key for each in given if isinstance(each, ShardedObject)],
    }


def write_names(out: Path) -> None:
    start_process_groups(0, 1, "", LayoutConfig(), timeout_s=60)
    try:
        found = {(name, spec): names_of(out / name, spec) for name in MODELS for spec in SPECS}
    finally:
        stop_process_groups()
    torch.save(found, out / "names")


def go_on(out: Path, model: str, spec: str, source: str | None, target: str) -> None:
    """Train a step under a spec after the checkpoint `source`, which is written again as `target`; without
    `source`, trains a first step before.
    """
    with layers_of(spec), started(config_of(out / model), source and out / model / source) as worker:
        if source is None:
            worker.train_on(batch(1), 1)
        worker.save_checkpoint(str(out / model / target), {})
        assert worker.saved_checkpoint(wait=True).failure is None
        published = weights(worker)
        stored = stored_tensors(out / model / target / "step_00000001")
        metrics = worker.train_on(batch(2), 2).metrics
        following = {part.key: part.data.clone() for part in shards.parts_to_save(worker.model)}
        layers = {type(module).__name__ for module in worker.model.chunks[0].modules()}
        assert ("TELayerNormColumnParallelLinear" in layers) == (spec == "transformer_engine")
    result = {"stored": stored, "published": published, "metrics": metrics, "following": following}
    torch.save(result, out / model / f"{target}.pt")


def run(rank: int, out: Path) -> None:
    """Run in a process of its own, which has an emulated TransformerEngine."""
    torch.set_num_threads(1)
    write_names(out)
    for model in TRAINED:
        go_on(out, model, "local", None, "first")
        go_on(out, model, "transformer_engine", "first", "over")
        go_on(out, model, "local", "over", "back")


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("specs")
    for name, build in MODELS.items():
        build(out / name)
    spawn_with_transformer_engine(run, out)
    return out


@pytest.mark.parametrize("model", MODELS)
def test_names_and_shapes_are_transformer_engines_when_either_spec_is_built(ran, model):
    found = torch.load(ran / "names")
    local, fused = (found[model, spec] for spec in SPECS)
    assert local["stored"] == fused["stored"]
    # Gate and up projections are one parameter in Megatron, and two tensors in a checkpoint.
    parameters = {re.sub(r"(linear_fc1\.(weight|bias))_[wv]$", r"\1", key) for key in fused["stored"]}
    assert parameters == set(fused["megatron"])
    assert fused["extra"]
    assert not any("_extra_state" in key for key in fused["stored"])


@pytest.mark.parametrize("model", TRAINED)
def test_a_checkpoint_goes_on_bit_for_bit_when_the_other_spec_resumes_it_and_back(ran, model):
    written, *resumed = (torch.load(ran / model / f"{name}.pt") for name in ("first", "over", "back"))
    kinds = {re.split(r"decoder|embedding|output_layer", key)[0] for key in written["stored"]}
    optimizer = {f"optimizer.state.{name}." for name in ("exp_avg", "exp_avg_sq", "fp32_param")}
    assert kinds == {"", "critic."} | optimizer | {f"critic.{name}" for name in optimizer}
    for result in resumed:  # the same checkpoint bit for bit, and the same state after another step
        for kind in ("stored", "published", "following"):
            assert not differing(result[kind], written[kind]), kind
        for figure in FIGURES:
            assert result["metrics"][figure] == pytest.approx(written["metrics"][figure], rel=1e-6), figure


@pytest.mark.parametrize("model", TRAINED)
def test_weights_of_transformer_engines_layers_are_exported_where_it_cannot_be_imported(
    ran, model, tmp_path, capsys
):
    out = tmp_path / "exported"
    checkpoint = ran / model / "over"
    assert main(["export", "--checkpoint", str(checkpoint), "--out", str(out)]) == 0
    assert "the weights of step 1" in capsys.readouterr().out
    exported = load_file(out / "model.safetensors")
    published = torch.load(ran / model / "over.pt")["published"]
    assert not differing(exported, published)
