"""Engines that come back: when, how often, and none in the way of another."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, cast
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config import SimulatedEngines
from async_rl.engine_protocol import Engine
from async_rl.engines import repair
from async_rl.engines.pool import EngineState
from async_rl.engines.repair import EngineRepair, RestartBackoff
from async_rl.errors import EngineError, EnvironmentNotReady, WeightSyncError
from async_rl.runtime.supervision import first_error, services
from tests.support.manual_engines import ManualEngine, ManualPool, manual_pool, settle

CONFIG = SimulatedEngines(max_restarts=4, max_outage_s=600.0)


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "RESTART_WINDOW_S", 1000.0)
    monkeypatch.setattr(repair, "RESTART_DELAY_MAX_S", 5.0)


def test_restarts_come_later_and_later_and_none_beyond_the_limit() -> None:
    restarts = RestartBackoff(CONFIG.max_restarts, random.Random(0))
    delays = []
    for _ in range(4):
        verdict = restarts.next_delay(100.0)
        assert not verdict.exhausted
        delays.append(verdict.delay_s)
        restarts.record_restart(100.0)
    assert delays[0] == 0.0  # most failures are over with the process that had them
    assert 1.0 <= delays[1] <= 2.0
    assert 2.0 <= delays[2] <= 4.0
    assert 2.5 <= delays[3] <= 5.0  # the longest
    last = restarts.next_delay(160.0)
    assert (last.exhausted, last.delay_s) == (True, 940.0)
    later = restarts.next_delay(1100.0)  # the window has moved on
    assert (later.exhausted, later.delay_s) == (False, 0.0)


def test_engines_that_failed_together_do_not_start_together() -> None:
    delays = set()
    for seed in range(20):
        restarts = RestartBackoff(CONFIG.max_restarts, random.Random(seed))
        restarts.record_restart(0.0)
        delays.add(restarts.next_delay(0.0).delay_s)
    assert len(delays) == 20


@given(failures=st.lists(st.floats(0, 500), max_size=60), limit=st.integers(0, 5), window=st.floats(1, 2000))
def test_no_window_has_more_restarts_than_the_limit(failures: list[float], limit: int, window: float) -> None:
    restarts, now, begun = RestartBackoff(limit, random.Random(1)), 0.0, []
    for pause in failures:
        now += pause
        with patch.object(repair, "RESTART_WINDOW_S", window):
            verdict = restarts.next_delay(now)
        assert verdict.delay_s >= 0
        if not verdict.exhausted:
            now += verdict.delay_s
            restarts.record_restart(now)
            begun.append(now)
    for start in begun:
        assert sum(start <= other < start + window for other in begun) <= limit


class Workshop:
    """A repair of manual engines: what restarts and loads do is the test's choice."""

    def __init__(self, bench: ManualPool, config: SimulatedEngines) -> None:
        self.bench = bench
        self.restarts: list[tuple[str, float]] = []
        self.loaded: list[str] = []
        self.broken: dict[str, Exception | None] = {}
        """Engines whose restart fails; None for one that hangs."""
        self.refuses: set[str] = set()
        """Engines that do not take the weights."""
        self.repair = EngineRepair(
            bench.pool,
            self.restart,
            self.catch_up,
            config,
            bench.metrics,
            asyncio.get_running_loop().time,
            seed=0,
        )

    async def restart(self, engine_id: str) -> None:
        self.restarts.append((engine_id, asyncio.get_running_loop().time()))
        if engine_id in self.broken:
            error = self.broken[engine_id]
            if error is None:
                await asyncio.Future()
            else:
                raise error

    async def catch_up(self, engine_id: str) -> None:
        assert self.bench.state(engine_id) is EngineState.JOINING
        self.loaded.append(engine_id)
        if engine_id in self.refuses:
            raise WeightSyncError(f"{engine_id} has half of them")
        self.bench.pool.serve_engine(engine_id, 7)


@asynccontextmanager
async def workshop(*names: str, **config: Any) -> AsyncIterator[Workshop]:
    async with manual_pool(*names) as bench:
        made = Workshop(bench, msgspec.structs.replace(CONFIG, **config))
        async with services(repair=made.repair.repair_engines):
            yield made


async def test_others_come_back_while_one_cannot_be_restarted() -> None:
    async with workshop("a", "b", "c", "d") as shop:
        shop.broken = {"a": None, "b": EnvironmentNotReady("no GPU")}
        for name in ("a", "b", "c"):
            shop.bench.pool.quarantine_engine(name, EngineError("killed"))
        await settle()
        assert shop.bench.state("c") is EngineState.SERVING
        await asyncio.sleep(2000.0)
        assert shop.bench.state("a") is EngineState.QUARANTINED
        assert [name for name, _ in shop.restarts].count("a") == 1  # it hangs to this day
        assert [name for name, _ in shop.restarts].count("b") >= 8  # four in a window
        shop.bench.pool.quarantine_engine("d", EngineError("killed"))
        await settle()
        assert shop.bench.state("d") is EngineState.SERVING


async def end_of(run: Awaitable[None]) -> str:
    """What a run that fails is ended by."""
    with pytest.raises(ExceptionGroup) as caught:
        await run
    return str(first_error(caught.value))


async def test_the_run_ends_with_every_cause_when_no_engine_serves_for_long() -> None:
    async def outage() -> None:
        async with workshop("a", "b") as shop:
            shop.broken = {"a": EnvironmentNotReady("no GPU"), "b": EnvironmentNotReady("no model")}
            shop.bench.pool.quarantine_engine("a", EngineError("killed"))
            await asyncio.sleep(5000.0)  # b serves
            shop.bench.pool.quarantine_engine("b", EngineError("killed"))
            await asyncio.Future()

    message = await end_of(outage())
    assert asyncio.get_running_loop().time() == pytest.approx(5600.0, abs=1.0)
    assert "engine.max_outage_s = 600.0" in message
    assert "no GPU; no model" in message


async def test_an_engine_is_left_out_when_its_restarts_are_used_up(caplog: pytest.LogCaptureFixture) -> None:
    async with workshop("a", "b") as shop:
        shop.refuses.add("a")
        shop.bench.pool.quarantine_engine("a", EngineError("killed"))
        await asyncio.sleep(900.0)
        assert len(shop.restarts) == 4
        assert "engine.max_restarts is 4" in caplog.text
        assert "a has half of them" in caplog.text
        await asyncio.sleep(200.0)  # the window has moved on
        assert len(shop.restarts) > 4


async def test_the_run_goes_on_when_an_outage_ends_in_time() -> None:
    async with workshop("a") as shop:
        shop.broken = {"a": EnvironmentNotReady("rebooting")}
        shop.bench.pool.quarantine_engine("a", EngineError("killed"))
        await asyncio.sleep(3.0)
        shop.broken = {}
        await asyncio.sleep(20.0)
        assert shop.bench.state("a") is EngineState.SERVING
        shop.bench.pool.hold_engine("a")  # an update is no outage
        await asyncio.sleep(9999.0)


async def test_a_newcomer_is_brought_to_the_weights_before_it_serves() -> None:
    async with workshop("a") as shop:
        shop.bench.pool.add_engine(cast(Engine, ManualEngine("z")), newcomer=True)
        await settle()
        assert shop.loaded == ["z"]
        assert shop.bench.pool.version_of("z") == 7


async def test_nothing_is_repaired_that_has_left() -> None:
    async with workshop("a", "b") as shop:
        shop.broken = {"a": EnvironmentNotReady("gone")}
        shop.bench.pool.quarantine_engine("a", EngineError("killed"))
        await settle()
        shop.bench.pool.remove_engine("a")
        await asyncio.sleep(9999.0)
        assert len(shop.restarts) == 1
