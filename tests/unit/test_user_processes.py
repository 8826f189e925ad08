"""Whatever user code starts ends with what started it, and is counted; nothing else is touched."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from async_rl.config import RolloutConfig
from async_rl.errors import AgentLoopError
from async_rl.observability.metrics import Metrics
from async_rl.rollout import attempt as attempt_module
from async_rl.rollout.attempt import run_agent_loop
from async_rl.rollout.loops import AgentLoops
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.user_processes import (
    MARK,
    ProcessScope,
    ReleasedBy,
    attempt_scope,
    end_leftovers,
    is_settled,
    read_reports,
    settle,
)
from async_rl.runtime.worker_processes import WorkerProcesses
from async_rl.types import Task
from tests.support.process_owner import STARTED, pids_in
from tests.support.sessions import Bench

pytestmark = pytest.mark.real_time

LIMIT_S = 60.0
"""Everything is gone within this time."""
ROOT = Path(__file__).parents[2]
TASK = Task(task_id="t", messages=[])
KINDS = [
    pytest.param(kind, marks=pytest.mark.needs("namespaces")) if kind == "sandbox" else kind
    for kind in STARTED
]


class Starting:
    """Starts processes, and ends as the test says."""

    folder: Path
    kind: str
    end: str
    started: asyncio.Event
    abandoned: asyncio.Future[Any]

    async def run(self, task: Any, session: Any) -> None:
        begin, count = STARTED[self.kind]
        running = type(self).abandoned = asyncio.ensure_future(begin(self.folder))
        try:
            await until(lambda: len(pids_in(self.folder)) == count or running.done())
            if running.done():
                running.result()
            self.started.set()
            if self.end == "raises":
                raise ValueError("a fault of the loop")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.end == "swallows":
                await asyncio.Event().wait()
            raise


def start_sleeper(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command or ["sleep", "1000"], stdout=subprocess.PIPE)


async def until(happened: Callable[[], bool]) -> None:
    """Poll a condition, because files and other processes raise no event."""
    async with asyncio.timeout(LIMIT_S):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def opened(pids: Iterable[int]) -> list[int]:
    return [os.pidfd_open(pid) for pid in pids]


def assert_gone(descriptors: list[int]) -> None:
    """Wait until processes have ended."""
    for descriptor in descriptors:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        assert poller.poll(1000 * LIMIT_S), "a process has outlived what started it"
        os.close(descriptor)


@contextmanager
def killed_at_the_end(folder: Path) -> Iterator[None]:
    """Leave nothing behind when a test fails."""
    try:
        yield
    finally:
        for pid in pids_in(folder):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def reaped(metrics: Metrics) -> dict[tuple[str, ...], float]:
    counted = metrics.user_processes_reaped_total.collect()[0].samples
    return {
        (s.labels["kind"], s.labels["reason"]): s.value
        for s in counted
        if s.name.endswith("_total") and s.value
    }


@contextmanager
def loops_of(end: str, kind: str, folder: Path) -> Iterator[tuple[AgentLoops, RolloutConfig, Metrics]]:
    Starting.folder, Starting.kind, Starting.end = folder, kind, end
    Starting.started = asyncio.Event()
    metrics = Metrics()
    config = msgspec.convert({"agent_loop": f"{__name__}:Starting", "max_context_tokens": 64}, RolloutConfig)
    with killed_at_the_end(folder):
        yield AgentLoops(config, metrics), config, metrics


@pytest.mark.real
@pytest.mark.parametrize("end", ["raises", "is cancelled", "swallows"])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_an_attempt_started_ends_with_the_attempt(
    kind: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "CLEAN_UP_S", 0.1)
    with loops_of(end, kind, tmp_path) as (loops, config, metrics):
        async with loops:
            attempt = run_agent_loop(TASK, Bench().session, loops, config)
            if end == "raises":
                with pytest.raises(AgentLoopError, match="a fault of the loop"):
                    await attempt
            else:
                async with Nursery() as nursery:
                    nursery.start_task("attempt", attempt)
                    await Starting.started.wait()
                    nursery.cancel_tasks()
            descriptors = opened(pids_in(tmp_path))
            await settle()
            await asyncio.to_thread(assert_gone, descriptors)
            await until(lambda: bool(reaped(metrics)))
            Starting.abandoned.cancel()
            await asyncio.gather(Starting.abandoned, return_exceptions=True)
        reason = "attempt_failed" if end == "raises" else "attempt_cancelled"
        assert reaped(metrics).keys() == {(kind, reason)}


class Leaving:
    """Starts a process for the whole run, and forgets it."""

    pid = 0

    async def __aenter__(self) -> None:
        process = await asyncio.create_subprocess_exec("sleep", "1000")
        type(self).pid = process.pid

    async def __aexit__(self, *error: object) -> None: ...

    async def run(self, task: Any, session: Any) -> None: ...


async def test_what_a_loop_started_for_the_run_ends_with_the_run_and_not_before() -> None:
    metrics = Metrics()
    config = msgspec.convert({"agent_loop": f"{__name__}:Leaving", "max_context_tokens": 64}, RolloutConfig)
    async with AgentLoops(config, metrics) as loops:
        with pytest.raises(AgentLoopError, match="without a turn"):
            await run_agent_loop(TASK, Bench().session, loops, config)
        await settle()
        process = psutil.Process(Leaving.pid)
        assert process.is_running()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert reaped(metrics) == {("other", "run_ended"): 1}


@contextmanager
def owner(kind: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started others, in a process group of its own."""
    (folder / "pids").mkdir()
    command = [sys.executable, "-m", "tests.support.process_owner", kind, folder / "pids", folder]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        with killed_at_the_end(folder / "pids"):
            yield process
    finally:
        process.kill()
        process.wait()


def has_started(kind: str, folder: Path) -> bool:
    return len(pids_in(folder / "pids")) == STARTED[kind][1]


@pytest.mark.real
@pytest.mark.parametrize("kind", KINDS)
async def test_everything_ends_and_is_counted_when_its_owner_is_killed(kind: str, tmp_path: Path) -> None:
    """Nothing of another run does."""
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    with owner(kind, run) as process, owner("agent_program", other):
        await until(partial(has_started, kind, run))
        await until(partial(has_started, "agent_program", other))
        descriptors = opened(pids_in(run / "pids"))
        process.kill()
        await asyncio.to_thread(assert_gone, descriptors)
        await until(lambda: bool(list((run / "logs" / "reaped").glob("*.json"))))
        assert all(psutil.pid_exists(pid) for pid in pids_in(other / "pids"))
    assert read_reports(run).keys() == {(kind, "owner_ended")}
    assert not read_reports(run)


@pytest.mark.real
@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_a_process_of_multiprocessing_ends_when_its_owner_is_killed(
    method: str, tmp_path: Path
) -> None:
    """Its environment has no mark. A pool that later attempts use too may have started it."""
    with owner(method, tmp_path) as process:
        await until(lambda: len(pids_in(tmp_path / "pids")) == len(reapers_of(process.pid)) == 1)
        (reaper,) = reapers_of(process.pid)
        descriptors = opened(pids_in(tmp_path / "pids"))
        reaper.kill()  # its successor learns of the process too
        await until(lambda: [each.pid for each in reapers_of(process.pid)] not in ([], [reaper.pid]))
        (tmp_path / "asked").touch()
        await until((tmp_path / "known").exists)
        process.kill()
        await asyncio.to_thread(assert_gone, descriptors)


@pytest.mark.real
async def test_what_is_left_ends_with_the_next_start_when_owner_and_reaper_are_killed_at_once(
    tmp_path: Path,
) -> None:
    with owner("agent_program", tmp_path) as process:
        await until(partial(has_started, "agent_program", tmp_path))
        descriptors = opened(pids_in(tmp_path / "pids"))
        end_leftovers(tmp_path)  # does nothing while the owner runs
        process.send_signal(signal.SIGSTOP)
        (reaper,) = reapers_of(process.pid)
        reaper.kill()
        process.kill()
        process.wait()
        assert all(psutil.pid_exists(pid) for pid in pids_in(tmp_path / "pids"))
        end_leftovers(tmp_path)
        await asyncio.to_thread(assert_gone, descriptors)
        await until(lambda: not list((tmp_path / "logs" / "reaped").glob("*.owner")))
    assert read_reports(tmp_path).keys() == {("agent_program", "owner_ended")}


def reapers_of(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [
            child
            for child in psutil.Process(pid).children()
            if child.status() != psutil.STATUS_ZOMBIE and "reaper.py" in " ".join(child.cmdline())
        ]
    return []


@pytest.mark.real
async def test_a_release_command_runs_when_its_owner_is_killed(tmp_path: Path) -> None:
    with owner("container", tmp_path) as process:
        await until(lambda: (tmp_path / "pids" / "held").exists())
        process.kill()
        await until(lambda: (tmp_path / "released").exists())
        await until(lambda: bool(list((tmp_path / "logs" / "reaped").glob("*.json"))))
    assert read_reports(tmp_path) == {("sandbox", "owner_ended"): 1}


@pytest.mark.real
async def test_a_workspace_is_removed_when_its_owner_is_killed(tmp_path: Path) -> None:
    with owner("workspace", tmp_path) as process:
        await until(lambda: (tmp_path / "pids" / "held").exists())
        folder = Path((tmp_path / "workspace").read_text())
        assert folder.exists()
        process.kill()
        await until(lambda: not folder.parent.exists())


@pytest.mark.real
async def test_scopes_are_forgotten_when_none_of_their_processes_is_left() -> None:
    """A run has millions of attempts, of which each may start a process."""
    with attempt_scope("trajectory 1", lambda kind, reason: None):
        await (await asyncio.create_subprocess_exec("true")).wait()
    await until(is_settled)


@pytest.mark.real
async def test_a_release_command_runs_only_when_the_block_outlives_its_attempt(tmp_path: Path) -> None:
    counted: list[tuple[str, str]] = []
    with attempt_scope("trajectory 1", lambda *labels: counted.append(labels)):
        async with ReleasedBy(["touch", str(tmp_path / "released in the block")]):
            pass
        await ReleasedBy(["touch", str(tmp_path / "not released")]).__aenter__()
    await settle()
    await until(lambda: (tmp_path / "not released").exists() and bool(counted))
    assert counted == [("sandbox", "attempt_ended")]
    assert not (tmp_path / "released in the block").exists()


@pytest.mark.real
async def test_a_process_that_ignores_sigterm_is_killed() -> None:
    scope = ProcessScope("the test")
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"{ignores}; print(flush=True); time.sleep(1000)"
    with scope.active():
        process = start_sleeper(sys.executable, "-c", code)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        scope.end("attempt_failed")
        assert await asyncio.to_thread(process.wait, LIMIT_S) == -signal.SIGKILL


@pytest.mark.real
async def test_a_process_ends_when_it_was_started_after_its_attempt() -> None:
    scope = ProcessScope("the test")
    with scope.active():
        scope.end("attempt_cancelled")
        with start_sleeper() as process:
            assert await asyncio.to_thread(process.wait, LIMIT_S) == -signal.SIGTERM


def leaves_a_process_and_hangs(path: str) -> None:
    """A reward function that runs in a worker process."""
    process = subprocess.Popen(["sleep", "1000"])
    Path(path).write_text(str(process.pid))
    process.wait()


@pytest.mark.real
async def test_what_a_reward_started_ends_when_its_worker_process_is_killed(tmp_path: Path) -> None:
    workers = WorkerProcesses(f"{__name__}:leaves_a_process_and_hangs", 1)
    try:
        async with Nursery() as nursery:
            nursery.start_task("reward", workers.call(str(tmp_path / "pid")))
            await until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
            descriptors = opened([int((tmp_path / "pid").read_text())])
            nursery.cancel_tasks()
        await asyncio.to_thread(assert_gone, descriptors)
    finally:
        await asyncio.to_thread(workers.close)


def test_a_process_outside_of_a_scope_is_started_as_ever() -> None:
    shown = subprocess.run(["env"], capture_output=True, text=True, check=True)
    assert MARK not in shown.stdout
    with ProcessScope("the test").active():
        marked = subprocess.run(["env"], capture_output=True, text=True, check=True)
        given = subprocess.run(["env"], env={"A": "1"}, capture_output=True, text=True, check=True)
    assert MARK in marked.stdout
    assert given.stdout.startswith("A=1\n")
    assert MARK in given.stdout
