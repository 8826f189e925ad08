"""A session on a real SGLang server: rows over turns, interruptions and missing answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import Chunk, DiskUpdate, Engine, Finish, GenerateRequest
from async_rl.types import Trajectory
from tests.support.engine_calls import call
from tests.support.sessions import PROMPT, Bench, PlainChat, row_versions
from tests.support.trajectories import verify

pytestmark = pytest.mark.sglang
GREEDY = {"top_k": 1, "max_context_tokens": 1024, "max_new_tokens": 900}
LONG = 900
"""Tokens of an answer that still runs when it is interrupted, also on a loaded machine."""


class NeverStops(PlainChat):
    """A chat format without stop tokens, so that a sampled answer lasts until its limit."""

    stop_token_ids = ()


class Watched:
    """An engine whose calls are written down, and may be made otherwise than they were asked for."""

    def __init__(self, engine: Engine, *, always_full: bool = False) -> None:
        self._engine = engine
        self._always_full = always_full
        self.mute = False
        self.asked: list[int] = []
        self.tokens = 0
        self._changed = asyncio.Condition()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk | Finish]:
        if self._always_full:
            request = msgspec.structs.replace(request, routing_start=0)
        self.asked.append(request.routing_start)
        async for event in self._engine.generate(request):
            async with self._changed:
                self.tokens += len(event.token_ids) if isinstance(event, Chunk) else 0
                self._changed.notify_all()
            if isinstance(event, Finish) and self.mute:
                event = msgspec.structs.replace(event, routing=None)
            yield event

    async def has_tokens(self, count: int) -> None:
        """Wait for this many tokens; a turn that ended early raises TimeoutError."""
        async with asyncio.timeout(120), self._changed:
            await self._changed.wait_for(lambda: self.tokens >= count)


@pytest.fixture
async def engine(sglang_world: Any) -> AsyncIterator[Engine]:
    engine = sglang_world.engine()
    await engine.wait_ready()
    await load(engine, sglang_world, 0)
    yield engine
    await engine.interrupt("abort")
    await engine.close()


async def load(engine: Engine, world: Any, version: int) -> None:
    update = DiskUpdate(weight_version=version, path=str(world.weights[version % 2]))
    await engine.update_weights(update, flush=True)


def bench_of(engine: Any, world: Any, **changes: Any) -> Bench:
    weights = [str(path) for path in world.weights]
    bench = Bench(engine, facts=world.facts, weights=weights, **GREEDY, **changes)
    bench.start()
    return bench


async def expert_sets(engine: Engine, world: Any, trajectory: Trajectory, version: int) -> np.ndarray:
    """The experts of a trajectory under a version, computed afresh in one prefill."""
    await load(engine, world, version)
    return (await call(engine, trajectory.token_ids.tolist(), 0)).expert_sets


async def converse(bench: Bench, turns: int) -> Trajectory:
    for turn in range(turns):
        if turn:
            bench.session.add_messages([{"role": "tool", "content": "4"}])
        await bench.session.generate(max_new_tokens=6)
    return await bench.finish()


@pytest.mark.case(23)
async def test_deltas_are_the_full_fetch_over_five_turns(engine: Engine, sglang_world: Any) -> None:
    delta, full = Watched(engine), Watched(engine, always_full=True)
    found = await converse(bench_of(delta, sglang_world), 5)
    expected = await converse(bench_of(full, sglang_world), 5)
    assert np.array_equal(found.token_ids, expected.token_ids)
    assert found.trace.rows.tobytes() == expected.trace.rows.tobytes()
    assert found.trace.valid.all()
    verify(found.trace, found.token_ids, sglang_world.facts.moe_layers)
    assert delta.asked[0] == 0
    assert np.diff(delta.asked).min() >= 6
    assert full.asked == [0] * 5
    fresh = await expert_sets(engine, sglang_world, found, 0)
    assert np.array_equal(np.sort(found.trace.rows, axis=-1), fresh)


@pytest.mark.case(10, 11, 12, 18, 20)
@pytest.mark.parametrize("merge", ["replace", "splice"])
async def test_rows_are_of_the_versions_that_the_merge_promises_when_an_update_interrupts(
    engine: Engine, sglang_world: Any, merge: str
) -> None:
    watched = Watched(engine)
    bench = bench_of(watched, sglang_world, merge=merge)
    async with asyncio.TaskGroup() as group:
        group.create_task(bench.session.generate(max_new_tokens=LONG))
        await watched.has_tokens(4)
        await bench.bump(1)
    trajectory = await bench.finish()
    first, second = trajectory.sampled
    assert (first.weight_version, second.weight_version) == (0, 1)
    assert len(first.token_ids) >= 4
    boundary = PROMPT + len(first.token_ids) - 1
    wanted = trajectory.num_tokens - 1
    assert watched.asked == [0, 0 if merge == "replace" else boundary]
    old = 0 if merge == "replace" else boundary
    assert row_versions(trajectory.trace) == [0] * old + [1] * (wanted - old)
    assert trajectory.trace.valid.all()
    assert bench.counted("routing_mixed_versions_total") == 0
    found = np.sort(trajectory.trace.rows, axis=-1)
    new_rows = await expert_sets(engine, sglang_world, trajectory, 1)
    old_rows = await expert_sets(engine, sglang_world, trajectory, 0)
    assert np.array_equal(found[old:], new_rows[old:])
    assert np.array_equal(found[:old], old_rows[:old])
    # The control: the two versions do choose different experts.
    assert (old_rows[:boundary] == new_rows[:boundary]).all(axis=-1).mean() < 0.9


@pytest.mark.case(25)
async def test_missing_rows_are_recovered_without_a_token(engine: Engine, sglang_world: Any) -> None:
    watched = Watched(engine)
    bench = bench_of(watched, sglang_world)
    await bench.session.generate(max_new_tokens=6)
    bench.session.add_messages([{"role": "tool", "content": "4"}])
    watched.mute = True
    await bench.session.generate(max_new_tokens=6)
    watched.mute = False
    left = bench.session.remaining_tokens
    trajectory = await bench.finish()
    assert trajectory.num_tokens == GREEDY["max_context_tokens"] - left
    assert len(watched.asked) == 3
    assert watched.asked[2] == PROMPT + 5
    assert trajectory.trace.valid.all()
    assert len(trajectory.trace.rows) == trajectory.num_tokens - 1
    fresh = await expert_sets(engine, sglang_world, trajectory, 0)
    assert np.array_equal(np.sort(trajectory.trace.rows, axis=-1), fresh)


@pytest.mark.parametrize("merge", ["replace", "splice"])
async def test_a_branch_has_the_rows_of_its_whole_text(engine: Engine, sglang_world: Any, merge: str) -> None:
    watched = Watched(engine)
    bench = bench_of(watched, sglang_world, merge=merge, max_branches=1)
    session = bench.session
    await session.generate(max_new_tokens=8)
    async with session.branch() as other:
        other.add_messages([{"role": "tool", "content": "4"}])
        await asyncio.gather(other.generate(max_new_tokens=6), session.generate(max_new_tokens=5))
    assert watched.asked[1:] == [PROMPT + 7] * 2, "what is held of the prefix is not asked for again"
    for each in session.tree:
        trajectory = await each.finish_trajectory("completed", {"reward": 1.0})
        assert trajectory.trace is not None
        verify(trajectory.trace, trajectory.token_ids, sglang_world.facts.moe_layers)
        assert trajectory.trace.valid.all()
        rows = np.sort(trajectory.trace.rows, axis=-1)
        assert np.array_equal(rows, await expert_sets(engine, sglang_world, trajectory, 0))


async def test_each_token_keeps_its_mask_when_updates_interrupt_truncated_sampling(
    engine: Engine, sglang_world: Any
) -> None:
    watched = Watched(engine)
    weights = [str(path) for path in sglang_world.weights]
    limits = {"max_context_tokens": 1024, "max_new_tokens": LONG}
    bench = Bench(
        watched,
        facts=sglang_world.facts,
        weights=weights,
        chat=cast(ChatFormat, NeverStops()),
        top_p=0.8,
        top_k=20,
        temperature=0.9,
        **limits,
    )
    bench.start()
    async with asyncio.TaskGroup() as group:
        turn = group.create_task(bench.session.generate())
        await watched.has_tokens(20)
        await bench.bump(1)
        await watched.has_tokens(watched.tokens + 20)
        await bench.abort()
    assert turn.result().num_interruptions >= 1
    trajectory = await bench.finish()
    mask, sampled = trajectory.sampling_mask, trajectory.response_mask
    assert mask is not None
    assert set(trajectory.weight_versions[sampled].tolist()) == {0, 1}
    assert mask.counts[sampled].min() >= 1
    assert mask.counts[sampled].max() <= 20
    assert mask.counts[~sampled].max() == 0
    assert mask.keeps(trajectory.token_ids).all()
    assert trajectory.rollout_log_probs[sampled].max() <= 0
    assert bench.counted("answers_discarded_total", reason="wrong_mask") == 0
