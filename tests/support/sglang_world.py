"""A real SGLang server on the CPU with a tiny model, and a second set of weights to update it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch

from async_rl.config import LoraConfig, ModelConfig, SGLangEngines
from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.server import SGLangServer
from tests.support.tiny_model import build_tiny_qwen3_moe, write_byte_tokenizer

VOCAB_SIZE = 300
CONTEXT_LENGTH = 2048
MAX_RUNNING = 4


class SGLangWorld:
    """One server for many tests; each test gets a client of its own.

    `weights[v]` is the folder of weight version v. In float32, unless told otherwise: what is equal is equal.
    """

    def __init__(
        self,
        folder: Path,
        build: Callable[..., Path] = build_tiny_qwen3_moe,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        adapters: LoraConfig | None = None,
        shared: bool = False,
    ) -> None:
        self._adapters = adapters
        self.weights = [folder / f"weights_{version}" for version in range(2)]
        for seed, path in enumerate(self.weights):
            build(
                path,
                vocab_size=VOCAB_SIZE,
                hidden_size=64,
                max_position_embeddings=CONTEXT_LENGTH,
                std=0.15,
                seed=seed,
            )
            write_byte_tokenizer(path, vocab_size=VOCAB_SIZE)
            never_stop(path)
        self.facts = load_facts(self.weights[0])
        self.server = SGLangServer(
            SGLangEngines(max_running_requests=MAX_RUNNING, max_total_tokens=4 * CONTEXT_LENGTH),
            ModelConfig(path=str(self.weights[0]), dtype=dtype),
            routing=True,
            index=0,
            log_dir=folder,
            seed=0,
            adapters=adapters,
            shared=shared,
        )

    def engine(self) -> SGLangEngine:
        """A client of the server."""
        return SGLangEngine(
            "engine-0",
            self.server.url,
            self.facts,
            api_key=self.server.api_key,
            admin_key=self.server.admin_key,
            routing=True,
            adapters=self._adapters,
            start_timeout_s=400,
            died=self.server.died,
        )

    def start(self) -> None:
        """Start the server and wait until it answers."""
        _run(self._start())

    def stop(self) -> None:
        """End it."""
        _run(self.server.stop())

    async def _start(self) -> None:
        await self.server.start()
        engine = self.engine()
        try:
            await engine.wait_ready()
        finally:
            await engine.close()


def in_trainer_order(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As a trainer exports weights: queries, keys, values; gate, up, down; experts by number."""
    first = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": 1, "down_proj": 2}

    def place(name: str) -> list[tuple[int, int, str]]:
        return [
            (0, int(part), "") if part.isdigit() else (1, first.get(part, len(first)), part)
            for part in name.split(".")
        ]

    return {name: tensors[name] for name in sorted(tensors, key=place)}


def never_stop(model: Path) -> None:
    """Take the end-of-text token away: calls last until they are interrupted or have what they asked for."""
    for name in ("config.json", "generation_config.json"):
        config = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(config | {"eos_token_id": None}))


def _run(work) -> None:
    """Run a coroutine on a loop of its own, beside the one a test framework may have."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()
