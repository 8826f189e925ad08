"""100 seeds of the whole program in virtual time (docs/design/simulation.md).

`make test-long` runs another 100, `make simulate` more.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from async_rl.simulation.__main__ import run_seed

CHUNK = 25


@pytest.mark.parametrize(
    "start",
    [pytest.param(start, marks=pytest.mark.long if start >= 100 else ()) for start in range(0, 200, CHUNK)],
)
def test_nothing_is_lost_stale_or_stuck_when_a_seed_decides_what_goes_wrong(start: int) -> None:
    failed = {
        seed: outcome.violations
        for seed in range(start, start + CHUNK)
        if (outcome := run_seed(seed)).violations
    }
    assert failed == {}, f"replay: make simulate SEED_START={min(failed)} SEEDS=1"


def test_a_seed_replays_itself_when_another_process_runs_it() -> None:
    program = (
        "from async_rl.simulation.__main__ import run_seed; o = run_seed(14); print(o.trace, o.decisions)"
    )
    other = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7"},
    )
    outcome = run_seed(14)
    assert other.stdout.split() == [outcome.trace, outcome.decisions]
