"""What the simulated engine does beyond the contract: faults, markers, and time that costs nothing."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator
from unittest import mock

import numpy as np
import pytest

from async_rl.config import SimulatedEngines
from async_rl.engine_protocol import (
    Chunk,
    DiskUpdate,
    Finish,
    GenerateRequest,
    InterruptMode,
    PayloadProgress,
    Retraction,
)
from async_rl.engines.simulated import Fault, SimulatedEngine, routing_rows
from async_rl.errors import AlignmentError, EngineError, EngineTimeout, EnvironmentNotReady, WeightSyncError
from async_rl.planning.virtual_time import run_virtual
from tests.support.engine_calls import Call, call, request
from verification.simulation.simulated_workers import DistantEngine

PROMPT = list(range(40, 60))
CONFIG = SimulatedEngines(max_running_requests=2, decode_step_s=0.01, prefill_tokens_per_s=1000.0)


def engine(*faults: Fault, seed: int = 1, **settings) -> SimulatedEngine:
    made = SimulatedEngine(
        "engine-0", CONFIG, seed=seed, policy=lambda prefix, rng: 3 + rng.randrange(90), **settings
    )
    made.faults.extend(faults)
    return made


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def update(subject: SimulatedEngine, *, flush: bool = True) -> None:
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


async def test_a_run_repeats_itself_when_the_seed_is_the_same() -> None:
    async def sample(seed: int) -> tuple[list[int], list[float]]:
        ended = await call(engine(seed=seed), PROMPT, 30)
        return ended.token_ids, ended.log_probs

    assert await sample(1) == await sample(1)
    assert (await sample(1))[0] != (await sample(2))[0]


async def test_siblings_differ_when_they_are_sampled_with_temperature() -> None:
    subject = engine()
    first, second = [await call(subject, PROMPT, 30, temperature=1.0) for _ in range(2)]
    assert first.token_ids != second.token_ids


async def test_a_script_answers_when_a_policy_is_given() -> None:
    words = [7, 8, 9]

    def policy(prefix, rng):
        return words[len(prefix) - len(PROMPT)] if len(prefix) < len(PROMPT) + 3 else None

    subject = SimulatedEngine("engine-0", CONFIG, policy=policy)
    ended = await call(subject, PROMPT, 10, stop=[11])
    assert ended.token_ids == [7, 8, 9, 11]
    assert ended.finish.reason == "stop"


async def test_rows_name_the_version_that_fed_them_when_an_update_does_not_flush() -> None:
    subject = engine()
    await call(subject, PROMPT, 0)
    await update(subject, flush=False)
    mixed = await call(subject, PROMPT, 3)
    await update(subject)
    fresh = await call(subject, PROMPT, 3)
    fed = np.array(mixed.sequence[:-1], np.int32)
    versions = np.ones(22, np.int32)
    assert np.array_equal(fresh.trace.rows, routing_rows(fed, versions, fresh.engine.facts))
    versions[:16] = 0  # one page of the prefix
    assert np.array_equal(mixed.trace.rows, routing_rows(fed, versions, mixed.engine.facts))


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
    with pytest.raises(EnvironmentNotReady):
        await subject.wait_ready()
    subject.restart()
    await subject.wait_ready()
    assert (await subject.health()).weight_version == 0
    assert len((await call(subject, PROMPT, 4)).token_ids) == 4


async def test_a_call_times_out_when_the_engine_hangs() -> None:
    subject = engine(Fault("hang", after_tokens=2))
    hanging = Call(subject, request(PROMPT, 9))
    with pytest.raises(EngineTimeout, match=r"silent for 60\.0 s"):
        await hanging.run()
    assert len(hanging.token_ids) == 2
    assert now_s() > 60
    assert len((await call(subject, PROMPT, 4)).token_ids) == 4


async def test_a_payload_or_a_log_prob_is_wrong_when_that_fault_is_due() -> None:
    ended = await call(engine(Fault("wrong_rows")), PROMPT, 4)
    with pytest.raises(AlignmentError, match="sent 24 routing rows, expected 23"):
        _ = ended.trace
    ended = await call(engine(Fault("nan", after_tokens=2)), PROMPT, 5)
    assert [math.isnan(value) for value in ended.log_probs] == [False, False, True, False, False]


async def test_a_call_goes_on_as_before_when_its_memory_was_taken_for_another() -> None:
    whole = await call(engine(), PROMPT, 9)
    ended = await call(engine(Fault("retract", after_tokens=4)), PROMPT, 9)
    assert (ended.token_ids, ended.log_probs) == (whole.token_ids, whole.log_probs)
    assert np.array_equal(ended.trace.rows, whole.trace.rows)
    assert whole.finish.retractions == ()
    assert ended.finish.retractions == (Retraction(at_least=5, at_most=5),)
    at_its_end = await call(engine(Fault("retract", after_tokens=4)), PROMPT, 5)
    assert at_its_end.finish.retractions == ()
    assert len(at_its_end.token_ids) == 5


async def test_a_call_ends_at_the_gap_when_a_chunk_is_lost() -> None:
    """A client counts along: what comes after a gap continues another text."""
    running = Call(engine(Fault("lose", after_tokens=2)), request(PROMPT, 9))
    with pytest.raises(EngineError, match="counts 4 tokens of the call"):
        await running.run()
    assert len(running.token_ids) == 2


@pytest.mark.parametrize(
    ("fault", "num_tokens"),
    [(Fault("lose", after_tokens=4), 4), (Fault("repeat"), 5)],
    ids=["lose", "repeat"],
)
async def test_the_count_is_of_all_tokens_when_the_last_chunk_is_lost_or_one_comes_twice(
    fault: Fault, num_tokens: int
) -> None:
    ended = await call(engine(fault), PROMPT, 5)
    assert len(ended.token_ids) == num_tokens
    assert ended.finish.version_spans[-1].end == 5


async def test_the_version_counts_once_when_a_flush_is_refused_at_first() -> None:
    subject = engine(Fault("refuse_flush"))
    await call(subject, PROMPT, 0)
    await update(subject)
    assert (await subject.health()).weight_version == 1
    assert (await call(subject, PROMPT, 0)).finish.cached_tokens == 0


async def test_the_old_version_is_reported_when_an_update_fails_halfway() -> None:
    subject = engine(Fault("partial_update"))
    with pytest.raises(WeightSyncError, match="halfway to version 1"):
        await update(subject)
    assert (await subject.health()).weight_version == 0


async def test_an_update_waits_when_calls_run_uninterrupted() -> None:
    subject = engine(update_s=2.0)
    async with asyncio.TaskGroup() as group:
        running = Call(subject, request(PROMPT, 100))
        group.create_task(running.run())
        await running.has_tokens(1)
        await update(subject)
    assert now_s() == pytest.approx(0.02 + 1.0 + 2.0)


def test_virtual_time_says_so_when_nothing_can_happen_any_more() -> None:
    with pytest.raises(RuntimeError, match="deadlock"):
        run_virtual(asyncio.Event().wait())


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
