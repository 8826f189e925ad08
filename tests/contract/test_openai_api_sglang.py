"""OpenAI's client, our endpoint and a real SGLang server, with new weights in the middle of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import DiskUpdate, Engine
from async_rl.openai_api.endpoint import Endpoint
from tests.support.api import client_of, reply
from tests.support.sessions import Bench
from tests.support.talk import ByteTokenizer
from tests.support.trajectories import verify

pytestmark = pytest.mark.sglang


TOKENS = 800


class NeverStops(ChatFormat):
    """Without stop tokens: a sampled answer lasts until its limit, and so until it is interrupted."""

    def __init__(self) -> None:
        super().__init__(ByteTokenizer())
        self.stop_token_ids = ()


@pytest.fixture
async def engine(sglang_world: Any) -> AsyncIterator[Engine]:
    engine = sglang_world.engine()
    await engine.wait_ready()
    await engine.update_weights(DiskUpdate(weight_version=0, path=str(sglang_world.weights[0])), flush=True)
    yield engine
    await engine.interrupt("abort")
    await engine.close()


async def test_two_turns_are_a_trajectory_when_weights_change_while_the_first_is_streamed(
    engine: Engine, sglang_world: Any
) -> None:
    weights = [str(path) for path in sglang_world.weights]
    bench = Bench(
        engine,
        facts=sglang_world.facts,
        weights=weights,
        chat=NeverStops(),
        max_context_tokens=1024,
        max_new_tokens=TOKENS,
    )
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    endpoint = Endpoint()
    async with endpoint.open_trajectory(bench.session, reader=None) as access, client_of(access) as client:
        stream = await client.chat.completions.create(
            model="policy", messages=messages, stream=True, max_tokens=TOKENS
        )
        said, updated = "", False
        async for chunk in stream:
            said += chunk.choices[0].delta.content or ""
            if said and not updated:
                updated = True
                await bench.bump(1)
        assert said == bench.session.last_turn.text
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on"}]
        second = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=8, logprobs=True
        )
    assert reply(second)["content"] == bench.session.last_turn.text
    trajectory = await bench.finish()
    first, *_ = turns = trajectory.turns
    assert len(turns) == 2
    versions = trajectory.weight_versions[first.start : first.end].tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    assert set(trajectory.weight_versions[turns[1].start : turns[1].end].tolist()) == {1}
    assert first.num_interruptions == 1
    told = [token.logprob for token in second.choices[0].logprobs.content]
    recorded = trajectory.rollout_log_probs[turns[1].start : turns[1].end].tolist()
    assert told == pytest.approx(recorded)
    verify(trajectory.trace, trajectory.token_ids, sglang_world.facts.moe_layers)
    assert trajectory.trace.valid.all()
