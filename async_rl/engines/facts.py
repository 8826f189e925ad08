"""What the rest of the program must know of a model, read from its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from async_rl.engines.protocol import EngineFacts
from async_rl.errors import ConfigError

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Qwen2/3-MoE as they are published; the same as newer transformers writes them; DeepSeek, GLM, Kimi."""


def load_facts(model_path: str | Path, context_length: int | None = None) -> EngineFacts:
    """Read a Hugging Face model folder.

    Args:
        model_path: The folder with config.json.
        context_length: What the server was told; None takes the model's own.

    Raises:
        ConfigError: When there is no such folder, or its config says too little.
    """
    file = Path(model_path) / "config.json"
    try:
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as e:
        raise ConfigError(
            f"cannot read {file}: {e.strerror}. Set model.path to a folder with a Hugging Face model"
        ) from e
    except msgspec.DecodeError as e:
        raise ConfigError(f"{file} is not valid JSON: {e}") from e
    try:
        return facts_of(config, context_length)
    except KeyError as e:
        raise ConfigError(f"{file} does not say {e}: is it the config of a causal language model?") from e


def facts_of(config: dict[str, Any], context_length: int | None = None) -> EngineFacts:
    """Read a config that is parsed already. Raises `KeyError` for what every language model says."""
    config = config.get("text_config") or config
    num_layers = int(config["num_hidden_layers"])
    num_experts = next((int(config[key]) for key in _NUM_EXPERTS if config.get(key)), 0)
    moe_layers = tuple(i for i in range(num_layers) if num_experts and _has_experts(config, i))
    return EngineFacts(
        num_layers=num_layers,
        moe_layers=moe_layers,
        num_experts=num_experts if moe_layers else 0,
        top_k=int(config["num_experts_per_tok"]) if moe_layers else 0,
        vocab_size=int(config["vocab_size"]),
        context_length=context_length or int(config["max_position_embeddings"]),
    )


def _has_experts(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer of an MoE model is sparse.

    Source: transformers `Qwen3MoeDecoderLayer` (decoder_sparse_step, mlp_only_layers) and DeepSeek-V3's
    `modeling_deepseek.py` (first_k_dense_replace, moe_layer_freq, which is a step or one flag a layer).
    """
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    if (layer + 1) % (config.get("decoder_sparse_step") or 1):
        return False
    if layer < (config.get("first_k_dense_replace") or 0):
        return False
    frequency = config.get("moe_layer_freq") or 1
    return bool(frequency[layer]) if isinstance(frequency, list) else layer % frequency == 0
