"""What is read from a model's config.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from async_rl.engines.model_facts import ARCHITECTURES, check_served_by_sglang, facts_of, load_facts
from async_rl.errors import ConfigError

BASE = {"num_hidden_layers": 6, "vocab_size": 1000, "max_position_embeddings": 4096}
QWEN3 = BASE | {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
QWEN2 = QWEN3 | {"model_type": "qwen2_moe", "num_experts": 60, "shared_expert_intermediate_size": 64}
DEEPSEEK = BASE | {
    "model_type": "deepseek_v3",
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
}


@pytest.mark.parametrize(
    ("config", "moe_layers", "num_experts"),
    [
        (QWEN3, (0, 1, 2, 3, 4, 5), 128),
        (QWEN3 | {"mlp_only_layers": [0, 4]}, (1, 2, 3, 5), 128),
        (QWEN3 | {"decoder_sparse_step": 2}, (1, 3, 5), 128),
        (QWEN3 | {"num_experts": None, "num_local_experts": 8}, (0, 1, 2, 3, 4, 5), 8),
        (QWEN2, (0, 1, 2, 3, 4, 5), 60),
        (QWEN2 | {"mlp_only_layers": [5], "decoder_sparse_step": 3}, (2,), 60),
        (DEEPSEEK, (3, 4, 5), 256),
        (DEEPSEEK | {"moe_layer_freq": 2}, (4,), 256),
        (DEEPSEEK | {"moe_layer_freq": [0, 0, 0, 1, 0, 1]}, (3, 5), 256),
        (DEEPSEEK | {"first_k_dense_replace": 0, "num_nextn_predict_layers": 1}, (0, 1, 2, 3, 4, 5), 256),
        (
            BASE | {"model_type": "mixtral", "num_local_experts": 16, "num_experts_per_tok": 8},
            (0, 1, 2, 3, 4, 5),
            16,
        ),
        ({"model_type": "qwen3_vl", "text_config": QWEN3}, (0, 1, 2, 3, 4, 5), 128),
    ],
)
def test_layers_with_experts_are_found_when_a_model_has_any(
    config: dict, moe_layers: tuple[int, ...], num_experts: int
) -> None:
    facts = facts_of(config)
    assert facts.is_moe
    assert (facts.moe_layers, facts.num_experts, facts.top_k) == (moe_layers, num_experts, 8)
    assert (facts.num_layers, facts.vocab_size, facts.context_length) == (6, 1000, 4096)


@pytest.mark.parametrize("experts", ["num_experts", "num_local_experts", "moe_num_experts"])
def test_known_architectures_are_listed_when_experts_are_in_another(experts: str) -> None:
    config = BASE | {"model_type": "somemoe", experts: 8, "num_experts_per_tok": 2}
    with pytest.raises(ConfigError, match=r"type 'somemoe'.*deepseek_v3.*qwen2_moe, qwen3_moe"):
        facts_of(config)


@pytest.mark.parametrize(
    ("kind", "missing"), [("gpt_oss", "sinks and sliding windows"), ("qwen3_next", "gated delta net")]
)
def test_what_is_missing_is_said_when_the_libraries_lack_a_part(kind: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"type '{kind}', which cannot be trained: .*{missing}"):
        facts_of(BASE | {"model_type": kind, "num_experts": 8, "num_experts_per_tok": 2})


def test_facts_are_asked_for_when_a_config_leaves_dense_layers_open() -> None:
    config = {key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"}
    with pytest.raises(KeyError, match="first_k_dense_replace"):
        facts_of(config)


def test_there_is_nothing_to_replay_when_a_model_is_dense() -> None:
    facts = facts_of(BASE | {"model_type": "llama", "num_experts": 0})
    assert not facts.is_moe
    assert (facts.moe_layers, facts.num_experts, facts.top_k) == ((), 0, 0)


def test_the_servers_context_length_counts_when_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert load_facts(tmp_path).context_length == 4096
    assert load_facts(tmp_path, 512).context_length == 512


def test_a_clear_error_is_raised_when_the_model_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Set model\.path to a folder"):
        load_facts(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_facts(tmp_path)
    (tmp_path / "config.json").write_bytes(b'{"name": "\xe9"}')
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_facts(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="has no 'vocab_size'"):
        load_facts(tmp_path)


def write(folder: Path, config: dict) -> None:
    named = [ARCHITECTURES.get(config.get("model_type"), "OtherForCausalLM")]
    (folder / "config.json").write_text(json.dumps({"architectures": named, **config}))


@pytest.mark.parametrize("change", [{"mlp_only_layers": [0, 4]}, {"decoder_sparse_step": 2}])
@pytest.mark.parametrize("config", [QWEN2, QWEN3])
def test_a_model_is_refused_when_sglang_would_serve_another_one(
    config: dict, change: dict, tmp_path: Path
) -> None:
    write(tmp_path, config | change)
    with pytest.raises(ConfigError, match=r"has dense layers \[0, .*every layer of a qwen"):
        check_served_by_sglang(tmp_path)


def config_of_kind(kind: str) -> dict:
    experts = {} if kind in ("llama", "qwen3") else {**QWEN3, **DEEPSEEK, "num_local_experts": 8}
    return {**BASE, **experts, "model_type": kind}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("qwen3_moe", {"tie_word_embeddings": True}),
        ("qwen2_moe", {"tie_word_embeddings": True}),
        ("glm4_moe", {"tie_word_embeddings": True}),
        ("mixtral", {"tie_word_embeddings": True}),
        ("mixtral", {"hidden_act": "gelu"}),
        ("llama", {"mlp_bias": True}),
        ("deepseek_v3", {"attention_bias": True}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 128}),
        ("mixtral", {"sliding_window": 128}),
        ("mixtral", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}),
        ("qwen2_moe", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}),
        ("mixtral", {"rope_theta": 1000.5}),
        ("mixtral", {"rope_parameters": {"rope_theta": 1000.5}}),
    ],
)
def test_a_field_that_sglang_ignores_is_refused(kind: str, change: dict, tmp_path: Path) -> None:
    config = config_of_kind(kind)
    write(tmp_path, config)
    check_served_by_sglang(tmp_path)
    write(tmp_path, config | change)
    field = list(change)[-1].replace("parameters", "theta")
    with pytest.raises(
        ConfigError,
        match=f"has {field} = .* which SGLang's model class for {kind}",
    ):
        check_served_by_sglang(tmp_path)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 128}),
        ("mixtral", {"sliding_window": None}),
        ("mixtral", {"sliding_window": 1 << 20}),
        ("mixtral", {"rope_theta": 1e6, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}),
        ("qwen3", {"rope_theta": 1000.5, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}),
    ],
)
def test_a_field_that_sglang_reads_is_taken(kind: str, change: dict, tmp_path: Path) -> None:
    config = config_of_kind(kind) | change
    write(tmp_path, config)
    check_served_by_sglang(tmp_path)


@pytest.mark.parametrize("config", [QWEN2, QWEN3, DEEPSEEK, BASE])
def test_a_model_passes_when_sglang_serves_it_as_it_is(config: dict, tmp_path: Path) -> None:
    write(tmp_path, config)
    check_served_by_sglang(tmp_path)


@pytest.mark.parametrize(
    "named", [None, [], ["Qwen2MoeForCausalLM"], ["Qwen3MoeForSequenceClassification"], "A"]
)
def test_a_model_is_refused_when_sglang_would_choose_another_class(named: Any, tmp_path: Path) -> None:
    write(tmp_path, QWEN3 | {"architectures": named})
    with pytest.raises(ConfigError, match=r"by which SGLang .*set architectures to \[Qwen3MoeForCausalLM\]"):
        check_served_by_sglang(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 10+, expected at most 10000"),
        ({"num_experts": 10**12}, "num_experts is 10+, expected at most 65536"),
        ({"vocab_size": 10**12}, "vocab_size is 10+, expected at most 2147483648"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4', expected a whole number"),
        ({"hidden_size": 64.5}, "hidden_size is 64.5"),
        ({"head_dim": -1}, "head_dim is -1"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"rope_parameters": [1]}, "rope_parameters is"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "expected a multiple of num_key_value_heads, 3",
        ),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0, expected 1 to 128"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok is 129, expected 1 to 128"),
    ],
)
def test_a_dimension_that_cannot_be_is_named(change: dict, words: str, tmp_path: Path) -> None:
    write(tmp_path, QWEN3 | change)
    with pytest.raises(ConfigError, match=f"config.json has a value that cannot be used: .*{words}"):
        load_facts(tmp_path)


def test_a_pipe_is_refused_where_the_model_has_its_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"config\.json is no regular file"):
        load_facts(tmp_path)
