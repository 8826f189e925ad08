"""The stall doctor in a run, and its command."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from async_rl.cli.main import main
from async_rl.config import load_config
from async_rl.engines.pool import EnginePool
from async_rl.errors import StallError
from async_rl.observability.diagnosis import Cause, Diagnosis
from async_rl.observability.endpoints import serve
from async_rl.observability.loop_watchdog import LoopWatchdog
from async_rl.observability.metrics import Metrics
from async_rl.planning.virtual_time import VirtualTimeLoop
from async_rl.run import doctor
from async_rl.run.doctor import Doctor, recording_waits
from async_rl.runtime.supervision import contained, services
from async_rl.runtime.waits import Waits, acting, waiting
from tests.support.finished_run import records, write_run_folder
from tests.support.run_config import write_run


class DoctorBench:
    """A doctor and the waits that it observes, on a clock set by hand."""

    def __init__(self, folder: Path, *overrides: str, clock: Callable[[], float] | None = None) -> None:
        self.now_s = 0.0
        self.metrics = Metrics()
        self.config = load_config(write_run(folder), ["doctor.stall_s=40", *overrides])
        clock = clock or self.clock
        self.waits = Waits(clock)
        self.doctor = Doctor(self.config, self.waits, EnginePool(self.metrics, clock), self.metrics)

    def clock(self) -> float:
        return self.now_s

    def look_until(self, end_s: float) -> None:
        while self.now_s < end_s:
            self.now_s += 5
            self.doctor.check_progress()

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"async_rl_{name}", labels) or 0.0


def test_a_stall_is_said_again_only_after_growing_times(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = DoctorBench(tmp_path)
    with acting("train loop", waits=bench.waits), waiting("slot"):
        bench.look_until(600)
        said = [record for record in caplog.records if "is stalled" in record.message]
        assert len(said) == 4  # at 45, 85, 165 and 325 seconds
        assert bench.value("stalls_total", awaited="slot") == 1
        assert bench.value("seconds_since_progress") == 600
        bench.waits.note_progress()
        bench.look_until(700)
    assert bench.value("stalls_total", awaited="slot") == 2


def test_the_run_ends_at_the_second_look_when_that_is_asked_for(tmp_path: Path) -> None:
    bench = DoctorBench(tmp_path, "doctor.action=end")
    with acting("train loop", waits=bench.waits), waiting("slot"):
        bench.look_until(40)
        with pytest.raises(StallError, match="no slot becomes free"):
            bench.look_until(45)


def test_a_quiet_run_is_no_stall_while_its_wait_is_within_its_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench = DoctorBench(tmp_path, "doctor.action=end", "trainer.step_timeout_s=3600")
    with acting("train loop", waits=bench.waits), waiting("trainer step", "1"):
        bench.look_until(3600)
        assert "within its limit" in caplog.text
        with pytest.raises(StallError, match="trainer step 1 does not return"):
            bench.look_until(3700)


async def test_time_in_which_the_event_loop_stood_still_is_no_stall(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    bench = DoctorBench(tmp_path, "doctor.action=end", clock=loop.time)
    with acting("train loop", waits=bench.waits), waiting("slot"):
        async with services(doctor=bench.doctor.run_checks):
            await asyncio.sleep(1)
            loop.jump(1000)
            await asyncio.sleep(30)
    assert bench.waits.quiet_s < 40


async def test_what_was_due_while_the_event_loop_stood_still_has_its_turn_before_a_stall(
    tmp_path: Path,
) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    bench = DoctorBench(tmp_path, "doctor.action=end", clock=loop.time)
    async with services(doctor=bench.doctor.run_checks):
        with acting("train loop", waits=bench.waits), waiting("slot"):
            loop.call_later(41, loop.jump, 1000)  # the doctor has found it quiet once
            await asyncio.sleep(60)


@pytest.mark.real_time
async def test_code_that_blocks_the_event_loop_is_named(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """prime-rl#1713: an event loop that lags by minutes."""

    def compute_without_an_await() -> None:
        end = time.monotonic() + 5
        while not caplog.records and time.monotonic() < end:
            pass

    metrics, waits = Metrics(), Waits()
    monkeypatch.setattr(doctor, "LoopWatchdog", partial(LoopWatchdog, blocked_s=0.1))
    async with recording_waits(waits, metrics):
        with waiting("checkpoint"):
            assert [str(wait.who) for wait in waits.open_waits()] == ["run"]
        compute_without_an_await()
        value = metrics.registry.get_sample_value
        while value("async_rl_event_loop_lag_seconds_sum") <= 0.05:  # noqa: ASYNC110 - a thread observes it
            await asyncio.sleep(0)
    assert "compute_without_an_await" in caplog.text
    assert value("async_rl_event_loop_blocked_total") >= 1


SLEEPS = """
import asyncio
from async_rl.observability.loop_watchdog import LoopWatchdog
from async_rl.observability.metrics import Metrics
async def main():
    with LoopWatchdog(Metrics(), blocked_s=0.4):
        print("sleeps", flush=True)
        await asyncio.sleep(2)
asyncio.run(main())
"""


@pytest.mark.real_time
def test_no_code_is_blamed_when_the_process_was_stopped() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "sleeps\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        assert process.stderr.read() == ""
        assert process.wait() == 0


def test_a_stall_is_treated_though_a_wait_was_overdue_before(tmp_path: Path) -> None:
    bench = DoctorBench(tmp_path, "doctor.action=repair", "rollout.tool_timeout_s=10")
    other = acting("trajectory", "7", waits=bench.waits)
    with acting("train loop", waits=bench.waits), waiting("slot"):
        with other, waiting("tool", "search"):  # nothing can be done about it: it has no timeout
            for _ in range(40):
                bench.waits.note_progress()
                bench.look_until(bench.now_s + 5)
        assert bench.value("stalls_total", awaited="tool") == 1
        with pytest.raises(StallError, match="no slot becomes free"):
            bench.look_until(bench.now_s + 45)


async def test_what_was_treated_has_time_to_move_before_the_run_ends(tmp_path: Path) -> None:
    bench = DoctorBench(tmp_path, "doctor.action=repair", "rollout.tool_timeout_s=10")
    async with asyncio.timeout(3600) as scope:
        with acting("train loop", waits=bench.waits), waiting("tool", "search", scope=scope) as wait:
            bench.look_until(25)
            assert wait.cut
            scope.reschedule(None)  # the tool takes no notice of it
            await asyncio.sleep(0)
            bench.look_until(60)
            with pytest.raises(StallError, match="tool search does not return"):
                bench.look_until(65)


async def test_a_loop_that_cleans_up_after_its_limit_is_no_stall(tmp_path: Path) -> None:
    """A loop that swallows its cancellation has time to end; then it is dropped, and the run continues."""

    async def swallow() -> None:
        while True:
            try:
                await asyncio.Future()
            except asyncio.CancelledError:
                continue

    async def run_loop() -> None:
        async with asyncio.timeout(15) as scope:
            with waiting("agent loop", "module:Loop", scope=scope):
                await contained(swallow(), limit_s=30)

    loop = asyncio.get_running_loop()
    bench = DoctorBench(tmp_path, "doctor.action=repair", "doctor.stall_s=10", clock=loop.time)
    bench.doctor.limits_s["agent loop"] = 15.0
    with acting("train loop", waits=bench.waits):
        async with services(doctor=bench.doctor.run_checks):
            with pytest.raises(TimeoutError):
                await run_loop()
    assert loop.time() == 45


# -- `async-rl doctor` against the endpoints of a driver ----------------------------------------------


def health(state: str) -> dict[str, Any]:
    cause = Cause(
        problem="hangs",
        on="tool",
        target="search",
        age_s=99.0,
        limit_s=30.0,
        waiters=1,
        sentence="tool search does not return",
        chain=("train loop waits for a batch", "trajectory 7 waits for tool search"),
    )
    diagnosis = Diagnosis(state=state, quiet_s=99.0, causes=(cause,))  # type: ignore[arg-type]
    status = "stalled" if state == "stalled" else "ok"
    return {"status": status, "phase": "training", "step": 3, "diagnosis": msgspec.to_builtins(diagnosis)}


@pytest.mark.real_time
@pytest.mark.parametrize(("state", "code"), [("stalled", 4), ("moving", 0)])
async def test_the_chain_of_a_running_job_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str, code: int
) -> None:
    async with serve(Metrics(), "127.0.0.1", 0, lambda: health(state)) as url:
        (tmp_path / "url").write_text(url)
        for target in (url, str(tmp_path)):
            assert await asyncio.to_thread(main, ["doctor", target]) == code
            out = capsys.readouterr().out
            assert out.startswith(f"training, step 3: {state}\n")
            assert "  <- trajectory 7 waits for tool search\n" in out


def test_one_sentence_is_printed_when_nothing_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "http://127.0.0.1:9"]) == 3
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path)]) == 2
    capsys.readouterr()
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["doctor", str(tmp_path)]) == 3
        assert "it is starting, so ask again in some seconds" in capsys.readouterr().err
        (tmp_path / "url").write_text("hello")
        assert main(["doctor", str(tmp_path)]) == 3
    assert f"{tmp_path / 'url'} holds 'hello', expected http://HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://host:99999", "http://[::1", "http://a b"])
def test_what_is_no_url_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", url]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("INFO    async_rl.run.train_loop: step 2", "after step 2: it was stopped or killed"),
        (
            "ERROR   async_rl.run.folder: the run failed: engine-0 failed: no memory",
            "after step 2: it failed: engine-0 failed: no memory",
        ),
    ],
)
def test_when_and_how_is_said_when_the_run_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], last: str, said: str
) -> None:
    line = f"2026-01-02 03:04:05,678 {last}\n"
    folder = write_run_folder(tmp_path / "run", records(2), max_steps=30, log=line)
    (folder / "url").write_text("http://127.0.0.1:9")
    os.utime(folder / "logs" / "driver.log", (when := 1.7e9, when))
    assert main(["doctor", str(folder)]) == 0
    out = capsys.readouterr().out
    assert datetime.fromtimestamp(when).strftime(f"{folder} ended at %Y-%m-%d %H:%M:%S, ") in out
    assert said in out
    with (folder / ".lock").open("w") as lock:  # it runs again, and does not answer
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["doctor", str(folder)]) == 3
    assert "nothing listens there" in capsys.readouterr().err
