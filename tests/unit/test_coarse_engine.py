"""The engine of a plan: its times are those of the formula, and tokens are kept by whom they belong to."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from async_rl.engine_protocol import Chunk, DiskUpdate, Finish, GenerateRequest, SamplingParams
from async_rl.planning.coarse_engine import CoarseEngine, EngineSpeed, mark

SPEED = EngineSpeed(
    slots=2,
    decode_base_s=0.01,
    decode_per_call_s=0.01,
    prefill_tokens_per_s=1000.0,
    update_s=5.0,
    shares_prompts=False,
)
_numbers = count(1)


def request(answer: int, prompt: int = 10, **who: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"{next(_numbers):032x}",
        input_ids=mark(prompt, stop_at=prompt + answer, **who),
        max_new_tokens=10_000,
        sampling=SamplingParams(),
    )


async def ask(engine: CoarseEngine, request: GenerateRequest) -> tuple[float, int, Finish]:
    """When the call ended, how many tokens came, and how it finished."""
    tokens = 0
    async for event in engine.generate(request):
        if isinstance(event, Chunk):
            tokens += len(event.token_ids)
        else:
            finish = event
    return asyncio.get_running_loop().time(), tokens, finish


async def update(engine: CoarseEngine, mode: str, version: int = 1) -> None:
    await engine.interrupt(mode)  # type: ignore[arg-type]
    await engine.update_weights(DiskUpdate(weight_version=version, path=""), flush=mode != "in_place")
    await engine.resume_generation(mode)  # type: ignore[arg-type]


async def test_calls_slow_each_other_down_and_wait_when_slots_are_taken() -> None:
    engine = CoarseEngine("e", SPEED)
    ends = [e for e, _, _ in await asyncio.gather(*(ask(engine, request(n)) for n in (50, 100, 100)))]
    both = 0.02 + 50 * 0.03  # two prefills, then 50 steps of two calls
    assert ends[0] == pytest.approx(both)
    third_joins = both + 0.01
    assert ends[1] == pytest.approx(third_joins + 50 * 0.03)
    assert ends[2] == pytest.approx(ends[1] + 50 * 0.02)


@pytest.mark.parametrize(("mode", "prefills"), [("in_place", 10), ("retract", 10 + 60)])
async def test_call_continues_under_the_new_version_when_it_was_paused(mode: str, prefills: int) -> None:
    engine = CoarseEngine("e", SPEED)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(ask(engine, request(100)))
        await asyncio.sleep(0.01 + 50 * 0.02)
        await update(engine, mode)
    ended_s, tokens, finish = asking.result()
    assert tokens == 100
    assert [(s.start, s.end, s.weight_version) for s in finish.version_spans] == [(0, 50, 0), (50, 100, 1)]
    assert engine.usage().prefilled_tokens == prefills
    assert ended_s == pytest.approx(100 * 0.02 + 5.0 + prefills / 1000)
    assert (await engine.health()).weight_version == 1


async def test_aborted_call_keeps_its_tokens_and_its_prefix_when_nothing_is_flushed() -> None:
    engine = CoarseEngine("e", SPEED)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(ask(engine, request(100, trajectory=7)))
        await asyncio.sleep(0.01 + 50 * 0.02)
        await engine.interrupt("abort")
    _, tokens, finish = asking.result()
    assert (tokens, finish.reason) == (50, "abort")
    resumed = request(50, prompt=60, trajectory=7)
    await ask(engine, resumed)
    assert engine.usage().prefilled_tokens == 10 + 1  # all but one token are in the cache
    await update(engine, "abort")
    await ask(engine, resumed)
    assert engine.usage().prefilled_tokens == 11 + 60


async def test_siblings_find_their_prompt_when_it_is_shared() -> None:
    engine = CoarseEngine("e", EngineSpeed(shares_prompts=True))
    for trajectory in (1, 2):
        await ask(engine, request(10, group=3, trajectory=trajectory))
    assert engine.usage().prefilled_tokens == 10 + 1


async def test_siblings_that_resume_share_their_prompt_and_no_more() -> None:
    engine = CoarseEngine("e", EngineSpeed(shares_prompts=True))
    resumed = [request(10, 60, group=3, trajectory=trajectory, shared=10) for trajectory in (1, 2)]
    await asyncio.gather(*(ask(engine, each) for each in resumed))
    assert engine.usage().prefilled_tokens == 60 + 50


async def test_slot_is_free_again_when_its_caller_goes_away() -> None:
    engine = CoarseEngine("e", SPEED)
    asking = asyncio.ensure_future(ask(engine, request(1000)))
    await asyncio.sleep(1.0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    begin_s = asyncio.get_running_loop().time()
    ended_s, _, _ = await ask(engine, request(10))
    assert ended_s - begin_s == pytest.approx(0.01 + 10 * 0.02)
