"""How many calls an engine is given: as many as its KV cache holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import msgspec
import pytest

from async_rl.engine_protocol import Engine, EngineCapacity
from async_rl.engines.cache_limit import CacheLimit, CallSizes
from async_rl.engines.granted_engines import GrantedEngines
from async_rl.engines.lease import EngineGrant, EngineJudge
from async_rl.observability.metrics import Metrics
from tests.support.manual_engines import END, ManualEngine, ManualPool, manual_pool, settle, tokens


def limit_of(tokens_of_call: int, **fields: float) -> CacheLimit:
    """A limit that knows calls of one size: without a prompt, and sampled to twice that size."""
    sizes = CallSizes()
    sizes.record_call(0, 2 * tokens_of_call)
    return CacheLimit(sizes, **fields)


def end_calls(limit: CacheLimit, number: int, *, calls: int) -> None:
    """End calls that held 100 tokens on average, while the engine has this number of them."""
    for _ in range(number):
        limit.held_tokens += 200
        limit.record_end(0, 200, calls)


# -- the size of a call ------------------------------------------------------------------------------------


def test_the_size_of_a_call_is_its_mean_over_the_time_that_calls_run() -> None:
    sizes, steps = CallSizes(), []
    for prompt, sampled in ((10, 4), (50, 400), (20, 30)):
        sizes.record_call(prompt, sampled)
        steps += [prompt + at + 0.5 for at in range(sampled)]
    assert sizes.mean_tokens == pytest.approx(sum(steps) / len(steps), rel=0.01)


def test_an_interrupted_call_counts_as_it_would_have_counted_whole() -> None:
    whole, parts = CallSizes(), CallSizes()
    whole.record_call(100, 300)
    parts.record_call(100, 120)
    parts.record_call(220, 180)
    assert parts.mean_tokens == pytest.approx(whole.mean_tokens, rel=0.01)


def test_a_quarter_of_the_budget_is_expected_before_a_call_has_ended() -> None:
    sizes = CallSizes()
    sizes.expect_call(100, 800)
    assert sizes.mean_tokens == 100 + 100
    sizes.expect_call(5000, 8000)  # only the first call is a guess
    assert sizes.mean_tokens == 200


def test_sizes_follow_calls_that_become_longer() -> None:
    sizes = CallSizes()
    for _ in range(600):
        sizes.record_call(0, 100)
    for _ in range(600):
        sizes.record_call(0, 1000)
    assert sizes.mean_tokens == pytest.approx(500, rel=0.1)


# -- the limit ---------------------------------------------------------------------------------------------


def test_the_limit_is_what_the_cache_holds_when_that_is_less_than_the_engine_runs() -> None:
    assert limit_of(100, cache_tokens=3200, max_calls=64).max_calls == 32
    assert limit_of(100, cache_tokens=3200, max_calls=16).max_calls == 16
    assert limit_of(100, cache_tokens=10, max_calls=16).max_calls == 1
    assert CacheLimit(CallSizes(), cache_tokens=3200).max_calls == math.inf


def test_a_round_in_which_much_is_prefilled_again_lowers_the_limit() -> None:
    limit = limit_of(100, cache_tokens=3200)
    limit.record_retraction(400)  # of 32 · 200 tokens: more than 5%
    assert limit.max_calls == 32
    end_calls(limit, 32, calls=32)
    assert limit.max_calls == pytest.approx(0.9 * 32)
    assert limit.reason == "retractions"


@pytest.mark.parametrize(("repeated", "correction"), [(0, 1.1), (150, 1.1), (250, 1.0), (330, 0.9)])
def test_few_retractions_do_not_keep_the_limit_down(repeated: int, correction: float) -> None:
    limit = limit_of(100, cache_tokens=3200)
    limit.record_retraction(repeated)
    end_calls(limit, 32, calls=32)
    assert limit.correction == correction


@pytest.mark.parametrize(("calls", "max_calls"), [(20, math.inf), (32, 30)])
def test_the_limit_does_not_rise_when_it_was_not_reached(calls: int, max_calls: float) -> None:
    """The engine had fewer calls than the limit, or as many as it may be given at all."""
    limit = limit_of(100, cache_tokens=3200, max_calls=max_calls)
    end_calls(limit, 100, calls=calls)
    assert limit.correction == 1


def test_no_prompt_is_added_that_the_cache_cannot_hold_now() -> None:
    limit = limit_of(100, cache_tokens=3200)
    limit.held_tokens = 3000
    assert not limit.is_full(5, prompt=200)
    assert limit.is_full(5, prompt=201)
    assert not limit.is_full(0, prompt=5000)  # alone it fits, or is refused


# -- calls of a pool ---------------------------------------------------------------------------------------


async def run_first(bench: ManualPool, size: int) -> None:
    """Run one call, from which the pool knows that calls hold this number of tokens."""
    bench.start("t0", prompt=size)
    await settle()
    bench.engines["a"].say(0, tokens(1), END)
    await settle()


def small(**caches: int) -> Mapping[str, EngineCapacity]:
    return {name: EngineCapacity(cache_tokens=size, max_running=100) for name, size in caches.items()}


async def test_calls_wait_for_the_cache_oldest_first_when_it_holds_no_more() -> None:
    async with manual_pool("a", capacities=small(a=240), max_calls="adaptive") as bench:
        for key in ("t1", "t2", "t3", "t6", "t5", "t4"):
            bench.start(key, prompt=70)
        await settle()
        assert bench.order == ["t1", "t2", "t3"]  # of 70 + 90 / 8 tokens each
        assert "but full" in bench.pool.dispatcher.describe_states()
        bench.engines["a"].say(1, tokens(20), END)
        await settle()
        assert bench.order == ["t1", "t2", "t3", "t4"]


@pytest.mark.parametrize(("max_calls", "given"), [("adaptive", 3), (5, 5), (None, 6)])
async def test_a_number_of_calls_can_be_fixed(max_calls: object, given: int) -> None:
    async with manual_pool("a", capacities=small(a=240), max_calls=max_calls) as bench:
        for number in range(6):
            bench.start(f"t{number}", prompt=70)
        await settle()
        assert len(bench.order) == given


async def test_an_engine_is_given_an_eighth_more_calls_than_it_runs() -> None:
    capacity = {"a": EngineCapacity(cache_tokens=10**6, max_running=8)}
    async with manual_pool("a", capacities=capacity, max_calls="adaptive") as bench:
        await bench.begin(*(f"t{number:02}" for number in range(12)))
        assert len(bench.order) == 9
        assert bench.counted("engine_call_limit", engine="a", reason="setting") == 9
        assert bench.counted("engine_call_limit", engine="a", reason="cache") == 0


async def test_a_call_whose_prefix_is_cached_is_given_to_a_full_engine() -> None:
    async with manual_pool("a", capacities=small(a=240), max_calls="adaptive") as bench:
        await run_first(bench, 70)
        for key in ("t1", "t2", "t3"):
            bench.start(key, prompt=90)
        await settle()
        bench.start("t0", prompt=75)  # the next turn of a trajectory
        await settle()
        assert bench.order == ["t0", "t1", "t2", "t0"]  # `t3` waits


async def test_calls_with_long_prompts_wait_until_they_fit_when_they_all_resume() -> None:
    """After an update with `abort` every prompt has what was sampled before, and nothing is cached."""
    async with manual_pool("a", capacities=small(a=1000), max_calls="adaptive") as bench:
        await bench.begin("t1", "t2", "t3", "t4")
        for number in range(4):
            bench.engines["a"].say(number, tokens(1), END)
        await settle()
        bench.pool.hold_engine("a")
        bench.pool.serve_engine("a", 1)
        for key in ("t1", "t2", "t3", "t4"):
            bench.start(key, prompt=450)
        await settle()
        assert bench.order[4:] == ["t1", "t2"]


async def test_a_larger_cache_is_filled_when_a_smaller_one_is_full() -> None:
    async with manual_pool("a", "b", capacities=small(a=120, b=2000), max_calls="adaptive") as bench:
        for number in range(12):
            bench.start(f"t{number:02}", prompt=50)
        await settle()
        loads = [bench.pool.load_of(name).calls for name in ("a", "b")]
        assert loads == [2, 10]


async def test_retractions_of_an_engine_lower_its_own_limit_only() -> None:
    async with manual_pool("a", "b", capacities=small(a=150, b=150), max_calls="adaptive") as bench:
        for turn in range(4):
            await bench.begin(f"{turn}a", f"{turn}b")
            for name, retractions in (("a", 1), ("b", 0)):
                retracted = msgspec.structs.replace(tokens(30), num_retractions=retractions)
                bench.engines[name].say(turn, tokens(60), retracted, END)
            await settle()
        a, b = (bench.pool.load_of(name) for name in ("a", "b"))
        assert a.max_calls == pytest.approx(0.9 * b.max_calls)
        assert (a.limited_by, b.limited_by) == ("retractions", "cache")
        limits = [
            bench.counted("engine_call_limit", engine="a", reason=reason)
            for reason in ("retractions", "cache", "setting", "refusals")
        ]
        assert limits == [pytest.approx(a.max_calls), 0, 0, 0]


async def test_retractions_by_a_weight_update_lower_nothing() -> None:
    async with manual_pool("a", capacities=small(a=150), max_calls="adaptive") as bench:
        for turn in range(4):
            await bench.begin(f"t{turn}")
            bench.engines["a"].say(turn, tokens(60))
            await settle()
            bench.pool.hold_engine("a")
            bench.pool.serve_engine("a", turn)
            bench.engines["a"].say(turn, msgspec.structs.replace(tokens(30), num_retractions=1), END)
            await settle()
        assert bench.pool.load_of("a").limited_by == "cache"


async def test_a_restarted_engine_is_given_what_its_cache_holds() -> None:
    async with manual_pool("a", capacities=small(a=240), max_calls="adaptive") as bench:
        await run_first(bench, 70)
        bench.pool.quarantine_engine("a", RuntimeError("it ended"))
        bench.engines["a"].capacity = EngineCapacity(cache_tokens=600, max_running=100)
        bench.pool.rejoin_engine("a")
        bench.pool.serve_engine("a", 0)
        assert 6 < bench.pool.load_of("a").max_calls < 9


def test_workers_that_share_an_engine_share_its_cache() -> None:
    engines = GrantedEngines(cast(EngineJudge, None), Metrics(), lambda: 0.0)
    fields = {"engine_id": "a", "weight_version": 0, "restart_count": 0, "epoch": 1, "num_flushes": 0}
    engine = cast(Engine, ManualEngine("a"))
    grant = EngineGrant(**fields, num_holders=2, max_calls=90, cache_tokens=1000)
    cache = engines.grant(engine, grant).cache
    assert (cache.cache_tokens, cache.ceiling) == (500, 45)
    cache = engines.grant(engine, msgspec.structs.replace(grant, num_holders=4)).cache
    assert [cache.is_full(calls) for calls in (21, 22)] == [False, True]  # 4 of 23 would be 92
    cache = engines.grant(engine, msgspec.structs.replace(grant, num_holders=1)).cache
    assert (cache.cache_tokens, cache.ceiling) == (1000, 90)
