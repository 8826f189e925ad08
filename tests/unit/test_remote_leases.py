"""Leases of rollout workers: what a worker sends to engines, and what the driver waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from async_rl.config import SimulatedEngines
from async_rl.engine_protocol import Chunk, Finish, GenerateRequest, InterruptMode, SamplingParams
from async_rl.engines.lease import EngineState, Lease
from async_rl.engines.membership import EngineMembership
from async_rl.engines.pool import EnginePool
from async_rl.engines.repair import EngineRepair
from async_rl.errors import CallLost, EngineBusy, EngineError, VersionMismatch
from async_rl.observability.metrics import Metrics
from async_rl.rollout.workers.messages import (
    CallProgress,
    DropCall,
    EngineReport,
    Heartbeat,
    LeaseEnded,
    LeaseGranted,
    LeasesRenewed,
    LeasesRevoked,
    LeaseWanted,
    Message,
    RevokeLeases,
)
from async_rl.rollout.workers.remote_calls import ModelCalls, RemoteCalls
from async_rl.run.device_sharing import SharedDevices
from async_rl.runtime.supervision import Nursery
from tests.support.relayed import LEASE_S, relayed_leases
from tests.support.sessions import Watched, simulated


class Worker:
    """A worker's calls to one engine that decodes a token in 100 ms, without a driver."""

    def __init__(self, report_s: float = 0.0) -> None:
        self.engine = simulated(Watched(), decode_step_s=0.1, prefill_tokens_per_s=1e9)
        self.posted: list[Message] = []
        clock = asyncio.get_running_loop().time
        self.calls = RemoteCalls(
            self.posted.append,
            lambda *of: self.engine,
            lease_s=LEASE_S,
            report_s=report_s,
            metrics=Metrics(),
            clock=lambda: clock() + self.stopped_s,
        )
        self.clock = clock
        self.stopped_s = 0.0
        """How long the process was stopped, which the timers of the event loop do not know yet."""
        self.leases: list[Lease] = []
        self.events: list[Chunk | Finish] = []
        self.calls.renew(clock())

    def grant(self, lease_id: int, *, weight_version: int = 0) -> None:
        self.calls.grant(
            LeaseGranted(
                lease_id=lease_id,
                engine_id="engine-0",
                address=None,
                weight_version=weight_version,
                restart_count=0,
                epoch=0,
            )
        )

    def revoke(self, *, aborts: bool = True, number: int = 7) -> None:
        self.calls.revoke(RevokeLeases(engines={"engine-0": aborts}, newest_version=0, number=number))

    async def call(self, *, wait_s: float = 0.0) -> Lease:
        """Make a call of up to 1000 tokens, so long after its lease was granted."""
        async with self.calls.lease("a", 1001, prompt=1) as lease:
            self.leases.append(lease)
            await asyncio.sleep(wait_s)
            async with aclosing(lease.generate(request())) as stream:
                async for event in stream:
                    self.events.append(event)
        return lease

    async def start_call(self, *, wait_s: float = 0.0, lease_id: int = 1) -> asyncio.Task[Lease]:
        """Start a call, and grant its lease."""
        calling = asyncio.create_task(self.call(wait_s=wait_s))
        await asyncio.sleep(0)
        self.grant(lease_id)
        return calling


def request() -> GenerateRequest:
    return GenerateRequest(
        request_id="0" * 32,
        input_ids=np.array([5], np.int32),
        max_new_tokens=1000,
        sampling=SamplingParams(),
    )


class Driver:
    """The driver's side of one worker, which this test plays itself."""

    def __init__(self, nursery: Nursery) -> None:
        self.nursery = nursery
        self.clock = asyncio.get_running_loop().time
        self.metrics = Metrics()
        self.pool = EnginePool(self.metrics, self.clock)
        self.engine = simulated(Watched())
        self.pool.add_engine(self.engine)
        self.pool.serve_engine("engine-0", 3)
        self.teacher = EnginePool(Metrics(), self.clock)
        self.teacher.add_engine(simulated(Watched(), engine_id="teacher-0"))
        self.teacher.serve_engine("teacher-0", 0)
        self.posted: list[Message] = []
        self.leased: list[tuple[str, int | None]] = []
        self.leases = relayed_leases(
            {"": self.pool, "teacher": self.teacher},
            self.posted,
            on_lease=lambda *of: self.leased.append(of),
        )

    def want(self, lease_id: int) -> None:
        """Ask for the lease of a call of a trajectory with this number."""
        self.leases.handle_message(LeaseWanted(lease_id=lease_id, key=str(lease_id), tokens=9, prompt=4))

    async def lease(self) -> LeaseGranted:
        self.want(1)
        await asyncio.sleep(0.01)
        (*_, granted) = self.granted
        return granted

    def end(self, lease_id: int = 1) -> None:
        self.leases.handle_message(LeaseEnded(lease_id=lease_id, received=5))

    def interrupt(self, mode: InterruptMode = "abort", pool: EnginePool | None = None) -> asyncio.Task[None]:
        """Hold the engine, and interrupt its calls."""
        pool = pool or self.pool
        pool.hold_engine("engine-0")
        return self.nursery.start_task("interrupt", pool.interrupt_engine(self.engine, mode))

    @property
    def revoked(self) -> RevokeLeases:
        """The only message that has revoked leases."""
        (message,) = (each for each in self.posted if isinstance(each, RevokeLeases))
        return message

    def confirm(self) -> None:
        """Say that nothing more is sent to the engines whose leases were revoked."""
        self.leases.handle_message(LeasesRevoked(number=self.revoked.number))

    def receive_payload(self, number: int) -> None:
        """Report that a piece of the call's payload has come."""
        piece = CallProgress(lease_id=1, received=1, payload_arrives=True)
        self.leases.renew(Heartbeat(number=number, calls=(piece,)))

    async def wait_for_engine(self) -> None:
        """Wait for an update that the engine never ends."""
        async with self.pool.bounded_request("engine-0", 4.0):
            await asyncio.Future()

    @property
    def granted(self) -> list[LeaseGranted]:
        return [message for message in self.posted if isinstance(message, LeaseGranted)]

    @property
    def num_calls(self) -> int:
        return self.pool.statistics.load_of("engine-0").calls

    @property
    def state(self) -> EngineState:
        snapshot = self.pool.snapshot_of("engine-0")
        assert snapshot is not None
        return snapshot.state


@asynccontextmanager
async def driving(*, leased: bool = True) -> AsyncIterator[Driver]:
    """A driver whose worker has one call; its tasks end with the block."""
    async with Nursery() as nursery:
        driver = Driver(nursery)
        if leased:
            await driver.lease()
        yield driver
        nursery.cancel_tasks()
        driver.leases.close()


# -- the worker's side ------------------------------------------------------------------------------


async def test_calls_of_other_models_name_them_and_their_versions_are_none_of_the_policy() -> None:
    worker = Worker()
    judge = ModelCalls(worker.calls, "judge")
    calling = asyncio.create_task(judge.lease("a", 10, prompt=9).__aenter__())
    await asyncio.sleep(0)
    worker.grant(1, weight_version=800)
    await calling
    assert (worker.calls.newest_version, judge.newest_version) == (-1, 800)
    wanted = worker.posted[0]
    assert isinstance(wanted, LeaseWanted)
    assert (wanted.model, wanted.tokens, wanted.prompt) == ("judge", 10, 9)


@pytest.mark.parametrize("end", ["revoked", "revoked and granted again", "expired, and its timer is late"])
async def test_nothing_is_sent_under_a_lease_that_has_ended(end: str) -> None:
    worker = Worker()
    calling = await worker.start_call(wait_s=0.5)
    await asyncio.sleep(0.1)
    if end.startswith("revoked"):
        worker.revoke()
        assert isinstance(worker.posted[-1], LeasesRevoked)
        if end == "revoked and granted again":
            worker.grant(1)
        # A lease given afterwards does not bring the revoked one back.
        other = await worker.start_call(wait_s=100.0, lease_id=2)
    else:
        worker.stopped_s = LEASE_S
        other = None
    lease = await calling
    (end_of_call,) = worker.events
    assert isinstance(end_of_call, Finish)
    assert (end_of_call.reason, lease.interrupted) == ("abort", True)
    assert isinstance(worker.posted[-1], LeaseEnded)
    if other is not None:
        other.cancel()


@pytest.mark.parametrize("revoked", [False, True])
async def test_a_refusal_is_not_reported_once_its_lease_was_revoked(revoked: bool) -> None:
    """Whose memory is released refuses calls; the report would arrive in its next epoch."""
    worker = Worker()

    async def refuse(request: GenerateRequest) -> AsyncIterator[Chunk | Finish]:
        await asyncio.sleep(0.5)
        raise EngineBusy("503", 5.0)
        yield

    worker.engine.generate = refuse  # type: ignore[assignment]
    calling = await worker.start_call()
    await asyncio.sleep(0.1)
    if revoked:
        worker.revoke()
    with pytest.raises(EngineBusy):
        await calling
    reports = [message for message in worker.posted if isinstance(message, EngineReport)]
    assert [(each.kind, each.retry_after_s) for each in reports] == ([] if revoked else [("busy", 5.0)])


@pytest.mark.parametrize("early_s", [1e-9, 0.0009])
async def test_a_lease_expires_also_when_the_timer_for_that_is_early(early_s: float) -> None:
    """By the resolution of the event loop: a nanosecond of asyncio's, a millisecond of uvloop's."""
    worker = Worker()
    worker.stopped_s = -early_s
    with pytest.raises(CallLost, match="lease has expired"):
        await (await worker.start_call())
    assert worker.clock() == pytest.approx(LEASE_S, abs=0.01)


async def test_an_expired_lease_closes_its_stream_and_sends_nothing() -> None:
    worker = Worker()
    calling = await worker.start_call()
    await asyncio.sleep(4.0)
    worker.calls.renew(worker.clock() - 1.0)  # what counts is when the heartbeat was sent
    with pytest.raises(CallLost, match="expired"):
        await calling
    assert worker.clock() == pytest.approx(3.0 + LEASE_S)
    received = sum(len(event.token_ids) for event in worker.events if isinstance(event, Chunk))
    assert received == pytest.approx(130, abs=2)
    worker.events.clear()
    await (await worker.start_call(lease_id=2))
    assert [event.reason for event in worker.events if isinstance(event, Finish)] == ["abort"]
    worker.calls.renew(worker.clock())
    again = await worker.start_call(lease_id=3)
    await asyncio.sleep(1.0)
    assert isinstance(worker.events[-1], Chunk)
    worker.calls.drop_call(DropCall(lease_id=3, why="enough"))
    with pytest.raises(CallLost, match="enough"):
        await again


async def test_pieces_of_payloads_are_reported_at_once_and_tokens_seldom() -> None:
    worker = Worker(report_s=8.0)
    calling = await worker.start_call()
    await asyncio.sleep(1.0)
    assert worker.calls.progress() == ()
    worker.leases[0].record_payload()
    (progress,) = worker.calls.progress()
    assert progress.payload_arrives
    assert worker.calls.progress() == ()
    calling.cancel()


# -- calls in the driver's pool ---------------------------------------------------------------------


async def test_a_call_of_a_teacher_has_its_engine_and_is_none_of_the_policys() -> None:
    async with driving(leased=False) as driver:
        driver.leases.handle_message(LeaseWanted(lease_id=1, key="a", tokens=9, prompt=9, model="teacher"))
        (granted,) = driver.granted
        assert (granted.engine_id, granted.weight_version) == ("teacher-0", 0)
        assert (driver.teacher.statistics.load_of("teacher-0").calls, driver.num_calls) == (1, 0)
        assert driver.leases.begin_revocation("teacher-0", aborts=True)
        driver.leases.handle_message(EngineReport(engine_id="teacher-0", kind="failure", text="gone"))
        assert driver.teacher.needs_repair("teacher-0")
        driver.end()
        assert driver.leased == []  # version 0 would make the trajectory too old
        driver.leases.handle_message(EngineReport(engine_id="engine-9", kind="failure", text="gone"))
        driver.leases.close()
        assert driver.leases.is_closed


async def test_a_lease_that_is_not_wanted_any_more_takes_no_engine() -> None:
    async with driving(leased=False) as driver:
        driver.pool.hold_engine("engine-0")
        for number in (1, 2):
            driver.want(number)
        driver.end(1)
        driver.pool.serve_engine("engine-0", 4)
        await asyncio.sleep(0.01)
        assert [granted.lease_id for granted in driver.granted] == [2]
        assert driver.num_calls == 1
        driver.end(2)
        assert driver.num_calls == 0


@pytest.mark.parametrize("keeps_cache", [False, True])
async def test_each_update_of_an_engine_begins_an_epoch(keeps_cache: bool) -> None:
    async with driving(leased=False) as driver, driver.pool.dispatcher.lease("a", 9, prompt=4) as before:
        await driver.interrupt()
        driver.pool.serve_engine("engine-0", 4, keeps_cache=keeps_cache)
        async with driver.pool.dispatcher.lease("b", 9, prompt=4) as after:
            assert (before.epoch, after.epoch) == (1, 2)
        (end,) = [event async for event in before.generate(request())]
        assert isinstance(end, Finish)
        assert end.reason == "abort"  # nothing was sent


# -- interruptions wait for workers ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["abort", "in_place"])
async def test_workers_know_how_an_engine_is_interrupted_and_which_version_its_calls_may_report(
    mode: InterruptMode,
) -> None:
    async with driving() as driver:
        driver.pool.announce_version(3)
        driver.interrupt(mode)
        await asyncio.sleep(0.1)
        assert driver.revoked.engines == {"engine-0": mode == "abort"}
        worker = Worker()
        assert worker.calls.newest_version == -1
        worker.calls.revoke(driver.revoked)
        assert worker.calls.newest_version == 3
        worker.calls.revoke(msgspec.structs.replace(driver.revoked, newest_version=2))
        assert worker.calls.newest_version == 3


@pytest.mark.parametrize("end", [Driver.confirm, lambda driver: driver.leases.close()], ids=["says", "ends"])
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


async def test_one_message_revokes_the_leases_of_all_engines_of_a_turn() -> None:
    """An update of a thousand engines would otherwise send each worker hundreds of messages."""
    async with driving(leased=False) as driver:
        driver.pool.add_engine(simulated(Watched(), engine_id="engine-1"))
        driver.pool.serve_engine("engine-1", 3)
        for number in (1, 2):  # one call on each engine
            driver.want(number)
        interrupting = {}
        for engine in driver.pool.engines():
            driver.pool.hold_engine(engine.engine_id)
            interrupt = driver.pool.interrupt_engine(engine, "abort")
            interrupting[engine.engine_id] = driver.nursery.start_task("interrupt", interrupt)
        await asyncio.sleep(0.1)
        assert driver.revoked.engines == dict.fromkeys(interrupting, True)
        driver.confirm()
        await asyncio.sleep(0.1)
        assert all(task.done() for task in interrupting.values())


async def test_leases_of_a_silent_worker_expire_and_it_gets_others_when_it_is_back() -> None:
    async with driving() as driver:
        driver.pool.hold_engine("engine-0")
        driver.want(2)
        await driver.interrupt()
        assert LEASE_S < driver.clock() < LEASE_S + 1.0
        assert driver.num_calls == 0
        driver.pool.serve_engine("engine-0", 4)
        await asyncio.sleep(0.1)
        assert driver.num_calls == 0  # the engine waits for no call of a worker that may be lost
        driver.leases.renew(Heartbeat(number=2))
        renewed, granted = driver.posted[-2:]
        assert isinstance(renewed, LeasesRenewed)
        assert isinstance(granted, LeaseGranted)
        assert (granted.lease_id, granted.weight_version) == (2, 4)
        assert driver.num_calls == 1


async def test_requests_of_a_lost_worker_take_no_engine_when_its_leases_are_returned() -> None:
    async with driving() as driver:
        driver.pool.hold_engine("engine-0")
        driver.want(2)
        driver.pool.serve_engine("engine-0", 4)
        driver.pool.hold_engine("engine-0")
        driver.want(3)
        driver.leases.close()
        driver.pool.serve_engine("engine-0", 5)
        await asyncio.sleep(0.1)
        assert driver.num_calls == 0
        assert not any(granted.lease_id == 3 for granted in driver.granted)


async def test_leases_expire_also_when_the_wait_for_that_is_cancelled() -> None:
    """An evaluation that is stopped has workers that may still send requests."""
    async with driving() as driver:
        expiring = asyncio.ensure_future(driver.leases.expire())
        await asyncio.sleep(1.0)
        expiring.cancel()
        await driver.interrupt()
        assert LEASE_S - 1.0 < driver.clock() < LEASE_S + 2.0
        await asyncio.sleep(1.0)
        assert driver.leases.is_closed


def lender_of(borrower: Driver) -> EnginePool:
    """The pool of a run that has lent the engine of an evaluation."""
    run = EnginePool(Metrics(), borrower.clock)
    run.add_engine(borrower.engine)
    run.serve_engine("engine-0", 3)
    run.lend_engine("engine-0")
    run.lease_holders[borrower.pool] = None
    return run


async def test_an_engine_that_was_lent_gets_no_calls_once_it_is_taken_away() -> None:
    """The run takes it from an evaluation: workers of the evaluation have leases of its own pool."""
    async with driving() as borrower:
        run = lender_of(borrower)
        run.quarantine_engine("engine-0", EngineError("it is broken"))
        interrupting = borrower.nursery.start_task("i", run.interrupt_engine(borrower.engine, "abort"))
        await asyncio.sleep(0.1)
        assert not borrower.pool.has_engine(EngineState.SERVING)
        assert not interrupting.done()
        borrower.confirm()
        await asyncio.sleep(0.1)
        assert interrupting.done()


# -- limits of engines ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_lent", [False, True])
async def test_the_limit_of_an_engine_begins_when_workers_send_it_nothing_more(is_lent: bool) -> None:
    """A worker's leases last longer than `weights.timeout_s` here: no engine is to blame for it.

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
        assert LEASE_S - 0.1 < driver.clock() - began_s - 3.9 < LEASE_S + 1.0
        with pytest.raises(TimeoutError):
            await update(4.1)


async def lose_worker(driver: Driver) -> None:
    await asyncio.sleep(10.0)
    driver.leases.close()


async def end_with_last_piece(driver: Driver) -> None:
    """The lease ends with it, before the next heartbeat."""
    await asyncio.sleep(3.0)
    driver.leases.renew(Heartbeat(number=3))
    driver.end()


@pytest.mark.parametrize(("payload", "until_s"), [(lose_worker, 14.0), (end_with_last_piece, 7.0)])
async def test_an_update_waits_for_a_payload_and_has_its_whole_limit_when_the_call_has_ended(
    payload: Callable[[Driver], Awaitable[None]], until_s: float
) -> None:
    async with driving() as driver:
        driver.receive_payload(2)
        driver.pool.hold_engine("engine-0")
        began_s = driver.clock()
        updating = asyncio.ensure_future(driver.wait_for_engine())
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
async def test_an_engine_is_not_blamed_for_a_worker_that_is_silent_or_handles_no_messages(
    is_deaf: bool,
) -> None:
    """Heartbeats of a deaf worker go on, but it does not hear that it may begin the calls."""
    async with driving() as driver:
        load = driver.pool.statistics.load_of
        assert not load("engine-0").unobserved
        for number in range(2, 22):
            await asyncio.sleep(0.25)
            if is_deaf:
                driver.leases.renew(Heartbeat(number=number), hears=False)
        assert load("engine-0").unobserved
        driver.leases.renew(Heartbeat(number=22))
        assert not load("engine-0").unobserved
        assert load("engine-0").progress_s == driver.clock()  # the silence begins now


# -- engines that fail, leave or are busy -------------------------------------------------------------


@pytest.mark.parametrize("wrong_weights", [False, True])
async def test_calls_of_a_worker_are_dropped_for_what_their_engine_is_quarantined_for(
    wrong_weights: bool,
) -> None:
    """Strike three: all calls of the engine sample by its weights."""
    worker = Worker()
    error = (VersionMismatch if wrong_weights else EngineError)("it serves version 0")
    async with driving() as driver:
        for _ in range(3):
            worker.calls.record_strike("engine-0", error)
            driver.leases.handle_message(worker.posted[-1])
        drop = driver.posted[-1]
        assert isinstance(drop, DropCall)
        assert driver.num_calls == 1  # until the worker has ended it
        calling = await worker.start_call()
        await asyncio.sleep(0.5)
        worker.calls.drop_call(drop)
        with pytest.raises(VersionMismatch if wrong_weights else CallLost, match="it serves version 0"):
            await calling
        # The driver has dealt with the engine.
        assert not any(isinstance(m, EngineReport) and m.kind == "failure" for m in worker.posted)


async def test_a_failed_engine_is_ended_when_its_leases_are_revoked() -> None:
    ended: list[str] = []

    async def end(engine_id: str) -> None:
        ended.append(engine_id)

    async with driving() as driver:
        driver.pool.quarantine_engine("engine-0", EngineError("it is broken"))
        devices = SharedDevices(driver.pool, end, driver.metrics, driver.clock, timeout_s=60.0)
        driver.nursery.start_task("clear", devices.clear_devices())
        await asyncio.sleep(1.0)
        assert ended == []
        driver.confirm()
        await asyncio.sleep(1.0)
        assert ended == ["engine-0"]


async def test_an_engine_is_not_restarted_when_it_leaves_while_leases_expire(tmp_path: Path) -> None:
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
    async with driving(leased=False) as driver:
        driver.pool.remove_engine("engine-0")
        members = EngineMembership(path, driver.pool, lambda *of: driver.engine, depart, drain_s=1.0)
        driver.nursery.start_task("members", members.follow_file())
        await asyncio.sleep(5.0)
        driver.pool.serve_engine("engine-0", 3)
        driver.leases.renew(Heartbeat(number=2))
        config = SimulatedEngines()
        repair = EngineRepair(driver.pool, restart, catch_up, config, driver.metrics, driver.clock, seed=0)
        driver.nursery.start_task("repair", repair.repair_engines())
        await driver.lease()
        driver.pool.quarantine_engine("engine-0", EngineError("its node has died"))
        path.write_text("")
        await asyncio.sleep(LEASE_S - 1.0)
        assert known
        await asyncio.sleep(20.0)
        assert not known
        assert not driver.pool.engines()


@pytest.mark.parametrize(
    ("report", "state"),
    [
        (EngineReport(engine_id="engine-0", kind="strike", text="x"), EngineState.SERVING),
        (EngineReport(engine_id="engine-0", kind="failure", text="x"), EngineState.QUARANTINED),
        (EngineReport(engine_id="engine-0", kind="busy", text="x", retry_after_s=5.0), EngineState.SERVING),
    ],
    ids=lambda each: getattr(each, "kind", None),
)
async def test_what_a_worker_reports_of_an_engine_counts_as_a_call_of_the_driver(
    report: EngineReport, state: EngineState
) -> None:
    async with driving() as driver:
        driver.leases.handle_message(report)
        driver.end()
        assert driver.state is state
        if report.kind == "busy":
            driver.want(2)
            await asyncio.sleep(4.0)
            assert len(driver.granted) == 1
            await asyncio.sleep(2.0)
            assert len(driver.granted) == 2


async def test_a_late_report_says_nothing_against_an_engine_that_was_restarted() -> None:
    """The worker's leases have expired, and its report was under way for longer."""
    async with driving() as driver:
        driver.pool.quarantine_engine("engine-0", EngineError("another worker has seen that"))
        await driver.pool.end_engine("engine-0", lambda name: asyncio.sleep(0))
        driver.pool.rejoin_engine("engine-0")
        driver.pool.serve_engine("engine-0", 4)
        for kind in ("failure", "strike", "connection", "busy", "refused"):
            report = EngineReport(engine_id="engine-0", kind=kind, text="x", wrong_weights=kind == "strike")
            for _ in range(3):
                driver.leases.handle_message(report)
        assert driver.state is EngineState.SERVING
