"""Random models that GPU kernels support: head sizes of 64, hidden sizes that are multiples of 128."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from async_rl.config import Config, ModelConfig, PlacementConfig, SGLangEngines, TrainerConfig
from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.server import SGLangServer
from async_rl.engines.sglang.server_checks import ServerNeeds
from tests.support.tiny_model import build_tiny_qwen3_moe, write_byte_tokenizer

VOCAB_SIZE = 512


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
        max_position_embeddings=2048,
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
    model: Path, logs: Path, *, shared: bool = False, share: float = 0.3
) -> AsyncIterator[SGLangEngine]:
    """Run a server on the GPU during the block; it uses `share` of the memory."""
    settings = SGLangEngines(
        device="cuda",
        max_running_requests=8,
        context_length=2048,
        start_timeout_s=600,
        extra_args=[f"--mem-fraction-static={share}"],
    )
    config = Config(
        engine=settings,
        model=ModelConfig(path=str(model), dtype="bfloat16"),
        trainer=TrainerConfig(device="cuda"),
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
