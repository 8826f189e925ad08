"""What a real trainer takes from the config, which layers it builds, and in which types it trains them."""

import importlib.util
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.config import LayoutConfig
from async_rl.errors import ConfigError, EnvironmentNotReady
from async_rl.trainer_protocol import BEST_FILE, BestCheckpoint
from tests.support.emulated_layers import EMULATED
from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    gradients,
    started,
    take_layers_of_transformer_engine,
    trainer_config,
    trial,
    weights,
)
from trainer import worker as worker_module
from trainer.megatron import architectures, bridge, cpu, layout, model, process_groups
from trainer.megatron.bridge import HFBridge
from trainer.worker import TrainerWorker

pytestmark = [pytest.mark.real, pytest.mark.megatron]


def test_the_optimizer_has_the_settings_of_the_config(one_layer):
    settings = {"weight_decay": 0.3, "beta2": 0.7}
    passed = {"adam_beta1": 0.8, "adam_eps": 1e-6}
    with started(trainer_config(one_layer, optimizer=settings, megatron=passed)) as worker:
        groups = [group for inner in worker.model.inner_optimizers for group in inner.param_groups]
        assert {(group["betas"], group["eps"]) for group in groups} == {((0.8, 0.7), 1e-6)}
        assert max(group["weight_decay"] for group in groups) == 0.3


def test_gradients_are_clipped_at_the_norm_of_the_config(one_layer):
    config = trainer_config(one_layer, optimizer={"clip_grad": 1e-3})
    with started(config) as worker, trial(worker, config):
        assert worker.train_on(random_batch(1, layers=1), 1).metrics["grad_norm"] > 1e-2
        norm = torch.stack([gradient.norm() for gradient in gradients(worker).values()]).norm()
        assert norm == pytest.approx(1e-3, rel=1e-2)


def test_checkpoints_are_kept_when_their_step_is_a_multiple(one_layer, tmp_path):
    with started(trainer_config(one_layer, keep_checkpoints=1, keep_every=2)) as worker:
        for step in (1, 2, 3, 4):
            worker.train_on(random_batch(step, layers=1), step)
            worker.save_checkpoint(str(tmp_path), {})
            worker.saved_checkpoint(wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000004"]


@pytest.mark.parametrize("keep_best", ["all/reward", None])
def test_the_best_checkpoint_is_kept_when_the_config_says_by_what(one_layer, tmp_path, keep_best):
    best = BestCheckpoint(metric="all/reward", step=1, value=0.5)
    (tmp_path / BEST_FILE).write_bytes(msgspec.json.encode(best))
    with started(trainer_config(one_layer, keep_checkpoints=1, keep_best=keep_best)) as worker:
        for step in (1, 2, 3):
            worker.train_on(random_batch(step, layers=1), step)
            worker.save_checkpoint(str(tmp_path), {})
            worker.saved_checkpoint(wait=True)
    kept = ["step_00000001", "step_00000003"] if keep_best else ["step_00000003"]
    assert sorted(path.name for path in tmp_path.glob("step_*")) == kept


class SetupEnded(Exception):
    """Ends a setup where a test has seen enough."""


def test_gradients_are_summed_during_the_backward_pass_when_the_config_says_so(one_layer, monkeypatch):
    seen: list[dict[str, Any]] = []

    class Remembered(model.DistributedDataParallelConfig):
        def __init__(self, **options: Any) -> None:
            seen.append(options)
            raise SetupEnded

    monkeypatch.setattr(model, "DistributedDataParallelConfig", Remembered)
    monkeypatch.setattr(model.parallel_state, "get_data_parallel_world_size", lambda **options: 2)
    for wanted in (False, True):
        with pytest.raises(SetupEnded), started(trainer_config(one_layer, overlap_grad_reduce=wanted)):
            pass
    assert [options["overlap_grad_reduce"] for options in seen] == [False, True]


def test_the_parallel_groups_have_the_sizes_of_the_layout(one_layer, monkeypatch):
    seen: list[dict[str, Any]] = []

    def make_groups(**sizes: Any) -> None:
        seen.append(sizes)
        raise SetupEnded

    monkeypatch.setattr(process_groups.dist, "init_process_group", lambda *arguments, **options: None)
    monkeypatch.setattr(process_groups.parallel_state, "initialize_model_parallel", make_groups)
    layout = {"tp": 2, "pp": 4, "vpp": 5, "cp": 3, "ep": 2, "etp": 3}
    worker = TrainerWorker(trainer_config(one_layer, num_ranks=24, layout=layout), 0, 1, "")
    with pytest.raises(SetupEnded):
        worker.setup(None)
    (sizes,) = seen
    assert sizes["tensor_model_parallel_size"] == 2
    assert sizes["pipeline_model_parallel_size"] == 4
    assert sizes["virtual_pipeline_model_parallel_size"] == 5
    assert sizes["context_parallel_size"] == 3
    assert sizes["expert_model_parallel_size"] == 2
    assert sizes["expert_tensor_parallel_size"] == 3


def test_as_many_ranks_send_as_the_config_says(one_layer, monkeypatch):
    seen: list[int | None] = []

    def exchange(held: Any, stage: int, num_senders: int | None) -> None:
        seen.append(num_senders)
        raise SetupEnded

    monkeypatch.setattr(bridge, "exchange_owners", exchange)
    for senders in (None, 3):
        sent = {"weights": {"transport": "distributed", "senders": senders}}
        with pytest.raises(SetupEnded), started(trainer_config(one_layer) | sent) as worker:
            worker.weights.owners()
    assert seen == [None, 3]


def test_a_snapshot_is_kept_where_the_config_says(one_layer, monkeypatch):
    seen: list[str] = []

    def snapshot(*, keeps: bool, where: str) -> None:
        seen.append(where)
        raise SetupEnded

    monkeypatch.setattr(worker_module, "WeightSnapshot", snapshot)
    for where in ("host", "device"):
        worker = TrainerWorker(trainer_config(one_layer) | {"weights": {"snapshot": where}}, 0, 1, "")
        with pytest.raises(SetupEnded):
            worker.take_snapshot(1)
    assert seen == ["host", "device"]


@pytest.mark.parametrize(
    "change",
    [
        {"advantages": "grpo"},
        {"aggregate": "sequence_mean"},
        {"overlong_buffer_tokens": 20},
        {"old_log_probs": "rollout"},
    ],
    ids=str,
)
def test_gradients_change_with_the_loss(one_layer, change):
    usual = {"advantages": "dr_grpo"}
    with started(trainer_config(one_layer)) as worker:
        found = []
        for loss in (usual, usual | change):
            config = trainer_config(one_layer, loss=loss)
            config["rollout"] |= {"max_new_tokens": 25}
            with trial(worker, config):
                worker.train_on(random_batch(1, layers=1), 1)
                found.append(torch.cat([gradient.flatten() for gradient in gradients(worker).values()]))
        usual, other = found
        assert (usual - other).norm() > 0.05 * usual.norm()


def test_weights_move_by_the_learning_rate_of_the_config(one_layer):
    with started(trainer_config(one_layer, optimizer={"lr": 1e-2, "warmup_steps": 10})) as worker:
        before = weights(worker)
        worker.train_on(random_batch(1, layers=1), 1)
        after = weights(worker)
        moved = max((after[name] - tensor).abs().max().item() for name, tensor in before.items())
    assert moved == pytest.approx(1e-2 / 10, rel=0.2)  # Adam's first step


def test_a_batch_is_cut_as_the_config_says(one_layer, monkeypatch):
    with started(trainer_config(one_layer)) as worker:
        schedule, cuts = worker.model.run_schedule, []

        def run_schedule(inputs, *arguments, **options):
            cuts.append(len(inputs))
            return schedule(inputs, *arguments, **options)

        monkeypatch.setattr(worker.model, "run_schedule", run_schedule)
        for tokens in (1, 10_000):
            config = trainer_config(one_layer, micro_batch_tokens=tokens)
            with trial(worker, config):
                worker.train_on(random_batch(1, layers=1), 1)
    assert sorted(set(cuts)) == [1, 6]


# -- which layers are built where ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense_first(tmp_path_factory):
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


def test_its_spec_and_kernels_are_asked_for_when_transformer_engine_is_taken(dense_first, monkeypatch):
    asked = []

    def remember(config, **fields):
        asked.append(fields["use_transformer_engine"])
        return "untouched"

    kernels = {"moe_grouped_gemm": True, "moe_permute_fusion": True, "apply_rope_fusion": True}
    with started(trainer_config(dense_first)) as worker:
        bridge = worker.model.bridge.mbridge
        assert kernels.keys().isdisjoint(layout.transformer_config(LayoutConfig(), "none", True, fused=False))
        assert not bridge.config.moe_grouped_gemm
        monkeypatch.setattr(architectures, "get_gpt_decoder_block_spec", remember)
        take_layers_of_transformer_engine(monkeypatch, True)
        fused = [cpu.fuses_layers(dtype) for dtype in (torch.bfloat16, torch.float32)]
        assert fused == [True, False]
        assert kernels.items() <= layout.transformer_config(LayoutConfig(), "none", True, fused=True).items()
        built = architectures.bridge_for(bridge.hf_config, str(dense_first), torch.bfloat16, {})
        assert built._get_transformer_layer_spec() == "untouched"  # attention stays TransformerEngine's
        plain = architectures.bridge_for(bridge.hf_config, str(dense_first), torch.float32, {})
        monkeypatch.undo()
        assert plain._get_transformer_layer_spec() != "untouched"
    assert asked == [True]


def test_nothing_is_dropped_out_when_config_json_says_so(dense_first):
    with started(trainer_config(dense_first)) as worker:
        model = worker.model.bridge.mbridge.hf_config
        model.hidden_dropout = model.attention_dropout = 0.1
        fields = layout.transformer_config(LayoutConfig(), "none", True, fused=False)
        built = architectures.bridge_for(model, str(dense_first), torch.float32, fields)
        assert (built.config.hidden_dropout, built.config.attention_dropout) == (0.0, 0.0)


def test_a_layout_is_refused_when_the_stages_do_not_hold_all_layers(dense_first):
    with started(trainer_config(dense_first)):
        fields = layout.transformer_config(
            LayoutConfig(pp=2, first_stage_layers=5), "none", False, fused=False
        )
        with pytest.raises(ConfigError, match=r"cannot be laid out by trainer\.layout: Mismatch"):
            HFBridge(str(dense_first), torch.float32, **fields)


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
