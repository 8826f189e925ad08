"""A short soak holds, and finds a leak of 100 B per trajectory (docs/design/simulation.md)."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from verification.simulation.compact_set import CompactSet
from verification.simulation.growth import regress


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "verification.simulation.soak", "--short", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_nothing_is_lost_and_nothing_grows_when_all_faults_happen() -> None:
    done = soak()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "the soak holds" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lifetime", ["process", "incarnation"])
def test_a_leak_of_100_bytes_per_trajectory_is_found(lifetime: str) -> None:
    done = soak("--leak-bytes", "100", "--leak", lifetime)
    assert done.returncode == 1, done.stdout[-6000:] + done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if "B per trajectory, within" in line]
    assert line.startswith("FAIL")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL")]
    assert all("memory" in line for line in failed), failed


def test_a_slope_is_found_beneath_levels_that_rise_and_fall() -> None:
    rng = np.random.default_rng(0)
    work = np.arange(0.0, 20_000, 200)
    in_flight = rng.integers(0, 1000, len(work)).astype(float)
    held = 5e7 + 100 * work + 2e4 * in_flight + rng.normal(0, 2e5, len(work))
    with_levels = regress(work, held, [0] * len(work), in_flight)
    assert abs(with_levels.slope - 100) < with_levels.half_width < 20
    assert regress(work, held, [0] * len(work)).half_width > 100


def test_a_compact_set_is_a_set() -> None:
    rng = random.Random(0)
    names = [f"{rng.randrange(5000):032x}" + rng.choice(("", "", ".1")) for _ in range(4000)]
    compact, real = CompactSet(), set[str]()
    for name in names:
        assert (name in compact) == (name in real)
        compact.add(name)
        real.add(name)
        assert len(compact) == len(real)
