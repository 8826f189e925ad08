"""Sandboxes are lent, recorded, and ended, whatever happens to those who use them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agent_loops.sandboxes import Sandboxes
from agent_loops.sandboxes.leftovers import SILENT_S, end_leftovers
from agent_loops.sandboxes.log import Record, SandboxLog, read_log
from async_rl.errors import ConfigError, EnvironmentNotReady, SandboxLost
from async_rl.runtime.user_processes import attempt_scope
from tests.support.memory_sandboxes import SERVICES, Service, backend
from tests.support.scripted_session import ScriptedSession


class Setup:
    """Sandboxes in memory, with their log in a folder."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.given = backend(str(folder))
        self.folder = folder
        self.sandboxes = Sandboxes(self.given, folder=folder, **options)

    @property
    def service(self) -> Service:
        return SERVICES[str(self.folder)]

    def logged(self) -> list[str]:
        """Names in the logs that have not ended."""
        return [record.begin for path in self.folder.glob("*.jsonl") for record in read_log(path)[1]]

    def assert_nothing_left(self) -> None:
        assert not self.service.running
        assert not list(self.folder.iterdir())


async def test_a_sandbox_is_recorded_before_it_is_created_and_ends_with_its_block(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.service.start_s = 4.0
    async with setup.sandboxes as sandboxes:
        session = ScriptedSession()
        lending = sandboxes.open(session)
        opening = asyncio.ensure_future(lending.__aenter__())
        await asyncio.sleep(1.0)
        assert not setup.service.running
        assert setup.logged() == setup.service.started
        assert session.status == "starting a sandbox"
        box = await opening
        assert (await box.exec("true")).stdout == f"{box.name}: true"
        assert (await box.exec("false")).exit_code == 1
        assert session.status == ""
        await lending.__aexit__(None, None, None)
        await asyncio.sleep(2.0)
        assert not setup.service.running
        assert not setup.logged()
    setup.assert_nothing_left()


async def test_nothing_is_lost_when_a_loop_is_cancelled_at_any_moment(tmp_path: Path) -> None:
    """Cancel at each moment, and some turns of the event loop after it, until the loop ends before."""
    for number in range(200):
        (tmp_path / str(number)).mkdir()
        setup = Setup(tmp_path / str(number), pool=number % 2)
        async with setup.sandboxes as sandboxes:

            async def run(sandboxes: Sandboxes = sandboxes) -> None:
                async with sandboxes.open() as box:
                    await box.exec("true")
                    await box.snapshot()

            await asyncio.sleep(5.0)
            running = asyncio.ensure_future(run())
            await asyncio.sleep(0.3 * (number // 5))
            for _ in range(number % 5):
                await asyncio.sleep(0)
            finished = running.done()
            running.cancel()
            await asyncio.wait([running])
            await asyncio.sleep(60.0)
            assert len(setup.service.running) == number % 2
        setup.assert_nothing_left()
        assert not setup.service.snapshots
        if finished:
            break
    else:
        pytest.fail("the loop never ended")
    assert number > 10


async def test_nothing_is_lost_when_the_run_ends_at_any_moment(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / str(number)).mkdir()
        setup = Setup(tmp_path / str(number), pool=2)

        async def run(setup: Setup = setup) -> None:
            async with setup.sandboxes as sandboxes, sandboxes.open() as box:
                await box.exec("true")
                await asyncio.Event().wait()

        running = asyncio.ensure_future(run())
        await asyncio.sleep(0.1 * number)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        setup.assert_nothing_left()


async def test_a_start_is_repeated_with_other_names_until_it_works(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.service.num_failing_starts = 3
    async with setup.sandboxes as sandboxes, sandboxes.open():
        assert len(set(setup.service.started)) == 4
        pauses = [b - a for a, b in zip(setup.service.starts_at, setup.service.starts_at[1:], strict=False)]
        assert pauses == sorted(pauses)
        assert pauses[-1] >= 2.0
    setup.assert_nothing_left()


async def test_a_start_that_fails_for_too_long_is_a_lost_sandbox(tmp_path: Path) -> None:
    setup = Setup(tmp_path, start_s=20.0)
    setup.service.num_failing_starts = 1000
    async with setup.sandboxes as sandboxes:
        begin = asyncio.get_running_loop().time()
        with pytest.raises(SandboxLost):
            async with sandboxes.open():
                pass
        assert asyncio.get_running_loop().time() - begin <= 20.0
        setup.service.num_failing_starts = 0
        setup.service.start_s = 100.0
        with pytest.raises(SandboxLost, match="start_s"):
            async with sandboxes.open():
                pass
        await asyncio.sleep(200.0)
        assert not setup.service.running
    setup.assert_nothing_left()


async def test_a_refused_start_is_not_repeated(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    async with setup.sandboxes as sandboxes:
        with pytest.raises(SandboxLost, match="no such image"):
            async with sandboxes.open(image="missing"):
                pass
    assert len(setup.service.started) == 1


async def test_a_sandbox_ends_at_its_time_to_live_while_its_block_goes_on(tmp_path: Path) -> None:
    setup = Setup(tmp_path, ttl_s=100.0)
    async with setup.sandboxes as sandboxes, sandboxes.open() as box:
        await asyncio.sleep(98.0)
        await box.exec("true")
        await asyncio.sleep(5.0)
        with pytest.raises(SandboxLost):
            await box.exec("true")
        assert not setup.logged()


async def test_a_sandbox_ends_with_its_attempt_though_its_block_is_stuck(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    async with setup.sandboxes as sandboxes:
        stuck = asyncio.Event()

        async def run() -> None:
            async with sandboxes.open():
                await stuck.wait()

        with attempt_scope("an attempt", lambda kind, reason: None):
            running = asyncio.ensure_future(run())
            await asyncio.sleep(5.0)
            assert len(setup.service.running) == 1
        await asyncio.sleep(5.0)
        assert not setup.service.running
        stuck.set()
        await running
    setup.assert_nothing_left()


async def test_a_pool_keeps_sandboxes_ready_and_fresh(tmp_path: Path) -> None:
    setup = Setup(tmp_path, pool={"": 2, "big": 1}, ttl_s=1000.0)
    clock = asyncio.get_running_loop().time
    async with setup.sandboxes as sandboxes:
        await asyncio.sleep(10.0)
        assert sorted(setup.service.running.values()) == ["", "", "big"]
        ready, begin = set(setup.service.running), clock()
        async with sandboxes.open() as box, sandboxes.open(image="big") as other:
            assert clock() == begin
            assert {box.name, other.name} <= ready
            await asyncio.sleep(10.0)
            assert len(setup.service.running) == 5
        await asyncio.sleep(600.0)  # more than half of their lives
        assert sorted(setup.service.running.values()) == ["", "", "big"]
        assert not ready & set(setup.service.running)
    setup.assert_nothing_left()


async def test_a_sandbox_of_the_pool_that_is_gone_costs_no_attempt(tmp_path: Path) -> None:
    setup = Setup(tmp_path, pool=2)
    async with setup.sandboxes as sandboxes:
        await asyncio.sleep(10.0)
        setup.service.running.clear()
        async with sandboxes.open() as box:
            await box.exec("true")
    setup.assert_nothing_left()


async def test_a_pool_waits_longer_after_each_failed_start(tmp_path: Path) -> None:
    setup = Setup(tmp_path, pool=1)
    setup.service.num_failing_starts = 1000
    async with setup.sandboxes:
        await asyncio.sleep(600.0)
        assert 5 < len(setup.service.started) < 40
        setup.service.num_failing_starts = 0
        await asyncio.sleep(60.0)
        assert len(setup.service.running) == 1
    setup.assert_nothing_left()


async def test_no_more_than_max_open_exist(tmp_path: Path) -> None:
    setup = Setup(tmp_path, max_open=3, pool=1)

    async def run(sandboxes: Sandboxes) -> None:
        async with sandboxes.open() as box:
            await box.exec("true")
            await asyncio.sleep(3.0)

    async with setup.sandboxes as sandboxes:
        await asyncio.gather(*(run(sandboxes) for _ in range(12)))
    assert setup.service.most == 3
    setup.assert_nothing_left()


async def test_an_end_is_repeated_and_otherwise_stays_in_the_log(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.service.num_failing_ends = 3
    async with setup.sandboxes as sandboxes:
        async with sandboxes.open():
            pass
        await asyncio.sleep(60.0)
        assert not setup.logged()
        setup.service.num_failing_ends = 5
        async with sandboxes.open() as box:
            pass
        await asyncio.sleep(300.0)
        assert setup.logged() == [box.name]
    setup.assert_nothing_left()  # the end of the run tries again


async def test_snapshots_end_with_the_run(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    async with setup.sandboxes as sandboxes:
        async with sandboxes.open() as box:
            image = await box.snapshot()
        async with sandboxes.open(image=image):
            assert image in setup.service.running.values()
        assert setup.service.snapshots == {image}
    assert not setup.service.snapshots
    setup.assert_nothing_left()


def left_log(setup: Setup, name: str, *, boot: str | None = None, pid: int = 2**22 + 1) -> Path:
    """A log of a process that has ended, with a sandbox that runs."""
    path = setup.folder / "left.jsonl"
    log = SandboxLog(path, setup.given)
    log.begin(Record(begin=name, expires_s=time.time() + 1000.0))
    log.close()
    head, _, rest = path.read_text().partition("\n")
    owner = {**json.loads(head), "pid": pid, **({} if boot is None else {"boot": boot})}
    path.write_text(json.dumps(owner) + "\n" + rest + '{"begin": "cut sh')
    setup.service.running[name] = ""
    return path


async def test_what_a_process_has_left_ends_at_the_start_of_the_next(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    path = left_log(setup, "async-rl-left")
    async with setup.sandboxes:
        await asyncio.sleep(10.0)
        assert not setup.service.running
        assert not path.exists()
    setup.assert_nothing_left()


async def test_what_a_process_on_another_host_has_left_ends_when_its_log_is_silent(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    path = left_log(setup, "async-rl-left", boot="another")
    async with setup.sandboxes:
        await asyncio.sleep(10.0)
        assert setup.service.running
        silent_s = time.time() - SILENT_S - 10
        os.utime(path, (silent_s, silent_s))
        await asyncio.sleep(100.0)
        assert not setup.service.running
    setup.assert_nothing_left()


async def test_sandboxes_of_a_process_that_runs_are_left_alone(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    async with setup.sandboxes as sandboxes, sandboxes.open() as box:
        for path in tmp_path.glob("*.jsonl"):
            silent_s = time.time() - SILENT_S - 10
            os.utime(path, (silent_s, silent_s))
        await end_leftovers(tmp_path, tmp_path / "own.jsonl")
        assert (await box.exec("true")).exit_code == 0


async def test_a_log_has_a_bounded_size(tmp_path: Path) -> None:
    log = SandboxLog(tmp_path / "log.jsonl", {"kind": "local"})
    log.begin(Record(begin="stays", expires_s=1.0))
    for number in range(700):
        log.begin(Record(begin=f"async-rl-{number}", expires_s=1.0))
        log.end(f"async-rl-{number}")
        log.end("never was")
    assert [record.begin for record in read_log(log.path)[1]] == ["stays"]
    assert len(log.path.read_bytes().splitlines()) < 1100
    log.close()
    assert log.path.exists()


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "nowhere"},
        {"backend": {"kind": "containers", "imgae": "x"}},
        {"backend": {"kind": "e2b", "key_env": "NO_SUCH_VARIABLE"}},
        {"backend": "local", "ttl_s": 0},
        {"backend": "local", "pool": 3, "max_open": 3},
        {"backend": "local", "pool": -1},
    ],
)
def test_a_wrong_setting_is_reported_before_anything_starts(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Sandboxes(**options)


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(EnvironmentNotReady, match=r"pip install -e '\.\[modal\]'"):
        Sandboxes("modal")
