"""Each architecture in the trainer: against Hugging Face, with routing replayed, over several ranks."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from async_rl.engines.model_facts import load_facts
from tests.integration.test_trainer_parity import hf_log_probs
from tests.support.ranks import run_ranks
from tests.support.tiny_model import (
    amend_config,
    build_tiny_deepseek_v3,
    build_tiny_dense,
    build_tiny_glm4_moe,
    build_tiny_kimi_k2,
    build_tiny_mixtral,
    build_tiny_qwen2_moe,
)
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    differing,
    gathered_gradients,
    log_probs_of,
    native_rows,
    started,
    trainer_config,
    trial,
    weights,
)
from trainer.megatron.replay import TopKRouter, moe_layer_numbers

pytestmark = [pytest.mark.real, pytest.mark.megatron]

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TWO_SCALES = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
NO_SCALES = {key: value for key, value in TWO_SCALES.items() if "mscale" not in key}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

DENSE = {
    "llama": lambda path: build_tiny_dense(path, "llama", std=0.3, rope_parameters=LLAMA3_ROPE),
    "llama, plain rope, tied": lambda path: build_tiny_dense(
        path, "llama", std=0.3, head_dim=24, tie_word_embeddings=True
    ),
    "qwen2": lambda path: build_tiny_dense(path, "qwen2", std=0.3),
    "tied qwen2": lambda path: build_tiny_dense(path, "qwen2", std=0.3, tie_word_embeddings=True),
    "qwen3": lambda path: build_tiny_dense(path, "qwen3", std=0.3, head_dim=16),
}

MODELS = {
    "mixtral": lambda path: build_tiny_mixtral(path, std=0.3),
    "deepseek_v3": lambda path: build_tiny_deepseek_v3(path, std=0.3),
    "deepseek_v3, whole queries, plain rope": lambda path: build_tiny_deepseek_v3(
        path, std=0.3, q_lora_rank=None, rope_parameters=PLAIN_ROPE, num_groups=1, top_groups=1
    ),
    "deepseek_v3, two scales, two dense layers": lambda path: build_tiny_deepseek_v3(
        path, std=0.3, num_layers=4, dense_layers=2, rope_parameters=TWO_SCALES, n_shared_experts=2
    ),
    "deepseek_v3, no scales, all groups": lambda path: build_tiny_deepseek_v3(
        path, std=0.3, rope_parameters=NO_SCALES, num_groups=8, top_groups=8
    ),
    "glm4_moe": lambda path: build_tiny_glm4_moe(path, std=0.3),
    "glm4_moe, bare attention, two shared experts": lambda path: build_tiny_glm4_moe(
        path, std=0.3, attention_bias=False, use_qk_norm=False, n_shared_experts=2, dense_layers=0
    ),
    "kimi_k2": lambda path: build_tiny_kimi_k2(path, std=0.3),
    "qwen2_moe": lambda path: build_tiny_qwen2_moe(path, std=0.3),
    "qwen2_moe, normalised, a dense layer": lambda path: build_tiny_qwen2_moe(
        path, std=0.3, norm_top_k=True, dense_layers=(1,)
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Build each model once."""
    parent = tmp_path_factory.mktemp("models")

    def of(name: str) -> Path:
        path = parent / name
        if not path.exists():
            (MODELS | DENSE)[name](path)
        return path

    return of


@pytest.fixture
def deepseek(folder):
    return folder("deepseek_v3")


def batch_for(path: Path, **fields):
    facts = load_facts(path)
    if not facts.is_moe:
        return random_batch(routing=False, **fields)
    return random_batch(layers=facts.moe_layers, experts=facts.num_experts, top_k=facts.top_k, **fields)


def routers(worker):
    return [m for chunk in worker.model.chunks for m in chunk.modules() if isinstance(m, TopKRouter)]


def models(*names):
    """Variants of an architecture, with a comma in their names, are left to `make test-long`."""
    return [pytest.param(name, marks=pytest.mark.long if "," in name else ()) for name in names]


@pytest.mark.parametrize("name", models(*MODELS, *DENSE))
def test_log_probs_and_weights_are_hugging_faces_when_the_model_is_float32(folder, name):
    path = folder(name)
    batch = batch_for(path)
    reference = hf_log_probs(path, batch)
    original = load_file(path / "model.safetensors")
    facts = load_facts(path)
    with started(trainer_config(path, replay=False)) as worker:
        assert np.abs(log_probs_of(worker, batch) - reference).max() < 1e-4
        with trial(worker, trainer_config(path, replay=False, micro_batch_tokens=1)):  # none is packed
            assert np.abs(log_probs_of(worker, batch) - reference).max() < 1e-4
        exported = weights(worker)
        with_experts = tuple(router.layer_number - 1 for router in routers(worker))
        if facts.is_moe:
            assert tuple(number - 1 for number in moe_layer_numbers(worker.model.config)) == with_experts
    assert not differing(exported, original)
    assert with_experts == facts.moe_layers
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == facts.num_layers
    assert reference.std() > 0.5


def test_a_tied_model_leaves_nothing_behind_for_one_that_is_not(folder):
    """The bridge notes ties in tables that all models of a class would share."""
    for name, lm_head in (("tied qwen2", False), ("qwen2", True)):
        with started(trainer_config(folder(name), replay=False)) as worker:
            names = [spec.name for bucket in worker.plan_buckets(1 << 20) for spec in bucket.tensors]
        assert ("lm_head.weight" in names) == lm_head
        assert len(set(names)) == len(names)


def test_experts_are_hugging_faces_when_groups_and_a_bias_select(deepseek):
    from transformers import AutoModelForCausalLM

    batch = batch_for(deepseek)
    with started(trainer_config(deepseek)) as worker:
        rows = native_rows(worker, batch)
    model = AutoModelForCausalLM.from_pretrained(deepseek, dtype=torch.float32).eval()
    chosen: list[np.ndarray] = []
    by_score_alone: list[np.ndarray] = []

    def watch(gate, inputs, outputs):
        scores, _, ids = outputs
        chosen.append(ids.sort(-1).values.numpy())
        by_score_alone.append(scores.topk(ids.shape[1]).indices.sort(-1).values.numpy())

    for layer in load_facts(deepseek).moe_layers:
        model.model.layers[layer].mlp.gate.register_forward_hook(watch)
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        with torch.no_grad():
            model(torch.from_numpy(batch.token_ids[start:end].astype(np.int64))[None])
        np.testing.assert_array_equal(np.sort(rows[start:end], -1), np.stack(chosen, 1))
        # Groups and bias have a say: without them other experts would have been chosen.
        assert (np.stack(by_score_alone, 1) != np.stack(chosen, 1)).any(axis=-1).mean() > 0.2
        chosen.clear()
        by_score_alone.clear()


def test_the_bias_stays_float32_when_the_model_is_bfloat16(deepseek, tmp_path):
    original = load_file(deepseek / "model.safetensors")
    with started(trainer_config(deepseek, dtype="bfloat16")) as worker:
        result = worker.train_on(batch_for(deepseek), 1)
        worker.publish(str(tmp_path / "out"), 1)
        specs = {spec.name: spec.dtype for bucket in worker.plan_buckets(1 << 20) for spec in bucket.tensors}
    assert np.isfinite(result.metrics["loss"])
    published = load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, tensor in published.items():
        assert tensor.dtype == (torch.float32 if name.endswith("_bias") else torch.bfloat16)
        assert specs[name] == str(tensor.dtype).removeprefix("torch.")
        if name.endswith("_bias"):
            assert torch.equal(tensor, original[name])


def test_layers_of_multi_token_prediction_stay_as_they_are_when_published(deepseek, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(deepseek, path)
    drafting = {
        "model.layers.3.eh_proj.weight": torch.randn(32, 64, dtype=torch.bfloat16),
        "model.layers.3.mlp.experts.0.up_proj.weight": torch.randn(32, 32),
    }
    save_file(drafting, path / "model-drafting.safetensors")
    amend_config(path, num_nextn_predict_layers=1)
    with started(trainer_config(path)) as worker:
        assert not any("mtp" in n for chunk in worker.model.chunks for n, _ in chunk.named_parameters())
        worker.train_on(batch_for(path), 1)
        worker.publish(str(tmp_path / "out"), 1)
        sent = {spec.name for bucket in worker.plan_buckets(1 << 20) for spec in bucket.tensors}
    published = load_file(tmp_path / "out" / "model.safetensors")
    assert set(published) == set(load_file(path / "model.safetensors")) | set(drafting)
    assert all(torch.equal(published[name], tensor) for name, tensor in drafting.items())
    assert not sent & set(drafting)  # engines that do not draft have nowhere to put them
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1


LAYOUTS = {
    "deepseek_v3: tensor": {"tp": 2, "etp": 2},
    "deepseek_v3: tensor and expert": {"tp": 2, "ep": 2},
    "deepseek_v3: pipeline": {"pp": 2},
    "deepseek_v3: interleaved": {"pp": 2, "vpp": 2},
    "deepseek_v3: context": {"cp": 2},
    "glm4_moe: expert": {"ep": 2},
    "glm4_moe: pipeline, a dense layer first": {"pp": 2, "first_stage_layers": 1},
    "kimi_k2: tensor and expert": {"tp": 2, "ep": 2},
    "tied qwen2: tensor": {"tp": 2},
    "tied qwen2: pipeline": {"pp": 2},
}


def laid_out_config(parent: Path, name: str, **trainer) -> dict:
    path = parent / name.split(": ")[0]
    replay = load_facts(path).is_moe
    return trainer_config(path, replay=replay, micro_batch_tokens=40, **trainer)


def step_in(config: dict, **rank):
    """Metrics, gradients and weights of one step."""
    with started(config, **rank) as worker:
        metrics = worker.train_on(batch_for(Path(config["model"]["path"])), 1).metrics
        return metrics, gathered_gradients(worker), weights(worker)


def run_rank(rank: int, out: Path) -> dict:
    """Take one step in every layout."""
    return {
        name: step_in(
            laid_out_config(out, name, num_ranks=2, layout=layout, recompute="full"),
            rank=rank,
            meeting=out / f"meeting {name}",
        )
        for name, layout in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory):
    """(metrics, gradients, weights) after one step of one rank by model, and of two ranks in each layout."""
    out = tmp_path_factory.mktemp("ranks")
    build_tiny_deepseek_v3(out / "deepseek_v3", num_layers=4)
    build_tiny_glm4_moe(out / "glm4_moe")
    build_tiny_kimi_k2(out / "kimi_k2")
    build_tiny_dense(out / "tied qwen2", "qwen2", tie_word_embeddings=True)
    models = {name.split(": ")[0]: name for name in LAYOUTS}
    alone = {model: step_in(laid_out_config(out, name)) for model, name in models.items()}
    return alone, run_ranks(run_rank, out)


@pytest.mark.case(30)
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_equal_one_when_a_model_is_laid_out(laid_out, layout):
    alone, results = laid_out
    metrics, expected_gradients, expected_weights = alone[layout.split(": ")[0]]
    assert metrics["grad_norm"] > 1e-2
    for rank_metrics, rank_gradients, rank_weights in (rank[layout] for rank in results):
        for key in ("loss", "grad_norm", "entropy", "log_prob_abs_diff"):
            assert rank_metrics[key] == pytest.approx(metrics[key], abs=2e-5, rel=1e-4), key
        assert set(rank_gradients) == set(expected_gradients)
        torch.testing.assert_close(rank_gradients, expected_gradients, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(rank_weights, expected_weights, atol=2e-4, rtol=0)
