"""Grants of rollout workers: what a worker sends to engines, and what the driver waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from async_rl.config import SimulatedEngines
from async_rl.engine_protocol import Chunk, Engine, Finish, GenerateRequest, InterruptMode, SamplingParams
from async_rl.engines.grant_holders import EngineShares
from async_rl.engines.lease import EngineGrant, Lease
from async_rl.engines.membership import EngineMembership
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.engines.repair import EngineRepair
from async_rl.errors import CallLost, EngineBusy, EngineError, RequestRefused, VersionMismatch
from async_rl.observability.metrics import Metrics
from async_rl.rollout.workers.messages import (
    GRANT_S,
    EngineReport,
    EnginesReleased,
    GrantedEngine,
    GrantEngines,
    Message,
    Renewed,
    Revoked,
    RevokeEngines,
)
from async_rl.rollout.workers.worker_engines import WorkerEngines
from async_rl.run.device_sharing import SharedDevices
from async_rl.runtime.supervision import Nursery
from tests.support.sessions import Watched, simulated
from tests.support.worker_grants import PlayedWorker, serving, use


class Worker:
    """A worker's calls to engines that decode a token in 100 ms, without a driver."""

    def __init__(self, *, granted: bool = False) -> None:
        self.engine = simulated(Watched(), decode_step_s=0.1, prefill_tokens_per_s=1e9)
        self.posted: list[Message] = []
        self.clock = clock = asyncio.get_running_loop().time
        self.stopped_s = 0.0
        """How long the process was stopped, which the timers of the event loop do not know yet."""
        self.engines = WorkerEngines(
            self.posted.append,
            lambda *of: self.engine,
            {"": Metrics(), "judge": Metrics()},
            clock=lambda: clock() + self.stopped_s,
        )
        self.calls = self.engines.models[""].dispatcher
        self.leases: list[Lease] = []
        self.events: list[Chunk | Finish] = []
        self.engines.renew(clock())
        if granted:
            self.grant()

    def grant(self, engine_id: str = "engine-0", *, epoch: int = 1, model: str = "", **changed: Any) -> None:
        fields = {"weight_version": 0, "restart_count": 0, "num_flushes": epoch} | changed
        grant = EngineGrant(engine_id=engine_id, epoch=epoch, **fields)
        self.engines.grant(GrantEngines(engines=(GrantedEngine(grant=grant, address=None, model=model),)))

    def revoke(self, engine_id: str = "engine-0", *, number: int = 7, **why: Any) -> None:
        revoked = {engine_id: Revoked(**why)}
        self.engines.revoke(RevokeEngines(engines=revoked, newest_version=0, number=number))

    async def call(self, *, wait_s: float = 0.0) -> Lease:
        """Make a call of up to 1000 tokens, so long after it was given its engine."""
        async with self.calls.lease("a", 1001, prompt=1) as lease:
            self.leases.append(lease)
            await asyncio.sleep(wait_s)
            async with aclosing(lease.generate(request())) as stream:
                async for event in stream:
                    self.events.append(event)
        return lease

    async def start_call(self, *, wait_s: float = 0.0) -> asyncio.Task[Lease]:
        calling = asyncio.create_task(self.call(wait_s=wait_s))
        await asyncio.sleep(0.01)
        return calling

    @property
    def released(self) -> list[tuple[int, tuple[str, ...]]]:
        return [(each.number, each.ended) for each in self.posted if isinstance(each, EnginesReleased)]


def request() -> GenerateRequest:
    return GenerateRequest(
        request_id="0" * 32,
        input_ids=np.array([5], np.int32),
        max_new_tokens=1000,
        sampling=SamplingParams(),
    )


class Driver(PlayedWorker):
    """A driver with an engine and a teacher, and the worker that calls them."""

    def __init__(self, nursery: Nursery) -> None:
        self.nursery = nursery
        self.metrics, clock = Metrics(), asyncio.get_running_loop().time
        self.pool = EnginePool(self.metrics, clock)
        self.engine = simulated(Watched())
        self.pool.add_engine(self.engine)
        self.pool.serve_engine("engine-0", 3)
        self.teacher = EnginePool(Metrics(), clock, shares_all=True)
        self.teacher.add_engine(simulated(Watched(), engine_id="teacher-0"))
        self.teacher.serve_engine("teacher-0", 0)
        self.revoked_versions: list[int] = []
        super().__init__({"": self.pool, "teacher": self.teacher}, on_revoke=self.revoked_versions.append)

    def add_second_engine(self) -> None:
        """Let engine-1 serve, too."""
        self.pool.add_engine(simulated(Watched(), engine_id="engine-1"))
        self.pool.serve_engine("engine-1", 3)

    def interrupt(self, mode: InterruptMode = "abort", pool: EnginePool | None = None) -> asyncio.Task[None]:
        """Hold an engine, and interrupt its calls."""
        return self.nursery.start_task("interrupt", self._interrupt(self.engine, mode, pool or self.pool))

    async def _interrupt(self, engine: Engine, mode: InterruptMode, pool: EnginePool) -> None:
        pool.hold_engine(engine.engine_id)
        await pool.interrupt_engine(engine, mode)

    async def wait_for_engine(self) -> None:
        """Wait for an update that the engine never ends."""
        async with self.pool.bounded_request("engine-0", 4.0):
            await asyncio.Future()

    @property
    def state(self) -> EngineState:
        snapshot = self.pool.snapshot_of("engine-0")
        assert snapshot is not None
        return snapshot.state


@asynccontextmanager
async def driving() -> AsyncIterator[Driver]:
    """A driver whose worker may call both engines, and has a call of the policy's."""
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.beat()
        await driver.beat(use("engine-0"))
        yield driver
        nursery.cancel_tasks()
        driver.grants.close()


# -- the worker's side ------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["revoked", "revoked and granted again", "expired, and its timer is late"])
async def test_nothing_is_sent_under_a_grant_that_has_ended(end: str) -> None:
    worker = Worker(granted=True)
    calling = await worker.start_call(wait_s=0.5)
    if end.startswith("revoked"):
        worker.revoke()
        assert worker.released == [(7, ())]
        if end == "revoked and granted again":
            worker.grant(epoch=2)
    else:
        worker.stopped_s = GRANT_S
    lease = await calling
    (end_of_call,) = worker.events
    assert isinstance(end_of_call, Finish)
    assert (end_of_call.reason, lease.interrupted) == ("abort", True)
    # The driver lets an engine serve again only after it has heard of the end, or not waited for it.
    assert worker.released == ([(7, ()), (7, ("engine-0",))] if end == "revoked" else worker.released[:1])


async def test_a_share_that_changes_interrupts_no_call() -> None:
    worker = Worker(granted=True)
    calling = await worker.start_call()
    worker.grant(num_holders=2)
    await asyncio.sleep(0.5)
    assert not worker.leases[0].interrupted
    assert isinstance(worker.events[-1], Chunk)
    calling.cancel()


async def test_a_refusal_says_nothing_once_its_grant_was_revoked() -> None:
    """Whose memory is released refuses calls; they would count in its next epoch."""
    worker = Worker(granted=True)

    async def refuse(request: GenerateRequest) -> AsyncIterator[Chunk | Finish]:
        await asyncio.sleep(0.5)
        raise EngineBusy("503", 5.0)
        yield

    worker.engine.generate = refuse  # type: ignore[assignment]
    calling = await worker.start_call()
    worker.revoke(aborts=True)
    with pytest.raises(EngineBusy):
        await calling
    worker.grant(epoch=2)
    slot = worker.engines.models[""].slots["engine-0"]
    assert (slot.pause, slot.back_pressure.max_calls) == (None, float("inf"))


@pytest.mark.parametrize("early_s", [1e-9, 0.0009])
async def test_a_grant_expires_also_when_the_timer_for_that_is_early(early_s: float) -> None:
    """By the resolution of the event loop: a nanosecond of asyncio's, a millisecond of uvloop's."""
    worker = Worker(granted=True)
    worker.stopped_s = -early_s
    with pytest.raises(CallLost, match="grant has expired"):
        await (await worker.start_call())
    assert worker.clock() == pytest.approx(GRANT_S, abs=0.01)


async def test_an_expired_grant_closes_its_stream_and_is_valid_again_when_the_driver_answers() -> None:
    worker = Worker(granted=True)
    calling = await worker.start_call()
    await asyncio.sleep(4.0)
    worker.engines.renew(worker.clock() - 1.0)  # what counts is when the heartbeat was sent
    with pytest.raises(CallLost, match="expired"):
        await calling
    assert worker.clock() == pytest.approx(3.0 + GRANT_S, abs=0.1)
    received = sum(len(event.token_ids) for event in worker.events if isinstance(event, Chunk))
    assert received == pytest.approx(130, abs=2)
    again = await worker.start_call()
    await asyncio.sleep(5.0)
    assert len(worker.leases) == 1  # it waits for an engine
    worker.engines.renew(worker.clock())
    await asyncio.sleep(1.0)
    assert isinstance(worker.events[-1], Chunk)
    again.cancel()


async def test_no_call_is_given_an_engine_while_the_timer_of_an_expiry_is_late() -> None:
    """A session would be given it again and again without a pause, in which the timer could run."""
    worker = Worker(granted=True)
    worker.stopped_s = GRANT_S
    calling = await worker.start_call()
    assert worker.leases == []
    worker.engines.renew(worker.clock() + worker.stopped_s)
    await asyncio.sleep(1.0)
    assert isinstance(worker.events[-1], Chunk)
    calling.cancel()


async def test_a_grant_that_was_revoked_while_the_worker_was_silent_is_not_valid_again() -> None:
    """The driver says so before it answers the heartbeat."""
    worker = Worker(granted=True)
    await asyncio.sleep(GRANT_S + 1.0)
    worker.revoke()
    worker.engines.renew(worker.clock())
    calling = await worker.start_call()
    await asyncio.sleep(1.0)
    assert worker.leases == []
    calling.cancel()


async def test_calls_of_other_models_have_their_engines_and_versions() -> None:
    worker = Worker()
    worker.grant("judge-0", model="judge", weight_version=800)
    judge = worker.engines.models["judge"].dispatcher
    async with judge.lease("a", 10, prompt=9) as lease:
        assert lease.weight_version == 800
    assert (worker.calls.newest_version, judge.newest_version) == (-1, 800)


@pytest.mark.parametrize("wrong_weights", [False, True])
async def test_calls_are_dropped_for_what_their_engine_is_quarantined_for(wrong_weights: bool) -> None:
    worker = Worker(granted=True)
    calling = await worker.start_call()
    worker.revoke(failure="it serves version 0", wrong_weights=wrong_weights)
    with pytest.raises(VersionMismatch if wrong_weights else CallLost, match="it serves version 0"):
        await calling
    assert worker.engines.pop_reports() == ()  # the driver has dealt with the engine


async def test_an_engine_that_failed_is_called_less_until_the_driver_has_judged_it() -> None:
    """Sessions would otherwise give up: they have several tries, and a report is under way."""
    worker = Worker(granted=True)
    times = []

    async def fail(request: GenerateRequest) -> AsyncIterator[Chunk | Finish]:
        times.append(worker.clock())
        raise EngineError("401")
        yield

    worker.engine.generate = fail  # type: ignore[assignment]
    for _ in range(5):
        with pytest.raises(EngineError):
            await worker.call()
    assert np.diff(times) == pytest.approx([0.25, 0.5, 1.0, 2.0], abs=0.01)
    reports = worker.engines.pop_reports()
    assert [(each.kind, each.epoch) for each in reports] == [("failure", 1)] * 5


@pytest.mark.parametrize(("has_others", "believed"), [(True, [True, True, False]), (False, [True] * 3)])
async def test_refusals_of_all_trajectories_are_doubted_where_other_engines_serve(
    has_others: bool, believed: list[bool]
) -> None:
    worker = Worker()
    worker.grant(has_others=has_others)
    policy = worker.engines.models[""]
    refused = [policy.record_refused_request("engine-0", f"t{n}", RequestRefused("400")) for n in range(3)]
    assert refused == believed
    assert [each.kind for each in worker.engines.pop_reports()] == ["refusals"] * has_others


# -- who may call which engine ------------------------------------------------------------------------


def test_shares_are_even_and_few_of_them_move() -> None:
    shares, engines = EngineShares(), [f"e{n}" for n in range(8)]
    shares.update(engines, ["a", "b", "c"])
    assert sorted(shares.weights.values()) == [2, 3, 3]
    assert all(len(mine) == 1 for mine in shares.holders_of.values())
    before = shares.holders_of
    shares.update(engines[1:], ["a", "b", "c"])
    assert sorted(shares.weights.values()) == [2, 2, 3]
    assert sum(before[engine] != mine for engine, mine in shares.holders_of.items()) <= 1
    shares.update(engines, ["b", "c"])
    assert sorted(shares.weights.values()) == [4, 4]


def test_every_worker_has_a_share_where_engines_are_few() -> None:
    shares, workers = EngineShares(), list("abcdefgh")
    shares.update(["x", "y", "z"], workers)
    assert sorted(len(mine) for mine in shares.holders_of.values()) == [2, 3, 3]
    before = shares.holders_of["x"]
    shares.update(["x"], workers)
    assert sorted(shares.holders_of["x"]) == workers
    shares.update(["x", "y", "z"], workers)
    assert len(shares.holders_of["x"]) <= 3
    assert set(shares.weights) == set(workers)
    assert before


def test_an_engine_with_few_calls_is_lent_until_it_has_as_many_as_others() -> None:
    shares = EngineShares()
    shares.update(["x", "y", "z"], ["a", "b", "c"])
    assert not shares.level({"x": 40, "y": 41, "z": 39})
    assert not shares.level({"x": 7, "y": 1, "z": 4})  # that is no load
    assert shares.level({"x": 100, "y": 2, "z": 30})
    assert shares.holders_of == {"x": ["a"], "y": ["b", "a"], "z": ["c"]}
    assert shares.weights == {"a": 1, "b": 1, "c": 1}  # attempts go where they went
    assert not shares.level({"x": 70, "y": 30, "z": 30})
    assert shares.level({"x": 44, "y": 44, "z": 40})
    assert shares.holders_of == {"x": ["a"], "y": ["b"], "z": ["c"]}
    assert shares.level({"x": 100, "y": 2, "z": 30})
    shares.update(["x", "y", "z"], ["b", "c"])
    assert sorted(map(len, shares.holders_of.values())) == [1, 1, 1]


async def test_a_worker_with_many_calls_borrows_an_engine_with_few() -> None:
    async with driving() as driver:
        driver.add_second_engine()
        other = PlayedWorker(driver.pools, name="rollout-worker-1")
        await other.beat()
        mine = next(name for name in driver.grants.grants() if name != "teacher-0")
        theirs = next(name for name in other.grants.grants() if name != "teacher-0")
        assert mine != theirs
        for calls, lent in ((60, True), (30, False)):
            for _ in range(6):
                await driver.beat(use(mine, calls))
                await other.beat(use(theirs, 60 - calls))
                await asyncio.sleep(0.25)
            assert (theirs in driver.grants.grants()) is lent
        other.grants.close()


async def test_an_engine_that_fails_is_replaced_by_a_share_of_another() -> None:
    async with driving() as driver:
        driver.add_second_engine()
        other = PlayedWorker(driver.pools, name="rollout-worker-1")
        await other.beat()
        assert sorted([*driver.grants.grants(), *other.grants.grants()]) == [
            "engine-0", "engine-1", "teacher-0", "teacher-0",
        ]  # fmt: skip
        driver.pool.quarantine_engine("engine-0", EngineError("gone"))
        await asyncio.sleep(0.01)
        for worker in (driver, other):
            assert "engine-1" in worker.grants.grants()
        assert [each.grant.num_holders for each in other.granted if each.grant.engine_id == "engine-1"][
            -1
        ] == 2
        other.grants.close()


async def test_engines_of_a_silent_worker_are_called_by_others_until_it_is_back() -> None:
    async with driving() as driver:
        other = PlayedWorker(driver.pools, name="rollout-worker-1")
        driver.nursery.start_task("beat", other.keep_beating())
        await asyncio.sleep(GRANT_S + 2.0)
        assert "engine-0" in other.grants.grants()
        assert not driver.grants.grants()
        assert driver.pool.load_of("engine-0").calls == 0
        await driver.beat()
        assert "engine-0" in driver.grants.grants()


# -- interruptions wait for workers ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["abort", "in_place"])
async def test_workers_know_how_an_engine_is_interrupted_and_which_version_its_calls_may_report(
    mode: InterruptMode,
) -> None:
    async with driving() as driver:
        driver.pool.announce_version(4)
        driver.interrupt(mode)
        await asyncio.sleep(0.1)
        (revoked,) = driver.revocations
        assert revoked.engines == {"engine-0": Revoked(aborts=mode == "abort")}
        assert driver.revoked_versions == [3]
        worker = Worker()
        worker.engines.revoke(revoked)
        worker.engines.revoke(msgspec.structs.replace(revoked, newest_version=2))
        assert worker.calls.newest_version == 4


def release(driver: Driver) -> None:
    driver.release("engine-0")


def close(driver: Driver) -> None:
    driver.grants.close()


@pytest.mark.parametrize("end", [release, close])
async def test_an_engine_is_interrupted_when_its_worker_says_that_it_sends_nothing_more_or_ends(
    end: Callable[[Driver], None],
) -> None:
    async with driving() as driver:
        interrupting = driver.interrupt()
        await asyncio.sleep(1.0)
        assert not interrupting.done()
        end(driver)
        await asyncio.sleep(0.1)
        assert interrupting.done()
        assert driver.pool.load_of("engine-0").calls == 0


async def test_an_engine_aborts_calls_until_the_worker_has_seen_their_ends() -> None:
    """A request that was under way may reach the engine after the first abort."""
    counted = []

    class Counted:
        def __enter__(self) -> None:
            counted.append("begins")

        def __exit__(self, *error: object) -> None:
            counted.append("ends")

    async with driving() as driver:
        driver.engine.remote_call = Counted  # type: ignore[method-assign,assignment]
        driver.interrupt()
        await asyncio.sleep(0.1)
        driver.release()
        assert counted == ["begins"]
        driver.release("engine-0")
        assert counted == ["begins", "ends"]


async def test_the_end_of_calls_of_an_earlier_grant_is_not_that_of_later_ones() -> None:
    async with driving() as driver:
        interrupting = driver.interrupt("in_place")
        await asyncio.sleep(0.1)
        driver.release()
        await interrupting
        driver.pool.serve_engine("engine-0", 4)
        await driver.beat(use("engine-0", 2))
        driver.release("engine-0")  # it was under way
        assert driver.pool.load_of("engine-0").calls == 2


async def test_one_message_revokes_the_engines_of_a_turn() -> None:
    """An update of a thousand engines would otherwise send each worker hundreds of messages."""
    async with driving() as driver:
        driver.add_second_engine()
        await asyncio.sleep(0.01)
        interrupting = {}
        for engine in driver.pool.engines():
            interrupt = driver._interrupt(engine, "abort", driver.pool)
            interrupting[engine.engine_id] = driver.nursery.start_task("interrupt", interrupt)
        await asyncio.sleep(0.1)
        (revoked,) = driver.revocations
        assert revoked.engines == dict.fromkeys(interrupting, Revoked(aborts=True))
        driver.release("engine-0", "engine-1")
        await asyncio.sleep(0.1)
        assert all(task.done() for task in interrupting.values())


async def test_grants_of_a_silent_worker_expire_and_it_gets_others_when_it_is_back() -> None:
    async with driving() as driver:
        await driver.interrupt()
        assert GRANT_S < driver.clock() < GRANT_S + 1.0
        assert driver.pool.load_of("engine-0").calls == 0
        driver.pool.serve_engine("engine-0", 4)
        await asyncio.sleep(0.1)
        assert not driver.grants.grants()
        await driver.beat()
        revoked, renewed, granted = driver.posted[-3:]
        assert isinstance(revoked, RevokeEngines)
        assert isinstance(renewed, Renewed)
        assert isinstance(granted, GrantEngines)
        assert {each.grant.engine_id: each.grant.weight_version for each in granted.engines} == {
            "engine-0": 4,
            "teacher-0": 0,
        }


async def test_no_engine_is_granted_to_a_worker_that_has_ended_in_the_same_turn() -> None:
    """Nothing would confirm its revocation."""
    async with driving() as driver:
        driver.pool.hold_engine("engine-0")
        driver.grants.close()
        driver.pool.serve_engine("engine-0", 4)
        await asyncio.sleep(0.1)
        began_s = driver.clock()
        await driver.interrupt()
        assert driver.clock() == began_s


async def test_grants_expire_also_when_the_wait_for_that_is_cancelled() -> None:
    """An evaluation that is stopped has workers that may still send requests."""
    async with driving() as driver:
        expiring = asyncio.ensure_future(driver.grants.expire())
        await asyncio.sleep(1.0)
        expiring.cancel()
        await driver.interrupt()
        assert GRANT_S - 1.0 < driver.clock() < GRANT_S + 2.0
        await asyncio.sleep(1.0)
        assert driver.grants.is_closed


def lender_of(borrower: Driver) -> EnginePool:
    """The pool of a run that has lent the engine of an evaluation."""
    run = EnginePool(Metrics(), borrower.clock)
    run.add_engine(borrower.engine)
    run.serve_engine("engine-0", 3)
    run.lend_engine("engine-0")
    run.borrowers[borrower.pool] = None
    return run


async def test_an_engine_that_was_lent_gets_no_calls_once_it_is_taken_away() -> None:
    """The run takes it from an evaluation: workers of the evaluation have grants of its own pool."""
    async with driving() as borrower:
        run = lender_of(borrower)
        run.quarantine_engine("engine-0", EngineError("it is broken"))
        interrupting = borrower.nursery.start_task("i", run.interrupt_engine(borrower.engine, "abort"))
        await asyncio.sleep(0.1)
        assert not borrower.pool.has_engine(EngineState.SERVING)
        assert not interrupting.done()
        borrower.release("engine-0")
        await asyncio.sleep(0.1)
        assert interrupting.done()


# -- limits of engines ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_lent", [False, True])
async def test_the_limit_of_an_engine_begins_when_workers_send_it_nothing_more(is_lent: bool) -> None:
    """A worker's grants last longer than `weights.timeout_s` here: no engine is to blame for it.

    The run that takes an engine away from an evaluation has no calls on it whose workers could be asked.
    """
    async with driving() as driver:
        pool = lender_of(driver) if is_lent else driver.pool
        if not is_lent:
            pool.hold_engine("engine-0")
        began_s = driver.clock()

        async def update(load_s: float) -> None:
            async with pool.bounded_request("engine-0", 4.0):
                await pool.interrupt_engine(driver.engine, "abort")
                await asyncio.sleep(load_s)

        await update(3.9)
        assert GRANT_S - 0.1 < driver.clock() - began_s - 3.9 < GRANT_S + 1.0
        with pytest.raises(TimeoutError):
            await update(4.1)


async def lose_worker(driver: Driver) -> None:
    await asyncio.sleep(3.0)
    driver.grants.close()


async def lose_worker_after_the_limit(driver: Driver) -> None:
    await asyncio.sleep(9.0)
    driver.grants.close()


async def receive_another_piece(driver: Driver) -> None:
    await asyncio.sleep(3.0)
    await driver.beat(use("engine-0", payload=True))


@pytest.mark.parametrize(
    ("payload", "until_s"),
    [(lose_worker, 7.0), (lose_worker_after_the_limit, 13.0), (receive_another_piece, 7.0)],
)
async def test_an_update_waits_for_a_payload_of_a_worker(
    payload: Callable[[Driver], Awaitable[None]], until_s: float
) -> None:
    async with driving() as driver:
        await driver.beat(use("engine-0", payload=True))
        driver.pool.hold_engine("engine-0")
        began_s = driver.clock()
        updating = asyncio.ensure_future(driver.wait_for_engine())
        if payload is receive_another_piece:
            driver.nursery.start_task("beat", driver.keep_beating(use("engine-0")))
        await payload(driver)
        assert not updating.done()
        with pytest.raises(TimeoutError):
            await updating
        assert driver.clock() - began_s == pytest.approx(until_s, abs=0.5)


async def test_an_engine_that_fails_while_workers_are_silent_is_waited_for_no_longer() -> None:
    async with driving() as driver:
        driver.pool.hold_engine("engine-0")
        began_s = driver.clock()
        asyncio.get_running_loop().call_later(
            1.0, driver.pool.quarantine_engine, "engine-0", EngineError("three probes missed")
        )
        with pytest.raises(TimeoutError):
            async with driver.pool.bounded_request("engine-0", 4.0):
                await driver.pool.interrupt_engine(driver.engine, "abort")
        assert driver.clock() - began_s == pytest.approx(1.0)


@pytest.mark.parametrize("is_deaf", [False, True])
async def test_nothing_is_known_of_the_calls_of_a_worker_that_is_silent_or_handles_no_messages(
    is_deaf: bool,
) -> None:
    """Heartbeats of a deaf worker go on, but it does not hear what is granted and revoked."""
    async with driving() as driver:
        load = driver.pool.load_of
        assert not load("engine-0").unobserved
        for _ in range(20):
            await asyncio.sleep(0.25)
            if is_deaf:
                await driver.beat(hears=False)
        assert load("engine-0").unobserved
        await driver.beat()
        assert not load("engine-0").unobserved


# -- engines that fail or leave ------------------------------------------------------------------------


async def test_a_server_leaves_when_the_calls_of_workers_have_ended() -> None:
    async with driving() as driver:
        leaving = driver.nursery.start_task("leave", driver.pool.drain_engine("engine-0"))
        await asyncio.sleep(1.0)
        driver.release()
        await asyncio.sleep(1.0)
        assert not leaving.done()
        driver.release("engine-0")
        await asyncio.sleep(0.1)
        assert leaving.done()


async def test_a_failed_engine_is_ended_when_its_grants_are_revoked() -> None:
    ended: list[str] = []

    async def end(engine_id: str) -> None:
        ended.append(engine_id)

    async with driving() as driver:
        driver.pool.quarantine_engine("engine-0", EngineError("it is broken"))
        devices = SharedDevices(driver.pool, end, driver.metrics, driver.clock, timeout_s=60.0)
        driver.nursery.start_task("clear", devices.clear_devices())
        await asyncio.sleep(1.0)
        assert ended == []
        assert driver.revocations[0].engines["engine-0"].failure
        driver.release("engine-0")
        await asyncio.sleep(1.0)
        assert ended == ["engine-0"]


async def test_an_engine_is_not_restarted_when_it_leaves_while_grants_expire(tmp_path: Path) -> None:
    """The cluster knows it no more."""
    known: set[str] = {"engine-0"}

    async def depart(engine_id: str) -> None:
        known.remove(engine_id)

    async def restart(engine_id: str) -> None:
        assert engine_id in known

    async def catch_up(engine_id: str) -> None:
        raise AssertionError(f"{engine_id} leaves")

    path = tmp_path / "servers.txt"
    path.write_text("http://a:1")
    async with driving() as driver:
        driver.pool.remove_engine("engine-0")
        members = EngineMembership(path, driver.pool, lambda *of: driver.engine, depart, drain_s=1.0)
        driver.nursery.start_task("members", members.follow_file())
        await asyncio.sleep(5.0)
        driver.pool.serve_engine("engine-0", 3)
        await driver.beat()
        assert "engine-0" in driver.grants.grants()
        config = SimulatedEngines()
        repair = EngineRepair(driver.pool, restart, catch_up, config, driver.metrics, driver.clock, seed=0)
        driver.nursery.start_task("repair", repair.repair_engines())
        driver.pool.quarantine_engine("engine-0", EngineError("its node has died"))
        path.write_text("")
        await asyncio.sleep(GRANT_S - 1.0)
        assert known
        await asyncio.sleep(20.0)
        assert not known
        assert not driver.pool.engines()


@pytest.mark.parametrize(
    ("kind", "times", "state"),
    [
        ("strike", 1, EngineState.SERVING),
        ("strike", 3, EngineState.QUARANTINED),
        ("failure", 1, EngineState.QUARANTINED),
        ("refusals", 9, EngineState.SERVING),  # no other engine has accepted a request
    ],
)
async def test_what_a_worker_reports_of_an_engine_counts_as_a_call_of_the_driver(
    kind: str, times: int, state: EngineState
) -> None:
    async with driving() as driver:
        for _ in range(times):
            await driver.beat(reports=[driver.report("engine-0", kind)])
        assert driver.state is state


@pytest.mark.parametrize("heard_s", [1.0, 9.0])
async def test_an_engine_that_is_silent_for_one_worker_only_is_not_to_blame(heard_s: float) -> None:
    """Its calls are lost, and are made again."""
    async with driving() as driver:
        other = PlayedWorker(driver.pools, name="rollout-worker-1")
        await other.beat()
        await driver.beat(use("engine-0"))
        await other.beat(use("engine-0", quiet_s=heard_s))
        silent = msgspec.structs.replace(driver.report("engine-0", "silent"), since_s=5.0)
        await driver.beat(use("engine-0", quiet_s=5.0), reports=[silent])
        assert driver.state is (EngineState.SERVING if heard_s < 5.0 else EngineState.QUARANTINED)
        assert driver.revocations[-1].engines["engine-0"].failure
        assert ("engine-0" in driver.grants.grants()) is (heard_s < 5.0)
        other.grants.close()


async def test_an_engine_that_refuses_what_others_accept_gets_strikes() -> None:
    async with driving() as driver:
        driver.add_second_engine()
        await driver.beat()
        await driver.beat(msgspec.structs.replace(use("engine-1"), accepted_s=1.0))
        for since_s in (0.5, 2.0, 2.0, 2.0):
            assert driver.state is EngineState.SERVING
            report = msgspec.structs.replace(driver.report("engine-0", "refusals"), since_s=since_s)
            await driver.beat(reports=[report])
        assert driver.state is EngineState.QUARANTINED


async def test_a_report_on_a_model_concerns_its_engines_and_one_on_an_unknown_engine_none() -> None:
    async with driving() as driver:
        unknown = msgspec.structs.replace(driver.report("teacher-0", "failure"), engine_id="engine-9")
        await driver.beat(reports=[driver.report("teacher-0", "failure"), unknown])
        assert driver.teacher.needs_repair("teacher-0")
        assert serving(driver.pool) == ["engine-0"]


async def test_a_late_report_says_nothing_against_an_engine_that_was_restarted() -> None:
    """The worker's grants have expired, and its report was under way for longer."""
    async with driving() as driver:
        kinds = ("failure", "strike", "connection", "refusals")
        reports: list[EngineReport] = [driver.report("engine-0", kind) for kind in kinds for _ in range(3)]
        driver.pool.quarantine_engine("engine-0", EngineError("another worker has seen that"))
        await driver.pool.end_engine("engine-0", lambda name: asyncio.sleep(0))
        driver.pool.rejoin_engine("engine-0")
        driver.pool.serve_engine("engine-0", 4)
        await driver.beat(reports=reports)
        assert driver.state is EngineState.SERVING
