from typing import cast

import pytest

from async_rl.engine_protocol import Engine
from async_rl.engines.pool import EnginePool
from async_rl.observability.metrics import Metrics


class NamedEngine:
    """The pool never calls an engine; it only hands it out."""

    def __init__(self, engine_id: str) -> None:
        self.engine_id = engine_id


def make_pool(*names: str, version: int | None = 0, clock=lambda: 0.0) -> EnginePool:
    pool = EnginePool(Metrics(), clock)
    for name in names:
        pool.add_engine(cast(Engine, NamedEngine(name)))
        if version is not None:
            pool.serve_engine(name, version)
    return pool


async def test_calls_go_to_the_least_loaded_engine_when_they_have_no_home():
    pool = make_pool("a", "b")
    async with (
        pool.dispatcher.lease("t1", tokens=100) as first,
        pool.dispatcher.lease("t2", tokens=10) as second,
    ):
        async with pool.dispatcher.lease("t3", tokens=10) as third:
            assert first.engine.engine_id == "a"
            assert second.engine.engine_id == "b"
            assert third.engine.engine_id == "b"


async def test_a_trajectory_returns_to_its_engine_unless_that_is_clearly_busier():
    pool = make_pool("a", "b")
    async with pool.dispatcher.lease("mine", tokens=100) as lease:
        assert lease.engine.engine_id == "a"
    for tokens, expected in ((100, "a"), (1000, "b")):
        async with (
            pool.dispatcher.lease(f"x{tokens}", tokens=tokens),
            pool.dispatcher.lease(f"y{tokens}", tokens=90),
        ):
            async with pool.dispatcher.lease("mine", tokens=10) as lease:
                assert lease.engine.engine_id == expected


async def test_the_oldest_version_counts_engines_that_are_being_updated():
    pool = make_pool("a", "b", version=3)
    pool.hold_engine("a")
    pool.serve_engine("b", 4)
    assert pool.oldest_version == 3
    pool.serve_engine("a", 4)
    assert pool.oldest_version == 4


async def test_idle_share_is_the_time_without_calls():
    now = [0.0]
    pool = make_pool("a", "b", clock=lambda: now[0])
    pool.restart_idle_clock()
    async with pool.dispatcher.lease("t", tokens=1):
        now[0] = 6.0
    now[0] = 10.0
    # engine a was busy for 6 of 10 seconds, engine b never
    assert pool.idle_share == pytest.approx(0.7)
