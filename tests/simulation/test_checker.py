"""The checker of the simulation reads rows of any version, and raises no false alarm."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest
from msgspec.structs import replace

from async_rl.engine_protocol import Chunk, Finish, GenerateRequest, SamplingParams
from async_rl.engines.sglang.routing_payload import MAX_RECEIVING
from async_rl.engines.simulated import routing_rows
from async_rl.planning.virtual_time import VirtualTimeLoop
from tests.support.small_run import small_run
from verification.simulation.faulty_engines import FaultyEngine
from verification.simulation.invariant_checker import InvariantChecker, caller_is_given_up, versions_of_rows
from verification.simulation.scenario import FACTS, Injection
from verification.simulation.simulated_trainer import Broadcasts


@pytest.mark.parametrize("newest", [0, 61, 62, 100_000])
def test_the_version_of_a_row_is_read_however_many_there_were(newest: int) -> None:
    rng = np.random.default_rng(newest)
    versions = rng.integers(max(0, newest - 50), newest + 3, 300).astype(np.int32)
    tokens = rng.integers(0, FACTS.vocab_size, 300).astype(np.int32)
    rows = routing_rows(tokens, versions, FACTS)
    assert versions_of_rows(rows, tokens, newest).tolist() == versions.tolist()


def request_of(tokens: list[int], *, number: int = 0, stop: tuple[str, ...] = ()) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{number:032x}",
        input_ids=np.array(tokens, np.int32),
        max_new_tokens=1,
        sampling=SamplingParams(stop=stop),
        return_routing=True,
    )


@pytest.mark.parametrize(
    ("sampled", "then", "continues"),
    [
        ([156, 95, 188], [284, 156, 4, 40], True),  # "284 156" ends the turn within the chunk
        ([95, 24, 156, 188], [284, 95, 24, 156, 4], True),
        ([156, 95, 188], [284, 4, 40], False),
        ([95, 188], [284, 95, 4], False),
    ],
)
async def test_what_follows_a_stop_string_in_a_chunk_is_not_kept(
    sampled: list[int], then: list[int], continues: bool
) -> None:
    checker = InvariantChecker(small_run(0), digests=False)
    request = request_of([284], stop=("4 1",))
    checker.call_begins("engine-0", request, 0, 0)
    checker.call_ends(request, [Chunk.of(sampled, [-1.0] * len(sampled))], None)
    checker.call_begins("engine-0", request_of(then), 0, 0)
    assert (checker.violations == []) == continues, checker.violations


@pytest.mark.parametrize("given_up", [False, True])
async def test_a_call_of_a_worker_that_was_given_up_counts_for_no_call_of_its_successor(
    given_up: bool,
) -> None:
    """One that is cut off samples on, while another worker continues the trajectory from the journal."""
    checker = InvariantChecker(small_run(0), digests=False)

    async def stale_call() -> None:
        caller_is_given_up.set(lambda: given_up)
        checker.call_ends(request_of([284]), [Chunk.of([95, 24], [-1.0, -1.0])], None)

    name = asyncio.current_task().get_name()  # type: ignore[union-attr]
    checker.call_begins("engine-0", request_of([284]), 0, 0)
    await asyncio.create_task(stale_call(), name=name)
    checker.call_begins("engine-1", request_of([284]), 0, 0)
    assert (checker.violations == []) == given_up, checker.violations


async def test_payloads_that_go_on_at_the_moment_at_which_others_arrive_are_no_violation() -> None:
    scenario = small_run(0)
    scenario = replace(
        scenario, config=replace(scenario.config, engine=replace(scenario.config.engine, stall_s=500.0))
    )
    checker = InvariantChecker(scenario, digests=False)

    async def call(engine: FaultyEngine, number: int) -> None:
        async with aclosing(engine.generate(request_of([5, 6, 7, 8], number=number))) as events:
            assert [event async for event in events if isinstance(event, Finish)]

    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    engine = FaultyEngine(0, scenario, checker, Broadcasts(), 0)
    await engine.health()
    engine.inject(Injection(step=0, kind="stuck_payload", engine=0, amount=1.0))
    async with asyncio.TaskGroup() as group:
        for number in range(MAX_RECEIVING):
            group.create_task(call(engine, number))
        await asyncio.sleep(1.0)
        assert checker.met_faults["stuck_payload"] == 1
        for number in range(3):
            group.create_task(call(engine, 100 + number))
        engine.inject(Injection(step=0, kind="freeze", engine=0, amount=0.5))  # thaws first
        await asyncio.sleep(1.0)
        loop.jump(400.0)
    assert checker.violations == []


class LimitBench:
    """A checker of an incarnation whose engines serve, with its clock."""

    def __init__(self, num_workers: int = 0) -> None:
        config = small_run(0).config
        config = replace(config, rollout=replace(config.rollout, num_workers=num_workers))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        self.jump = loop.jump
        self.checker = InvariantChecker(small_run(0), digests=False)
        self.checker.begin_incarnation(config, loop.time)
        self.checker.engines_serve(True)


@pytest.mark.parametrize(("num_workers", "too_early"), [(0, True), (2, False)])
async def test_only_a_rollout_worker_of_this_incarnation_may_learn_late_that_engines_are_held(
    num_workers: int, too_early: bool
) -> None:
    bench = LimitBench(num_workers)
    limit = bench.checker.attempt_begins(60.0)
    bench.jump(59.0)
    bench.checker.attempt_cancelled(limit, 0.0)
    assert bool(bench.checker.violations) == too_early


async def test_the_limit_of_an_attempt_is_not_that_of_one_that_another_worker_makes_again() -> None:
    """A worker that is cut off runs on until it hears of it: an attempt may have begun a second time."""
    bench = LimitBench()
    first = bench.checker.attempt_begins(60.0)
    bench.jump(40.0)
    bench.checker.attempt_begins(60.0)
    bench.jump(20.0)
    bench.checker.attempt_cancelled(first, 0.0)
    assert bench.checker.violations == []


@pytest.mark.parametrize(("num_workers", "too_early"), [(0, True), (2, False)])
async def test_a_rollout_worker_may_not_have_heard_that_engines_are_held_when_the_clock_jumps(
    num_workers: int, too_early: bool
) -> None:
    bench = LimitBench(num_workers)
    limit = bench.checker.attempt_begins(60.0)
    bench.jump(10.0)
    bench.checker.engines_serve(False)
    bench.checker.clock_jumps(50.0)
    bench.jump(50.0)
    bench.checker.attempt_cancelled(limit, 0.0)
    assert bool(bench.checker.violations) == too_early


@pytest.mark.parametrize(("begins_later", "too_early"), [(False, False), (True, True)])
async def test_the_clock_of_a_worker_that_was_unaware_stays_ahead(
    begins_later: bool, too_early: bool
) -> None:
    bench = LimitBench(num_workers=2)
    bench.checker.worker_is_unaware(10.0)
    bench.jump(20.0 if begins_later else 0.0)
    limit = bench.checker.attempt_begins(60.0)
    bench.checker.engines_serve(False)
    bench.jump(10.0)
    bench.checker.engines_serve(True)
    bench.jump(50.0)
    bench.checker.attempt_cancelled(limit, 0.0)
    assert bool(bench.checker.violations) == too_early
