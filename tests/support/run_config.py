"""A config, a model folder and a dataset that pass every check; without processes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file

from async_rl.config import Config, apply_override, parse_config
from async_rl.engines.model_facts import ARCHITECTURES, facts_of
from async_rl.engines.model_files import _weights_of
from async_rl.errors import ConfigError
from tests.support.templates_of_models import chat_of

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


def write_weights(folder: Path, config: dict[str, Any] = MOE) -> None:
    """Write a safetensors file with the weights that `check_weights` asks for."""
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], MOE["hidden_size"]]}
    with suppress(ConfigError, KeyError, TypeError):  # a test of such a config
        shapes |= dict(_weights_of(config, facts_of(config)))
    weights = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")


def write_run(folder: Path, **model: Any) -> Path:
    """Write `run.yaml` with a model (its config.json changed by `model`) and two tasks; return its path."""
    (folder / "model").mkdir()
    if "model_type" in model:
        model = {"architectures": [ARCHITECTURES.get(model["model_type"], "OtherForCausalLM")], **model}
    (folder / "model" / "config.json").write_text(json.dumps(MOE | model))
    write_weights(folder / "model", MOE | model)
    chat_of("ours").tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "2 + 2?", "answer": "4"}]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "tasks.jsonl")},
        "run": {"name": "tiny", "dir": str(folder / "runs"), "max_steps": 3},
        "rollout": {"group_size": 2, "max_context_tokens": 128, "max_new_tokens": 32},
        "trainer": {"groups_per_batch": 2},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def config_with(*overrides: str, **sections: Any) -> Config:
    """Return a config with these sections and then overrides as on the command line; it needs no files."""
    tree = {"model": {"path": "m"}, "data": {"path": "x.jsonl"}, **sections}
    for override in overrides:
        apply_override(tree, override)
    return parse_config(tree)


def config_of(**rollout: Any) -> Config:
    """Return a config of which a test uses only the rollout section."""
    return config_with(rollout=rollout)
