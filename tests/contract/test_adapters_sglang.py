"""Adapters on a real SGLang server: what it computes, and what an update changes.

The reference is Hugging Face's model with the adapter merged into its weights, in float32.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from async_rl.config import LoraConfig
from async_rl.engine_protocol import AdapterUpdate, Engine, GenerateRequest
from async_rl.engines.device_memory import stop_engine
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.errors import RequestRefused, WeightSyncError
from tests.support.engine_calls import Call, request
from tests.support.engine_through_worker import through_worker
from tests.support.sessions import Bench, row_versions
from tests.support.sglang_world import SGLangWorld
from tests.support.tiny_adapter import merged_weights, write_adapter
from tests.support.tiny_model import build_tiny_deepseek_v3, build_tiny_qwen3_moe
from tests.support.watched_engine import NeverStops, WatchedEngine

pytestmark = [pytest.mark.real, pytest.mark.sglang, pytest.mark.timeout(900)]

LORA = LoraConfig(rank=4, alpha=8.0, targets=("attention",))
PROMPT = [40, 41, 42, 43, 44, 45, 46]
LONG = 200
"""Tokens of an answer that still runs when it is interrupted, also on a loaded machine."""


class AdapterWorld(SGLangWorld):
    """One server, and two adapters for its model: `adapters[v % 2]` is the folder of version v."""

    def __init__(
        self, folder: Path, build: Callable[..., Path] = build_tiny_qwen3_moe, index: int = 0
    ) -> None:
        super().__init__(folder, build, adapters=LORA, shared=True, index=index)
        self.model = self.weights[0]
        self.adapters = [
            write_adapter(folder / f"version_{version}", self.model, LORA, seed=version)
            for version in range(2)
        ]

    async def load(self, engine: Engine, version: int, *, flush: bool = True) -> None:
        path = str(self.adapters[version % 2])
        await engine.update_weights(AdapterUpdate(weight_version=version, path=path), flush=flush)

    def expected(self, version: int | None, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs `[T - 1]` of tokens from the second on, and sorted experts `[T, L, K]`.

        Without a version, those of the model without an adapter.
        """
        import torch

        adapter = None if version is None else self.adapters[version % 2]
        log_probs, found = self.run_merged(adapter, tokens, output_router_logits=True)
        chosen = torch.stack([each.topk(self.facts.top_k).indices for each in found.router_logits], 1)
        return log_probs, np.sort(chosen.numpy(), axis=-1)

    def run_merged(
        self, adapter: Path | None, tokens: Sequence[int], **options: bool
    ) -> tuple[np.ndarray, Any]:
        """Log-probs of tokens from the second on by Hugging Face's model, with an adapter merged into its
        weights, and all that the model returns.
        """
        import torch
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        merged = {} if adapter is None else merged_weights(self.model, adapter)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if merged and ".self_attn." in name:
                    weight.copy_(merged[name])
            found = model(torch.tensor([list(tokens)]), **options)
        log_probs = torch.log_softmax(found.logits[0].double(), -1)
        return log_probs[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1).numpy(), found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterWorld]:
    with AdapterWorld(tmp_path_factory.mktemp("adapters")) as made:
        yield made


def asking(version: int, prompt: Sequence[int] = PROMPT, max_new_tokens: int = 12) -> GenerateRequest:
    return msgspec.structs.replace(request(prompt, max_new_tokens), weight_version=version)


async def loaded(engine: SGLangEngine) -> list[str]:
    """The names of the adapters that the server has."""
    listed = await engine.http.get_info("v1/models", dict)
    return [card["id"] for card in listed["data"] if card["parent"]]


async def test_log_probs_and_experts_are_those_of_merged_weights_when_an_adapter_is_loaded(
    world: AdapterWorld, engine: SGLangEngine
) -> None:
    for version in (0, 1):
        await world.load(engine, version)
        called = await Call(engine, asking(version)).run()
        log_probs, experts = world.expected(version, called.sequence)
        assert called.log_probs == pytest.approx(log_probs[-12:], abs=2e-5)
        assert np.array_equal(called.expert_sets, experts[:-1])
        assert [span.weight_version for span in called.finish.version_spans] == [version]
        others = world.expected(1 - version, called.sequence), world.expected(None, called.sequence)
        for other_log_probs, other_experts in others:  # the control: the adapter matters
            assert np.abs(other_log_probs - log_probs).max() > 0.1
            assert not np.array_equal(other_experts, experts)


@pytest.mark.long
@pytest.mark.megatron
@pytest.mark.filterwarnings("ignore:::megatron", "ignore::DeprecationWarning")
async def test_log_probs_are_those_of_merged_weights_when_attention_is_latent(tmp_path: Path) -> None:
    """Also of an adapter that the trainer publishes."""
    from tests.support.trainers import started, trainer_config
    from trainer.megatron.lora import adapted_weights

    world, published = AdapterWorld(tmp_path, build_tiny_deepseek_v3, index=1), tmp_path / "published"
    lora = {"rank": LORA.rank, "alpha": LORA.alpha, "targets": LORA.targets}
    with started(trainer_config(world.model, lora=lora)) as worker:
        for each in adapted_weights(worker.model.chunks):
            each.b.data.normal_(std=0.2)
        worker.publish(str(published), 2)
    with world:
        engine = world.engine()
        await engine.wait_ready()
        for version, adapter in enumerate((*world.adapters, published)):
            await engine.update_weights(AdapterUpdate(weight_version=version, path=str(adapter)), flush=True)
            for prompt in (PROMPT, PROMPT * 6):
                called = await Call(engine, asking(version, prompt)).run()
                log_probs, _ = world.run_merged(adapter, called.sequence)
                assert called.log_probs == pytest.approx(log_probs[-12:], abs=2e-5)
                plain, _ = world.run_merged(None, called.sequence)
                assert np.abs(plain[-12:] - log_probs[-12:]).max() > 0.1  # the control: the adapter matters
        await engine.close()


async def test_a_resumed_session_has_tokens_and_rows_of_both_adapters(
    world: AdapterWorld, engine: SGLangEngine
) -> None:
    watched = WatchedEngine(engine)
    weights = [str(path) for path in world.adapters]
    limits = {"max_context_tokens": 1024, "max_new_tokens": LONG}
    chat = cast(Any, NeverStops())
    bench = Bench(
        cast(Any, watched), facts=world.facts, weights=weights, update=AdapterUpdate, chat=chat, **limits
    )
    bench.start()
    async with asyncio.TaskGroup() as group:
        group.create_task(bench.session.generate(max_new_tokens=LONG))
        await watched.has_tokens(4)
        await bench.bump(1)
        assert await loaded(engine) == ["policy-v1"]
    trajectory = await bench.finish()
    first, second = trajectory.sampled
    assert (first.weight_version, second.weight_version) == (0, 1)
    tokens = trajectory.token_ids.tolist()
    begin = len(tokens) - len(first.token_ids) - len(second.token_ids)
    assert begin > 0
    for segment, version in ((first, 0), (second, 1)):
        end = begin + len(segment.token_ids)
        log_probs, experts = world.expected(version, tokens)
        assert segment.rollout_log_probs == pytest.approx(log_probs[begin - 1 : end - 1], abs=5e-5)
        begin = end
    assert row_versions(trajectory.trace) == [1] * (len(tokens) - 1)
    assert trajectory.trace.valid.all()
    assert np.array_equal(np.sort(trajectory.trace.rows, axis=-1), experts[:-1])


async def test_a_prefix_is_not_used_under_the_next_adapter(world: AdapterWorld, engine: SGLangEngine) -> None:
    prompt = PROMPT * 6
    cold = await Call(engine, asking(0, prompt)).run()
    warm = await Call(engine, asking(0, prompt)).run()
    assert warm.finish.cached_tokens > cold.finish.cached_tokens == 0
    for version in (1, 2):  # the second has the first one's files again
        await world.load(engine, version)
        called = await Call(engine, asking(version, prompt)).run()
        assert called.finish.cached_tokens == 0
        assert await loaded(engine) == [f"policy-v{version}"]
    await world.load(engine, 2)  # of a trainer that has restarted
    assert await loaded(engine) == ["policy-v2"]
    assert (await engine.health()).weight_version == 2
    with pytest.raises(RequestRefused, match="policy-v99"):
        await Call(engine, asking(99)).run()


async def test_the_next_adapter_is_served_when_the_engine_was_without_its_memory(
    world: AdapterWorld, engine: SGLangEngine
) -> None:
    prompt = PROMPT * 6
    before = await Call(engine, asking(0, prompt)).run()
    sums = await engine.checksums()
    for version in (1, 2):
        stopped = await stop_engine(engine, engine.interrupt)
        loadable = await (await stopped.release_all(keeps_weights=True)).resume_weights()
        await world.load(engine, version)  # before there is memory for a cache
        assert await loaded(engine) == [f"policy-v{version}"]
        await loadable.resume_rest()
        called = await Call(engine, asking(version, prompt)).run()
        log_probs, experts = world.expected(version, called.sequence)
        assert called.log_probs == pytest.approx(log_probs[-12:], abs=2e-5)
        assert np.array_equal(called.expert_sets, experts[:-1])
        assert called.finish.cached_tokens == 0
    assert called.token_ids == before.token_ids  # versions 0 and 2 have the same adapter
    assert await engine.checksums() == sums  # of the model's weights alone


async def test_an_adapter_that_does_not_fit_is_refused(
    world: AdapterWorld, engine: SGLangEngine, tmp_path: Path
) -> None:
    wide = write_adapter(tmp_path / "wide", world.model, LoraConfig(rank=5, alpha=8.0))
    with pytest.raises(WeightSyncError, match=r"policy-v1.*rank 5"):
        await engine.update_weights(AdapterUpdate(weight_version=1, path=str(wide)), flush=True)
    with pytest.raises(WeightSyncError, match="policy-v2"):
        await engine.update_weights(AdapterUpdate(weight_version=2, path=str(tmp_path / "no")), flush=True)
    await world.load(engine, 3)
    assert await loaded(engine) == ["policy-v3"]


async def test_calls_of_a_worker_have_the_adapter_of_their_lease(
    world: AdapterWorld, engine: SGLangEngine
) -> None:
    async with through_worker(engine, world.engine()) as through:
        called = await Call(through, request(PROMPT, 6)).run()
        await through.interrupt("abort")
        await through.client.close()
    log_probs, _ = world.expected(0, called.sequence)
    assert called.log_probs == pytest.approx(log_probs[-6:], abs=2e-5)
