"""Compares scheduling policies in virtual time: async_rl's production code and models of its peers.

    python benchmarks/scheduling.py [--quick] [--world NAME] [--plot FILE] [--json FILE]

The base world: 8 engines of 128 slots, a decode step of 12 ms + 0.06 ms for each running call, prefill at 30k
tokens/s, unshared prompts of 512 tokens, groups of 8, answers lognormal (mean 8192, sigma 0.8, cut
at 32768). Training a version takes 0.9 of its fluid generation time, updating engines 5 s. The others:

    long_tail      mean 4096, sigma 1.2
    long_prompts   prompts of 4096, updates of 20 s
    small_engines  16 engines of 64 slots, groups of 16
    multi_turn     6 turns; a tool says 256 tokens after a lognormal time (mean 20 s, sigma 1.2, cut at 600 s)
    hardware       Qwen3-30B-A3B by the roofline model: engines of 4 H100, a trainer of 8 that recomputes
                   activations, whose step then takes 0.92 of the fluid generation time

`relative` is trained trajectories a second over the fluid bound: engines always full, updates free, the
trainer never waited for. All policies that have a setting for it run at the staleness bound of the world;
some peers train on older tokens all the same. `merge` is the `routing.merge` that fits the interruption.

async_rl runs `async_rl.planning.planned_job.simulate`: the orchestrator, manager, queue, pool and weight
sync that run. Peers are models (`benchmarks/support/peer_schedulers.py`) on the same engines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # a script finds only modules of its own folder

from async_rl.config import Config, parse_config
from async_rl.engine_protocol import InterruptMode
from async_rl.planning.planned_job import PlannedRun, simulate
from benchmarks.support.peer_schedulers import PEERS
from benchmarks.support.tables import Row, argument_parser, report
from benchmarks.support.worlds import BASE, FIGURES, SCALE, WORLDS, Length, Policy, World, merge_for


class Ours(Policy, frozen=True, kw_only=True):
    """The scheduler that runs, with its settings."""

    interrupt: InterruptMode = "in_place"
    rollout: dict[str, object] = msgspec.field(default_factory=dict)
    every: int = 1
    """Engines take every so manyth version."""

    @property
    def interrupts(self) -> InterruptMode:
        """Implements `Policy.interrupts`."""
        return self.interrupt

    def config(self, world: World, groups: int, bound: float) -> Config:
        """Return the config of a job in a world."""
        return parse_config(
            {
                "model": {"path": "none"},
                "data": {"path": "none"},
                "engine": {"num_engines": world.engines, "max_running_requests": world.slots},
                "rollout": {
                    "group_size": world.group_size,
                    "max_concurrent_trajectories": world.in_flight,
                    "max_staleness": bound,
                    **self.rollout,
                },
                "weights": {"interrupt": self.interrupt, "every": self.every},
                "routing": {"replay": "off", "merge": merge_for(self.interrupt)},
                "trainer": {"groups_per_batch": groups},
            }
        )

    def run(self, world: World, groups: int, bound: float, seed: int, length: Length) -> Row:
        """Implements `Policy.run`."""
        simulation = PlannedRun(versions=length.versions, warmup=length.warmup, seed=seed, scale=SCALE)
        plan = simulate(self.config(world, groups, bound), world.workload, simulation)
        return {name: plan.ks_lengths if name == "ks" else getattr(plan, name) for name in FIGURES}


_LONG_ANSWERS: Final = ("base", 32), ("long_tail", 128), ("multi_turn", 128)
"""Where the longest trajectories take more versions than the bound allows."""

OURS: Final = (
    Ours(name="async_rl, in place"),
    Ours(name="async_rl, abort", interrupt="abort"),
    Ours(name="async_rl, abort, every 2", interrupt="abort", every=2),
    Ours(name="async_rl, in place, drop", rollout={"staleness_policy": "drop"}, only=_LONG_ANSWERS),
    Ours(
        name="async_rl, in place, mask_tokens",
        rollout={"staleness_policy": "mask_tokens"},
        only=_LONG_ANSWERS,
    ),
    Ours(
        name="async_rl, in place, straggler_wait_s 260",
        rollout={"straggler_wait_s": 260.0},
        only=_LONG_ANSWERS,
    ),
)


_COLUMNS: Final = (
    *("world", "policy", "groups", "bound", "relative", "trainer_idle"),
    *("staleness_mean", "staleness_max", "dropped", "masked", "prefilled", "ks"),
)
"""What fits into a line."""


def jobs_in(world: World) -> Iterator[tuple[Policy, int, float]]:
    """Yield each policy that runs in a world, the groups of a version, and the bound of staleness."""
    for groups, bound in world.bounds.items():
        for policy in (*PEERS, *OURS):
            if not policy.only or (world.name, groups) in policy.only:
                yield policy, groups, bound if policy.bound is None else policy.bound


def run_job(world: World, policy: Policy, groups: int, bound: float, length: Length, seeds: int) -> Row:
    """Return the row of a policy in a world: means over seeds, and of the oldest the oldest."""
    measured = [policy.run(world, groups, bound, seed, length) for seed in range(seeds)]
    oldest = ("staleness_p99", "staleness_max")
    figures = {
        name: max(row[name] for row in measured)
        if name in oldest
        else float(np.mean([row[name] for row in measured]))
        for name in FIGURES
    }
    return {
        "world": world.name,
        "policy": policy.name,
        "interrupt": policy.interrupts,
        "merge": merge_for(policy.interrupts),
        "groups": groups,
        "bound": bound,
        **figures,
    }


def compare(worlds: Sequence[World], *, quick: bool) -> Iterator[Row]:
    """Yield the rows of some worlds, which two processes simulate."""
    # A forked process would share threads and loops that libraries started on import.
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        futures = []
        for world in worlds:
            for policy, groups, bound in jobs_in(world):
                length = world.length(groups)
                if quick:
                    length = Length(versions=length.versions // 5, warmup=length.warmup * 3 // 4)
                seeds = 1 if quick else 5
                futures.append(processes.submit(run_job, world, policy, groups, bound, length, seeds))
        for future in futures:
            yield future.result()


def plot(path: Path, versions: int) -> None:
    """Throughput and staleness of ours over the bound, in the base world, with a trajectory for eight."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
    for color, groups in (("C0", 128), ("C1", 32)):
        longest = BASE.versions_of_longest(groups)
        bounds = range(1, 8) if groups == 128 else range(2, 17, 2)
        plans = []
        for bound in bounds:
            warmup = 4 + round(longest)
            simulation = PlannedRun(versions=versions * 128 // groups, warmup=warmup, coarsen=8)
            plans.append(simulate(OURS[0].config(BASE, groups, bound), BASE.workload, simulation))
            print(f"{groups} groups, bound {bound}: {plans[-1].relative:.3f}", file=sys.stderr)
        label = f"{groups} groups a version ({longest:.0f} versions for the longest answer)"
        above.plot(bounds, [plan.relative for plan in plans], color, marker="o", label=label)
        below.plot(bounds, [plan.staleness_mean for plan in plans], color, marker="o", label="mean")
        below.plot(bounds, [plan.staleness_max for plan in plans], color, marker=".", ls=":", label="max")
    above.set_ylabel("of the fluid bound")
    above.set_ylim(0, 1)
    above.legend()
    below.legend()
    below.set_ylabel("staleness of the trained")
    below.set_xlabel("rollout.max_staleness")
    figure.savefig(path)


def main() -> None:
    parser = argument_parser(__doc__, quick="one seed, few versions: a minute or two for each world")
    parser.add_argument(
        "--world",
        action="append",
        choices=WORLDS,
        help="one world, or several if repeated; default: all",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        help="only draw throughput and staleness over the bound, to here; needs matplotlib",
    )
    options = parser.parse_args()
    if options.plot is not None:
        plot(options.plot, versions=5 if options.quick else 15)
        return
    rows = []
    for row in compare([WORLDS[name] for name in options.world or WORLDS], quick=options.quick):
        rows.append(row)
        print("{world}, {groups} groups: {policy}: {relative:.3f}".format_map(row), file=sys.stderr)
    report(rows, "scheduling policies", options.json, columns=_COLUMNS)


if __name__ == "__main__":
    main()
