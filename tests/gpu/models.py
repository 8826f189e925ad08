"""Random models that GPU kernels support: head sizes of 64, hidden sizes that are multiples of 128."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from async_rl.config import Config, ModelConfig, PlacementConfig, RolloutConfig, SGLangEngines, TrainerConfig
from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.server import SGLangServer
from async_rl.engines.sglang.server_checks import ServerNeeds
from tests.gpu.device import DEVICE, ON_GPU
from tests.support.tiny_model import build_tiny_qwen3_moe, write_byte_tokenizer

MODEL_CONFIGS = Path(__file__).parents[1] / "support" / "model_configs"
VOCAB_SIZE = 512
CONTEXT_LENGTH = 2048
_SHARE = 0.3


def build(
    path: Path, *, seed: int = 0, hidden_size: int = 256, num_layers: int = 4, speaks_as: Path | None = None
) -> Path:
    """Write a Qwen3-MoE with 16 experts per layer, with a byte tokenizer or another model's."""
    other = {} if speaks_as is None else json.loads((speaks_as / "config.json").read_text())
    vocab_size = other.get("vocab_size", VOCAB_SIZE)
    build_tiny_qwen3_moe(
        path,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=hidden_size // 64,
        num_groups=max(1, hidden_size // 128),
        head_dim=64,
        num_experts=16,
        expert_size=hidden_size // 2,
        max_position_embeddings=CONTEXT_LENGTH,
        std=0.06,
        seed=seed,
    )
    if speaks_as is None:
        write_byte_tokenizer(path, vocab_size=vocab_size)
        return path
    for file in speaks_as.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            shutil.copy(file, path)
    own = json.loads((path / "config.json").read_text())
    own |= {key: other[key] for key in ("eos_token_id", "pad_token_id")}
    (path / "config.json").write_text(json.dumps(own))
    return path


@asynccontextmanager
async def serving(
    model: Path, logs: Path, *, shared: bool = False, narrow: bool = False
) -> AsyncIterator[SGLangEngine]:
    """Run a server during the block; it uses `_SHARE` of a GPU's memory."""
    settings = SGLangEngines(
        device=DEVICE,
        max_running_requests=8,
        context_length=CONTEXT_LENGTH,
        start_timeout_s=600,
        narrow_routing=narrow,
        extra_args=[f"--mem-fraction-static={_SHARE}"] if ON_GPU else [],
    )
    config = Config(
        engine=settings,
        model=ModelConfig(path=str(model), dtype="bfloat16"),
        rollout=RolloutConfig(max_context_tokens=CONTEXT_LENGTH, max_new_tokens=CONTEXT_LENGTH // 2),
        trainer=TrainerConfig(device=DEVICE),
        placement=PlacementConfig(shared=shared),
    )
    server = SGLangServer(config, index=0, log_dir=logs)
    engine = SGLangEngine(
        "engine-0",
        server.url,
        load_facts(model),
        settings,
        ServerNeeds(routing=True),
        api_key=server.api_key,
        admin_key=server.admin_key,
        state=server.state,
    )
    await server.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.close()
        await server.stop()


def active_parameters(model: Path) -> float:
    """Return how many parameters of a folder's model a token is multiplied with."""
    config = json.loads((model / "config.json").read_text())
    chosen = config.get("num_experts_per_tok", 1) / config.get("num_experts", 1)
    with safe_open(model / "model.safetensors", "pt") as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return sum(
        size * (chosen if ".experts." in name else 1)
        for name, size in sizes.items()
        if not name.endswith("embed_tokens.weight")
    )


def build_cut(path: Path, name: str, num_layers: int, **sizes: int) -> Path:
    """Write a model of `tests/support/model_configs` with a few layers and random weights; no tokenizer."""
    fields = json.loads((MODEL_CONFIGS / f"{name}.json").read_text())
    fields |= {key: size for key, size in sizes.items() if key in fields} | {"num_hidden_layers": num_layers}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(DEVICE):  # billions of random numbers
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path
