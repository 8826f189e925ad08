"""Runs seeds on all cores and says what happened: `make simulate SEEDS=2000 SEED_START=0`.

A single seed is reported in detail: its config, its last events and the end of every incarnation. With
`--awaits` each seed's run is cancelled at each of its awaits, one after the other. `--decisions` prints the
digest of each seed's decisions, to compare two versions of the program.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from async_rl.config import changed_fields
from verification.simulation.cancellation_sweep import Place, Sweep, sweep
from verification.simulation.faults import fault_table
from verification.simulation.scenario import (
    Scenario,
    branching,
    by_difficulty,
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
    for kind, (_, what) in KINDS.items():
        parser.add_argument(f"--{kind}", action="store_true", help=what)
    parser.add_argument("--decisions", action="store_true", help="print each seed's digest of decisions")
    options = parser.parse_args(arguments)
    kinds = tuple(kind for kind in KINDS if getattr(options, kind))
    run = partial(run_seed, kinds=kinds)
    seeds = range(options.start, options.start + options.seeds)
    if options.awaits:
        return _sweep(seeds, options.jobs)
    if len(seeds) == 1 and not options.decisions:
        outcome = run(seeds[0])
        _tell(outcome)
        return int(bool(outcome.violations))
    begin_s, outcomes, failed = time.perf_counter(), list[SeedOutcome](), 0
    with ProcessPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(run, seeds, chunksize=4):
            outcomes.append(outcome)
            if options.decisions:
                print(outcome.seed, outcome.decisions)
            if outcome.violations:
                failed += 1
                how = " ".join(("", *(f"--{kind}" for kind in kinds), f"--start {outcome.seed} --seeds 1"))
                print(f"seed {outcome.seed} failed; replay it: python -m verification.simulation{how}")
                print(f"  {outcome.violations[0][:400]}")
            if not options.decisions and len(outcomes) % 100 == 0:
                seconds = time.perf_counter() - begin_s
                print(f"{len(outcomes)} of {len(seeds)} seeds, {failed} failed, {seconds:.0f} s", flush=True)
    if not options.decisions:
        print("\n".join(summary(outcomes, time.perf_counter() - begin_s)))
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


def _in_workers(scenario: Scenario) -> Scenario:
    shares = random.Random(f"workers share {scenario.seed}").random() < _SHARING_WORKERS
    return with_workers(sharing(scenario) if shares and not scenario.config.models else scenario)


def _evaluating(scenario: Scenario) -> Scenario:
    shares = scenario.seed % 3 == 2 and not scenario.config.placement.shared
    return evaluating(sharing(scenario) if shares else scenario)


KINDS: Final[dict[str, tuple[Callable[[Scenario], Scenario], str]]] = {
    "curriculum": (by_difficulty, "with tasks that are drawn by their difficulty"),
    "branches": (branching, "with agent loops that branch; with --workers and --models every other one does"),
    "shared": (sharing, "on devices that engines and trainer share"),
    "models": (with_models, "with a teacher"),
    "workers": (_in_workers, "with loops in rollout workers, some on shared devices"),
    "evaluation": (_evaluating, "with evaluations in every seed, every third one on shared devices"),
    "peaceful": (peaceful, "without faults and ends of the driver"),
}
"""How seeds can be changed, in this order."""


def run_seed(seed: int, kinds: Collection[str] = ()) -> SeedOutcome:
    """Simulate a seed, changed by some of `KINDS`, in a folder of its own."""
    scenario = draw(seed)
    if seed % 2 and not {"models", "workers"}.isdisjoint(kinds) and "branches" not in kinds:
        scenario = branching(scenario)
    for kind, (changed, _) in KINDS.items():
        if kind in kinds:
            scenario = changed(scenario)
    with scratch() as folder:
        try:
            return simulate(seed, Path(folder), scenario=scenario)
        except Exception:  # of the simulation itself; one seed must not end the others
            broken = f"the simulation broke: {traceback.format_exc()}"
            return SeedOutcome(seed=seed, violations=(broken,))


def run_worker_seed(seed: int) -> SeedOutcome:
    """Simulate a seed with agent loops in rollout workers."""
    return run_seed(seed, ("workers",))


def summary(outcomes: Sequence[SeedOutcome], real_s: float) -> list[str]:
    """A table of what was done to the runs and what became of them."""
    # `failed: WeightSyncError: no engine ...` is a `failed: WeightSyncError`.
    incarnations = Counter(": ".join(end.split(": ")[:2]) for each in outcomes for end in each.incarnations)
    faults, hit = Counter[str](), Counter[str]()
    for outcome in outcomes:
        faults.update(outcome.faults)
        hit.update(outcome.faults.keys())
    steps = sum(outcome.steps for outcome in outcomes)
    return [
        f"{len(outcomes)} seeds in {real_s:.0f} s: {sum(1 for o in outcomes if o.violations)} failed; "
        f"{steps:,} callbacks, {sum(o.tokens for o in outcomes):,} tokens, "
        f"{sum(o.virtual_s for o in outcomes) / 3600:.1f} virtual hours",
        "",
        *fault_table(faults, hit),
        "",
        f"{'an incarnation of the driver ended':<48}{'times':>8}",
        *(f"{kind:<48}{number:>8}" for kind, number in incarnations.most_common()),
    ]


def _tell(outcome: SeedOutcome) -> None:
    scenario = draw(outcome.seed)
    for key, value in changed_fields(scenario.config).items():
        print(f"{key} = {value}")
    print(f"speeds = {scenario.speeds}\ndeaths = {scenario.deaths}")
    print("injections =", [(each.step, each.kind, each.engine) for each in scenario.injections])
    print(f"\nthe last events\n{os.linesep.join(outcome.events)}\n")
    for number, incarnation in enumerate(outcome.incarnations):
        print(f"incarnation {number}: {incarnation}")
    print(f"faults: {outcome.faults}")
    print(f"{outcome.steps} callbacks, {outcome.virtual_s:.1f} virtual seconds, trace {outcome.trace}")
    print(f"decisions {outcome.decisions}")
    for violation in outcome.violations:
        print(f"VIOLATION {violation}")


if __name__ == "__main__":
    sys.exit(main())
