"""Adapters with random weights for tiny models, on disk as PEFT writes them, and their merged weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from async_rl.config import LoraConfig

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def write_adapter(path: Path, model: Path, lora: LoraConfig, *, std: float = 0.1, seed: int = 0) -> Path:
    """Write a random adapter of a model's attention, both of its matrices far from zero."""
    generator, tensors, modules = torch.Generator().manual_seed(seed), {}, set()
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if (kind := module.rpartition(".")[2]) in (*ATTENTION, *LATENT):
            modules.add(kind)
            for part, shape in (("A", (lora.rank, weight.shape[1])), ("B", (weight.shape[0], lora.rank))):
                tensor = torch.randn(shape, generator=generator) * std
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = tensor
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(modules),
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def merged_weights(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a model plus those of an adapter, multiplied in float64."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors, merged = load_file(adapter / "adapter_model.safetensors"), load_file(model / "model.safetensors")
    for name in tensors:
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        low, high = tensors[name].double(), tensors[name.replace("lora_A", "lora_B")].double()
        weight = merged[f"{module}.weight"]
        scale = config["lora_alpha"] / config["r"]
        merged[f"{module}.weight"] = (weight.double() + scale * high @ low).to(weight.dtype)
    return merged
