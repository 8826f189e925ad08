"""20 seeds of the whole program in virtual time (docs/design/simulation.md).

`make test-long` runs 180 more, `make simulate` as many as it is told to.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from verification.simulation.__main__ import run_seed, run_worker_seed
from verification.simulation.simulate import SeedOutcome

CHUNK = 20


@pytest.mark.parametrize(
    "start",
    [pytest.param(start, marks=pytest.mark.long if start else ()) for start in range(0, 200, CHUNK)],
)
def test_nothing_is_lost_stale_or_stuck_when_a_seed_decides_what_goes_wrong(start: int) -> None:
    failed = {
        seed: outcome.violations
        for seed in range(start, start + CHUNK)
        if (outcome := run_seed(seed)).violations
    }
    assert failed == {}, f"replay: make simulate SEED_START={min(failed)} SEEDS=1"


@pytest.mark.parametrize(("run", "seed"), [(run_seed, 14), (run_seed, 143), (run_worker_seed, 249)])
def test_a_seed_replays_itself_when_another_process_runs_it(
    run: Callable[[int], SeedOutcome], seed: int
) -> None:
    program = (
        f"from verification.simulation.__main__ import {run.__name__} as run; o = run({seed}); "
        "print(o.trace, o.decisions)"
    )
    other = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "5"},  # sets have another order
    )
    outcome = run(seed)
    assert other.stdout.split() == [outcome.trace, outcome.decisions]
