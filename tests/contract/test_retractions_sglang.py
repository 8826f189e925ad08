"""Sessions on a real SGLang server whose KV cache is too small for its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from async_rl.config import ModelConfig, SGLangEngines
from async_rl.engine_protocol import Chunk, Finish, GenerateRequest
from async_rl.engines.model_facts import load_facts
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.engines.sglang.server import SGLangServer
from async_rl.types import Trajectory
from tests.support.engine_calls import call
from tests.support.sessions import PROMPT, Bench
from tests.support.sglang_world import VOCAB_SIZE, never_stop
from tests.support.tiny_model import build_tiny_qwen3_moe, write_byte_tokenizer
from tests.support.trajectories import verify

pytestmark = [pytest.mark.long, pytest.mark.sglang, pytest.mark.timeout(600)]

CALLS = 4
NEW_TOKENS = 150
CACHE_TOKENS = 400
"""What two of the calls need, and a little more."""


class Recorded(SGLangEngine):
    """Remembers how its calls ended."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | Finish]:
        async for event in super().generate(request):
            if isinstance(event, Finish):
                self.finished.append(event)
            yield event


async def test_rows_before_a_retraction_are_marked_when_calls_do_not_fit_the_cache(tmp_path: Any) -> None:
    model = tmp_path / "model"
    build_tiny_qwen3_moe(model, vocab_size=VOCAB_SIZE, hidden_size=64, max_position_embeddings=1024, std=0.15)
    write_byte_tokenizer(model, vocab_size=VOCAB_SIZE)
    never_stop(model)
    config = SGLangEngines(
        max_running_requests=CALLS,
        max_total_tokens=CACHE_TOKENS,
        extra_args=["--schedule-conservativeness=0.01"],  # it admits calls that will not fit
    )
    server = SGLangServer(
        config,
        ModelConfig(path=str(model), dtype="float32"),
        routing=True,
        index=0,
        log_dir=tmp_path,
        seed=0,
    )
    engine = Recorded(
        "engine-0",
        server.url,
        load_facts(model),
        api_key=server.api_key,
        admin_key=server.admin_key,
        routing=True,
        start_timeout_s=400,
        died=server.died,
    )
    engine.finished = []

    async def answer() -> tuple[Bench, Trajectory]:
        bench = Bench(
            engine, facts=load_facts(model), top_k=1, max_context_tokens=512, max_new_tokens=NEW_TOKENS
        )
        bench.start()
        await bench.session.generate()
        return bench, await bench.finish()

    await server.start()
    try:
        await engine.wait_ready()
        ended = await asyncio.gather(*(answer() for _ in range(CALLS)))
        retractions = [each for finish in engine.finished for each in finish.retractions]
        assert retractions
        assert all(1 <= each.at_least <= each.at_most < NEW_TOKENS for each in retractions)
        counted = sum(bench.counted("engine_retractions_total", engine="engine-0") for bench, _ in ended)
        assert counted == sum(each.count for each in retractions)
        ends = {
            PROMPT + finish.retractions[-1].at_most - 1 for finish in engine.finished if finish.retractions
        }
        assert {trajectory.trace.recomputed for _, trajectory in ended} - {()} == {
            ((0, end),) for end in ends
        }
        fresh = (await call(engine, ended[0][1].token_ids.tolist(), 0)).expert_sets
        for _, trajectory in ended:
            assert np.array_equal(trajectory.token_ids, ended[0][1].token_ids)
            verify(trajectory.trace, trajectory.token_ids, load_facts(model).moe_layers)
            assert trajectory.trace.valid.all()
            assert np.array_equal(np.sort(trajectory.trace.rows, axis=-1), fresh)
    finally:
        await engine.close()
        await server.stop()
