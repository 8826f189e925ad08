"""How a server is started that loads adapters (`trainer.lora.sync: adapter`)."""

from __future__ import annotations

from typing import Final

from async_rl.config import LoraConfig
from async_rl.engine_protocol import EngineFacts

_MODULES: Final = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "experts": ("gate_proj", "up_proj", "down_proj"),
}
"""By target: the names of Hugging Face's modules. SGLang fuses them as it fuses the weights."""

_LATENT: Final = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
"""The modules of `attention` where it is latent."""


def target_modules(lora: LoraConfig, model: EngineFacts) -> list[str]:
    """Return the modules that adapters change, for `--lora-target-modules`."""
    modules = _MODULES | ({"attention": _LATENT} if model.latent_attention else {})
    return list(dict.fromkeys(name for target in lora.targets for name in modules[target]))


def adapter_flags(lora: LoraConfig, model: EngineFacts, device: str) -> list[str]:
    """Return the options of a server that loads adapters.

    One adapter is loaded at a time, and all calls are made with it, so the server reserves memory on its
    devices for one.
    """
    flags = [
        "--enable-lora",
        f"--max-lora-rank={lora.rank}",
        "--max-loras-per-batch=1",
        # The value takes all that follow, so another option must.
        "--lora-target-modules",
        *target_modules(lora, model),
        # Otherwise it would serve an adapter without the tensors whose names it does not know.
        "--lora-strict-loading",
    ]
    # The default backend is for GPUs.
    return [*flags, "--lora-backend=torch_native"] if device == "cpu" else flags
