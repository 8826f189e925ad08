"""Leases of rollout workers: what a worker sends to engines, and what the driver waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
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
from async_rl.errors import CallLost, EngineBusy, EngineError, InvariantError, RequestRefused, VersionMismatch
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
from async_rl.rollout.workers.relayed_leases import RelayedLeases
from async_rl.rollout.workers.remote_calls import ModelCalls, RemoteCalls
from async_rl.run.device_sharing import SharedDevices
from async_rl.runtime.supervision import Nursery
from tests.support.sessions import Watched, simulated

LEASE_S = 10.0


class Worker:
    """A worker's calls to one engine that decodes a token in 100 ms, without a driver."""

    def __init__(self, report_s: float = 0.0) -> None:
        self.engine = simulated(Watched(), decode_step_s=0.1, prefill_tokens_per_s=1e9)
        self.posted: list[Message] = []
        self.requests = 0
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

    async def call(self, *, wait_s: float = 0.0) -> Lease:
        """Make a call of up to 1000 tokens, so long after its lease was granted."""
        async with self.calls.lease("a", 1001, prompt=1) as lease:
            self.leases.append(lease)
            await asyncio.sleep(wait_s)
            await self.generate(lease)
        return lease

    async def generate(self, lease: Lease) -> None:
        async with aclosing(lease.generate(request())) as stream:
            async for event in stream:
                self.events.append(event)


async def dropped(worker: Worker) -> str:
    """Make a call that is dropped; return why."""
    with pytest.raises(CallLost) as error:
        await worker.call()
    return str(error.value)


async def refused(worker: Worker, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        await worker.call()


def request() -> GenerateRequest:
    return GenerateRequest(
        request_id="0" * 32,
        input_ids=np.array([5], np.int32),
        max_new_tokens=1000,
        sampling=SamplingParams(),
    )


async def test_streams_are_read_at_once_when_their_engine_aborts_them_and_not_when_it_pauses_them() -> None:
    """After each update in place a worker would otherwise wake up for every event of every stream."""
    worker = Worker()
    reads: list[str] = []
    worker.engine.read_at_once = lambda: reads.append("at once")
    worker.calls.renew(worker.clock())
    async with asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(worker.call())
        await asyncio.sleep(0)
        worker.grant(1)
        await asyncio.sleep(0.5)
        worker.calls.revoke(RevokeLeases(engines={"engine-0": False}, newest_version=0, number=7))
        assert not reads
        worker.calls.revoke(
            RevokeLeases(engines={"engine-0": True}, newest_version=0, number=8)
        )  # no call has begun since
        assert reads == ["at once"]
        calling.cancel()


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_workers_know_whether_an_interrupted_engine_aborts_its_calls(mode: InterruptMode) -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        driver.pool.hold_engine("engine-0")
        nursery.start_task("interrupt", driver.pool.interrupt_engine(driver.engine, mode))
        await asyncio.sleep(0.1)
        (revoke,) = (message for message in driver.posted if isinstance(message, RevokeLeases))
        assert revoke.engines == {"engine-0": mode == "abort"}
        driver.leases.close()


async def test_workers_know_which_version_running_calls_can_report_before_its_update_begins() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        driver.pool.announce_version(3)
        driver.pool.hold_engine("engine-0")
        nursery.start_task("interrupt", driver.pool.interrupt_engine(driver.engine, "in_place"))
        await asyncio.sleep(0.1)
        (revoke,) = (message for message in driver.posted if isinstance(message, RevokeLeases))
        worker = Worker()
        assert worker.calls.newest_version == -1
        worker.calls.revoke(revoke)
        assert worker.calls.newest_version == 3
        worker.calls.revoke(msgspec.structs.replace(revoke, newest_version=2))
        assert worker.calls.newest_version == 3
        driver.leases.close()


async def test_the_versions_of_other_models_are_none_of_the_policy() -> None:
    worker = Worker()
    worker.calls.renew(worker.clock())
    judge = ModelCalls(worker.calls, "judge")
    async with asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(judge.lease("a", 10).__aenter__())
        await asyncio.sleep(0)
        worker.grant(1, weight_version=800)
        await calling
    assert (worker.calls.newest_version, judge.newest_version) == (-1, 800)


async def test_nothing_is_sent_under_a_lease_that_was_revoked() -> None:
    worker = Worker()
    worker.calls.renew(worker.clock())
    async with asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(worker.call(wait_s=0.5))
        await asyncio.sleep(0)
        worker.grant(1)
        await asyncio.sleep(0.1)
        worker.calls.revoke(RevokeLeases(engines={"engine-0": True}, newest_version=0, number=7))
        assert isinstance(worker.posted[-1], LeasesRevoked)
        # A lease given afterwards does not bring the revoked one back.
        other = tasks.create_task(worker.call(wait_s=100.0))
        await asyncio.sleep(0)
        worker.grant(2)
        lease = await calling
        other.cancel()
    (end,) = worker.events
    assert isinstance(end, Finish)
    assert (end.reason, lease.interrupted) == ("abort", True)
    assert isinstance(worker.posted[-1], LeaseEnded)


@pytest.mark.parametrize("error", [EngineBusy("503", 5.0), RequestRefused("400")])
@pytest.mark.parametrize("revoked", [False, True])
async def test_a_refusal_is_not_reported_once_its_lease_was_revoked(revoked: bool, error: Exception) -> None:
    """Whose memory is released refuses calls; the report would arrive in its next epoch."""
    worker = Worker()
    worker.calls.renew(worker.clock())

    async def refuse(request: GenerateRequest) -> AsyncIterator[Chunk | Finish]:
        await asyncio.sleep(0.5)
        raise error
        yield

    worker.engine.generate = refuse  # type: ignore[assignment]
    async with asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(refused(worker, type(error)))
        await asyncio.sleep(0)
        worker.grant(1)
        await asyncio.sleep(0.1)
        if revoked:
            worker.calls.revoke(RevokeLeases(engines={"engine-0": True}, newest_version=0, number=7))
        await calling
    assert any(isinstance(message, EngineReport) for message in worker.posted) == (not revoked)


async def test_a_lease_that_was_revoked_stays_revoked_when_its_grant_is_repeated() -> None:
    worker = Worker()
    worker.calls.renew(worker.clock())
    async with asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(worker.call(wait_s=0.5))
        await asyncio.sleep(0)
        worker.grant(1)
        await asyncio.sleep(0.1)
        worker.calls.revoke(RevokeLeases(engines={"engine-0": True}, newest_version=0, number=7))
        worker.grant(1)
        lease = await calling
    (end,) = worker.events
    assert isinstance(end, Finish)
    assert (end.reason, lease.interrupted) == ("abort", True)


@pytest.mark.parametrize("early_s", [1e-9, 0.0009])
async def test_a_lease_expires_also_when_the_timer_for_that_is_early(early_s: float) -> None:
    """By the resolution of the event loop: a nanosecond of asyncio's, a millisecond of uvloop's."""
    worker = Worker()
    worker.calls.renew(worker.clock())
    worker.stopped_s = -early_s
    calling = asyncio.create_task(worker.call())
    await asyncio.sleep(0)
    worker.grant(1)
    with pytest.raises(CallLost, match="lease has expired"):
        await calling
    assert worker.clock() == pytest.approx(LEASE_S, abs=0.01)


async def test_an_expired_lease_closes_its_stream_and_sends_nothing() -> None:
    worker = Worker()
    worker.calls.renew(worker.clock())
    async with asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(dropped(worker))
        await asyncio.sleep(0)
        worker.grant(1)
        await asyncio.sleep(4.0)
        worker.calls.renew(worker.clock() - 1.0)  # what counts is when the heartbeat was sent
        assert "expired" in await calling
        assert worker.clock() == pytest.approx(3.0 + LEASE_S)
        received = sum(len(event.token_ids) for event in worker.events if isinstance(event, Chunk))
        assert received == pytest.approx(130, abs=2)
        worker.events.clear()
        late = tasks.create_task(worker.call())
        await asyncio.sleep(0)
        worker.grant(2)
        await late
        assert [event.reason for event in worker.events if isinstance(event, Finish)] == ["abort"]
        worker.calls.renew(worker.clock())
        again = tasks.create_task(dropped(worker))
        await asyncio.sleep(0)
        worker.grant(3)
        await asyncio.sleep(1.0)
        assert isinstance(worker.events[-1], Chunk)
        worker.calls.drop_call(DropCall(lease_id=3, why="enough"))
        assert await again == "enough"


class Driver:
    """The driver's side of one worker, which this test plays itself."""

    def __init__(self, nursery: Nursery) -> None:
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
        self.leases = RelayedLeases(
            "rollout-worker-0",
            {"": self.pool, "teacher": self.teacher},
            self.posted.append,
            lease_s=LEASE_S,
            clock=self.clock,
            on_lease=lambda *of: self.leased.append(of),
            probe_timeout_s=5.0,
            worker_stall_s=30.0,
        )
        self.leases.renew(Heartbeat(number=1))

    async def lease(self) -> LeaseGranted:
        self.leases.handle_message(LeaseWanted(lease_id=1, key="a", tokens=9, prompt=4))
        await asyncio.sleep(0.01)
        granted = self.posted[-1]
        assert isinstance(granted, LeaseGranted)
        return granted

    async def wait_for_engine(self) -> None:
        """Wait for an update that the engine never ends."""
        async with self.pool.bounded_request("engine-0", 4.0):
            await asyncio.Future()

    @property
    def num_calls(self) -> int:
        return self.pool.statistics.load_of("engine-0").calls


async def test_a_call_of_a_teacher_has_its_engine_and_is_none_of_the_policys() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        driver.leases.handle_message(LeaseWanted(lease_id=1, key="a", tokens=9, prompt=9, model="teacher"))
        granted = driver.posted[-1]
        assert isinstance(granted, LeaseGranted)
        assert (granted.engine_id, granted.weight_version) == ("teacher-0", 0)
        assert (driver.teacher.statistics.load_of("teacher-0").calls, driver.num_calls) == (1, 0)
        assert driver.leases.begin_revocation("teacher-0", aborts=True)
        driver.leases.handle_message(EngineReport(engine_id="teacher-0", kind="failure", text="gone"))
        assert driver.teacher.needs_repair("teacher-0")
        driver.leases.handle_message(LeaseEnded(lease_id=1))
        assert driver.leased == []  # version 0 would make the trajectory too old
        driver.leases.handle_message(EngineReport(engine_id="engine-9", kind="failure", text="gone"))
        driver.leases.close()
        assert driver.leases.is_closed


async def test_calls_of_a_worker_name_their_model() -> None:
    worker = Worker()

    async def call() -> None:
        async with ModelCalls(worker.calls, "teacher").lease("a", 9, prompt=9):
            raise AssertionError("nothing grants it")

    calling = asyncio.create_task(call())
    await asyncio.sleep(0)
    calling.cancel()
    wanted = worker.posted[0]
    assert isinstance(wanted, LeaseWanted)
    assert (wanted.model, wanted.tokens, wanted.prompt) == ("teacher", 9, 9)


async def test_a_worker_holds_a_lease_of_the_pool_for_each_call() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        granted = await driver.lease()
        assert (granted.engine_id, granted.weight_version, driver.num_calls) == ("engine-0", 3, 1)
        assert driver.leased == [("a", 3)]
        driver.leases.handle_message(LeaseEnded(lease_id=1, received=5))
        await asyncio.sleep(0.01)
        assert driver.num_calls == 0
        assert driver.leased == [("a", 3), ("a", None)]


async def test_a_repeated_message_takes_no_second_lease_and_returns_no_other() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        wanted = LeaseWanted(lease_id=1, key="a", tokens=9, prompt=4)
        driver.leases.handle_message(wanted)
        await asyncio.sleep(0.01)
        assert driver.num_calls == 1
        for _ in range(2):
            driver.leases.handle_message(LeaseEnded(lease_id=1, received=5))
            await asyncio.sleep(0.01)
        driver.leases.handle_message(wanted)  # late
        await asyncio.sleep(0.01)
        assert driver.num_calls == 0
        assert sum(isinstance(message, LeaseGranted) for message in driver.posted) == 1


async def test_a_lease_that_is_not_wanted_any_more_takes_no_engine() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        driver.pool.hold_engine("engine-0")
        for number in (1, 2):
            driver.leases.handle_message(LeaseWanted(lease_id=number, key=str(number), tokens=9, prompt=4))
        driver.leases.handle_message(LeaseEnded(lease_id=1))
        driver.pool.serve_engine("engine-0", 4)
        await asyncio.sleep(0.01)
        granted = [message.lease_id for message in driver.posted if isinstance(message, LeaseGranted)]
        assert granted == [2]
        assert driver.num_calls == 1
        driver.leases.handle_message(LeaseEnded(lease_id=2))
        assert driver.num_calls == 0


async def test_all_waiting_calls_begin_in_turns_of_the_event_loop() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        driver.pool.hold_engine("engine-0")
        for number in range(1, 101):
            driver.leases.handle_message(LeaseWanted(lease_id=number, key=str(number), tokens=9, prompt=4))
        driver.pool.serve_engine("engine-0", 4)
        assert 0 < driver.num_calls < 50
        await asyncio.sleep(0.01)
        assert driver.num_calls == 100
        for number in range(1, 101):
            driver.leases.handle_message(LeaseEnded(lease_id=number))


async def test_an_engine_is_interrupted_when_workers_have_confirmed_that_they_send_nothing_more() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        driver.pool.hold_engine("engine-0")
        interrupting = nursery.start_task("interrupt", driver.pool.interrupt_engine(driver.engine, "abort"))
        await asyncio.sleep(1.0)
        revoke = driver.posted[-1]
        assert isinstance(revoke, RevokeLeases)
        assert not interrupting.done()
        driver.leases.handle_message(LeasesRevoked(number=revoke.number))
        await asyncio.sleep(0.1)
        assert interrupting.done()
        driver.leases.handle_message(LeaseEnded(lease_id=1))


async def test_one_message_revokes_the_leases_of_all_engines_of_a_turn() -> None:
    """An update of a thousand engines would otherwise send each worker hundreds of messages."""
    async with Nursery() as nursery:
        driver = Driver(nursery)
        driver.pool.add_engine(simulated(Watched(), engine_id="engine-1"))
        driver.pool.serve_engine("engine-1", 3)
        posted: list[Message] = []
        other = RelayedLeases(
            "rollout-worker-1",
            {"": driver.pool},
            posted.append,
            lease_s=LEASE_S,
            clock=driver.clock,
            on_lease=lambda *of: None,
            probe_timeout_s=5.0,
            worker_stall_s=30.0,
        )
        other.renew(Heartbeat(number=1))
        for number in (1, 2):  # one call on each engine
            driver.leases.handle_message(LeaseWanted(lease_id=number, key=str(number), tokens=9, prompt=4))
        other.handle_message(LeaseWanted(lease_id=1, key="3", tokens=1, prompt=1))
        (shared,) = (message.engine_id for message in posted if isinstance(message, LeaseGranted))
        interrupting = {}
        for engine in driver.pool.engines():
            driver.pool.hold_engine(engine.engine_id)
            interrupt = driver.pool.interrupt_engine(engine, "abort")
            interrupting[engine.engine_id] = nursery.start_task("interrupt", interrupt)
        await asyncio.sleep(0.1)
        (revoke,) = (message for message in driver.posted if isinstance(message, RevokeLeases))
        assert revoke.engines == dict.fromkeys(interrupting, True)
        driver.leases.handle_message(LeasesRevoked(number=revoke.number))
        await asyncio.sleep(0.1)  # the other worker delays only the engine that it may call
        assert [name for name, task in interrupting.items() if not task.done()] == [shared]
        (revoke,) = (message for message in posted if isinstance(message, RevokeLeases))
        assert revoke.engines == {shared: True}
        other.handle_message(LeasesRevoked(number=revoke.number))
        await asyncio.sleep(0.1)
        assert interrupting[shared].done()
        driver.leases.close()
        other.close()


async def test_a_worker_that_ends_before_its_leases_are_revoked_delays_no_engine() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        driver.pool.hold_engine("engine-0")
        interrupting = nursery.start_task("interrupt", driver.pool.interrupt_engine(driver.engine, "abort"))
        await asyncio.sleep(0)
        driver.leases.close()
        await asyncio.sleep(0.1)
        assert interrupting.done()


async def test_a_heartbeat_reports_trajectories_that_make_no_more_calls() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        sent: list[Message] = []
        calls = RemoteCalls(
            sent.append,
            lambda *of: driver.engine,
            lease_s=LEASE_S,
            metrics=Metrics(),
            clock=driver.clock,
        )
        leases = [driver.pool.request_lease(key, 9, prompt=4, on_placed=lambda of: None) for key in "ab"]
        for lease in leases:
            driver.pool.return_lease(lease)
        calls.forget_trajectory("a")
        driver.leases.renew(Heartbeat(number=2, forgotten=calls.pop_forgotten()))
        assert calls.pop_forgotten() == ()
        assert sent == []
        again = [driver.pool.request_lease(key, 9, prompt=4, on_placed=lambda of: None) for key in "ab"]
        assert [lease.cached_prefix is None for lease in again] == [True, False]
        for lease in again:
            driver.pool.return_lease(lease)


async def test_leases_of_a_silent_worker_expire_before_an_engine_is_interrupted() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        renewed_s = driver.clock()
        await driver.lease()
        driver.pool.hold_engine("engine-0")
        await driver.pool.interrupt_engine(driver.engine, "abort")
        waited_s = driver.clock() - renewed_s
        assert LEASE_S < waited_s < LEASE_S + 1.0
        await asyncio.sleep(0.1)
        assert driver.num_calls == 0


async def test_a_silent_worker_that_is_back_in_time_still_gets_the_leases_that_it_waits_for() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        driver.pool.hold_engine("engine-0")
        driver.leases.handle_message(LeaseWanted(lease_id=2, key="b", tokens=9, prompt=4))
        await driver.pool.interrupt_engine(driver.engine, "abort")  # its leases expire
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
        driver.leases.close()


async def test_requests_of_a_lost_worker_take_no_engine_when_its_leases_are_returned() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        driver.pool.hold_engine("engine-0")
        driver.leases.handle_message(LeaseWanted(lease_id=2, key="b", tokens=9, prompt=4))
        driver.pool.serve_engine("engine-0", 4)
        driver.pool.hold_engine("engine-0")
        driver.leases.handle_message(LeaseWanted(lease_id=3, key="c", tokens=9, prompt=4))
        driver.leases.close()
        driver.pool.serve_engine("engine-0", 5)
        await asyncio.sleep(0.1)
        assert driver.num_calls == 0
        assert not any(isinstance(m, LeaseGranted) and m.lease_id == 3 for m in driver.posted)


async def test_calls_of_a_worker_that_is_silent_after_its_answer_end_with_its_leases() -> None:
    """It has confirmed that it sends nothing more, and does not say that its streams are closed."""
    async with Nursery() as nursery:
        driver = Driver(nursery)
        renewed_s = driver.clock()
        await driver.lease()
        driver.pool.hold_engine("engine-0")
        interrupting = nursery.start_task("i", driver.pool.interrupt_engine(driver.engine, "abort"))
        await asyncio.sleep(0.1)
        (revoke,) = (message for message in driver.posted if isinstance(message, RevokeLeases))
        driver.leases.handle_message(LeasesRevoked(number=revoke.number))
        await interrupting
        assert driver.clock() - renewed_s < LEASE_S + 1.0
        await asyncio.sleep(LEASE_S + 1.0)
        assert driver.num_calls == 0


async def test_nothing_is_sent_after_expiry_when_the_timer_of_it_is_late() -> None:
    worker = Worker()
    worker.calls.renew(worker.clock())
    async with asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(worker.call(wait_s=0.5))
        await asyncio.sleep(0)
        worker.grant(1)
        worker.stopped_s = LEASE_S
        lease = await calling
    (end,) = worker.events
    assert isinstance(end, Finish)
    assert (end.reason, lease.interrupted) == ("abort", True)


async def test_the_limit_of_an_engine_begins_when_workers_send_it_nothing_more() -> None:
    """A silent worker's leases last longer than `weights.timeout_s` here: no engine is to blame for it."""
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        driver.pool.hold_engine("engine-0")
        began_s = driver.clock()

        async def update(load_s: float) -> None:
            async with driver.pool.bounded_request("engine-0", 4.0):
                await driver.pool.interrupt_engine(driver.engine, "abort")
                await asyncio.sleep(load_s)

        await update(3.9)
        assert driver.clock() - began_s > LEASE_S + 3.9
        with pytest.raises(TimeoutError):
            await update(4.1)


async def test_the_silence_of_an_engine_is_judged_from_the_end_of_a_lost_workers_leases_on() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        other = driver.pool.request_lease("b", 9, prompt=4, on_placed=lambda lease: None)
        await asyncio.sleep(5.0)
        driver.leases.close()
        assert driver.pool.statistics.load_of("engine-0").progress_s == driver.clock()
        driver.pool.return_lease(other)


async def test_an_update_has_its_whole_limit_when_a_lost_worker_receives_a_payload_no_longer() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        piece = CallProgress(lease_id=1, received=1, payload_arrives=True)
        driver.leases.renew(Heartbeat(number=2, calls=(piece,)))
        driver.pool.hold_engine("engine-0")
        updating = asyncio.ensure_future(driver.wait_for_engine())
        await asyncio.sleep(10.0)
        driver.leases.close()
        await asyncio.sleep(3.9)
        assert not updating.done()
        with pytest.raises(TimeoutError):
            await updating


async def test_an_update_has_its_whole_limit_when_a_lost_worker_did_not_say_that_calls_ended() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        driver.pool.hold_engine("engine-0")
        updating = asyncio.ensure_future(driver.wait_for_engine())
        nursery.start_task("expire", driver.leases.expire())
        await asyncio.sleep(LEASE_S + 0.4)
        assert driver.num_calls == 1
        await asyncio.sleep(4.0)
        assert driver.num_calls == 0
        assert not updating.done()
        with pytest.raises(TimeoutError):
            await updating
        assert driver.clock() < LEASE_S + 5.5


async def test_pieces_of_payloads_are_reported_at_once_and_tokens_seldom() -> None:
    worker = Worker(report_s=8.0)
    worker.calls.renew(worker.clock())
    calling = asyncio.create_task(worker.call())
    await asyncio.sleep(0)
    worker.grant(1)
    await asyncio.sleep(1.0)
    assert worker.calls.progress() == ()
    worker.leases[0].record_payload()
    (progress,) = worker.calls.progress()
    assert progress.payload_arrives
    assert worker.calls.progress() == ()
    calling.cancel()


async def test_an_update_waits_for_the_report_of_a_worker_that_receives_a_payload() -> None:
    """A piece may have come that a silent worker has not reported; one that reports none ends the wait."""
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        piece = CallProgress(lease_id=1, received=1, payload_arrives=True)
        driver.leases.renew(Heartbeat(number=2, calls=(piece,)))
        driver.pool.hold_engine("engine-0")
        began_s = driver.clock()
        updating = asyncio.ensure_future(driver.wait_for_engine())
        await asyncio.sleep(6.0)
        assert not updating.done()
        driver.leases.renew(Heartbeat(number=3, calls=(piece,)))
        await asyncio.sleep(5.0)
        assert not updating.done()
        driver.leases.renew(Heartbeat(number=4))
        with pytest.raises(TimeoutError):
            await updating
        assert began_s + 11.0 < driver.clock() < began_s + 11.5
        driver.leases.close()


async def test_an_update_has_its_whole_limit_when_the_last_piece_of_a_payload_has_come() -> None:
    """The lease ends with it, before the next heartbeat."""
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        piece = CallProgress(lease_id=1, received=1, payload_arrives=True)
        driver.leases.renew(Heartbeat(number=2, calls=(piece,)))
        driver.pool.hold_engine("engine-0")
        updating = asyncio.ensure_future(driver.wait_for_engine())
        await asyncio.sleep(3.0)
        driver.leases.renew(Heartbeat(number=3))
        ended_s = driver.clock()
        driver.leases.handle_message(LeaseEnded(lease_id=1, received=1))
        with pytest.raises(TimeoutError):
            await updating
        assert driver.clock() == pytest.approx(ended_s + 4.0)
        driver.leases.close()


async def test_an_engine_that_fails_while_workers_are_silent_is_waited_for_no_longer() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        driver.pool.hold_engine("engine-0")
        began_s = driver.clock()
        asyncio.get_running_loop().call_later(
            1.0, driver.pool.quarantine_engine, "engine-0", EngineError("three probes missed")
        )
        with pytest.raises(TimeoutError):
            async with driver.pool.bounded_request("engine-0", 4.0):
                await driver.pool.interrupt_engine(driver.engine, "abort")
        assert driver.clock() - began_s == pytest.approx(1.0)
        driver.leases.close()


async def test_an_engine_that_still_gets_calls_is_not_interrupted() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        with pytest.raises(InvariantError, match="hold it first"):
            await driver.pool.interrupt_engine(driver.engine, "abort")


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
    async with Nursery() as nursery:
        borrower = Driver(nursery)
        run = lender_of(borrower)
        await borrower.lease()
        run.quarantine_engine("engine-0", EngineError("it is broken"))
        interrupting = nursery.start_task("interrupt", run.interrupt_engine(borrower.engine, "abort"))
        await asyncio.sleep(0.1)
        assert not borrower.pool.has_engine(EngineState.SERVING)
        assert not interrupting.done()
        (revoke,) = (message for message in borrower.posted if isinstance(message, RevokeLeases))
        borrower.leases.handle_message(LeasesRevoked(number=revoke.number))
        await asyncio.sleep(0.1)
        assert interrupting.done()
        borrower.leases.handle_message(LeaseEnded(lease_id=1))


async def test_a_lent_engines_limit_begins_when_the_borrowers_workers_send_it_nothing() -> None:
    """The run that takes it away has no calls on it whose workers could be asked."""
    async with Nursery() as nursery:
        borrower = Driver(nursery)
        run = lender_of(borrower)
        await borrower.lease()
        began_s = borrower.clock()
        async with run.bounded_request("engine-0", 4.0):
            await run.interrupt_engine(borrower.engine, "abort")
            await asyncio.sleep(3.9)
        assert borrower.clock() - began_s > LEASE_S + 3.9


async def test_the_limit_of_an_engine_begins_when_a_worker_that_hears_nothing_is_ended() -> None:
    """Its heartbeats go on, so its leases do not expire."""
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        driver.pool.hold_engine("engine-0")

        async def be_deaf() -> None:
            for number in range(2, 14):
                await asyncio.sleep(1.0)
                driver.leases.renew(Heartbeat(number=number), hears=False)
            driver.leases.close()

        began_s = driver.clock()
        nursery.start_task("deaf", be_deaf())
        async with driver.pool.bounded_request("engine-0", 4.0):
            await driver.pool.interrupt_engine(driver.engine, "abort")
            await asyncio.sleep(3.9)
        assert driver.clock() - began_s == pytest.approx(12.0 + 3.9)


async def test_calls_of_a_worker_are_dropped_when_their_engine_is_quarantined() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        driver.pool.quarantine_engine("engine-0", EngineError("it is broken"))
        await asyncio.sleep(0.01)
        drop = driver.posted[-1]
        assert isinstance(drop, DropCall)
        assert "it is broken" in drop.why
        assert driver.num_calls == 1  # until the worker has ended it
        driver.leases.handle_message(LeaseEnded(lease_id=1))


@pytest.mark.parametrize("wrong_weights", [False, True])
async def test_workers_know_that_calls_are_dropped_for_their_weights(wrong_weights: bool) -> None:
    """Strike three: all calls of the engine sample by its weights."""
    worker = Worker()
    worker.calls.renew(worker.clock())
    error = (VersionMismatch if wrong_weights else EngineError)("it serves version 0")
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        for _ in range(3):
            worker.calls.record_strike("engine-0", error)
            driver.leases.handle_message(worker.posted[-1])
        drop = driver.posted[-1]
        assert isinstance(drop, DropCall)
        calling = asyncio.ensure_future(refused(worker, VersionMismatch if wrong_weights else CallLost))
        await asyncio.sleep(0)
        worker.grant(1)
        await asyncio.sleep(0.5)
        worker.calls.drop_call(drop)
        await calling
        # The driver has dealt with the engine.
        assert not any(isinstance(m, EngineReport) and m.kind == "failure" for m in worker.posted)
        driver.leases.close()


async def test_a_failed_engine_is_restarted_when_its_leases_are_revoked() -> None:
    restarted: list[str] = []

    async def restart(engine_id: str) -> None:
        restarted.append(engine_id)

    async def catch_up(engine_id: str) -> None:
        driver.pool.serve_engine(engine_id, 3)

    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        config = SimulatedEngines()
        repair = EngineRepair(driver.pool, restart, catch_up, config, driver.metrics, driver.clock, seed=0)
        nursery.start_task("repair", repair.repair_engines())
        driver.pool.quarantine_engine("engine-0", EngineError("it is broken"))
        await asyncio.sleep(1.0)
        assert restarted == []
        revoke = driver.posted[-1]
        assert isinstance(revoke, RevokeLeases)
        driver.leases.handle_message(LeasesRevoked(number=revoke.number))
        await asyncio.sleep(1.0)
        assert restarted == ["engine-0"]
        driver.leases.handle_message(LeaseEnded(lease_id=1))
        await asyncio.sleep(0.1)
        nursery.cancel_tasks()


async def test_a_failed_engine_on_shared_devices_is_ended_when_its_leases_are_revoked() -> None:
    ended: list[str] = []

    async def end(engine_id: str) -> None:
        ended.append(engine_id)

    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        devices = SharedDevices(driver.pool, end, driver.metrics, driver.clock, timeout_s=60.0)
        driver.pool.quarantine_engine("engine-0", EngineError("it is broken"))
        clearing = nursery.start_task("clear", devices.clear_devices())
        await asyncio.sleep(1.0)
        assert ended == []
        revoke = driver.posted[-1]
        assert isinstance(revoke, RevokeLeases)
        driver.leases.handle_message(LeasesRevoked(number=revoke.number))
        await asyncio.sleep(0.1)
        assert ended == ["engine-0"]
        assert clearing.done()
        driver.leases.handle_message(LeaseEnded(lease_id=1))


async def test_an_engine_leaves_when_the_leases_of_a_silent_worker_have_expired(tmp_path: Path) -> None:
    departed: list[float] = []

    async def depart(engine_id: str) -> None:
        departed.append(driver.clock())

    path = tmp_path / "servers.txt"
    path.write_text("http://a:1")
    async with Nursery() as nursery:
        driver = Driver(nursery)
        driver.pool.remove_engine("engine-0")  # it joins by the file
        members = EngineMembership(path, driver.pool, lambda *of: driver.engine, depart, drain_s=1.0)
        nursery.start_task("members", members.follow_file())
        await asyncio.sleep(5.0)
        driver.pool.serve_engine("engine-0", 3)
        await driver.lease()
        path.write_text("")
        await asyncio.sleep(5.0)
        driver.leases.renew(Heartbeat(number=2))
        renewed_s = driver.clock()  # as the time to drain is up
        await asyncio.sleep(9.9)
        assert not departed
        await asyncio.sleep(10.0)
        assert LEASE_S < departed[0] - renewed_s < LEASE_S + 1.0
        nursery.cancel_tasks()


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
    async with Nursery() as nursery:
        driver = Driver(nursery)
        driver.pool.remove_engine("engine-0")  # it joins by the file
        members = EngineMembership(path, driver.pool, lambda *of: driver.engine, depart, drain_s=30.0)
        nursery.start_task("members", members.follow_file())
        await asyncio.sleep(5.0)
        driver.pool.serve_engine("engine-0", 3)
        config = SimulatedEngines()
        repair = EngineRepair(driver.pool, restart, catch_up, config, driver.metrics, driver.clock, seed=0)
        nursery.start_task("repair", repair.repair_engines())
        driver.leases.renew(Heartbeat(number=2))
        await driver.lease()
        driver.pool.quarantine_engine("engine-0", EngineError("its node has died"))
        path.write_text("")
        await asyncio.sleep(30.0)
        assert not known
        assert not driver.pool.engines()
        nursery.cancel_tasks()


async def test_leases_expire_also_when_the_wait_for_that_is_cancelled() -> None:
    """An evaluation that is stopped has workers that may still send requests."""
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        expiring = asyncio.ensure_future(driver.leases.expire())
        await asyncio.sleep(1.0)
        expiring.cancel()
        driver.pool.hold_engine("engine-0")
        began_s = driver.clock()
        await driver.pool.interrupt_engine(driver.engine, "abort")
        assert LEASE_S - 2.0 < driver.clock() - began_s < LEASE_S + 1.0
        await asyncio.sleep(1.0)
        assert driver.leases.is_closed


@pytest.mark.parametrize("keeps_cache", [False, True])
async def test_each_update_of_an_engine_begins_an_epoch(keeps_cache: bool) -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        async with driver.pool.lease("a", 9, prompt=4) as before:
            driver.pool.hold_engine("engine-0")
            await driver.pool.interrupt_engine(driver.engine, "abort")
            driver.pool.serve_engine("engine-0", 4, keeps_cache=keeps_cache)
            async with driver.pool.lease("b", 9, prompt=4) as after:
                assert (before.epoch, after.epoch) == (1, 2)
            (end,) = [event async for event in before.generate(request())]
            assert isinstance(end, Finish)
            assert end.reason == "abort"  # nothing was sent


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
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        driver.leases.handle_message(report)
        driver.leases.handle_message(LeaseEnded(lease_id=1))
        snapshot = driver.pool.snapshot_of("engine-0")
        assert snapshot is not None
        assert snapshot.state is state
        if report.kind == "busy":
            driver.leases.handle_message(LeaseWanted(lease_id=2, key="a", tokens=9, prompt=4))
            await asyncio.sleep(4.0)
            assert sum(isinstance(message, LeaseGranted) for message in driver.posted) == 1
            await asyncio.sleep(2.0)
            assert isinstance(driver.posted[-1], LeaseGranted)
            driver.leases.handle_message(LeaseEnded(lease_id=2))


async def test_a_late_report_says_nothing_against_an_engine_that_was_restarted() -> None:
    """The worker's leases have expired, and its report was under way for longer."""
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        driver.pool.quarantine_engine("engine-0", EngineError("another worker has seen that"))
        await driver.pool.end_engine("engine-0", lambda name: asyncio.sleep(0))
        driver.pool.rejoin_engine("engine-0")
        driver.pool.serve_engine("engine-0", 4)
        for kind, wrong in (
            ("failure", False),
            ("strike", True),
            ("connection", False),
            ("busy", False),
            ("refused", False),
        ):
            report = EngineReport(engine_id="engine-0", kind=kind, text="x", wrong_weights=wrong)
            for _ in range(3):
                driver.leases.handle_message(report)
        snapshot = driver.pool.snapshot_of("engine-0")
        assert snapshot is not None
        assert snapshot.state is EngineState.SERVING
        driver.leases.close()


async def test_a_busy_engine_is_reported_with_the_time_that_it_asked_for() -> None:
    worker = Worker()
    worker.calls.record_back_pressure("engine-0", EngineBusy("too many calls", 5.0))
    (report,) = worker.posted
    assert isinstance(report, EngineReport)
    assert (report.kind, report.retry_after_s) == ("busy", 5.0)


async def test_an_engine_is_not_blamed_for_the_silence_of_a_worker() -> None:
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        load = driver.pool.statistics.load_of
        assert not load("engine-0").unobserved
        await asyncio.sleep(5.0)
        assert load("engine-0").unobserved
        driver.leases.renew(Heartbeat(number=2))
        assert not load("engine-0").unobserved
        assert load("engine-0").progress_s == driver.clock()  # the silence begins now
        driver.leases.handle_message(LeaseEnded(lease_id=1))


async def test_an_engine_is_not_blamed_for_calls_of_a_worker_that_handles_no_messages() -> None:
    """Its heartbeats go on, but it does not hear that it may begin the calls."""
    async with Nursery() as nursery:
        driver = Driver(nursery)
        await driver.lease()
        load = driver.pool.statistics.load_of
        for number in range(2, 22):
            await asyncio.sleep(0.25)
            driver.leases.renew(Heartbeat(number=number), hears=False)
        assert load("engine-0").unobserved
        driver.leases.renew(Heartbeat(number=22))
        assert not load("engine-0").unobserved
        assert load("engine-0").progress_s == driver.clock()
        driver.leases.handle_message(LeaseEnded(lease_id=1))
