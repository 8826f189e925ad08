"""Who is to blame when a worker has no connection to an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from async_rl.engines.lease import EngineState
from async_rl.engines.pool import EnginePool
from async_rl.engines.simulated import SimulatedEngine
from async_rl.errors import EngineError, LocalShortage, WorkerLost
from async_rl.observability.metrics import Metrics
from async_rl.rollout.workers.messages import (
    CallProgress,
    CallStarted,
    EngineReport,
    Heartbeat,
    LeaseEnded,
    LeaseGranted,
    LeaseWanted,
    Message,
)
from async_rl.runtime.supervision import first_error, services
from async_rl.runtime.waits import Waits, acting
from tests.support.relayed import relayed_leases
from tests.support.sessions import Watched, simulated

LIMIT_S = 30.0


class Driver:
    """The driver's side of a worker that this test plays."""

    def __init__(self, num_engines: int, *, limit_s: float = LIMIT_S) -> None:
        self.clock = asyncio.get_running_loop().time
        self.pool = EnginePool(Metrics(), self.clock)
        self.engines: list[SimulatedEngine] = []
        for index in range(num_engines):
            self.engines.append(simulated(Watched(), engine_id=f"engine-{index}"))
            self.pool.add_engine(self.engines[-1])
            self.pool.serve_engine(f"engine-{index}", 0)
        self.posted: list[Message] = []
        self.leases = relayed_leases({"": self.pool}, self.posted, stall_s=limit_s)
        self.streams: dict[int, int] = {}
        """By lease: what a call has received that continues."""
        self._num_calls = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the leases valid while the block runs."""

        async def beat() -> None:
            while True:
                await asyncio.sleep(1.0)
                self.streams = {lease_id: received + 1 for lease_id, received in self.streams.items()}
                calls = tuple(
                    CallProgress(lease_id=lease_id, received=received, payload_arrives=False)
                    for lease_id, received in self.streams.items()
                )
                self.leases.renew(Heartbeat(number=2, calls=calls))

        async with services(checks=self.leases.checks.check_engines, beat=beat):
            yield
        self.leases.close()

    def call(self) -> int:
        """Ask for a lease; return its number."""
        self._num_calls += 1
        key = f"{self._num_calls:032d}"
        self.leases.handle_message(LeaseWanted(lease_id=self._num_calls, key=key, tokens=9, prompt=4))
        return self._num_calls

    def engine_of(self, lease_id: int) -> str | None:
        """The engine that a lease was granted; None before that."""
        granted = [each for each in self.posted if isinstance(each, LeaseGranted)]
        return next((each.engine_id for each in granted if each.lease_id == lease_id), None)

    async def fail_calls(self) -> None:
        """Make three calls, which find no connection once they have been granted engines."""
        calls = [self.call() for _ in range(3)]
        for _ in range(2 * int(LIMIT_S)):
            await asyncio.sleep(1.1)
            if self.engine_of(calls[-1]) is not None:
                break
        self.fail(*calls)

    def answer(self, lease_id: int) -> None:
        """Let a call get its answer."""
        self.leases.handle_message(CallStarted(lease_id=lease_id, received=1))
        self.leases.handle_message(LeaseEnded(lease_id=lease_id, received=5))

    def fail(self, *lease_ids: int) -> None:
        """Let calls find no connection."""
        for lease_id in lease_ids:
            engine_id = self.engine_of(lease_id)
            assert engine_id is not None
            report = EngineReport(engine_id=engine_id, kind="connection", text=f"{engine_id} refused it")
            self.leases.handle_message(report)
        for lease_id in lease_ids:
            self.leases.handle_message(LeaseEnded(lease_id=lease_id))

    @property
    def serving(self) -> list[str]:
        return [engine.engine_id for engine in self.pool.engines(EngineState.SERVING)]


@pytest.mark.parametrize(("num_engines", "limit_s", "most_s"), [(3, LIMIT_S, 63.0), (2, 10.0, 16.0)])
async def test_a_worker_that_alone_reaches_no_engine_has_none_quarantined_and_is_ended(
    num_engines: int, limit_s: float, most_s: float
) -> None:
    """Its pauses take 1, 2, 4 and 8 s, but no longer than it may be silent: it may be the only worker."""
    driver = Driver(num_engines, limit_s=limit_s)

    async def fail_all_calls() -> None:
        async with asyncio.timeout(10 * LIMIT_S), driver.running():
            while True:
                await driver.fail_calls()

    with pytest.raises(ExceptionGroup) as errors:
        await fail_all_calls()
    lost = first_error(errors.value)
    assert isinstance(lost, WorkerLost)
    assert f"it reaches no engine, and {num_engines} of them answer the driver" in str(lost)
    assert limit_s < driver.clock() < most_s
    assert len(driver.serving) == num_engines
    num_granted = sum(isinstance(each, LeaseGranted) for each in driver.posted)
    assert num_granted < 3 * 9  # sessions give up at 9 failures


async def test_an_engine_that_does_not_answer_the_driver_either_is_quarantined() -> None:
    driver = Driver(2)
    async with driver.running():
        lease_id = driver.call()
        engine_id = driver.engine_of(lease_id)
        next(engine for engine in driver.engines if engine.engine_id == engine_id).die()
        driver.fail(lease_id)
        other = driver.engine_of(driver.call())
        await asyncio.sleep(0.1)
        assert driver.serving == [other]


async def test_a_call_of_a_paused_worker_waits_for_its_worker_and_not_for_an_engine() -> None:
    """Engines serve, so the stall doctor would say that the call has missed a wake-up."""
    waits = Waits(asyncio.get_running_loop().time)

    def waited_for() -> list[tuple[str, str, float | None]]:
        trajectories = (wait for wait in waits.open_waits() if wait.who.kind == "trajectory")
        return [(wait.on, wait.target, wait.limit_s) for wait in trajectories]

    with acting("run", waits=waits):
        driver = Driver(2)
        async with driver.running():
            for _ in range(4):
                await driver.fail_calls()
            await asyncio.sleep(0.1)
            lease_id = driver.call()
            assert waited_for() == [("rollout worker calls", "rollout-worker-0", LIMIT_S + 5.0)]
            for engine in driver.engines:
                driver.pool.hold_engine(engine.engine_id)
            await asyncio.sleep(LIMIT_S)
            assert waited_for() == [("engine", "", None)]
            driver.pool.serve_engine("engine-1", 0)
            assert waited_for() == [("first chunk", "engine-1", None)]
            driver.answer(lease_id)
        assert not waited_for()


async def test_a_worker_whose_network_is_back_goes_on() -> None:
    driver = Driver(3)
    async with driver.running():
        for _ in range(4):
            for _ in range(4):
                await driver.fail_calls()
            await asyncio.sleep(0.1)
            waits = driver.call()
            assert driver.engine_of(waits) is None
            await asyncio.sleep(LIMIT_S)
            driver.answer(waits)
        for _ in range(3):
            await driver.fail_calls()
        await asyncio.sleep(3600.0)  # it makes no calls for long
        await driver.fail_calls()
        await asyncio.sleep(1.0)
        assert len(driver.serving) == 3


async def test_an_engine_that_answers_the_driver_and_not_a_worker_that_reaches_others_is_quarantined() -> (
    None
):
    driver = Driver(2)
    async with driver.running():
        for _ in range(40):
            lease_id = driver.call()
            await asyncio.sleep(0.1)
            if driver.engine_of(lease_id) == "engine-0":
                driver.fail(lease_id)
            else:
                driver.answer(lease_id)
            await asyncio.sleep(0.1)
        assert driver.serving == ["engine-1"]


async def test_a_worker_that_streams_from_one_engine_is_not_ended_for_another() -> None:
    """The other one is the least loaded, because all calls fail there: it would get all further calls."""
    driver = Driver(2)
    async with driver.running():
        stream = driver.call()
        kept = driver.engine_of(stream)
        driver.streams[stream] = 1
        for _ in range(60):
            lease_id = driver.call()
            await asyncio.sleep(1.0)
            if driver.engine_of(lease_id) not in (None, kept):
                driver.fail(lease_id)
        assert driver.serving == [kept]


async def test_calls_go_to_other_engines_while_one_is_asked_that_does_not_answer() -> None:
    driver = Driver(2)

    async def hang() -> None:
        await asyncio.sleep(60.0)

    async with driver.running():
        lease_id = driver.call()
        hung = next(e for e in driver.engines if e.engine_id == driver.engine_of(lease_id))
        hung.health = hang  # type: ignore[method-assign,assignment]
        driver.fail(lease_id)
        for _ in range(4):
            assert driver.engine_of(driver.call()) not in (None, hung.engine_id)
            await asyncio.sleep(1.0)


async def test_many_streams_that_one_engine_loses_at_once_are_one_strike() -> None:
    driver = Driver(1)
    async with driver.running():
        calls = [driver.call() for _ in range(20)]
        await asyncio.sleep(0.1)
        driver.fail(*calls)
        await asyncio.sleep(0.1)
        assert driver.serving == ["engine-0"]
        again = driver.call()
        await asyncio.sleep(1.0)
        assert driver.engine_of(again) == "engine-0"


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
            lease_id = driver.call()
            await asyncio.sleep(0.1)
            assert driver.serving == ["engine-0"]
            driver.fail(lease_id)
            await asyncio.sleep(5.5)
        assert driver.serving == (["engine-0"] if shortage else [])


async def test_an_engine_that_was_restarted_while_it_was_asked_is_not_blamed() -> None:
    driver = Driver(1)

    async def health() -> None:
        await asyncio.sleep(1.0)
        raise EngineError("refused")

    driver.engines[0].health = health  # type: ignore[method-assign,assignment]
    async with driver.running():
        driver.fail(driver.call())
        await asyncio.sleep(0.5)
        driver.pool.quarantine_engine("engine-0", EngineError("another worker has seen that"))
        driver.pool.rejoin_engine("engine-0")
        driver.pool.serve_engine("engine-0", 0)
        await asyncio.sleep(1.0)
        assert driver.serving == ["engine-0"]
