"""What every engine promises: the simulated one, and a real SGLang server, also through a rollout worker.

`make test` asks the simulated engine, `make test-real` a server, `make test-long` a server through a worker.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack, aclosing

import msgspec
import numpy as np
import pytest

from async_rl.config import SimulatedEngines
from async_rl.engine_protocol import DiskUpdate, Engine, check_partition
from async_rl.engines.device_memory import stop_engine
from async_rl.engines.simulated import TINY_FACTS, SimulatedEngine
from async_rl.errors import PromptTooLong, RequestRefused, WeightSyncError
from tests.support.engine_calls import Call, call, request
from tests.support.engine_through_worker import through_worker
from tests.support.trajectories import verify_rows

PROMPT = [40, 41, 42, 43, 44, 45, 46]
MAX_RUNNING, CONTEXT_LENGTH = 4, 2048
"""Of every engine here."""
LONG = 1200
"""More tokens than any engine here samples before a test has done what it came for."""
SOME = 500
"""Tokens of a call that still runs when it is interrupted, and is then waited for."""


class Subject:
    """An engine under test at weight version 0, and how to get it to version 1."""

    def __init__(self, engine: Engine, weights: list[str]) -> None:
        self.engine = engine
        self._weights = weights

    async def load(self, version: int, *, flush: bool = True) -> None:
        await self.engine.update_weights(
            DiskUpdate(weight_version=version, path=self._weights[version % 2]), flush=flush
        )

    async def expert_sets(self, sequence: list[int]) -> np.ndarray:
        """The experts of a sequence under the weights the engine has now, computed afresh."""
        version = (await self.engine.health()).weight_version
        await self.load(version)
        return (await call(self.engine, sequence, 0)).expert_sets


@pytest.fixture(
    params=[
        "simulated",
        pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.real]),
        pytest.param("worker", marks=[pytest.mark.sglang, pytest.mark.long]),
    ]
)
async def subject(request: pytest.FixtureRequest):
    if request.param == "simulated":
        config = SimulatedEngines(max_running_requests=MAX_RUNNING)
        engine = SimulatedEngine(
            "engine-0",
            config,
            seed=1,
            facts=msgspec.structs.replace(TINY_FACTS, context_length=CONTEXT_LENGTH),
            policy=lambda prefix, rng: 3 + int(rng.random() * 290),
            keeps_weights=True,
        )
        yield Subject(engine, ["", ""])
        await engine.close()
        return
    world = request.getfixturevalue("sglang_world")
    weights = [str(path) for path in world.weights]
    async with AsyncExitStack() as stack:
        engine = world.engine()
        await engine.wait_ready()
        if request.param == "worker":
            engine = await stack.enter_async_context(through_worker(engine, world.engine()))
        subject = Subject(engine, weights)
        await subject.load(0)
        yield subject
        await engine.interrupt("abort")
        await engine.close()


# -- rows -----------------------------------------------------------------------------------------------


@pytest.mark.case(1, 7)
async def test_rows_are_prompt_plus_sampled_minus_one_when_a_call_ends_by_length(subject: Subject) -> None:
    ended = await call(subject.engine, PROMPT, 5)
    assert ended.finish.reason == "length"
    assert len(ended.token_ids) == 5
    assert ended.finish.routing.num_rows == 11
    verify_rows(ended.trace, 12, ended.trace.moe_layers)
    assert ended.trace.rows.dtype == np.uint8
    assert max(ended.log_probs) <= 0


@pytest.mark.case(1)
async def test_only_later_rows_come_when_a_start_is_asked_for(subject: Subject) -> None:
    whole = await call(subject.engine, PROMPT, 5)
    # With a prompt that has no row from its end on, when nothing is sampled.
    for start, tokens, num_rows in ((0, 5, 11), (3, 5, 8), (7, 5, 4), (7, 0, 0)):
        asked = msgspec.structs.replace(request(PROMPT, tokens), routing_start=start)
        part = await Call(subject.engine, asked).run()
        assert part.token_ids == whole.token_ids[:tokens]
        assert (part.finish.routing.start, part.finish.routing.num_rows) == (start, num_rows)
        assert np.array_equal(part.expert_sets, whole.expert_sets[start : start + num_rows])
        assert part.trace.rows.shape == (num_rows, *whole.trace.rows.shape[1:])


@pytest.mark.case(1)
async def test_a_call_is_refused_at_once_when_rows_are_to_start_outside_its_prompt(subject: Subject) -> None:
    for start in (-1, 8):
        asked = msgspec.structs.replace(request(PROMPT, 5), routing_start=start)
        async with asyncio.timeout(60):
            with pytest.raises(RequestRefused, match=f"{asked.request_id}.*{start}"):
                await Call(subject.engine, asked).run()
    assert len((await call(subject.engine, PROMPT, 2)).token_ids) == 2


@pytest.mark.case(5)
async def test_rows_are_the_same_when_the_prefix_comes_from_the_cache(subject: Subject) -> None:
    prompt = PROMPT * 6
    cold = await call(subject.engine, prompt, 4)
    warm = await call(subject.engine, prompt, 4)
    assert cold.finish.cached_tokens == 0
    assert warm.finish.cached_tokens > 0
    assert np.array_equal(cold.expert_sets, warm.expert_sets)


async def test_only_rows_come_when_no_token_is_asked_for(subject: Subject) -> None:
    whole = await call(subject.engine, PROMPT, 6)
    recovered = await call(subject.engine, whole.sequence, 0)
    assert recovered.token_ids == []
    assert recovered.finish.version_spans == ()
    verify_rows(recovered.trace, len(whole.sequence), recovered.trace.moe_layers)
    assert np.array_equal(recovered.expert_sets, whole.expert_sets)


# -- how calls end --------------------------------------------------------------------------------------


@pytest.mark.case(7)
async def test_the_stop_token_is_delivered_when_it_ends_a_call(subject: Subject) -> None:
    free = await call(subject.engine, PROMPT, 12)
    stop = next(t for i, t in enumerate(free.token_ids) if i >= 2 and t not in free.token_ids[:i])
    stopped = await call(subject.engine, PROMPT, 12, stop=[stop])
    assert stopped.finish.reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    verify_rows(stopped.trace, len(stopped.sequence), stopped.trace.moe_layers)


async def test_a_call_is_refused_when_its_prompt_leaves_no_capacity(subject: Subject) -> None:
    for prompt, tokens in ((CONTEXT_LENGTH + 1, 1), (CONTEXT_LENGTH - 5, 6)):
        with pytest.raises(PromptTooLong, match=str(CONTEXT_LENGTH)):
            await call(subject.engine, [50] * prompt, tokens)
    assert len((await call(subject.engine, PROMPT, 2)).token_ids) == 2


# -- interruption ---------------------------------------------------------------------------------------


async def test_a_call_ends_with_nothing_when_it_is_aborted_in_the_queue(subject: Subject) -> None:
    running = [Call(subject.engine, request([60 + i, *PROMPT], LONG)) for i in range(MAX_RUNNING)]
    async with asyncio.TaskGroup() as group:
        for one in running:
            group.create_task(one.run())
        for one in running:
            await one.has_tokens(1)
        queued = Call(subject.engine, request(PROMPT, LONG))
        ended = group.create_task(queued.run())
        await queued.started.wait()
        for _ in range(3):  # what is sent before these has arrived when they are answered
            await subject.engine.health()
        for one in running:  # by then it has arrived; their slots are taken for as long as they run
            await one.has_tokens(len(one.token_ids) + 20)
        await subject.engine.interrupt("abort")
        assert all(one.finish is not None for one in (*running, queued)), "all have ended when it returns"
        await ended
    assert queued.token_ids == []
    assert queued.finish.reason == "abort"
    assert queued.finish.version_spans == ()
    assert queued.finish.routing is None
    assert all(one.finish.routing is not None for one in running)


@pytest.mark.case(45)
async def test_the_answer_is_as_if_uninterrupted_when_an_aborted_call_is_resumed(subject: Subject) -> None:
    budget = 24
    whole = await call(subject.engine, PROMPT, budget)
    first = Call(subject.engine, request(PROMPT, LONG))
    async with asyncio.TaskGroup() as group:
        group.create_task(first.run())
        await first.has_tokens(3)
        await subject.engine.interrupt("abort")
        assert first.finish is not None
    assert first.finish.reason == "abort"
    assert 3 <= len(first.token_ids) < LONG
    verify_rows(first.trace, len(first.sequence), first.trace.moe_layers)
    assert check_partition(first.finish.version_spans, len(first.token_ids))
    await subject.engine.resume_generation("abort")
    left = max(1, budget - len(first.token_ids))
    second = await call(subject.engine, first.sequence, left)
    answer = [*first.token_ids, *second.token_ids]
    assert answer[:budget] == whole.token_ids
    log_probs = [*first.log_probs, *second.log_probs]
    assert log_probs[:budget] == pytest.approx(whole.log_probs, abs=1e-4)
    rows = len(whole.expert_sets)
    assert np.array_equal(second.expert_sets[:rows], whole.expert_sets)
    verify_rows(second.trace, len(PROMPT) + len(answer), second.trace.moe_layers)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_calls_go_on_when_the_engine_had_been_left_paused(subject: Subject, mode: str) -> None:
    """A driver that died in an update; seen elsewhere as a pause that never ends (sglang#22620)."""
    engine, running = subject.engine, Call(subject.engine, request(PROMPT, 40))
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(running.run())
        await running.has_tokens(2)
        await engine.interrupt(mode)
        await engine.health()  # answers all the same
        await engine.wait_ready()
    assert len(running.token_ids) == 40


@pytest.mark.case(17)
async def test_nothing_comes_twice_when_a_call_goes_on_after_its_connection_was_dropped(
    subject: Subject,
) -> None:
    budget = 24
    whole = await call(subject.engine, PROMPT, budget)
    seen: list[int] = []
    log_probs: list[float] = []
    async with aclosing(subject.engine.generate(request(PROMPT, LONG))) as stream:
        while len(seen) < 3:
            chunk = await anext(stream)
            seen += chunk.token_ids.tolist()
            log_probs += chunk.log_probs.tolist()
    seen, log_probs = seen[:3], log_probs[:3]  # a chunk has all that has arrived
    assert seen == whole.token_ids[: len(seen)]
    rest = await call(subject.engine, [*PROMPT, *seen], budget - len(seen))
    assert [*seen, *rest.token_ids] == whole.token_ids
    assert [*log_probs, *rest.log_probs] == pytest.approx(whole.log_probs, abs=1e-4)
    verify_rows(rest.trace, len(PROMPT) + budget, rest.trace.moe_layers)
    assert np.array_equal(rest.expert_sets, whole.expert_sets)


@pytest.mark.case(16)
async def test_only_the_call_that_is_left_ends_when_another_id_ends_like_its_own(subject: Subject) -> None:
    # Of one width, as all are: SGLang aborts every running call whose id begins with the given one.
    # New ones each time: SGLang also aborts an id two seconds after its call has ended.
    name = uuid.uuid4().hex[:20]
    short, long = f"{name + 'e1':0>32}", f"{name + 'e10':0>32}"
    whole = await call(subject.engine, PROMPT, 60)
    other = Call(subject.engine, msgspec.structs.replace(request(PROMPT, 60), request_id=long))
    async with asyncio.TaskGroup() as group:
        async with aclosing(
            subject.engine.generate(msgspec.structs.replace(request(PROMPT, LONG), request_id=short))
        ) as left:
            await anext(left)
            group.create_task(other.run())
            await other.has_tokens(2)
    assert other.finish.reason == "length"
    assert other.token_ids == whole.token_ids


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_call_goes_on_under_new_weights_when_it_stood_still(subject: Subject, mode: str) -> None:
    flush = mode == "retract"
    running = Call(subject.engine, request(PROMPT, SOME))
    async with asyncio.TaskGroup() as group:
        group.create_task(running.run())
        await running.has_tokens(4)
        await subject.engine.interrupt(mode)
        await subject.load(1, flush=flush)
        await subject.engine.resume_generation(mode)
    spans = running.finish.version_spans
    assert running.finish.reason == "length"
    assert check_partition(spans, SOME)
    assert [span.weight_version for span in spans] == [0, 1]
    verify_rows(running.trace, len(running.sequence), running.trace.moe_layers)
    # The session tells retractions of updates from others by the change of the version.
    retractions = [(each.at_least <= spans[0].end <= each.at_most) for each in running.finish.retractions]
    assert retractions == [True] * flush
    fresh = await subject.expert_sets(running.sequence)
    old = len(PROMPT) + spans[0].end - 1
    same = (running.expert_sets == fresh).all(axis=-1)
    if flush:
        assert same.all()
    else:
        assert same[:old].mean() < 0.9


async def test_no_token_comes_twice_when_a_retracted_call_is_aborted(subject: Subject) -> None:
    whole = await call(subject.engine, PROMPT, SOME)
    running = Call(subject.engine, request(PROMPT, SOME))
    async with asyncio.TaskGroup() as group:
        group.create_task(running.run())
        await running.has_tokens(5)
        await subject.engine.interrupt("retract")
        await subject.engine.interrupt("abort")
    await subject.engine.resume_generation("retract")
    assert running.finish.reason == "abort"
    assert running.finish.routing is None
    assert 5 <= len(running.token_ids) < SOME
    assert running.token_ids == whole.token_ids[: len(running.token_ids)]
    assert running.log_probs == pytest.approx(whole.log_probs[: len(running.log_probs)], abs=1e-4)
    assert check_partition(running.finish.version_spans, len(running.token_ids))


async def test_a_slot_is_free_when_a_stream_is_left(subject: Subject) -> None:
    others = [Call(subject.engine, request([80 + i, *PROMPT], LONG)) for i in range(MAX_RUNNING - 1)]
    async with asyncio.TaskGroup() as group:
        for one in others:
            group.create_task(one.run())
            await one.has_tokens(1)
        async with aclosing(subject.engine.generate(request(PROMPT, LONG))) as left:
            await anext(left)
            queued = Call(subject.engine, request(PROMPT, 3))
            ended = group.create_task(queued.run())
            await queued.started.wait()
        await ended
        assert all(one.finish is None for one in others)
        await subject.engine.interrupt("abort")
    assert len(queued.token_ids) == 3


# -- weights --------------------------------------------------------------------------------------------


async def test_old_rows_are_gone_when_an_update_flushes_the_prefix_cache(subject: Subject) -> None:
    """Seen elsewhere: keys and values of old weights that are used under new ones (sglang#27886)."""
    prompt = PROMPT * 6
    old = await call(subject.engine, prompt, 0)
    await subject.load(1, flush=False)
    stale = await call(subject.engine, prompt, 0)
    assert stale.finish.cached_tokens > 0
    await subject.load(1, flush=True)
    assert (await subject.engine.health()).weight_version == 1
    fresh = await call(subject.engine, prompt, 0)
    assert fresh.finish.cached_tokens == 0
    cached = stale.finish.cached_tokens
    assert np.array_equal(stale.expert_sets[:cached], old.expert_sets[:cached])
    assert (fresh.expert_sets[:cached] == old.expert_sets[:cached]).all(axis=-1).mean() < 0.9


async def test_an_update_fails_when_running_calls_refuse_the_flush(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.engines.sglang.client._FLUSH_LIMIT_S", 0.2)
    running = Call(subject.engine, request(PROMPT, SOME))
    async with asyncio.TaskGroup() as group:
        group.create_task(running.run())
        await running.has_tokens(2)
        await subject.engine.interrupt("in_place")
        with pytest.raises(WeightSyncError, match="has new weights but would not flush"):
            await subject.load(1, flush=True)
        await subject.engine.resume_generation("in_place")
    assert len(running.token_ids) == SOME


# -- memory ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps_weights", [False, True])
async def test_an_engine_answers_as_before_when_it_was_without_its_memory(
    subject: Subject, keeps_weights: bool
) -> None:
    before, running = await call(subject.engine, PROMPT, 5), Call(subject.engine, request(PROMPT, LONG))
    async with asyncio.TaskGroup() as group:
        group.create_task(running.run())
        await running.has_tokens(2)
        stopped = await stop_engine(subject.engine, subject.engine.interrupt)
        empty = await stopped.release_all(keeps_weights=keeps_weights)
    assert running.finish.reason == "abort"
    loadable = await empty.resume_weights()
    if not keeps_weights:
        await subject.load(0)
    await loadable.resume_rest()
    after = await call(subject.engine, PROMPT, 5)
    assert after.token_ids == before.token_ids
    assert after.finish.cached_tokens == 0
    assert (await subject.engine.health()).weight_version == 0
    assert len((await call(subject.engine, running.sequence, 3)).token_ids) == 3
