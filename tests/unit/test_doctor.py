"""The service around a diagnosis: when it logs and acts; and the watchdog of the event loop."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from async_rl.config import load_config
from async_rl.engines.pool import EnginePool
from async_rl.errors import StallError
from async_rl.observability.loop_watchdog import LoopWatchdog
from async_rl.observability.metrics import Metrics
from async_rl.planning.virtual_time import VirtualTimeLoop
from async_rl.run import doctor
from async_rl.run.doctor import Doctor, recording_waits
from async_rl.runtime.supervision import contained, services
from async_rl.runtime.waits import Waits, acting, waiting
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
