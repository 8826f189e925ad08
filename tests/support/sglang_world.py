"""A real SGLang server on the CPU with a tiny model, and a second set of weights to update it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import aiohttp
import numpy as np
import torch

from async_rl.config import (
    Config,
    LoraConfig,
    ModelConfig,
    PlacementConfig,
    RolloutConfig,
    RoutingConfig,
    SGLangEngines,
    TrainerConfig,
)
from async_rl.engine_protocol import DiskUpdate, Engine
from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.server import SGLangServer
from async_rl.engines.sglang.server_checks import ServerNeeds
from tests.support.engine_calls import call
from tests.support.fake_sglang import new_client
from tests.support.tiny_model import build_tiny_qwen3_moe, write_byte_tokenizer

VOCAB_SIZE = 300
CONTEXT_LENGTH = 2048
MAX_RUNNING = 4


class Answer(NamedTuple):
    """What a server answers to a request."""

    status: int
    retry_after: str | None
    text: str


class SGLangWorld:
    """One server for many tests; each test gets a client of its own.

    `weights[v % 2]` is the folder of weight version v, in float32: what is equal is equal.

    Example:
        >>> with SGLangWorld(tmp_path, max_running_requests=2) as world:
        ...     engine = world.engine()
    """

    def __init__(
        self,
        folder: Path,
        build: Callable[..., Path] = build_tiny_qwen3_moe,
        *,
        routing: bool = True,
        adapters: LoraConfig | None = None,
        shared: bool = False,
        index: int = 0,
        **engine: Any,
    ) -> None:
        """Write the weights; `engine` are fields of `SGLangEngines`."""
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
        capacity = {"max_running_requests": MAX_RUNNING, "max_total_tokens": 4 * CONTEXT_LENGTH}
        self._config = SGLangEngines(**{**capacity, "start_timeout_s": 400, **engine})
        self._needs = ServerNeeds(routing=routing, adapters=adapters)
        longest = min(CONTEXT_LENGTH, self._config.max_total_tokens or CONTEXT_LENGTH)
        config = Config(
            engine=self._config,
            model=ModelConfig(path=str(self.weights[0]), dtype="float32"),
            rollout=RolloutConfig(max_context_tokens=longest, max_new_tokens=longest // 2),
            routing=RoutingConfig(replay="r3" if routing else "off"),
            trainer=TrainerConfig(lora=adapters),
            placement=PlacementConfig(shared=shared),
        )
        self.server = SGLangServer(config, index=index, log_dir=folder)

    def engine(self, client: type[SGLangEngine] = SGLangEngine, **options: Any) -> SGLangEngine:
        """A client of the server."""
        keys = {"api_key": self.server.api_key, "admin_key": self.server.admin_key}
        return new_client(
            self.server.url,
            self.facts,
            client,
            config=self._config,
            needs=self._needs,
            **{**keys, "state": self.server.state, **options},
        )

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        from transformers import AutoTokenizer

        return str(AutoTokenizer.from_pretrained(self.weights[0]).decode(token_ids))

    async def load(self, engine: Engine, version: int, *, flush: bool = True) -> None:
        """Load a version into the server."""
        update = DiskUpdate(weight_version=version, path=str(self.weights[version % 2]))
        await engine.update_weights(update, flush=flush)

    async def ask(self, method: str, endpoint: str, key: str | None, body: Any = None) -> Answer:
        """Send a request without the client, with a key."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, f"{self.server.url}/{endpoint}", json=body) as response,
        ):
            return Answer(response.status, response.headers.get("Retry-After"), await response.text())

    async def expert_sets(self, engine: Engine, sequence: Sequence[int], version: int) -> np.ndarray:
        """The experts of a sequence under a version, computed afresh in one prefill."""
        await self.load(engine, version)
        return (await call(engine, sequence, 0)).expert_sets

    def __enter__(self) -> Self:
        """Start the server and wait until it answers."""
        try:
            _run(self._start())
        except BaseException:
            _run(self.server.stop())
            raise
        return self

    def __exit__(self, *_: object) -> None:
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
