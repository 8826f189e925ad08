"""What is read from a model's config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.engines.facts import facts_of, load_facts
from async_rl.errors import ConfigError

BASE = {"num_hidden_layers": 6, "vocab_size": 1000, "max_position_embeddings": 4096}
QWEN3 = BASE | {"num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
DEEPSEEK = BASE | {"n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3}


@pytest.mark.parametrize(
    ("config", "moe_layers", "num_experts"),
    [
        (QWEN3, (0, 1, 2, 3, 4, 5), 128),
        (QWEN3 | {"mlp_only_layers": [0, 4]}, (1, 2, 3, 5), 128),
        (QWEN3 | {"decoder_sparse_step": 2}, (1, 3, 5), 128),
        (BASE | {"num_local_experts": 8, "num_experts_per_tok": 8}, (0, 1, 2, 3, 4, 5), 8),
        (DEEPSEEK, (3, 4, 5), 256),
        (DEEPSEEK | {"moe_layer_freq": 2}, (4,), 256),
        (DEEPSEEK | {"moe_layer_freq": [0, 0, 0, 1, 0, 1]}, (3, 5), 256),
        ({"text_config": QWEN3}, (0, 1, 2, 3, 4, 5), 128),
    ],
)
def test_layers_with_experts_are_found_when_a_model_has_any(
    config: dict, moe_layers: tuple[int, ...], num_experts: int
) -> None:
    facts = facts_of(config)
    assert facts.is_moe
    assert (facts.moe_layers, facts.num_experts, facts.top_k) == (moe_layers, num_experts, 8)
    assert (facts.num_layers, facts.vocab_size, facts.context_length) == (6, 1000, 4096)


def test_there_is_nothing_to_replay_when_a_model_is_dense() -> None:
    facts = facts_of(BASE | {"num_experts": 0})
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
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="does not say 'vocab_size'"):
        load_facts(tmp_path)
