"""How often the live page and `/health` let the run be diagnosed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from async_rl.observability.diagnosis import Diagnosis
from async_rl.observability.metrics import Metrics
from async_rl.run.doctor import Doctor
from async_rl.run.live_status import LiveStatus
from async_rl.run.run_log import RunLogger
from async_rl.runtime.waits import Waits


class SlowDoctor:
    """A doctor whose diagnoses take a while."""

    is_quiet = False

    def __init__(self) -> None:
        self.now_s = self.takes_s = 0.0
        self.num_diagnoses = 0
        self.state: Any = "moving"

    def diagnosis(self) -> Diagnosis:
        self.num_diagnoses += 1
        self.now_s += self.takes_s
        return Diagnosis(state=self.state, causes=(), quiet_s=0.0)


def answers_in(doctor: SlowDoctor, seconds: int) -> int:
    """Ask for the health of a run once a second, and return how often it is diagnosed."""
    run_log = cast(RunLogger, SimpleNamespace(records=[], phase="training"))
    status = LiveStatus(
        run_log,
        cast(Doctor, doctor),
        Waits(lambda: doctor.now_s),
        Metrics(),
        Path(),
        queue=lambda: None,
        manager=lambda: None,
        max_steps=1,
    )
    end_s = doctor.now_s + seconds
    while doctor.now_s < end_s:
        assert status.health()["diagnosis"]["state"] == doctor.state
        doctor.now_s += 1.0
    return doctor.num_diagnoses


def test_diagnoses_of_a_run_that_makes_progress_take_a_hundredth_of_the_time() -> None:
    assert answers_in(SlowDoctor(), 100) == 20
    doctor = SlowDoctor()
    doctor.takes_s = 2.0  # 200,000 trajectories
    assert answers_in(doctor, 1000) in (4, 5)


def test_a_run_without_progress_is_diagnosed_anew_each_time() -> None:
    quiet = SlowDoctor()
    quiet.is_quiet = True
    assert answers_in(quiet, 10) == 10
    stalled = SlowDoctor()
    stalled.state = "stalled"
    assert answers_in(stalled, 10) == 10
