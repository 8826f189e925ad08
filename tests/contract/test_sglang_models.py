"""The architectures beside Qwen3-MoE on real SGLang, and on the trainer at equal weights."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from async_rl.engine_protocol import DiskUpdate
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.types import TrainBatch
from tests.support.engine_calls import Call, call, request
from tests.support.sampled_batches import batch_of
from tests.support.sglang_world import VOCAB_SIZE, SGLangWorld
from tests.support.tiny_model import (
    build_tiny_deepseek_v3,
    build_tiny_glm4_moe,
    build_tiny_kimi_k2,
    build_tiny_qwen2_moe,
    build_tiny_qwen3_moe,
)
from tests.support.trainers import log_probs_of, native_rows, started, trainer_config
from trainer.worker import TrainerWorker

pytestmark = [
    pytest.mark.long,
    pytest.mark.sglang,
    pytest.mark.megatron,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:::megatron"),
]

BUILDERS = {
    "deepseek_v3": build_tiny_deepseek_v3,
    "glm4_moe": build_tiny_glm4_moe,
    "kimi_k2, 384 experts": partial(build_tiny_kimi_k2, num_experts=384, top_k=8),
    "qwen2_moe": build_tiny_qwen2_moe,
    # More experts than a byte can number, odd numbers of layers and of experts per token, dense layers first.
    "qwen3_moe, 300 experts": partial(
        build_tiny_qwen3_moe, num_experts=300, top_k=5, num_layers=5, expert_size=16
    ),
    "deepseek_v3, 320 experts": partial(
        build_tiny_deepseek_v3, num_experts=320, top_k=6, top_groups=3, num_layers=5, dense_layers=2
    ),
}
MOE_LAYERS = {
    "deepseek_v3": (1, 2),
    "glm4_moe": (1, 2),
    "kimi_k2, 384 experts": (1, 2),
    "qwen2_moe": (0, 1, 2),
    "qwen3_moe, 300 experts": (0, 1, 2, 3, 4),
    "deepseek_v3, 320 experts": (2, 3, 4),
}
PROMPT = [40, 41, 42, 43, 44, 45, 46]


@pytest.fixture(scope="module", params=BUILDERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def world(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangWorld]:
    """One server a model, ended before the next one starts."""
    with SGLangWorld(tmp_path_factory.mktemp(kind), BUILDERS[kind]) as world:
        yield world


async def sample(engine: SGLangEngine, count: int = 6, new_tokens: int = 24) -> list[Call]:
    """Calls at temperature 1 with prompts of their own, of several lengths."""
    rng = np.random.default_rng(0)
    calls = [
        Call(engine, request(rng.integers(3, VOCAB_SIZE, 5 + 3 * i).tolist(), new_tokens, temperature=1.0))
        for i in range(count)
    ]
    async with asyncio.TaskGroup() as group:
        for one in calls:
            group.create_task(one.run())
    return calls


def mismatch(worker: TrainerWorker, batch: TrainBatch) -> float:
    """Mean |trainer - engine| of the log-probs of sampled tokens, nats."""
    ours = np.roll(log_probs_of(worker, batch), 1)  # they come at the positions that predict them
    return float(np.abs(ours - batch.rollout_log_probs)[batch.loss_mask].mean())


def natively(batch: TrainBatch) -> TrainBatch:
    """The batch as the trainer would route it by itself."""
    return msgspec.structs.replace(batch, routing_valid=np.zeros(batch.num_tokens, bool))


def one_row_late(batch: TrainBatch) -> TrainBatch:
    """Every row at the token after its own; the first of each trajectory, which then is free, twice."""
    assert batch.routed_experts is not None
    rows = np.roll(batch.routed_experts, 1, axis=0)
    rows[batch.offsets[:-1]] = batch.routed_experts[batch.offsets[:-1]]
    return msgspec.structs.replace(batch, routed_experts=rows)


async def raw_rows(world: SGLangWorld) -> tuple[np.ndarray, dict[str, Any]]:
    """What SGLang itself answers, `[T-1, all layers, K] int32`, and the whole answer."""
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 5, "temperature": 0.0, "ignore_eos": True},
        "return_routed_experts": True,
    }
    answer = json.loads((await world.ask("POST", "generate", world.server.api_key, body)).text)
    ids = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4")
    return ids.reshape(-1, world.facts.num_layers, world.facts.top_k).copy(), answer


@pytest.mark.case(2, 4)
async def test_rows_are_of_the_layers_with_experts_when_others_are_dense(
    kind: str, world: SGLangWorld, engine: SGLangEngine
) -> None:
    facts = world.facts
    assert facts.moe_layers == MOE_LAYERS[kind]
    raw, answer = await raw_rows(world)
    ended = await call(engine, PROMPT, 5)
    assert ended.token_ids == answer["output_ids"]
    assert len(raw) == len(PROMPT) + 5 - 1
    dense = sorted(set(range(facts.num_layers)) - set(facts.moe_layers))
    assert not raw[:, dense].any()
    assert raw[:, facts.moe_layers].any(axis=(0, 2)).all()
    rows = ended.trace.rows
    np.testing.assert_array_equal(rows, raw[:, facts.moe_layers])
    assert rows.max() < facts.num_experts
    assert rows.dtype == (np.uint8 if facts.num_experts <= 256 else np.uint16)
    assert len(np.unique(rows)) > facts.top_k  # tokens differ in what they choose
    assert all(len(set(row)) == facts.top_k for row in rows.reshape(-1, facts.top_k).tolist())


@pytest.mark.case(41, 42)
async def test_log_probs_are_the_engines_when_its_rows_are_replayed(
    world: SGLangWorld, engine: SGLangEngine
) -> None:
    batch = batch_of(await sample(engine), world.facts)
    with started(trainer_config(world.weights[0], micro_batch_tokens=256)) as worker:
        replayed, native = mismatch(worker, batch), mismatch(worker, natively(batch))
        shifted = mismatch(worker, one_row_late(batch))
        own = np.sort(native_rows(worker, batch), axis=-1)
    assert replayed < 1e-4
    assert replayed <= native + 1e-6
    assert shifted > 100 * replayed
    # At equal weights in float32 both parts choose the same experts, but for the rare tie.
    assert batch.routing_valid is not None
    same = (own == np.sort(batch.routed_experts, axis=-1)).all(axis=-1)[batch.routing_valid]
    assert same.mean() > 0.99


async def test_the_engine_takes_every_tensor_when_the_trainer_publishes(
    world: SGLangWorld, engine: SGLangEngine, tmp_path: Path
) -> None:
    before = batch_of(await sample(engine), world.facts)
    config = trainer_config(world.weights[0], micro_batch_tokens=256, optimizer={"lr": 1e-2})
    with started(config) as worker:
        worker.train_on(before, 1)  # moves every parameter by about the learning rate
        worker.publish(str(tmp_path / "version_1"), 1)
        await engine.update_weights(
            DiskUpdate(weight_version=1, path=str(tmp_path / "version_1")), flush=True
        )
        after = batch_of(await sample(engine), world.facts, version=1)
        assert mismatch(worker, after) < 1e-4
        assert mismatch(worker, before) > 1e-2
