"""A config, a model folder and a dataset that pass every check; without processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save_file

from async_rl.config import Config, parse_config
from tests.support.templates_of_models import chat_of

MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
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


def write_weights(folder: Path, vocab_size: int = MOE["vocab_size"]) -> None:
    """Write a safetensors file with an embedding alone."""
    embedding = np.zeros((vocab_size, MOE["hidden_size"]), np.float32)
    save_file({"model.embed_tokens.weight": embedding}, folder / "model.safetensors")


def write_run(folder: Path, **model: Any) -> Path:
    """Write `run.yaml` with a model (its config.json changed by `model`) and two tasks; return its path."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MOE | model))
    write_weights(folder / "model", (MOE | model)["vocab_size"])
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


def config_of(**rollout: Any) -> Config:
    """Return a config of which a test uses only the rollout section."""
    return parse_config({"model": {"path": "m"}, "data": {"path": "x.jsonl"}, "rollout": rollout})
