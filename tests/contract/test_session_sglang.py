"""Sessions and grants of rollout workers on a real SGLang server.

Sessions whose version changes, and an engine that stops, are in `test_real_parts.py`.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import pytest

from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import Engine
from async_rl.engines.sglang.client import SGLangEngine
from async_rl.errors import CallLost
from async_rl.openai_api.constraints import Forced, forced_text
from async_rl.types import Trajectory
from tests.support.engine_calls import Call, request
from tests.support.engine_through_worker import EngineThroughWorker, through_worker
from tests.support.sessions import PROMPT, Bench
from tests.support.sglang_world import SGLangWorld
from tests.support.trajectories import verify
from tests.support.watched_engine import NeverStops, WatchedEngine

pytestmark = [pytest.mark.real, pytest.mark.sglang]

ANSWER = 200
"""Tokens of an answer that still runs when it is interrupted, also on a loaded machine."""

LEASED = 1500
"""Tokens of a leased call that still runs when it is interrupted; no test waits for its end."""

SHORT = [40, 41, 42, 43]


def bench_of(engine: Any, world: SGLangWorld, **changes: Any) -> Bench:
    weights, limits = [str(path) for path in world.weights], {"top_k": 1, "max_new_tokens": ANSWER}
    return Bench(engine, facts=world.facts, weights=weights, max_context_tokens=1024, **{**limits, **changes})


async def assert_rows_are_of(world: SGLangWorld, engine: Engine, trajectory: Trajectory) -> None:
    """Check the rows of a trajectory of version 0 against those of one prefill of it."""
    assert trajectory.trace is not None
    verify(trajectory.trace, trajectory.token_ids, world.facts.moe_layers)
    assert trajectory.trace.valid.all()
    fresh = await world.expert_sets(engine, trajectory.token_ids.tolist(), 0)
    assert np.array_equal(np.sort(trajectory.trace.rows, axis=-1), fresh)


@pytest.mark.case(25)
async def test_missing_rows_are_recovered_without_a_token(
    engine: SGLangEngine, sglang_world: SGLangWorld
) -> None:
    watched = WatchedEngine(engine)
    bench = bench_of(watched, sglang_world)
    bench.start()
    await bench.session.generate(max_new_tokens=6)
    bench.session.add_messages([{"role": "tool", "content": "4"}])
    watched.mute = True
    await bench.session.generate(max_new_tokens=6)
    watched.mute = False
    left = bench.session.remaining_tokens
    trajectory = await bench.finish()
    assert trajectory.num_tokens == 1024 - left
    assert len(watched.asked) == 3
    assert watched.asked[2] == PROMPT + 5
    await assert_rows_are_of(sglang_world, engine, trajectory)


async def test_a_branch_has_the_rows_of_its_whole_text(
    engine: SGLangEngine, sglang_world: SGLangWorld
) -> None:
    watched = WatchedEngine(engine)
    bench = bench_of(watched, sglang_world, merge="splice", max_branches=1)
    bench.start()
    session = bench.session
    await session.generate(max_new_tokens=8)
    async with session.branch() as other:
        other.add_messages([{"role": "tool", "content": "4"}])
        await asyncio.gather(other.generate(max_new_tokens=6), session.generate(max_new_tokens=5))
    assert watched.asked[1:] == [PROMPT + 7] * 2, "what is held of the prefix is not asked for again"
    for each in session.tree:
        trajectory = await each.finish_trajectory("completed", {"reward": 1.0})
        await assert_rows_are_of(sglang_world, engine, trajectory)


async def test_each_token_keeps_its_mask_when_updates_interrupt_truncated_sampling(
    engine: SGLangEngine, sglang_world: SGLangWorld
) -> None:
    watched = WatchedEngine(cast(Engine, engine))
    sampling = {"top_p": 0.8, "top_k": 20, "temperature": 0.9}
    bench = bench_of(watched, sglang_world, chat=cast(ChatFormat, NeverStops()), **sampling)
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


async def test_a_turn_follows_its_grammar_over_a_weight_update_and_masks_say_which_tokens_it_allowed(
    engine: SGLangEngine, sglang_world: SGLangWorld
) -> None:
    """`retract` and `in_place` go on in the same call, whose grammar has read all tokens.

    The turn ends inside the text: this tokenizer has no token with which a grammar could end.
    """
    forced = Forced(schema={"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 100})
    constraint = forced_text(forced, [], None, opens_thought=False)
    for interrupt in ("retract", "in_place"):
        watched = WatchedEngine(cast(Engine, engine))
        bench = bench_of(watched, sglang_world, top_k=64, interrupt=interrupt)
        bench.start()
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(bench.session.generate(constraint=constraint, max_new_tokens=ANSWER))
            await watched.has_tokens(20)
            await bench.bump(1)
        trajectory = await bench.finish()
        sampled = trajectory.response_mask
        mask = trajectory.sampling_mask
        assert turn.result().finish_reason == "length"
        assert mask is not None
        assert mask.keeps(trajectory.token_ids).all()
        counts = mask.counts[sampled]
        assert counts.min() >= 1
        assert counts.max() <= 5, "of 64: `y`, `n`, a comma, or white space"
        assert set(trajectory.weight_versions[sampled].tolist()) == {0, 1}
        written = trajectory.token_ids[sampled].tolist()
        text = sglang_world.text(written)
        assert re.fullmatch(r'\[\s*("(yes|no)"\s*,\s*)*("?[a-z]*"?\s*)?', text), text
        await bench.bump(0)


# -- grants of rollout workers ----------------------------------------------------------------------------


@pytest.fixture
async def subject(sglang_world: SGLangWorld) -> AsyncIterator[EngineThroughWorker]:
    engine, client = sglang_world.engine(), sglang_world.engine()
    async with through_worker(engine, client) as made:
        await sglang_world.load(made, 0)
        yield made
        await engine.interrupt("abort")
        await made.close()


async def is_idle(world: SGLangWorld) -> bool:
    """Whether the scheduler has no request within a second: else it refuses a flush."""
    return (await world.ask("POST", "flush_cache?timeout=1", world.server.admin_key)).status == 200


async def test_nothing_runs_at_the_server_once_an_interruption_has_returned(
    subject: EngineThroughWorker, sglang_world: SGLangWorld
) -> None:
    calls = [Call(subject, request([60 + i, *SHORT], LEASED)) for i in range(6)]  # more than run at a time
    async with asyncio.TaskGroup() as tasks:
        for one in calls:
            tasks.create_task(one.run())
        await calls[0].has_tokens(4)
        assert not await is_idle(sglang_world)
        await subject.interrupt("abort")
        assert await is_idle(sglang_world)
    assert {one.finish.reason for one in calls if one.finish is not None} == {"abort"}


async def test_nothing_runs_at_the_server_when_the_grants_of_a_silent_worker_have_expired(
    subject: EngineThroughWorker, sglang_world: SGLangWorld
) -> None:
    running = Call(subject, request(SHORT, LEASED))

    async def run() -> None:
        with pytest.raises(CallLost, match="expired"):
            await running.run()

    group = sglang_world.server.pid
    async with asyncio.TaskGroup() as tasks:
        lost = tasks.create_task(run())
        await running.has_tokens(4)
        os.killpg(group, signal.SIGSTOP)  # a fast server would end the call before its grant expires
        try:
            subject.driver_answers = False
            subject.worker.revoke = lambda message: None  # type: ignore[method-assign]
            interruption = tasks.create_task(subject.interrupt("abort"))
            await lost
        finally:
            os.killpg(group, signal.SIGCONT)
        await interruption
        assert await is_idle(sglang_world)
    assert running.token_ids, "its session keeps them"
