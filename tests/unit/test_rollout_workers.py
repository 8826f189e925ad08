"""Tests of the protocol between driver and workers in virtual time, and of links over real sockets."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Set
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Self, cast

import msgspec
import pytest

from async_rl import codec
from async_rl.config import Config, parse_config
from async_rl.data.chat_format import ChatFormat
from async_rl.errors import (
    AgentLoopError,
    ConfigError,
    EnvironmentNotReady,
    PromptTooLong,
    RewardError,
    RolloutError,
    SpoolFull,
    WorkerLost,
)
from async_rl.observability.metrics import Metrics, value_of
from async_rl.placement.rollout_worker_actor import config_per_worker
from async_rl.planning.virtual_time import VirtualTimeLoop
from async_rl.rollout.attempt import Attempt, AttemptEnd, LocalBackend, LostWorkers, RolloutBackend
from async_rl.rollout.groups import UnscoredTrajectory
from async_rl.rollout.session.api import Session
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.workers import messages
from async_rl.rollout.workers.failing_workers import FailingWorkers
from async_rl.rollout.workers.link import StreamLink, connect_link, listen
from async_rl.rollout.workers.messages import (
    AttemptEnded,
    AttemptFailed,
    AttemptProgress,
    CancelRequest,
    EntriesReleased,
    Failure,
    GroupScored,
    Heartbeat,
    Message,
    MetricIncrement,
    StartAttempt,
)
from async_rl.rollout.workers.metric_counts import IncrementCollector, add_increments
from async_rl.rollout.workers.worker_backend import WorkerBackend
from async_rl.rollout.workers.worker_handle import Inbox
from async_rl.runtime.shortages import is_shortage
from async_rl.runtime.supervision import Nursery, first_error
from async_rl.store import journal as journal_module
from async_rl.store.archive import InspectedTrajectories
from async_rl.store.frames import read_columns, verify_frame
from async_rl.store.journal_file import read_journal
from async_rl.store.journal_folders import JournalClaim, JournalFolders, JournalSource
from async_rl.store.progress import ProgressReport, TrajectoryProgress
from async_rl.store.spool import Spool
from async_rl.types import Completion, StoredCompletion, StoredTrajectory, Task, Trajectory
from tests.support.sessions import FACTS, Bench, PlainChat, Watched, simulated
from tests.support.trajectories import make_trajectory
from verification.simulation import simulated_workers
from verification.simulation.simulated_workers import SimulatedWorkers
from verification.simulation.users import bad_environment

HERE = __name__
TASK = Task(task_id="t", messages=[{"role": "user", "content": "hi"}])


class OneTurn:
    async def run(self, task: Task, session: Session) -> None:
        session.start(task.messages)
        await session.generate()


class Everything:
    """Uses everything that a session offers, and does not fail."""

    async def run(self, task: Task, session: Session) -> str:
        session.start(task.messages)
        texts: list[str] = []
        turn = await session.generate(max_new_tokens=4, on_text=texts.append)
        assert "".join(texts).split() == turn.text.split()
        session.annotate(length=len(turn.token_ids), left=session.remaining_tokens)
        session.add_tool_result({"found": 3}, name="search")
        async with session.branch() as other:
            other.add_messages([{"role": "user", "content": "another way?"}])
            await other.generate(max_new_tokens=3)
            async with other.branch() as deeper:
                await deeper.generate(max_new_tokens=2)
        async with session.conversation() as helper:
            helper.start(task.messages)
            await helper.generate(max_new_tokens=5)
            helper.share_reward()
        await session.generate(max_new_tokens=2)
        session.add_messages([{"role": "user", "content": "bye"}])
        return "max_turns"


class TooTalkative:
    async def run(self, task: Task, session: Session) -> None:
        session.start(task.messages)
        await session.generate(max_new_tokens=1)
        session.add_messages([{"role": "user", "content": "so much"}] * 100)


class Swallows:
    """Catches its cancellation, and takes another turn."""

    caught: ClassVar[list[str]] = []

    async def run(self, task: Task, session: Session) -> None:
        session.start(task.messages)
        try:
            await asyncio.sleep(60)
        except BaseException as error:
            self.caught.append(type(error).__name__)
        try:
            await session.generate()
        except BaseException as error:
            self.caught.append(type(error).__name__)


class AddsObject:
    """Adds a message that a template may print but no frame can hold."""

    async def run(self, task: Task, session: Session) -> None:
        session.start(task.messages)
        await session.generate(max_new_tokens=2)
        session.add_messages([{"role": "user", "content": object()}])
        await session.generate(max_new_tokens=2)


class OurOwnError(AgentLoopError):
    """An error class that the driver does not know."""


class CannotEnter(OneTurn):
    """Needs a server that is down at first."""

    failures: ClassVar[int] = 0

    async def __aenter__(self) -> Self:
        if CannotEnter.failures:
            CannotEnter.failures -= 1
            raise ConnectionRefusedError("the search server is down")
        return self

    async def __aexit__(self, *error: object) -> None:
        pass


def reward(task: Task, completion: Completion) -> float:
    return float(completion.token_ids.sum() % 97)


def group_reward(task: Task, completions: list[Completion]) -> list[float]:
    return [float(completion.token_ids.sum() % 89) for completion in completions]


HALF = "\ud83d"
"""Half of a surrogate pair, which no message can hold. A policy can write it as an escape of JSON."""


def quoting_reward(task: Task, completion: Completion) -> float:
    raise ValueError(f"the answer has no unit {HALF}")


def named_by_policy(task: Task, completions: list[Completion]) -> list[dict[str, float]]:
    return [{"reward": 1.0, HALF: 1.0} for _ in completions]


class UsesHalfATool(OneTurn):
    async def run(self, task: Task, session: Session) -> None:
        await super().run(task, session)
        session.record_tool_call(error=False, tool=HALF)
        await asyncio.sleep(1.0)  # heartbeats report the tool


class AwaitsWhatOthersCancel:
    """Awaits a future that somebody else has cancelled."""

    async def run(self, task: Task, session: Session) -> None:
        session.start(task.messages)
        shared: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        shared.cancel()
        await shared


def config_of(loop: str = "OneTurn", **rollout: Any) -> Config:
    tree = {
        "model": {"path": "model"},
        "data": {"path": "tasks"},
        "engine": {"kind": "simulated"},
        "rollout": {
            "agent_loop": f"{HERE}:{loop}",
            "reward": f"{HERE}:reward",
            "max_context_tokens": 64,
            "max_new_tokens": 16,
            "max_branches": 4,
            "num_workers": 1,
            "worker_stall_s": 8.0,
            **rollout,
        },
    }
    return parse_config(tree)


class WorkerBench:
    """Rollout workers in front of a simulated engine that decodes a token in 10 ms."""

    def __init__(
        self,
        loop: str = "OneTurn",
        *,
        delay_s: float = 0.001,
        journals: Path | None = None,
        node: str | None = None,
        num_tokens: int | None = None,
        **rollout: Any,
    ) -> None:
        """Let answers have `num_tokens` tokens, and never end if these are more than they may have."""
        long = {} if num_tokens is None else {"max_context_tokens": 4096, "max_new_tokens": 4000}
        self.config = config_of(loop, **(long | rollout))
        self.policy = Watched(stop_at=[17, 23] if num_tokens is None else [num_tokens])
        self.bench = Bench(simulated(self.policy, decode_step_s=0.01, prefill_tokens_per_s=1e9))
        self.metrics = self.bench.metrics
        chat = cast(ChatFormat, PlainChat())
        self._folder = tempfile.TemporaryDirectory()
        self.spool = Spool(Path(self._folder.name) / "spool", None)
        self.inspected = InspectedTrajectories(Path(self._folder.name) / "trajectories")
        self.processes = SimulatedWorkers(0, chat, self.bench.engines, FACTS, delay_s=lambda: delay_s)
        self.clock = asyncio.get_running_loop().time
        self.folders = None if journals is None else JournalFolders(journals, 1, {}, node=node)
        self.backend = WorkerBackend(
            self.config,
            self.processes.open,
            self.metrics,
            {"": self.bench.pool},
            self.clock,
            self.spool,
            self.folders,
            inspected=self.inspected,
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> WorkerBench:
        await self._stack.enter_async_context(self.backend)
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._stack.aclose()
        finally:
            self._folder.cleanup()

    def local_backend(self) -> LocalBackend:
        """The backend that runs loops in this process."""
        return LocalBackend(self.context, self.spool, self.inspected)

    async def run(self, of: Attempt | None = None) -> AttemptEnd:
        """Run an attempt in a worker."""
        return await self.backend.run_attempt(of or attempt())

    async def trajectories(
        self, of: Attempt | None = None, backend: RolloutBackend | None = None
    ) -> tuple[Trajectory, ...]:
        """Run an attempt, and return what it makes."""
        end = await (backend or self.backend).run_attempt(of or attempt())
        kept = [self.inspected.read_file(each.trajectory_id, 1) for each in end.trajectories]
        for stored in end.trajectories:
            verify_frame(stored)
        return tuple(each.trajectory for each in kept)

    def attempt(self, known: Mapping[str, TrajectoryProgress] | None = None) -> Attempt:
        """An attempt that is journalled, and that continues if something is known of it."""
        assert self.folders is not None
        name, folders = "0" * 32, self.folders
        claim = folders.claim_trajectory(name, (known or {}).values())
        return Attempt(
            TASK,
            name,
            "g",
            1,
            started_s=0.0,
            claim=claim,
            known=known or {},
            on_start=lambda folder: folders.record_owner(name, claim, folder),
        )

    @property
    def context(self) -> SessionContext:
        """What sessions of this process share."""
        return replace(self.bench.context, config=self.config)


def attempt(name: str = "0" * 32, group: str = "g") -> Attempt:
    """An attempt that a backend can run."""
    return Attempt(TASK, name, group, 1, started_s=0.0)


def timeless(trajectory: Trajectory) -> tuple[Any, ...]:
    """Return everything of a trajectory that does not depend on timing."""
    outcome = trajectory.outcome
    turns = [(t.start, t.end, t.finish_reason, t.metadata) for t in trajectory.turns]
    segments = [(type(s).__name__, s.token_ids.tolist()) for s in trajectory.segments]
    counts = (outcome.stop_reason, outcome.num_turns, outcome.num_tool_calls, outcome.num_tool_errors)
    return trajectory.trajectory_id, segments, turns, counts, outcome.reward_parts, trajectory.num_inherited


@pytest.mark.parametrize("loop", ["Everything", "TooTalkative"])
async def test_trajectories_are_the_same_wherever_the_loop_runs(loop: str) -> None:
    async with WorkerBench(loop) as workers:
        there = await workers.trajectories()
    async with WorkerBench(loop) as workers, workers.local_backend() as here:
        local = await workers.trajectories(backend=here)
    assert [timeless(trajectory) for trajectory in there] == [timeless(trajectory) for trajectory in local]
    if loop == "TooTalkative":
        assert [t.outcome.stop_reason for t in there] == ["length"]
        return
    assert [len(t.trajectory_id.split(".")) for t in there] == [1, 2, 3, 2]
    assert there[0].turns[0].metadata["length"] == 4
    assert len({trajectory.outcome.reward for trajectory in there}) == 1  # one reward source


async def test_attempts_go_to_workers_on_nodes_that_answer() -> None:
    async with WorkerBench(num_workers=2) as workers:
        await workers.trajectories()
        gone, there = workers.backend.workers.values()
        gone.link.peer_node = "gone"
        workers.spool.absent.add("gone")
        assert await folders_of_four_attempts(workers) == {there.output_folders[0]}


async def folders_of_four_attempts(workers: WorkerBench) -> set[str]:
    """Run attempts at the same time; return the folders of their frames."""
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(workers.run(attempt(f"{number:032x}"))) for number in range(4)]
    return {os.path.dirname(each.path) for run in runs for each in run.result().trajectories}


async def test_attempts_go_to_workers_on_nodes_that_have_space() -> None:
    async with WorkerBench(num_workers=2) as workers:
        await workers.trajectories()
        full, other = workers.backend.workers.values()
        full.frame_node = full.link.peer_node = "full"
        workers.processes.on_full_disk = lambda: None
        with pytest.raises(SpoolFull):
            await workers.run()
        workers.processes.on_full_disk = None
        assert workers.backend.has_space_elsewhere
        assert await folders_of_four_attempts(workers) == {other.output_folders[0]}
        other.frame_node = other.link.peer_node = "full"
        assert not workers.backend.has_space_elsewhere


@pytest.mark.real
async def test_a_long_hold_of_all_engines_counts_against_no_limit_in_a_worker() -> None:
    loop = asyncio.get_running_loop()
    async with WorkerBench("Everything", trajectory_timeout_s=5.0) as workers:
        engine_id = workers.bench.engines[0].engine_id
        loop.call_later(0.02, workers.bench.pool.hold_engine, engine_id)  # the next call waits
        loop.call_later(1000.0, workers.bench.pool.serve_engine, engine_id, 0)
        assert len(await workers.trajectories()) == 4
    assert loop.time() > 1000.0


@pytest.mark.real
@pytest.mark.parametrize("how", ["kill", "mute", "cut_off"])
async def test_a_tick_of_tokens_is_lost_at_most_when_a_worker_ends_in_a_turn(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is cut off keeps sampling and writing for as long as its grants last."""
    monkeypatch.setattr(simulated_workers, "CUT_OFF_S", 0.0)
    async with WorkerBench(num_workers=2, journals=tmp_path, num_tokens=1500) as workers:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            first = workers.attempt()
            playing = tasks.create_task(_lost(workers.run(first)))
            await workers.policy.reaches(257)
            end = getattr(workers.processes, how)
            assert sum(map(end, (0, 1))) == 2  # one of them has it
            begin_s = loop.time()
            error = await playing
        lasted_s = loop.time() - begin_s
        assert lasted_s < 1.0 if how == "kill" else 7.0 < lasted_s < 11.0  # worker_stall_s, in ticks of 1 s
        assert "rollout-worker-" in str(error)
        (known,) = first.progress.values()
        assert (known.oldest_version, known.newest_version) == (0, 0)
        assert 250 * 4 // 5 - 90 < known.num_sampled_tokens <= 250  # reported when it has grown by a quarter
        (trajectory,) = await workers.trajectories(workers.attempt(first.progress))
        restarts = workers.bench.counted("rollout_worker_restarts_total")
        await asyncio.sleep(1.0)  # the counters of workers arrive with a heartbeat
        resumed = workers.bench.counted("resumed_tokens_total")
    assert len(trajectory.token_ids) == 1500
    assert restarts == 2
    if how == "kill":
        assert 250 - 101 <= resumed <= 250  # a token takes 10 ms, a tick of the journal 1 s
    else:
        assert 250 + 600 < resumed < 1500  # it was sampling when the other one took over
    assert workers.bench.counted("engine_quarantined_total", engine="engine-0") == 0.0


async def test_attempts_that_go_on_from_the_same_journals_share_a_worker(tmp_path: Path) -> None:
    """After a restart each worker reads the journals of one worker before, and not of all."""
    async with WorkerBench(
        num_workers=3, journals=tmp_path, num_tokens=9999, max_concurrent_trajectories=12
    ) as workers:
        await asyncio.sleep(1.0)
        found: dict[str, set[str]] = {"a": set(), "b": set(), "c": set()}
        async with asyncio.TaskGroup() as tasks:
            running = []
            for number, journal in enumerate("abcabcabcabc"):
                sources = (JournalSource(folder=str(tmp_path / journal)),)
                claim = JournalClaim(owner_epoch=number + 1, sources=sources)
                each = Attempt(TASK, f"{number:032}", f"g{number}", 1, started_s=0.0, claim=claim)
                running.append(tasks.create_task(workers.run(each)))
                await asyncio.sleep(0)
                (owner,) = (w for w in workers.backend.workers.values() if each in w.attempts.values())
                found[journal].add(owner.name)
            for task in running:
                task.cancel()
        assert sorted(map(len, found.values())) == [1, 1, 1]
        assert len(set.union(*found.values())) == 3


@pytest.mark.parametrize("worker", ["comes back", "comes up elsewhere", "does not start"])
async def test_an_attempt_goes_on_at_the_node_that_has_its_journal(worker: str, tmp_path: Path) -> None:
    started: list[str] = []

    def node_of(name: str) -> str:
        started.append(name)
        if started.count(name) == 1 or worker == "comes back":
            return f"node of {name}"
        if worker == "does not start" and started.count(name) == 2:
            raise EnvironmentNotReady("there is no such node")
        return "another node"

    def busy() -> list[str]:
        return [each.name for each in workers.backend.workers.values() if each.attempts]

    workers = WorkerBench(num_workers=2, journals=tmp_path, node="driver", num_tokens=1500)
    workers.processes.nodes.node_of = node_of  # type: ignore[method-assign]
    async with workers, asyncio.TaskGroup() as tasks:
        first = workers.attempt()
        playing = tasks.create_task(_lost(workers.run(first)))
        await workers.policy.reaches(257)
        (lost,) = busy()
        workers.processes.kill(sorted(workers.processes.ends).index(lost))
        await playing
        going_on = tasks.create_task(workers.trajectories(workers.attempt(first.progress)))
        await asyncio.sleep(0.3)
        assert not busy()  # it waits for a worker that may come up there
        await asyncio.sleep(1.0)
        (owner,) = busy()
        assert worker != "comes back" or owner == lost
        assert worker != "does not start" or owner != lost
        (trajectory,) = await going_on
    assert len(trajectory.token_ids) == 1500


async def lose_attempts(workers: WorkerBench) -> None:
    """Run attempts for ten minutes, two at a time, each of which loses its worker."""

    async def lose(name: str) -> None:
        while True:
            await _lost(workers.run(attempt(name)))

    async with workers, asyncio.timeout(600.0), asyncio.TaskGroup() as tasks:
        tasks.create_task(lose("0" * 32))
        tasks.create_task(lose("1" * 32))


async def test_the_run_ends_with_the_cause_when_the_loop_cannot_be_entered_in_any_worker() -> None:
    CannotEnter.failures = 100
    with pytest.raises(ExceptionGroup) as errors:
        await lose_attempts(WorkerBench("CannotEnter", num_workers=2))
    error = first_error(errors.value)
    assert isinstance(error, EnvironmentNotReady)
    assert "the search server is down" in str(error)


async def test_a_worker_is_started_again_when_its_loop_could_not_be_entered_for_a_while() -> None:
    CannotEnter.failures = 2
    async with WorkerBench("CannotEnter") as workers:
        for _ in range(2):
            await _lost(workers.run())
        (trajectory,) = await workers.trajectories()
        assert len(trajectory.token_ids) > 1
    assert CannotEnter.failures == 0


NO_PLACE = EnvironmentNotReady("no node has enough of {'CPU': 64}")
BROKEN_CODE = ConfigError("my_rewards.py: invalid syntax")


def leave_no_place(workers: WorkerBench, names: Set[str], error: Exception = NO_PLACE) -> None:
    """Let workers of these names find no node to start on, or fail to start otherwise."""
    node_of = workers.processes.nodes.node_of

    def place(name: str) -> str:
        if name in names:
            raise error
        return node_of(name)

    workers.processes.nodes.node_of = place  # type: ignore[method-assign]


@pytest.mark.parametrize("error", [NO_PLACE, BROKEN_CODE], ids=["no place", "broken code"])
async def test_the_run_goes_on_when_one_worker_cannot_start_again_for_a_while(error: Exception) -> None:
    """Its node has left, and the others have no resources for it; or its file is being edited."""
    left: set[str] = set()
    workers = WorkerBench(num_workers=2)
    leave_no_place(workers, left, error)
    async with workers:
        await workers.trajectories()
        left.add(sorted(workers.processes.ends)[0])
        workers.processes.kill(0)
        await asyncio.sleep(600.0)
        assert len(workers.backend.workers) == 1
        await workers.trajectories()
        left.clear()
        await asyncio.sleep(60.0)
        assert len(workers.backend.workers) == 2


async def test_a_worker_that_handles_no_messages_is_given_up() -> None:
    """Its grants expire then, for which an interruption of its engine waits."""
    async with WorkerBench(num_tokens=4000) as workers, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(_lost(workers.run()))
        await workers.policy.reaches(100)
        assert workers.processes.deafen(0)
        pool, engine = workers.bench.pool, workers.bench.engines[0]
        pool.hold_engine(engine.engine_id)
        begin_s = workers.clock()
        await pool.interrupt_engine(engine, "abort")
        assert 7.0 < workers.clock() - begin_s < 22.0  # worker_stall_s, then the grants
        assert "it has not answered for rollout.worker_stall_s" in str(await running)
        pool.serve_engine(engine.engine_id, 0)
        await workers.trajectories()


async def test_a_worker_that_is_slow_to_handle_messages_is_not_given_up() -> None:
    async with WorkerBench(delay_s=3.0) as workers:  # its answers arrive 6 s later
        await asyncio.sleep(60.0)
        await workers.trajectories()
        assert len(workers.processes.metrics) == 1  # the first incarnation


async def test_heartbeats_carry_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    lengths: list[int] = []

    def encode(message: Message) -> bytes:
        encoded = messages.encode(message)
        if isinstance(message, Heartbeat):
            sizes.append(len(encoded))
            lengths.extend(each.report.num_sampled_tokens for each in message.progress)
        return encoded

    monkeypatch.setattr(simulated_workers, "encode", encode)
    async with WorkerBench(journals=tmp_path, num_tokens=1500) as workers:
        await workers.trajectories(workers.attempt())
    assert len(sizes) > 50
    assert median(sizes) < 400
    assert 3 < len(lengths) < 8, "a trajectory is reported when it has changed enough"


async def test_the_run_ends_with_one_error_when_the_disk_is_full_under_the_journal_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def refuse(file: int, data: Any) -> int:
        if str(tmp_path) in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", refuse)
    begin_s = asyncio.get_running_loop().time()

    async def run() -> None:
        async with WorkerBench(journals=tmp_path) as workers:
            await workers.run(workers.attempt())
            await asyncio.sleep(100.0)

    with pytest.raises(ExceptionGroup) as errors:
        await run()
    error = first_error(errors.value)
    assert isinstance(error, SpoolFull)
    assert "000001-rollout-worker-0-" in str(error)
    assert "the disk is full" in str(error)
    assert asyncio.get_running_loop().time() - begin_s > 30.0, "it waits for space first"


async def test_a_worker_keeps_a_finished_attempt_until_the_ledger_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_COMPACT_BYTES", 0)
    monkeypatch.setattr(journal_module, "_GROWTH", 0)  # every write compacts
    async with WorkerBench(journals=tmp_path / "journal") as workers:
        await workers.run(workers.attempt())
        await asyncio.sleep(5.0)
        (folder,) = (tmp_path / "journal").iterdir()
        (left,) = read_journal(folder)[0].values()
        assert left.num_sampled_tokens > 0
        assert workers.folders is not None
        workers.folders.release_trajectories([left.trajectory_id])
        await asyncio.sleep(5.0)
        assert read_journal(folder)[0], "the ledger was not written yet"
        workers.folders.notify_owners(workers.folders.take_released())
        await asyncio.sleep(5.0)
        assert read_journal(folder)[0] == {}


async def test_grants_of_a_worker_that_may_still_run_are_kept_until_they_expire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulated_workers, "CUT_OFF_S", 0.0)  # the driver gives up to end its process
    loop = asyncio.get_running_loop()
    async with WorkerBench(max_new_tokens=40, worker_stall_s=2.0) as workers:
        workers.policy.stop_at = frozenset()
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(_lost(workers.run()))
            await workers.policy.reaches(20)
            (lost,) = workers.backend.workers.values()
            workers.processes.cut_off(0)
            begin_s = loop.time()
            await playing
        assert loop.time() - begin_s < 4.0  # the attempt continues elsewhere at once
        await asyncio.sleep(9.0 - (loop.time() - begin_s))
        assert lost.grants in workers.bench.pool.holders
        await asyncio.sleep(3.0)
        assert lost.grants not in workers.bench.pool.holders


async def _lost(work: Any) -> WorkerLost:
    with pytest.raises(WorkerLost) as error:
        await work
    return error.value


async def test_an_attempt_ends_when_its_loop_swallows_the_cancellation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Swallows.caught.clear()
    async with WorkerBench("Swallows") as workers:
        for count in (1, 2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.055):
                    await workers.run()
            await asyncio.sleep(1.0)
            assert Swallows.caught == ["CancelledError", "RuntimeError"] * count
        assert len(workers.processes.metrics) == 1  # the worker continues
    assert sum("does not end when it is cancelled" in message for message in caplog.messages) == 1


async def test_a_task_that_no_message_can_hold_fails_and_leaves_nothing_in_the_driver() -> None:
    """Else its attempts would count for their worker, which in the end would be given no others."""
    task = Task(task_id="t", messages=TASK.messages, answer=2**70)
    async with WorkerBench() as workers:
        await asyncio.sleep(1.0)
        with pytest.raises(RolloutError, match=r"task t cannot be sent .* of more than 64 bits"):
            await workers.run(Attempt(task, "0" * 32, "g", 1, started_s=0.0))
        with pytest.raises(RolloutError, match="64 bits"):
            await workers.backend.score_group(task, [])
        (worker,) = workers.backend.workers.values()
        assert (worker.inboxes, worker.attempts) == ({}, {})
        await workers.run()
        assert len(workers.processes.metrics) == 1


@pytest.mark.parametrize(
    ("loop", "reward", "words"),
    [
        ("OneTurn", "quoting_reward", r"no unit \?"),
        ("OneTurn", "named_by_policy", "surrogates not allowed"),
        ("UsesHalfATool", "reward", None),
        ("AddsObject", "group_reward", "object"),
    ],
)
async def test_a_worker_goes_on_when_user_code_makes_what_no_message_can_hold(
    loop: str, reward: str, words: str | None
) -> None:
    async with WorkerBench(loop, reward=f"{HERE}:{reward}") as workers:
        with nullcontext() if words is None else pytest.raises(RolloutError, match=words):
            end = await workers.run()
            for score in await workers.backend.score_group(TASK, end.completions) if end.unscored else ():
                if isinstance(score, RewardError):
                    raise score
        await asyncio.sleep(1.0)
        assert len(workers.processes.metrics) == 1


async def test_an_attempt_fails_when_its_code_is_cancelled_by_others() -> None:
    async with WorkerBench("AwaitsWhatOthersCancel") as workers, asyncio.timeout(60.0):
        with pytest.raises(RolloutError):
            await workers.run()


async def test_a_run_does_not_start_when_a_worker_cannot_load_its_code() -> None:
    workers = WorkerBench(num_workers=2)
    leave_no_place(workers, {"rollout-worker-0"}, BROKEN_CODE)
    with pytest.raises(ExceptionGroup) as errors:
        async with workers:
            await asyncio.sleep(60.0)
    assert isinstance(first_error(errors.value), ConfigError)


@pytest.mark.parametrize(("loop", "in_call"), [("OneTurn", True), ("Swallows", False)])
async def test_an_attempt_knows_whether_it_waited_for_an_engine_when_its_worker_ended(
    loop: str, in_call: bool
) -> None:
    async with WorkerBench(loop, num_tokens=9999) as workers:
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(_lost(workers.run()))
            await asyncio.sleep(5.0)
            workers.processes.kill(0)
        assert playing.result().is_excused == in_call


def test_only_attempts_that_may_have_ended_their_workers_fail_by_it() -> None:
    def goes_on(*losses: tuple[int, bool]) -> list[bool]:
        """Lose a worker after so many tokens, while it waited for an engine or not."""
        count, ours = LostWorkers(), attempt()
        results = []
        for num_tokens, in_call in losses:
            ours.progress[ours.trajectory_id] = ProgressReport(num_sampled_tokens=num_tokens)
            lost = WorkerLost("it was killed")
            lost.is_excused = in_call
            results.append(count.may_go_on(lost, ours))
        return results

    assert goes_on(*[(0, False)] * 3) == [True, True, False]
    assert goes_on(*[(0, True)] * 29) == [True] * 29
    assert goes_on(*[(0, True)] * 30)[-1] is False
    assert goes_on((5, False), (5, False), (9, False), (9, False), (9, False)) == [True] * 4 + [False]
    assert goes_on((9, False), (5, False), (9, False)) == [True, True, False]  # it samples the same again
    assert not LostWorkers().may_go_on(RewardError("none"), attempt())


async def test_workers_are_not_restarted_when_the_driver_stalls() -> None:
    async with WorkerBench() as workers:
        await asyncio.sleep(1.0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        for _ in range(5):
            loop.jump(100.0)
            await asyncio.sleep(0.5)
        await workers.run()
        assert len(workers.processes.metrics) == 1  # the first incarnation


def test_errors_keep_their_class_when_they_cross_the_link() -> None:
    for error in (PromptTooLong("long"), RewardError("none")):
        there = Failure.of(error).error
        assert type(there) is type(error)
        assert str(there) == str(error)
    assert type(Failure.of(OurOwnError("own")).error) is AgentLoopError
    assert "KeyError" in str(Failure.of(KeyError("k")).error)
    try:
        raise AgentLoopError("no file") from OSError(errno.EMFILE, "Too many open files")
    except AgentLoopError as error:
        lost = msgspec.msgpack.decode(msgspec.msgpack.encode(Failure.of(error)), type=Failure)
    assert is_shortage(lost.error)  # the attempt is made again instead of counted as failed


async def test_a_group_is_scored_by_another_worker_when_one_ends() -> None:
    """The completion is that of a worker that has ended; then the worker ends that was asked first."""
    async with WorkerBench(num_workers=3, reward=f"{HERE}:group_reward") as workers:
        end = await workers.run()
        (trajectory,), (unscored,) = end.trajectories, end.unscored
        assert unscored.trajectory_id == unscored.reward_source == trajectory.trajectory_id
        writer = Path(trajectory.path).parent.name.partition("-")[2]
        workers.processes.ends[writer].lose("it was killed")
        await asyncio.sleep(0.1)
        assert writer not in workers.backend.workers
        token_ids = read_columns(trajectory)["token_ids"]
        async with asyncio.TaskGroup() as tasks:
            scoring = tasks.create_task(workers.backend.score_group(TASK, [unscored.completion] * 2))
            await asyncio.sleep(0)  # it has asked a worker
            (busy,) = (w.name for w in workers.backend.workers.values() if w.inboxes)
            workers.processes.ends[busy].lose("it was killed")
        expected = float(token_ids.sum() % 89)
        assert await scoring == [{"reward": expected}] * 2


async def test_a_group_is_scored_without_the_completions_that_are_damaged() -> None:
    async with WorkerBench(reward=f"{HERE}:group_reward") as workers:
        ends = [await workers.run(attempt(f"{number:032x}")) for number in range(4)]
        stored = [end.unscored[0].completion for end in ends]
        damaged = bytearray(Path(stored[0].path).read_bytes())
        damaged[-1] ^= 1
        Path(stored[0].path).write_bytes(damaged)
        codec.write_frame(stored[2].path, Completion(messages=[], text="", stop_reason="completed"))
        Path(stored[3].path).unlink()
        flawed, scored, other, lost = await workers.backend.score_group(TASK, stored)
        token_ids = read_columns(ends[1].trajectories[0])["token_ids"]
        assert scored == {"reward": float(token_ids.sum() % 89)}
        for error, words in ((flawed, "checksum"), (other, "another"), (lost, "does not exist")):
            assert isinstance(error, RewardError)
            assert words in str(error)


def frames_in(spool: Spool) -> list[Path]:
    """All files of a spool."""
    return list(spool.directory.glob("*/*"))


async def test_frames_outlive_their_worker_and_those_that_it_never_reported_do_not() -> None:
    async with WorkerBench() as workers:
        kept = (await workers.run()).trajectories
        workers.processes.on_kill_after_frame = lambda: None
        await _lost(workers.run(attempt(name="1" * 32)))
        assert len(frames_in(workers.spool)) == 2
        await asyncio.sleep(1.0)  # its process has ended
        assert [str(path) for path in frames_in(workers.spool)] == [kept[0].path]
        again = (await workers.run(attempt(name="1" * 32))).trajectories
        assert Path(again[0].path).parent != Path(kept[0].path).parent


@pytest.mark.parametrize("reward", ["reward", "group_reward"])
@pytest.mark.parametrize("late_s", [0.0, 0.5])
async def test_no_frame_is_left_of_an_attempt_that_is_not_wanted_any_more(late_s: float, reward: str) -> None:
    """A straggler is dropped when its answer is under way, or has just arrived."""
    async with WorkerBench(delay_s=late_s / 2, reward=f"{HERE}:{reward}") as workers:
        stored = asyncio.Event()
        workers.processes.on_store = stored.set
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(workers.run())
            await stored.wait()
            if not late_s:
                (worker,) = workers.backend.workers.values()
                (inbox,) = worker.inboxes.values()
                while inbox.message is None:  # noqa: ASYNC110  # to the callback
                    await asyncio.sleep(0)
            playing.cancel()
        assert playing.cancelled()
        await asyncio.sleep(1.0)
        assert value_of(workers.metrics.late_results_total) == 1
        assert len(frames_in(workers.spool)) == (1 if reward == "reward" else 2)
        workers.spool.delete_discarded()
        assert frames_in(workers.spool) == []


@pytest.mark.parametrize("named", ["frame", "completion"])
async def test_a_worker_is_given_up_that_names_a_file_outside_its_folder(tmp_path: Path, named: str) -> None:
    async with WorkerBench() as workers:
        frame = tmp_path / "ledger.sqlite"
        frame.write_bytes(b"")
        await asyncio.sleep(0.1)
        if named == "frame":
            end = AttemptEnd(trajectories=(StoredTrajectory.of(make_trajectory("t"), path=str(frame)),))
        else:
            completion = StoredCompletion(path=str(frame), nbytes=1, checksum=0)
            unscored = UnscoredTrajectory(
                trajectory_id="t", attempt=1, reward_source="t", completion=completion
            )
            end = AttemptEnd(trajectories=(), unscored=(unscored,))
        (link,) = workers.processes.ends.values()
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(_lost(workers.run()))
            await asyncio.sleep(0.01)
            (worker,) = workers.backend.workers.values()
            link.post(AttemptEnded(request_id=next(iter(worker.inboxes)), end=end))
            assert "not in its folder" in str(await playing)
        workers.spool.delete_discarded()
        assert frame.exists()


def _wrong_messages(request_id: int, own: str, folder: str) -> dict[str, Message]:
    """Return messages that do not fit a request for the trajectory `own`."""

    def end(name: str, file: str) -> AttemptEnd:
        stored = StoredTrajectory.of(make_trajectory(name), path=f"{folder}/{file}")
        return AttemptEnd(trajectories=(msgspec.structs.replace(stored, group_id="g"),))

    lie = Failure(kind="AgentLoopError", text="a lie")
    right = end(own, f"{own}-0")
    progress = AttemptProgress(request_id=request_id, trajectory_id="other", report=ProgressReport())
    count = MetricIncrement(name="tool_calls_total", labels=("too", "many", "labels"), value=1.0)
    histogram = MetricIncrement(name="tool_seconds", labels=("search",), value=1.0)
    buckets = MetricIncrement(name="sampled_tokens_total", labels=(), value=1.0, buckets=(1.0,))
    return {
        "unknown request": AttemptEnded(request_id=99, end=right),
        "other trajectory": AttemptEnded(request_id=request_id, end=end("other", "other-0")),
        "file of another": AttemptEnded(request_id=request_id, end=end(own, "other-0")),
        "twice": AttemptEnded(request_id=request_id, end=AttemptEnd(trajectories=right.trajectories * 2)),
        "failure of another": AttemptFailed(
            request_id=request_id, failure=lie, trajectory=end("other", "other-0").trajectories[0]
        ),
        "scores": GroupScored(request_id=request_id),
        "progress": Heartbeat(progress=(progress,)),
        "counts": Heartbeat(increments=(count,)),
        "count of another type": Heartbeat(increments=(histogram,)),
        "buckets of a counter": Heartbeat(increments=(buckets,)),
        "message of the driver": CancelRequest(request_id=request_id),
    }


@pytest.mark.parametrize("wrong", _wrong_messages(1, "t", ""))
async def test_a_worker_is_given_up_that_sends_what_fits_no_request(wrong: str) -> None:
    async with WorkerBench() as workers:
        await asyncio.sleep(0.1)
        (link,) = workers.processes.ends.values()
        async with asyncio.TaskGroup() as tasks:
            playing = tasks.create_task(_lost(workers.run()))
            await asyncio.sleep(0.01)
            (worker,) = workers.backend.workers.values()
            ((request_id, running),) = worker.attempts.items()
            assert running.group_id == "g"
            link.post(_wrong_messages(request_id, running.trajectory_id, worker.output_folders[0])[wrong])
            assert "it sent" in str(await playing)


class LacksPackage(OneTurn):
    """Raises at once in one worker, or in all of them for one task."""

    bad: ClassVar[Callable[[Task], bool]]

    async def run(self, task: Task, session: Session) -> None:
        if LacksPackage.bad(task):
            raise ImportError("No module named 'solver'")
        await super().run(task, session)


async def run_in_any(workers: WorkerBench, task_id: str, name: str) -> AttemptEnd:
    """Run an attempt as the rollout manager does, which makes it again when its worker is lost."""
    task, losses = msgspec.structs.replace(TASK, task_id=task_id), LostWorkers()
    while True:
        of = Attempt(task, name, name, 1, started_s=0.0)
        try:
            return await workers.run(of)
        except WorkerLost as error:
            if not losses.may_go_on(error, of):
                raise


async def test_a_worker_is_ended_when_loops_raise_at_once_in_it_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    LacksPackage.bad = lambda task: bad_environment.get()()
    async with WorkerBench("LacksPackage", num_workers=2, max_concurrent_trajectories=8) as workers:
        await asyncio.sleep(0.1)
        workers.processes.spoil_environment(0, 1e6, lambda: None)
        for first in range(0, 40, 8):
            async with asyncio.TaskGroup() as tasks:
                for number in range(first, first + 8):
                    tasks.create_task(run_in_any(workers, f"t{number}", f"{number:032x}"))
    assert "rollout-worker-0: its attempts fail, unlike those of other workers" in caplog.text
    assert "rollout-worker-1" not in caplog.text
    assert value_of(workers.metrics.rollout_worker_restarts_total) >= 1


class RunsToolsOrLacksPackage(OneTurn):
    """Runs a tool that takes hours for one task, and raises at once in one worker for the others."""

    async def run(self, task: Task, session: Session) -> None:
        if task.task_id == "tool":
            await asyncio.sleep(1e5)
        if bad_environment.get()():
            raise ImportError("No module named 'solver'")
        await super().run(task, session)


async def test_attempts_are_excused_when_their_worker_is_ended_for_what_its_node_lacks() -> None:
    async with (
        WorkerBench("RunsToolsOrLacksPackage", num_workers=2, max_concurrent_trajectories=8) as workers,
        Nursery() as nursery,
    ):
        await asyncio.sleep(0.1)
        workers.processes.spoil_environment(0, 1e6, lambda: None)
        task = msgspec.structs.replace(TASK, task_id="tool")
        with_tools = [
            nursery.start_task(name, _lost(workers.run(Attempt(task, name, name, 1, started_s=0.0))))
            for name in (f"{number:032x}" for number in (100, 101))
        ]
        await asyncio.sleep(0.1)
        for number in range(8):
            await run_in_any(workers, f"t{number}", f"{number:032x}")
        assert value_of(workers.metrics.rollout_worker_restarts_total) == 1
        (lost,) = (task.result() for task in with_tools if task.done())
        assert lost.is_excused
        nursery.cancel_tasks()


class LacksProxy(OneTurn):
    """Raises after its turn in one worker."""

    async def run(self, task: Task, session: Session) -> None:
        await super().run(task, session)
        if bad_environment.get()():
            raise ConnectionRefusedError("no proxy")


async def test_a_worker_is_ended_when_attempts_fail_in_it_alone_and_each_is_tried_in_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with WorkerBench("LacksProxy", num_workers=3, max_concurrent_trajectories=8) as workers:
        await asyncio.sleep(1.0)
        workers.processes.spoil_environment(0, 1e6, lambda: None)
        failed = 0
        for number in range(48):
            name = f"{number:032x}"
            try:
                await run_in_any(workers, "t", name)
            except RolloutError:
                failed += 1
                await run_in_any(workers, "t", name)  # in another worker
        assert "rollout-worker-0: its attempts fail, unlike those of other workers" in caplog.text
        assert "no proxy" in caplog.text
    assert failed >= 8
    assert "rollout-worker-1" not in caplog.text


def test_no_worker_is_to_blame_for_what_fails_everywhere() -> None:
    workers, names = FailingWorkers(), ["w0", "w1", "w2"]
    for number in range(100):
        for name in names:
            if number % 4 == 3 and name != "w0":
                workers.record_success(name)
            else:
                workers.record_failure(name, f"{number}", f"{number}", at_once=False)
    assert not workers.is_to_blame("w0", names[1:])
    for _ in range(16):
        workers.record_success("w1")
    assert workers.is_to_blame("w0", ["w1"])
    assert not workers.is_to_blame("w0", ["w1"])  # it is judged anew


def test_a_worker_is_to_blame_for_what_fails_in_it_while_the_only_good_one_starts_again() -> None:
    workers = FailingWorkers()
    workers.record_sampling("w1")  # it has ended since
    for number in range(3):
        assert not workers.is_to_blame("w0", ["w1"])
        workers.record_failure("w0", f"{number}", f"{number}", at_once=True)
    assert workers.is_to_blame("w0", ["w1"])


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EACCES])
async def test_a_worker_whose_disk_fails_is_replaced_and_no_sample_is_lost(
    number: int, tmp_path: Path
) -> None:
    async with WorkerBench(num_workers=2, journals=tmp_path / "journal") as workers:
        await asyncio.sleep(1.0)
        folder = workers.processes._running["rollout-worker-0"]._backend._frames

        def refuse(tree: object) -> Any:
            error = OSError(number, os.strerror(number))
            raise SpoolFull("the folder cannot take 9 bytes") from error

        folder.store_tree = refuse  # type: ignore[method-assign]
        first = workers.attempt()
        lost = await _lost(workers.run(first))
        assert lost.is_excused
        end = await workers.run(workers.attempt(first.progress))
        sampled = sum(value_of(each.sampled_tokens_total) for each in workers.processes.metrics)
        assert [each.num_sampled_tokens for each in end.trajectories] == [sampled]
        assert value_of(workers.metrics.rollout_worker_restarts_total) == 1


async def test_a_task_fails_and_ends_no_worker_when_its_loop_raises_at_once_in_all_of_them() -> None:
    LacksPackage.bad = lambda task: task.task_id == "broken"
    async with WorkerBench("LacksPackage", num_workers=3, max_concurrent_trajectories=8) as workers:
        await asyncio.sleep(0.1)
        for number in range(8):
            with pytest.raises(AgentLoopError, match="solver"):
                await run_in_any(workers, "broken", f"{number:032x}")
            await run_in_any(workers, "fine", f"{number + 100:032x}")
    assert value_of(workers.metrics.rollout_worker_restarts_total) == 0


async def test_no_worker_runs_more_attempts_than_its_memory_is_planned_for() -> None:
    async with WorkerBench(num_workers=3, max_concurrent_trajectories=6) as workers:
        await asyncio.sleep(0.1)
        workers.bench.pool.hold_engine("engine-0")
        async with asyncio.TaskGroup() as tasks:
            for number in range(12):
                tasks.create_task(workers.run(attempt(name=f"{number:032x}")))
            await asyncio.sleep(1.0)
            assert [len(worker.attempts) for worker in workers.backend.workers.values()] == [3, 3, 3]
            workers.bench.pool.serve_engine("engine-0", 0)
        assert len(frames_in(workers.spool)) == 12


@pytest.mark.parametrize(("slots", "siblings"), [(384, [4, 0, 4, 0, 4]), (96, [2, 2, 2, 2, 2])])
async def test_siblings_share_a_worker_unless_that_overloads_it(slots: int, siblings: list[int]) -> None:
    """With 384 slots a worker may have 6 trajectories more than another one, with 96 slots 1."""
    async with WorkerBench(num_workers=2, max_concurrent_trajectories=slots, group_size=4) as workers:
        await asyncio.sleep(0.1)
        workers.bench.pool.hold_engine("engine-0")
        async with asyncio.TaskGroup() as tasks:
            first = workers.backend.workers["rollout-worker-0"]
            counts, total = [], 0
            for group in range(len(siblings)):
                for number in range(4):
                    name = f"{group:016x}{number:016x}"
                    tasks.create_task(workers.run(attempt(name, group=str(group))))
                    await asyncio.sleep(0.01)
                counts.append(len(first.attempts) - total)
                total += counts[-1]
            workers.bench.pool.serve_engine("engine-0", 0)
        assert counts == siblings


def test_counts_of_workers_are_added_to_those_of_the_driver() -> None:
    theirs, ours = Metrics(), Metrics()
    increments = IncrementCollector(theirs)
    ours.tool_calls_total.labels("search", "ok").inc()
    theirs.tool_calls_total.labels("search", "ok").inc(2)
    for seconds in (0.3, 700.0):
        theirs.tool_seconds.labels("search").observe(seconds)
        add_increments(increments.collect_increments(), ours)
    assert increments.collect_increments() == ()
    add_increments([MetricIncrement(name="of_another_version", labels=(), value=1.0)], ours)

    def counted(name: str, **labels: str) -> float | None:
        return ours.registry.get_sample_value(f"async_rl_{name}", {"tool": "search", **labels})

    assert counted("tool_calls_total", status="ok") == 3
    assert counted("tool_seconds_sum") == pytest.approx(700.3)
    assert counted("tool_seconds_bucket", le="0.5") == 1


async def test_trajectories_are_taken_for_as_old_as_they_may_be_until_their_worker_reports() -> None:
    """A call that began since the last heartbeat samples under weights that are about to change."""
    async with WorkerBench() as workers:
        await asyncio.sleep(1.0)
        ours = attempt()
        (worker,) = workers.backend.workers.values()
        worker.attempts[1], worker.inboxes[1] = ours, Inbox()
        worker.assume_sampling(3)
        assert ours.progress["0" * 32].oldest_version == 3
        report = ProgressReport(oldest_version=4, newest_version=5)
        worker.record_progress([AttemptProgress(request_id=1, trajectory_id="0" * 32, report=report)])
        assert ours.progress == {"0" * 32: report}
        worker.assume_sampling(3)
        (assumed,) = ours.progress.values()
        assert (assumed.oldest_version, assumed.newest_version) == (3, 5)
        del worker.inboxes[1]


def test_limits_of_rewards_are_divided_among_workers() -> None:
    judge = {"kind": "http", "url": "http://127.0.0.1:1", "max_concurrent": 64}
    slow = {"kind": "function", "function": f"{HERE}:reward", "max_concurrent": 1}
    config = config_of(num_workers=4, rewards={"judge": judge, "slow": slow})
    parted = config_per_worker(config).rollout.rewards
    assert {name: each.max_concurrent for name, each in parted.items()} == {"judge": 16, "slow": 1}


# -- links -----------------------------------------------------------------------------------------


@asynccontextmanager
async def connected_links() -> AsyncIterator[tuple[StreamLink, StreamLink]]:
    """Both ends of a link over a socket."""
    async with listen("127.0.0.1") as listener, asyncio.TaskGroup() as tasks:
        worker = tasks.create_task(connect_link("127.0.0.1", listener.port, listener.key))
        ours, theirs = await listener.accept_link(), await worker
    yield ours, theirs
    ours.close()
    theirs.close()


async def numbers_received(link: StreamLink, count: int) -> list[int]:
    """The numbers of requests that messages ask to cancel."""
    received = [await link.receive() for _ in range(count)]
    return [message.request_id for message in received if isinstance(message, CancelRequest)]


@pytest.mark.real_time  # real sockets
async def test_messages_arrive_whole_and_in_order_over_a_socket() -> None:
    task = Task(task_id="t", messages=TASK.messages, answer={"a": [1]})
    start = StartAttempt(request_id=1, task=task, trajectory_id="x", group_id="g", attempt=1)
    async with connected_links() as (ours, theirs):
        released = EntriesReleased(trajectory_ids=("é" * 100_000,))  # may wait for others
        for message in (start, released, CancelRequest(request_id=2)):
            ours.post(message)
        end = AttemptEnd(trajectories=())
        theirs.post(AttemptEnded(request_id=1, end=end))  # may wait for others
        theirs.post(Heartbeat())
        theirs.post(AttemptEnded(request_id=2, end=end))
        assert (await theirs.receive()).task == task  # type: ignore[attr-defined]
        assert len((await theirs.receive()).trajectory_ids[0]) == 100_000  # type: ignore[attr-defined]
        assert isinstance(await theirs.receive(), CancelRequest)
        names = [type(await ours.receive()).__name__ for _ in range(3)]
        assert names == ["AttemptEnded", "Heartbeat", "AttemptEnded"]
        theirs.post(CancelRequest(request_id=3))
        theirs.close()
        assert await numbers_received(ours, 1) == [3]  # what was posted before arrives
        with pytest.raises(WorkerLost):
            await ours.receive()


@pytest.mark.real_time  # real sockets
async def test_a_connection_is_refused_without_the_key() -> None:
    async with listen("127.0.0.1") as listener:
        with pytest.raises(EnvironmentNotReady):
            await connect_link("127.0.0.1", listener.port, b"another key")
        assert not listener.is_connected
        async with asyncio.TaskGroup() as tasks:
            worker = tasks.create_task(connect_link("127.0.0.1", listener.port, listener.key))
            (await listener.accept_link()).close()
        worker.result().close()


@pytest.mark.real_time  # real sockets
@pytest.mark.parametrize(
    "data", [struct.pack("<QQ", 1 << 40, 1), struct.pack("<QQ", 64, 1) + bytes(64), b"\x01"], ids=len
)
async def test_a_link_is_lost_when_an_invalid_message_comes(data: bytes) -> None:
    async with connected_links() as (ours, theirs):
        theirs.transport.write(data)
        theirs.transport.write_eof()
        with pytest.raises(WorkerLost):
            await ours.receive()


def numbered(number: int) -> bytes:
    """A message as a link writes it, which says its number."""
    frame = messages.encode(CancelRequest(request_id=number))
    return struct.pack("<QQ", len(frame), number) + frame


@pytest.mark.real_time  # real sockets
async def test_a_message_that_arrives_again_is_discarded() -> None:
    async with connected_links() as (ours, theirs):
        for number in (1, 1, 2, 3, 1, 2, 4):
            theirs.transport.write(numbered(number))
        assert await numbers_received(ours, 4) == [1, 2, 3, 4]


@pytest.mark.real_time  # real sockets
@pytest.mark.parametrize("numbers", [(1, 3), (2, 1), (1, 2, 2**64 - 1)], ids=str)
async def test_a_link_is_lost_when_a_message_is_missing_or_late(numbers: tuple[int, ...]) -> None:
    async with connected_links() as (ours, theirs):
        for number in numbers:
            theirs.transport.write(numbered(number))
        with pytest.raises(WorkerLost, match="messages are missing"):
            await numbers_received(ours, len(numbers))
