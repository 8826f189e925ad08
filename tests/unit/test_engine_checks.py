"""Who is to blame when a worker gets no connection to an engine, or loses one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from async_rl.engines.health import PROBE_TIMEOUT_S
from async_rl.engines.pool import EnginePool
from async_rl.engines.simulated import SimulatedEngine
from async_rl.errors import EngineError, LocalShortage, WorkerLost
from async_rl.observability.metrics import Metrics
from async_rl.runtime.supervision import first_error, services
from tests.support.sessions import Watched, simulated
from tests.support.worker_grants import PlayedWorker, serving, use

LIMIT_S = 30.0


class Driver(PlayedWorker):
    """The driver's side of a worker that reaches some engines."""

    def __init__(self, num_engines: int) -> None:
        self.pool = EnginePool(Metrics(), asyncio.get_running_loop().time)
        self.engines: list[SimulatedEngine] = []
        for index in range(num_engines):
            self.engines.append(simulated(Watched(), engine_id=f"engine-{index}"))
            self.pool.add_engine(self.engines[-1])
            self.pool.serve_engine(f"engine-{index}", 0)
        super().__init__({"": self.pool}, stall_s=LIMIT_S)
        self.streams: set[str] = set()
        """The engines from which it receives tokens."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the grants valid while the block runs."""

        async def beat() -> None:
            while True:
                await self.beat(*(use(engine_id) for engine_id in self.streams))
                await asyncio.sleep(0.99)

        async with services(checks=self.grants.checks.check_engines, beat=beat):
            await asyncio.sleep(0.1)
            yield
        self.grants.close()

    async def fail(self, *engines: str) -> None:
        """Let calls find no connection."""
        await self.beat(reports=[self.report(e, "connection", f"{e} refused it") for e in engines])

    async def fail_all_calls(self) -> None:
        """Let no call find a connection, until the worker is ended."""
        async with asyncio.timeout(10 * LIMIT_S), self.running():
            while True:
                await self.fail(*self.serving)
                await asyncio.sleep(2.0)

    @property
    def serving(self) -> list[str]:
        return serving(self.pool)


@pytest.mark.parametrize("num_engines", [2, 3])
async def test_a_worker_that_alone_reaches_no_engine_has_none_quarantined_and_is_ended(
    num_engines: int,
) -> None:
    driver = Driver(num_engines)
    with pytest.raises(ExceptionGroup) as errors:
        await driver.fail_all_calls()
    lost = first_error(errors.value)
    assert isinstance(lost, WorkerLost)
    assert f"it reaches no engine, and {num_engines} of them answer the driver" in str(lost)
    assert LIMIT_S < driver.clock() < LIMIT_S + 5.0
    assert len(driver.serving) == num_engines


async def test_a_worker_with_one_engine_is_ended_and_the_engine_gets_one_strike() -> None:
    driver = Driver(1)
    with pytest.raises(ExceptionGroup):
        await driver.fail_all_calls()
    assert driver.serving == ["engine-0"]


async def test_an_engine_that_does_not_answer_the_driver_either_is_quarantined() -> None:
    driver = Driver(2)
    async with driver.running():
        driver.engines[0].die()
        await driver.fail("engine-0")
        await asyncio.sleep(0.1)
        assert driver.serving == ["engine-1"]


async def test_a_worker_whose_network_is_back_goes_on() -> None:
    driver = Driver(3)
    async with driver.running():
        for _ in range(4):
            for _ in range(10):
                await driver.fail(*driver.serving)
                await asyncio.sleep(2.0)
            driver.streams = {"engine-0"}
            await asyncio.sleep(LIMIT_S)
            driver.streams.clear()
        assert len(driver.serving) == 3


async def test_an_engine_that_answers_the_driver_and_not_a_worker_that_reaches_others_is_quarantined() -> (
    None
):
    driver = Driver(2)
    async with driver.running():
        driver.streams = {"engine-1"}
        for _ in range(int(LIMIT_S)):
            await driver.fail("engine-0")
            await asyncio.sleep(2.0)
        assert driver.serving == ["engine-1"]


async def test_many_streams_that_one_engine_loses_at_once_are_one_strike() -> None:
    driver = Driver(1)
    async with driver.running():
        await driver.fail(*["engine-0"] * 20)
        await asyncio.sleep(0.1)
        assert driver.serving == ["engine-0"]


@pytest.mark.parametrize("shortage", [True, False])
async def test_an_engine_that_does_not_answer_in_time_gets_a_strike_and_none_if_it_was_not_asked(
    shortage: bool,
) -> None:
    driver = Driver(1)

    async def health() -> None:
        if shortage:
            raise LocalShortage("no descriptors")
        await asyncio.sleep(60.0)

    driver.engines[0].health = health  # type: ignore[method-assign,assignment]
    async with driver.running():
        for _ in range(3):
            assert driver.serving == ["engine-0"]
            await driver.fail("engine-0")
            await asyncio.sleep(PROBE_TIMEOUT_S + 1.5)
        assert driver.serving == (["engine-0"] if shortage else [])


async def test_an_engine_that_was_restarted_while_it_was_asked_is_not_blamed() -> None:
    driver = Driver(1)

    async def health() -> None:
        await asyncio.sleep(1.0)
        raise EngineError("refused")

    driver.engines[0].health = health  # type: ignore[method-assign,assignment]
    async with driver.running():
        await driver.fail("engine-0")
        await asyncio.sleep(0.5)
        driver.pool.quarantine_engine("engine-0", EngineError("another worker has seen that"))
        driver.pool.rejoin_engine("engine-0")
        driver.pool.serve_engine("engine-0", 0)
        await asyncio.sleep(1.0)
        assert driver.serving == ["engine-0"]
