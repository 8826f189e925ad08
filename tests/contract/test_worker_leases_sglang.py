"""Leases of a rollout worker on a real SGLang server: what reaches it, and when the driver may change it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import aiohttp
import pytest

from async_rl.engine_protocol import DiskUpdate, Finish, InterruptMode
from async_rl.errors import CallLost
from tests.support.engine_calls import Call, call, request
from tests.support.engine_through_worker import EngineThroughWorker, through_worker
from tests.support.sglang_world import SGLangWorld

pytestmark = pytest.mark.sglang

PROMPT = [40, 41, 42, 43]
LONG = 1500
"""Tokens of a call that still runs when it is interrupted."""

LEASE_S = 10.0
"""No stall of the machine lets leases expire where no test wants it."""


@pytest.fixture
async def subject(
    request: pytest.FixtureRequest, sglang_world: SGLangWorld
) -> AsyncIterator[EngineThroughWorker]:
    engine, client = sglang_world.engine(), sglang_world.engine()
    async with through_worker(engine, client, lease_s=getattr(request, "param", LEASE_S)) as made:
        await load(made, sglang_world, 0)
        yield made
        await engine.interrupt("abort")
        await made.close()


async def load(subject: EngineThroughWorker, world: SGLangWorld, version: int, *, flush: bool = True) -> None:
    update = DiskUpdate(weight_version=version, path=str(world.weights[version % 2]))
    await subject.update_weights(update, flush=flush)


async def is_idle(world: SGLangWorld) -> bool:
    """Whether the scheduler has no request within a second: else it refuses a flush."""
    headers = {"Authorization": f"Bearer {world.server.admin_key}"}
    url = f"{world.server.url}/flush_cache?timeout=1"
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url) as response:
        return response.status == 200


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_each_update_ends_an_epoch(
    subject: EngineThroughWorker, sglang_world: SGLangWorld, mode: InterruptMode
) -> None:
    before = await call(subject, PROMPT, 3)
    await subject.interrupt(mode)
    await load(subject, sglang_world, 1, flush=mode != "in_place")
    await subject.resume_generation(mode)
    after = await call(subject, PROMPT, 3)
    assert [span.weight_version for span in before.finish.version_spans] == [0]
    assert [span.weight_version for span in after.finish.version_spans] == [1]
    assert subject.epochs[1] > subject.epochs[0]


async def test_nothing_runs_at_the_server_once_an_interruption_has_returned(
    subject: EngineThroughWorker, sglang_world: SGLangWorld
) -> None:
    calls = [Call(subject, request([60 + i, *PROMPT], LONG)) for i in range(6)]  # more than run at a time
    async with asyncio.TaskGroup() as tasks:
        for one in calls:
            tasks.create_task(one.run())
        await calls[0].has_tokens(4)
        assert not await is_idle(sglang_world)
        await subject.interrupt("abort")
        assert await is_idle(sglang_world)
    assert {one.finish.reason for one in calls if one.finish is not None} == {"abort"}


async def test_a_call_is_not_sent_when_its_engine_was_interrupted_after_the_lease(
    subject: EngineThroughWorker, sglang_world: SGLangWorld
) -> None:
    async with subject.calls.lease("0" * 32, len(PROMPT) + LONG, prompt=len(PROMPT)) as lease:
        subject.pool.hold_engine(subject.engine_id)
        await subject.pool.interrupt_engine(subject.engine, "in_place")
        (end,) = [event async for event in lease.generate(request(PROMPT, LONG))]
    assert isinstance(end, Finish)
    assert end.reason == "abort"
    await subject.resume_generation("in_place")
    assert await is_idle(sglang_world)
    assert len((await call(subject, PROMPT, 3)).token_ids) == 3


@pytest.mark.parametrize("subject", [4.0], indirect=True, ids=["4s"])
async def test_nothing_runs_at_the_server_when_the_leases_of_a_silent_worker_have_expired(
    subject: EngineThroughWorker, sglang_world: SGLangWorld
) -> None:
    running = Call(subject, request(PROMPT, LONG))

    async def run() -> None:
        with pytest.raises(CallLost, match="expired"):
            await running.run()

    group = sglang_world.server.pid
    async with asyncio.TaskGroup() as tasks:
        lost = tasks.create_task(run())
        await running.has_tokens(4)
        os.killpg(group, signal.SIGSTOP)  # a fast server would end the call before its lease expires
        try:
            subject.driver_answers = False
            subject.calls.revoke = lambda message: None  # type: ignore[method-assign]
            interruption = tasks.create_task(subject.interrupt("abort"))
            await lost
        finally:
            os.killpg(group, signal.SIGCONT)
        await interruption
        assert await is_idle(sglang_world)
    assert running.token_ids, "its session keeps them"
