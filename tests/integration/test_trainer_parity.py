"""The Megatron model against Hugging Face's own, weights in and out."""

import json
import shutil

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from async_rl.engines.model_facts import read_config
from tests.support.tiny_model import build_tiny_qwen3_moe
from tests.support.train_batches import random_batch
from tests.support.trainers import (
    differing,
    gradients,
    log_probs_of,
    native_rows,
    started,
    trainer_config,
    weights,
)
from trainer.megatron import architectures, bridge
from trainer.supported_values import KNOWN_MODEL_TYPES

pytestmark = pytest.mark.megatron


def hf_log_probs(path, batch, temperature=1.0):
    """Hugging Face's log-probs of the trained tokens at the predicting positions, and its experts."""
    from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config

    if read_config(path)["model_type"] == "kimi_k2":  # whose architecture transformers knows by another name
        config = DeepseekV3Config.from_pretrained(path)
        config.model_type = "deepseek_v3"
    else:
        config = AutoConfig.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).eval()
    result = np.zeros(batch.num_tokens, np.float32)
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = torch.from_numpy(batch.token_ids[start:end].astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        log_probs = torch.log_softmax(logits / temperature, -1)[:-1].gather(1, ids[1:, None])[:, 0]
        result[start : end - 1] = log_probs * torch.from_numpy(batch.loss_mask[start + 1 : end])
    return result


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """Three layers, the first dense."""
    return build_tiny_qwen3_moe(tmp_path_factory.mktemp("models") / "moe", dense_layers=(0,))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_weights_equal_hf_when_the_moe_model_is_float32(moe, temperature):
    batch = random_batch(layers=2, routing=False)
    with started(trainer_config(moe, replay=False, temperature=temperature)) as worker:
        ours = log_probs_of(worker, batch)
        assert not differing(weights(worker), load_file(moe / "model.safetensors"))
    reference = hf_log_probs(moe, batch, temperature)
    assert np.abs(ours - reference).max() < 1e-4
    assert reference.std() > 0.1


def test_tokens_are_trained_at_the_temperature_at_which_they_were_sampled(moe):
    """The run was resumed with another temperature than the one that sampled the first half."""
    batch = random_batch(layers=2, routing=False)
    both, half = {}, batch.num_tokens // 2
    for temperature in (0.6, 1.0):
        with started(trainer_config(moe, replay=False, temperature=temperature)) as worker:
            recorded = np.full(batch.num_tokens, 0.6, np.float32)
            mixed = np.where(np.arange(batch.num_tokens) < half, np.float32(0.6), np.float32(np.nan))
            ours = log_probs_of(worker, msgspec.structs.replace(batch, temperatures=mixed))
            plain = log_probs_of(worker, batch)
            result = worker.train_on(msgspec.structs.replace(batch, temperatures=recorded), 1).metrics
            both[temperature] = ours, plain, result, gradients(worker)
    (_, at_06, expected, gradient), (ours, at_1, metrics, found) = both[0.6], both[1.0]
    # Log-probs are at the position that predicts the token.
    assert np.abs(ours - np.where(np.arange(batch.num_tokens) < half - 1, at_06, at_1)).max() < 1e-5
    assert np.abs(at_06 - at_1).max() > 0.1
    for name in ("loss", "entropy", "grad_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(found, gradient, rtol=1e-3, atol=1e-6)


def test_chosen_experts_equal_hf_when_routing_is_native(moe):
    from transformers import AutoModelForCausalLM

    batch = random_batch(layers=(1, 2))
    with started(trainer_config(moe)) as worker:
        rows = native_rows(worker, batch)
    model = AutoModelForCausalLM.from_pretrained(moe, dtype=torch.float32).eval()
    start, end = batch.offsets[2], batch.offsets[3]
    ids = torch.from_numpy(batch.token_ids[start:end].astype(np.int64))[None]
    with torch.no_grad():
        router_logits = model(ids, output_router_logits=True).router_logits
    assert len(router_logits) == 2
    for column, logits in enumerate(router_logits):
        expected = logits.topk(2).indices.sort(-1).values.numpy()
        np.testing.assert_array_equal(np.sort(rows[start:end, column], -1), expected)


def test_published_folder_is_a_complete_model_when_written_in_shards(moe, tmp_path, monkeypatch):
    (moe / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(bridge, "SHARD_BYTES", 40_000)
    target = tmp_path / "versions" / "version_7"
    with started(trainer_config(moe)) as worker:
        worker.publish(str(target), 7)
        worker.publish(str(target), 7)  # replaces what is there
    index = json.loads((target / "model.safetensors.index.json").read_text())
    original = load_file(moe / "model.safetensors")
    assert set(index["weight_map"]) == set(original)
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        with safe_open(target / file, "pt") as shard:
            assert torch.equal(shard.get_tensor(name), original[name])
    assert (target / "tokenizer_config.json").is_file()
    assert [p.name for p in target.parent.iterdir()] == ["version_7"]
    batch = random_batch(layers=(1, 2))
    np.testing.assert_array_equal(hf_log_probs(target, batch), hf_log_probs(moe, batch))


def test_model_is_refused_when_a_weight_is_missing(moe, tmp_path):
    """What is not loaded would be random, and equal on all expert ranks."""
    shutil.copytree(moe, tmp_path / "model")
    tensors = load_file(moe / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match=r"experts\.3\.up_proj"), started(trainer_config(tmp_path / "model")):
        pass


def test_what_is_known_before_the_start_is_what_has_a_bridge():
    assert list(KNOWN_MODEL_TYPES) == sorted(architectures._BRIDGES)
