"""Runs seeds on all cores and says what happened: `make simulate SEEDS=2000 SEED_START=0`.

A single seed is reported in detail: its config, its last events and the end of every incarnation. With
`--awaits` each seed's run is cancelled at each of its awaits, one after the other. `--decisions` prints the
digest of each seed's decisions, to compare two versions of the program.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

from async_rl.config import changed_fields
from verification.simulation.cancellation_sweep import Place, Sweep, sweep
from verification.simulation.faults import fault_table
from verification.simulation.scenario import (
    Scenario,
    branching,
    draw,
    evaluating,
    peaceful,
    sharing,
    with_models,
    with_workers,
)
from verification.simulation.scratch import scratch
from verification.simulation.simulate import SeedOutcome, simulate

_SHARING_WORKERS: Final = 0.2
"""Share of the seeds with workers in which engines and trainer share devices."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 when a seed has failed."""
    parser = argparse.ArgumentParser(prog="python -m verification.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--awaits", action="store_true", help="cancel each seed's run at all its awaits")
    parser.add_argument("--branches", action="store_true", help="with agent loops that branch")
    parser.add_argument(
        "--workers", action="store_true", help="with loops, every other branching, in workers"
    )
    parser.add_argument("--shared", action="store_true", help="on devices that engines and trainer share")
    parser.add_argument(
        "--evaluation", action="store_true", help="with evaluations in every seed; also with --workers"
    )
    parser.add_argument("--models", action="store_true", help="with a teacher; also with --workers")
    parser.add_argument("--peaceful", action="store_true", help="without faults and ends of the driver")
    parser.add_argument("--decisions", action="store_true", help="print each seed's digest of decisions")
    options = parser.parse_args(arguments)
    run = run_branching_seed if options.branches else run_shared_seed if options.shared else run_seed
    run = run_worker_seed if options.workers else run_peaceful_seed if options.peaceful else run
    if options.evaluation:
        run = run_evaluating_worker_seed if options.workers else run_evaluating_seed
    if options.models:
        run = run_model_worker_seed if options.workers else run_model_seed
    seeds = range(options.start, options.start + options.seeds)
    if options.awaits:
        return _sweep(seeds, options.jobs)
    if options.decisions:
        wrong = 0
        with ProcessPoolExecutor(options.jobs) as pool:
            for outcome in pool.map(run, seeds, chunksize=4):
                print(outcome.seed, outcome.decisions, *outcome.violations[:1])
                wrong += bool(outcome.violations)
        return int(bool(wrong))
    if len(seeds) == 1:
        outcome = run(seeds[0])
        _tell(outcome)
        return int(bool(outcome.violations))
    begin_s = time.perf_counter()
    outcomes: list[SeedOutcome] = []
    failed: list[SeedOutcome] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(run, seeds, chunksize=4):
            outcomes.append(outcome)
            if outcome.violations:
                failed.append(outcome)
                print(f"\nseed {outcome.seed}: {outcome.violations[0][:400]}")
            _show_progress(len(outcomes), len(seeds), len(failed), time.perf_counter() - begin_s)
    print()
    print("\n".join(summary(outcomes, time.perf_counter() - begin_s)))
    for outcome in failed:
        how = f"--start {outcome.seed} --seeds 1"
        how += " --branches" if options.branches else ""
        how += " --workers" if options.workers else ""
        how += " --shared" if options.shared else ""
        how += " --evaluation" if options.evaluation else ""
        how += " --models" if options.models else ""
        print(f"seed {outcome.seed} failed; replay it: python -m verification.simulation {how}")
    return int(bool(failed))


def sweep_seed(seed: int) -> Sweep:
    """Cancel a seed's run at each of its awaits."""
    with scratch() as folder:
        return sweep(draw(seed), Path(folder))


def _sweep(seeds: range, jobs: int) -> int:
    begin_s = time.perf_counter()
    met: set[Place] = set()
    num_runs = failed = 0
    with ProcessPoolExecutor(jobs) as pool:
        for seed, swept in zip(seeds, pool.map(sweep_seed, seeds), strict=True):
            met.update(swept.places)
            num_runs += len(swept.runs)
            for violation in swept.violations:
                failed += 1
                print(f"seed {seed}: {violation[:400]}")
            real_s = time.perf_counter() - begin_s
            print(f"seed {seed}: {len(met)} awaits, {num_runs} runs, {failed} violations, {real_s:.0f} s")
    return int(bool(failed))


def run_seed(seed: int) -> SeedOutcome:
    """Simulate in a folder of its own."""
    return _run(draw(seed))


def run_branching_seed(seed: int) -> SeedOutcome:
    """The same with agent loops that branch."""
    return _run(branching(draw(seed)))


def run_evaluating_seed(seed: int) -> SeedOutcome:
    """The same with evaluations, in every third seed on devices that engines and trainer share."""
    scenario = draw(seed)
    return _run(evaluating(sharing(scenario) if seed % 3 == 2 else scenario))


def run_evaluating_worker_seed(seed: int) -> SeedOutcome:
    """The same with evaluations, and with the sessions of both in rollout workers."""
    scenario = with_workers(branching(draw(seed)) if seed % 2 else draw(seed))
    return _run(evaluating(sharing(scenario) if seed % 3 == 2 else scenario))


def run_model_seed(seed: int) -> SeedOutcome:
    """The same with a teacher."""
    return _run(with_models(branching(draw(seed)) if seed % 2 else draw(seed)))


def run_model_worker_seed(seed: int) -> SeedOutcome:
    """The same with a teacher, and with sessions in rollout workers."""
    return _run(with_workers(with_models(branching(draw(seed)) if seed % 2 else draw(seed))))


def run_peaceful_seed(seed: int) -> SeedOutcome:
    """The same with nothing going wrong."""
    return _run(peaceful(draw(seed)))


def run_shared_seed(seed: int) -> SeedOutcome:
    """The same on devices that engines and trainer share."""
    return _run(sharing(draw(seed)))


def run_worker_seed(seed: int) -> SeedOutcome:
    """The same with agent loops in rollout workers; those of odd seeds branch, some share devices."""
    scenario = branching(draw(seed)) if seed % 2 else draw(seed)
    shares = random.Random(f"workers share {seed}").random() < _SHARING_WORKERS
    return _run(with_workers(sharing(scenario) if shares else scenario))


def _run(scenario: Scenario) -> SeedOutcome:
    seed = scenario.seed
    with scratch() as folder:
        try:
            return simulate(seed, Path(folder), scenario=scenario)
        except Exception:  # of the simulation itself; one seed must not end the others
            return _broken(seed, traceback.format_exc())


def summary(outcomes: Sequence[SeedOutcome], real_s: float) -> list[str]:
    """A table of what was done to the runs and what became of them."""
    incarnations = Counter(kind for outcome in outcomes for kind in map(_kind_of_end, outcome.incarnations))
    faults = Counter[str]()
    hit = Counter[str]()
    for outcome in outcomes:
        faults.update(outcome.faults)
        hit.update(outcome.faults.keys())
    steps = sum(outcome.steps for outcome in outcomes)
    lines = [
        f"{len(outcomes)} seeds in {real_s:.0f} s: {sum(1 for o in outcomes if o.violations)} failed; "
        f"{steps:,} callbacks, {sum(o.tokens for o in outcomes):,} tokens, "
        f"{sum(o.virtual_s for o in outcomes) / 3600:.1f} virtual hours",
        "",
        *fault_table(faults, hit),
        "",
        f"{'an incarnation of the driver ended':<48}{'times':>8}",
        *(f"{kind:<48}{number:>8}" for kind, number in incarnations.most_common()),
    ]
    return lines


def _kind_of_end(incarnation: str) -> str:
    """`failed: WeightSyncError: no engine ...` is a `failed: WeightSyncError`."""
    return ":".join(re.split(": ", incarnation)[:2]) if incarnation.startswith("failed") else incarnation


def _tell(outcome: SeedOutcome) -> None:
    for key, value in _settings(outcome.seed):
        print(f"{key} = {value}")
    print(f"\nthe last events\n{os.linesep.join(outcome.events)}\n")
    for number, incarnation in enumerate(outcome.incarnations):
        print(f"incarnation {number}: {incarnation}")
    print(f"faults: {outcome.faults}")
    print(f"{outcome.steps} callbacks, {outcome.virtual_s:.1f} virtual seconds, trace {outcome.trace}")
    print(f"decisions {outcome.decisions}")
    for violation in outcome.violations:
        print(f"VIOLATION {violation}")


def _settings(seed: int) -> Iterable[tuple[str, object]]:
    scenario = draw(seed)
    yield from changed_fields(scenario.config).items()
    yield "speeds", scenario.speeds
    yield "deaths", scenario.deaths
    yield "injections", [(i.step, i.kind, i.engine) for i in scenario.injections]


def _show_progress(done: int, total: int, failed: int, real_s: float) -> None:
    if sys.stdout.isatty() or done == total or done % 100 == 0:
        end = "\r" if sys.stdout.isatty() else "\n"
        print(f"{done} of {total} seeds, {failed} failed, {real_s:.0f} s", end=end, flush=True)


def _broken(seed: int, what: str) -> SeedOutcome:
    return SeedOutcome(
        seed=seed,
        violations=(f"the simulation broke: {what}",),
        incarnations=(),
        faults={},
        steps=0,
        tokens=0,
        virtual_s=0.0,
        real_s=0.0,
        trace="",
        decisions="",
        events=(),
    )


if __name__ == "__main__":
    sys.exit(main())
