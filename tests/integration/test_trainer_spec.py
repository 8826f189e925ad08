"""Which layers are built where, and in which types they are trained.

TransformerEngine is not here. What can be seen without it is which spec is asked for and with which fields,
and that the names of its parameters lead to those of Hugging Face.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.config import LayoutConfig
from async_rl.errors import ConfigError, EnvironmentNotReady
from tests.support.emulated_layers import EMULATED
from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    gradients,
    started,
    take_layers_of_transformer_engine,
    trainer_config,
)
from trainer.megatron import architectures, cpu, layout
from trainer.megatron.bridge import HFBridge

pytestmark = [pytest.mark.real, pytest.mark.megatron]


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """Two layers, the first dense."""
    return build_tiny_qwen3_moe(
        tmp_path_factory.mktemp("models") / "moe", num_layers=2, dense_layers=(0,), num_experts=2
    )


def test_an_installed_transformer_engine_is_left_out_when_no_gpu_is_visible():
    program = (
        "import importlib.util\n"
        "print(importlib.util.find_spec('transformer_engine') is not None)\n"
        "import trainer.megatron\n"
        "from megatron.core.extensions import transformer_engine\n"
        "print(transformer_engine.HAVE_TE)\n"
    )
    path = os.pathsep.join([str(EMULATED), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_a_transformer_engine_that_cannot_be_imported_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(EnvironmentNotReady, match=r"is installed, but cannot be imported .*make setup-gpu"):
        cpu.has_transformer_engine()


def test_its_spec_and_kernels_are_asked_for_when_transformer_engine_is_taken(moe, monkeypatch):
    asked = []

    def remember(config, **fields):
        asked.append(fields["use_transformer_engine"])
        return "untouched"

    kernels = {"moe_grouped_gemm": True, "moe_permute_fusion": True, "apply_rope_fusion": True}
    with started(trainer_config(moe)) as worker:
        bridge = worker.model.bridge.mbridge
        assert kernels.keys().isdisjoint(layout.transformer_config(LayoutConfig(), "none", True, fused=False))
        assert not bridge.config.moe_grouped_gemm
        monkeypatch.setattr(architectures, "get_gpt_decoder_block_spec", remember)
        take_layers_of_transformer_engine(monkeypatch, True)
        fused = [cpu.fuses_layers(dtype) for dtype in (torch.bfloat16, torch.float32)]
        assert fused == [True, False]
        assert kernels.items() <= layout.transformer_config(LayoutConfig(), "none", True, fused=True).items()
        built = architectures.bridge_for(bridge.hf_config, str(moe), torch.bfloat16, {})
        assert built._get_transformer_layer_spec() == "untouched"  # attention stays TransformerEngine's
        plain = architectures.bridge_for(bridge.hf_config, str(moe), torch.float32, {})
        monkeypatch.undo()
        assert plain._get_transformer_layer_spec() != "untouched"
    assert asked == [True]


def test_nothing_is_dropped_out_when_config_json_says_so(moe):
    with started(trainer_config(moe)) as worker:
        model = worker.model.bridge.mbridge.hf_config
        model.hidden_dropout = model.attention_dropout = 0.1
        fields = layout.transformer_config(LayoutConfig(), "none", True, fused=False)
        built = architectures.bridge_for(model, str(moe), torch.float32, fields)
        assert (built.config.hidden_dropout, built.config.attention_dropout) == (0.0, 0.0)


def test_a_layout_is_refused_when_the_stages_do_not_hold_all_layers(moe):
    with started(trainer_config(moe)):
        fields = layout.transformer_config(
            LayoutConfig(pp=2, first_stage_layers=5), "none", False, fused=False
        )
        with pytest.raises(ConfigError, match=r"cannot be laid out by trainer\.layout: Mismatch"):
            HFBridge(str(moe), torch.float32, **fields)


def parameters(worker) -> dict[str, torch.Tensor]:
    """What the optimizer steps, by the parameter's name."""
    return {
        name.replace("module.", ""): getattr(p, "main_param", p).detach().clone()
        for chunk in worker.model.chunks
        for name, p in chunk.named_parameters()
    }


def test_bfloat16_is_trained_through_float32_when_steps_are_too_small_for_it(tmp_path):
    """Six steps of 1e-5: a weight of 0.1 has its neighbour 5e-4 away in bfloat16, and would never move."""
    path = build_tiny_qwen3_moe(tmp_path / "moe", num_layers=2)
    exact = {
        name: tensor.bfloat16().float() for name, tensor in load_file(path / "model.safetensors").items()
    }
    save_file(exact, path / "model.safetensors", metadata={"format": "pt"})
    batch = random_batch(layers=2)  # routing is replayed: experts are the same in both
    norms, start, end = {}, {}, {}
    for dtype in ("float32", "bfloat16"):
        config = trainer_config(path, dtype=dtype, optimizer={"lr": 1e-5}, micro_batch_tokens=30)
        with started(config) as worker:
            start[dtype] = parameters(worker)
            norms[dtype] = worker.train_on(batch, 1).metrics["grad_norm"]
            assert {gradient.dtype for gradient in gradients(worker).values()} == {torch.float32}
            for step in range(2, 7):
                worker.train_on(batch, step)
            end[dtype] = parameters(worker)
            if dtype == "bfloat16":
                published = dict(worker.export_weights())
                assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
                for name, p in worker.model.chunks[0].named_parameters():
                    assert torch.equal(p, end[dtype][name.replace("module.", "")].bfloat16())
    assert norms["bfloat16"] == pytest.approx(norms["float32"], rel=0.02)
    away, moved = 0.0, 0.0
    for name, expected in end["float32"].items():
        assert end["bfloat16"][name].dtype == torch.float32
        torch.testing.assert_close(start["bfloat16"][name], start["float32"][name], atol=0, rtol=0)
        away += float((end["bfloat16"][name] - expected).abs().sum())
        moved += float((expected - start["float32"][name]).abs().sum())
    assert away < 0.1 * moved
