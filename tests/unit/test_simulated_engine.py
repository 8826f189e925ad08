"""What the simulated engine does beyond the contract: faults, markers, and time that costs nothing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from unittest import mock

import pytest

from async_rl.config import SimulatedEngines
from async_rl.engine_protocol import (
    Chunk,
    DiskUpdate,
    Finish,
    GenerateRequest,
    InterruptMode,
    PayloadProgress,
)
from async_rl.errors import EngineError
from tests.support.engine_calls import Call, call, request
from verification.simulation.breakable_engine import BreakableEngine, Fault
from verification.simulation.simulated_workers import DistantEngine

PROMPT = list(range(40, 60))
CONFIG = SimulatedEngines(max_running_requests=2, decode_step_s=0.01, prefill_tokens_per_s=1000.0)


def engine(*faults: Fault, seed: int = 1, **settings) -> BreakableEngine:
    made = BreakableEngine(
        "engine-0", CONFIG, seed=seed, policy=lambda prefix, rng: 3 + rng.randrange(90), **settings
    )
    made.faults.extend(faults)
    return made


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def update(subject: BreakableEngine, *, flush: bool = True) -> None:
    await subject.update_weights(DiskUpdate(weight_version=1, path=""), flush=flush)


async def test_a_call_takes_prefill_and_steps() -> None:
    await call(engine(), PROMPT, 1000)
    assert now_s() == pytest.approx(20 / 1000 + 1000 * 0.01)


async def test_calls_queue_when_all_slots_are_taken() -> None:
    subject, ends = engine(), []

    async def one() -> None:
        await call(subject, PROMPT, 100)
        ends.append(now_s())

    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(one())
    assert [round(end) for end in ends] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_request_that_arrives_late_is_looked_at_when_generation_goes_on(mode: InterruptMode) -> None:
    """A rollout worker sent it before it knew of the update; SGLang keeps it until then."""
    subject, began_s = engine(), list[float]()
    generate = subject.generate

    def seen(request: GenerateRequest) -> AsyncGenerator[Chunk | PayloadProgress | Finish, None]:
        began_s.append(now_s())
        return generate(request)

    distant = DistantEngine(subject, lambda: 0.5, deque())
    with mock.patch.object(subject, "generate", seen):
        late = asyncio.create_task(call(distant, PROMPT, 3))
        await subject.interrupt(mode)
        await asyncio.sleep(1.0)
        await update(subject)
        await subject.resume_generation(mode)
        ended = await late
    assert began_s == [pytest.approx(1.0)]
    assert [span.weight_version for span in ended.finish.version_spans] == [1]


async def test_everything_fails_until_a_restart_when_the_engine_dies() -> None:
    subject = engine(Fault("die", after_tokens=3))
    dying, other = Call(subject, request(PROMPT, 9)), Call(subject, request(PROMPT, 900))
    results = await asyncio.gather(dying.run(), other.run(), return_exceptions=True)
    assert [type(result) for result in results] == [EngineError, EngineError]
    assert len(dying.token_ids) == 3
    assert len(other.token_ids) >= 3
    with pytest.raises(EngineError, match="cannot be reached"):
        await subject.health()
    subject.restart()
    assert (await subject.health()).weight_version == 0
    assert len((await call(subject, PROMPT, 4)).token_ids) == 4


async def test_what_a_call_computed_before_its_retraction_does_not_reach_the_prefix_cache() -> None:
    """The memory of a retracted call is free, so an abort before it runs again leaves nothing of it."""
    subject = engine()
    running = Call(subject, request(PROMPT, 100))
    async with asyncio.TaskGroup() as group:
        group.create_task(running.run())
        await running.has_tokens(5)
        await subject.interrupt("retract")
        await update(subject)
        await subject.resume_generation("retract")  # it has a slot again, and has not run yet
        await subject.interrupt("abort")
    assert (await call(subject, PROMPT, 4)).finish.cached_tokens == 0
