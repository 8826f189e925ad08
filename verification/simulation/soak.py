"""A long run in virtual time with every fault and many restarts, in which nothing may grow: `make soak`.

```
 versions   0 ───────────── restarts ─────────────► ──────────────── one long incarnation ────────────► end
 driver     killed · killed on disk · cancelled · stopped, `endings_each`      not touched
 faults     all                                                    those that restart nothing
 config     in process · in workers · on shared devices · with a judge                     in process
 growth     of the process, between incarnations                    of an incarnation, at every few versions
```

A leak is what is still held when no work is left. So the growth of an incarnation is measured in steps that
last until no trajectory is in flight and all outstanding groups are queued.

The program, its files and its numbers of slots are real, as in `make simulate` (docs/design/simulation.md).
The faults are those of `verification.simulation.faults`; each is injected until it has taken effect
`faults_each` times.

Memory is counted exactly: the allocators of CPython and glibc report what is allocated.
Exit codes: 0 all checks hold, 1 one does not, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import random
import shutil
import sys
import time
from bisect import insort
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
from msgspec.structs import replace

from async_rl.config import Config, parse_config
from async_rl.observability.records import TrajectoryCounts
from verification.simulation import growth
from verification.simulation.faults import FAULTS, FaultKind, Setting, fault_table, kinds_of
from verification.simulation.growth import Growth, regress
from verification.simulation.invariant_checker import AttemptLimit
from verification.simulation.scenario import NODES, Death, Ending, Injection, Scenario, Speeds, draw_task
from verification.simulation.scratch import scratch
from verification.simulation.simulate import Simulation

_CALLBACKS_PER_VERSION: Final = 4000
"""Roughly: injections and deaths fall at any moment of a version."""

_FORGET_EVERY: Final = 10
"""Versions within which an injected fault takes effect, if it can."""

_ENDS_INCARNATION: Final = frozenset(
    {
        "second_driver",
        "unwritable_disk",
        "step_is_nan",
        "step_fails",
        "checkpoint_fails",
        "publish_fails",
        "disk_full",
        "corrupt_frame",
    }
)
"""Faults after which driver or trainer start anew, which would end the long incarnation."""

_SHOWN_EVERY: Final = 10
"""Versions between two lines of progress."""

_MIN_SAMPLES: Final = 20
"""Fewer say nothing of a slope."""

_LEVELS: Final = ("in_flight", "queued", "kept_tokens", "expected_tokens", "cached_pages")
"""What rises and falls and takes memory in proportion: trajectories, and the simulated world itself."""

_DRAINED_S: Final = 120.0
"""Virtual seconds after which a step ends without a sample, as trajectories are still in flight."""

_MAX_BYTES_PER_TRAJECTORY: Final = 50.0
"""The limit of growth, set beforehand: a leak of 100 B must be found."""

_SETTINGS: Final[tuple[Setting, ...]] = ("any", "models", "workers", "any", "shared")
"""Settings of the incarnations in turn, while there are restarts."""

Lifetime = Literal["process", "incarnation"]


class SoakPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done."""

    versions: int
    faults_each: int
    """How often each fault must take effect."""
    endings_each: int
    """How often the driver must end in each way: killed, killed on disk, cancelled, stopped."""
    restarts: int
    """How often the driver must restart, also after faults that end a run."""
    restart_share: float
    """Share of the versions with restarts, before the long incarnation."""
    max_versions_between: int
    """Versions between two endings of the driver, at most."""
    sample_every: int
    """Versions between two samples of the long incarnation; even, as every 2nd one writes a checkpoint."""
    trajectories: int
    """How many must be dispatched."""
    seed: int = 0
    groups_per_batch: int = 16
    group_size: int = 8
    max_staleness: int = 4
    engines: int = 8
    slots: int = 64
    """Calls that one engine decodes together."""


FULL: Final = SoakPlan(
    versions=1010,
    faults_each=50,
    endings_each=13,
    restarts=100,
    restart_share=0.5,
    max_versions_between=12,
    sample_every=4,
    trajectories=200_000,
    groups_per_batch=20,
)
SHORT: Final = SoakPlan(
    versions=320,
    faults_each=1,
    endings_each=1,
    restarts=4,
    restart_share=0.2,
    max_versions_between=3,
    sample_every=2,
    trajectories=8_000,
)


class _Samples:
    """Samples of what is held, with the work done at each."""

    def __init__(self) -> None:
        self.columns: dict[str, list[float]] = {}

    def add(self, **values: float) -> None:
        """Add one sample."""
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)

    def __len__(self) -> int:
        return len(self.columns.get("version", ()))

    def regress(self, held: str, work: str) -> Growth:
        """Regress what is held on the work done, without the first fifth: the warm-up."""
        if len(self) < _MIN_SAMPLES:
            return Growth(slope=math.nan, half_width=math.inf, samples=len(self))
        kept = {name: values[len(self) // 5 :] for name, values in self.columns.items()}
        levels = [kept[name] for name in _LEVELS if name in kept]
        return regress(kept[work], kept[held], [int(segment) for segment in kept["segment"]], *levels)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the verdict."""

    name: str
    holds: bool
    found: str
    expected: str


def soak_config(plan: SoakPlan, setting: Setting, number: int) -> Config:
    """Return the config of an incarnation: the setting decides where loops run, who owns the devices, and
    whether a judge gives the rewards.
    """
    transports = ("disk", "tensor", "distributed", "delta")
    tree: dict[str, Any] = {
        "run": {
            "name": "soak",
            "seed": plan.seed,
            "max_steps": plan.versions,
            "keep_trajectories": 0,
            "drain_s": 0.5,
        },
        "model": {"path": "model"},
        "data": {"path": "tasks"},
        "engine": {
            "kind": "simulated",
            "num_engines": plan.engines,
            "max_running_requests": plan.slots,
            "decode_step_s": 0.02,
            "mean_new_tokens": 16.0,
            "stall_s": 5.0,
            "max_restarts": 1_000_000,
            "max_outage_s": 300.0,
        },
        "rollout": {
            "agent_loop": "verification.simulation.users:TurnsLoop",
            "reward": "verification.simulation.users:reward",
            "group_size": plan.group_size,
            # A lost worker or node takes its share with it: half as many make its faults take half the time.
            "max_concurrent_trajectories": plan.engines * plan.slots // (2 if setting == "workers" else 1),
            "max_staleness": plan.max_staleness,
            "max_context_tokens": 256,
            "max_new_tokens": 64,
            "trajectory_timeout_s": 60.0,
            "tool_timeout_s": 1.0,
            "reward_timeout_s": 2.0,
            "max_failed_share": 1.0,
            "top_p": 0.9,
            "top_k": 4,
            "num_workers": 2 if setting == "workers" else 0,
        },
        "queue": {
            "journal_s": 0.5,
            "spool_dir": NODES if setting == "workers" else None,
        },
        "weights": {
            "transport": transports[number % (2 if setting == "shared" else len(transports))],
            "interrupt": "abort",
            "timeout_s": 10.0,
            "overlap": setting != "shared" and number % 2 == 1,
            "bucket_bytes": 1 << 20,
            "verify": "checksum",
        },
        "placement": {"shared": setting == "shared"},
        "trainer": {
            "groups_per_batch": plan.groups_per_batch,
            "checkpoint_every": 2,
            "keep_checkpoints": 2,
            "max_restarts": 1_000_000,
        },
    }
    if setting == "models":
        tree["models"] = {"judge": {"path": "model", "num_engines": 2}}
        judge = {"judge": "judge", "template": "7 {response}", "score": r"\d+", "max_new_tokens": 8}
        tree["rollout"] |= {"reward": "graded", "rewards": {"graded": {"kind": "judge", **judge}}}
    return parse_config(tree)


def soak_scenario(plan: SoakPlan) -> Scenario:
    """Return tasks and speeds of the soak; faults and deaths come as it goes."""
    rng = random.Random(f"soak {plan.seed}")
    troubles = [kind for kind in kinds_of("user") if kind != "slow_tool"]
    tasks = []
    for index in range(2000):
        task = draw_task(rng, index)
        trouble = troubles[index // 20 % len(troubles)] if index % 20 == 0 else None
        if index % 40 == 10:  # few of its calls are interrupted and end at a stop string
            trouble = "split_stop"
        turns = task.metadata["turns"][: 1 + (index % 4 == 0)]  # the more attempts, not turns, the better
        tasks.append(replace(task, metadata={"turns": turns, "trouble": trouble}))
    return Scenario(
        seed=plan.seed,
        config=soak_config(plan, "any", 0),
        tasks=tuple(tasks),
        speeds=Speeds(
            train_s=0.8, update_s=0.1, restart_s=1.0, latency_s=0.004, thread_s=0.005, chunk_tokens=16
        ),
        injections=(),
        deaths=(),
        constants={
            "async_rl.engines.health.PROBE_S": 2.0,
            "async_rl.engines.health.PROBE_TIMEOUT_S": 1.0,
            "async_rl.engines.repair.RESTART_DELAY_S": 0.1,
            "async_rl.engines.repair.RESTART_DELAY_MAX_S": 5.0,
            "async_rl.run.recovery.NODE_LOST_S": 5.0,
            "async_rl.weights.delta_delivery.FULL_EVERY": 10,
        },
    )


class Soak(Simulation):
    """One soak; see the module.

    Example:
        >>> with scratch() as folder:
        ...     soak = Soak(SHORT, folder)
        ...     soak.run()
        ...     assert all(check.holds for check in soak.checks())
    """

    max_incarnations = 100_000
    max_stuck_steps = 2_000_000
    look_every = scrape_every = 512

    def __init__(
        self,
        plan: SoakPlan,
        folder: Path,
        *,
        leak_bytes: int = 0,
        leak: Lifetime = "process",
    ) -> None:
        """Prepare the soak.

        Args:
            plan: How much is done.
            folder: Empty; run folders are made in it.
            leak_bytes: Planted for each attempt, to prove that a leak is found.
            leak: Until when the planted leak is held.
        """
        super().__init__(soak_scenario(plan), folder, digests=False)
        self._plan = plan
        self._rng = random.Random(f"soak faults {plan.seed}")
        self._setting: Setting = "any"
        self._injected: Counter[FaultKind] = Counter()
        self._met_before: Counter[FaultKind] = Counter()
        self._version = self._begin_version = self._due_version = 0
        self._step_begin_s = 0.0
        self._leak_bytes, self._leak = leak_bytes, leak
        self._planted: dict[int, list[bytes]] = {}
        self.attempts = 0
        self.steps_done = 0
        """Steps of the trainer, those that a restart undid included."""
        self.between, self.within = _Samples(), _Samples()
        self.counts: TrajectoryCounts | None = None
        self._begin_cpu_s = time.process_time()

    # -- incarnations -------------------------------------------------------------------------------------

    def run_incarnation(self, incarnation: int, death: Death | None) -> None:
        """Run one incarnation in its setting, clear away its folder if it was killed, and take a sample."""
        plan = self._plan
        self._setting = self._next_setting(incarnation)
        # In the long incarnation engines load files: those that restart need no trainer that is in a step.
        number = incarnation if self._restarting else 0
        self._config = self._in_folder(soak_config(plan, self._setting, number))
        self._scenario = replace(self._scenario, config=self._config)
        self._injections.clear()
        self._injected.clear()
        self._met_before = self._checker.met_faults.copy()
        self._begin_version = self._version
        self._due_version = self._version + self._rng.randint(1, plan.max_versions_between)
        if self._setting != "any":  # its own faults take a while to take effect
            self._due_version += 3
        folder = self._run_dir
        super().run_incarnation(incarnation, death)
        if folder != self._run_dir:
            with self._disk.open_to_checks():
                shutil.rmtree(folder)
        if self._leak == "incarnation":
            self._planted.clear()
        del self._orchestrator, self._cluster, self._loop, self._task, self._stop, self._metrics
        gc.collect()
        with self._disk.open_to_checks():
            self.between.add(
                segment=0,
                in_flight=self.counts.in_flight if self.counts else 0,
                queued=self.counts.queued if self.counts else 0,
                **self._held_by_process(),
            )

    def _next_setting(self, incarnation: int) -> Setting:
        """Return the next setting in turn; at last only those whose own faults have not all happened."""
        if not self._restarting:
            return "any"
        few = {row.only for kind, row in FAULTS.items() if self._is_rare(kind)}
        endings = any(map(self._is_rare, get_args(Ending)))
        settings = [one for one in _SETTINGS if endings or one in few] or ["any"]
        return settings[incarnation % len(settings)]

    def _goal(self, kind: FaultKind) -> int:
        """How often a fault must take effect."""
        return self._plan.endings_each if FAULTS[kind].family == "driver" else self._plan.faults_each

    def _is_rare(self, kind: FaultKind) -> bool:
        return self._checker.met_faults[kind] < self._goal(kind)

    @property
    def _restarting(self) -> bool:
        """Whether restarts go on: until all that comes with them has happened, if that is possible."""
        share = self._version / self._plan.versions
        return share < 0.8 and any(
            self._is_rare(kind)
            for kind, row in FAULTS.items()
            if row.family == "driver" or row.only != "any" or kind in _ENDS_INCARNATION
        )

    # -- versions -----------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Check the ledger; at each new version plan faults and an ending, and sample."""
        super().before_step()
        version = self._cluster.trainer.step
        if version == self._version or self._checker.deaf:
            return
        self._version = version
        self.steps_done += 1
        queue = self._orchestrator.queue
        assert queue is not None
        self.counts = queue.groups.ledger.counts()
        self._plan_faults()
        is_long = not self._restarting and self._setting == "any"
        if not is_long and self._death is None and version >= self._due_version:
            self._plan_ending()
        if is_long and version % self._plan.sample_every == 0:
            self._step_begin_s = self._loop.time()
            self._cluster.trainer.may_end = self._sample_when_drained
        if version % _SHOWN_EVERY == 0:
            with self._disk.open_to_checks():
                print(self._progress(), flush=True)

    def _plan_faults(self) -> None:
        """Inject the faults that are behind schedule, at moments until the next version."""
        plan, met = self._plan, self._checker.met_faults
        if self._version % _FORGET_EVERY == 0:  # what was injected and could not take effect is lost
            self._injected.clear()
            self._met_before = met.copy()
        goal = plan.faults_each * min(1.0, 1.2 * self._version / plan.versions / plan.restart_share)
        long_goal = plan.faults_each * min(1.0, 1.15 * self._version / plan.versions)
        for kind, row in FAULTS.items():
            if row.family in ("user", "driver") or row.only not in ("any", self._setting):
                continue
            if kind in _ENDS_INCARNATION and not self._restarting:
                continue
            limited = kind in _ENDS_INCARNATION or row.only != "any"
            pending = self._injected[kind] - (met[kind] - self._met_before[kind])
            if met[kind] + pending >= (goal if limited else long_goal) or pending > 2:
                continue
            self._injected[kind] += 1
            injection = Injection(
                step=self._steps + self._rng.randrange(_CALLBACKS_PER_VERSION),
                kind=kind,
                engine=self._rng.randrange(plan.engines),
                amount=self._rng.uniform(0.001, 0.999),
            )
            insort(self._injections, injection, key=lambda injection: injection.step)

    def _plan_ending(self) -> None:
        kinds = list(filter(self._is_rare, get_args(Ending)))
        kind: Ending = self._rng.choice(kinds or ["stop"])
        after = self._rng.randrange(1, _CALLBACKS_PER_VERSION)
        self._death = Death(kind=kind, after=self._incarnation_steps + after)
        if kind == "kill_on_disk":
            self._disk.die_at = self._disk.operations + self._rng.randrange(1, 200)

    def _sample_when_drained(self) -> bool:
        """Take a sample once all outstanding groups wait for the trainer; the trainer's step may then end."""
        queue = self._orchestrator.queue
        assert queue is not None
        self.counts = queue.groups.ledger.counts()
        if self.counts.in_flight and self._loop.time() < self._step_begin_s + _DRAINED_S:
            return False
        self._cluster.trainer.may_end = lambda: True
        if not self.counts.in_flight:
            with self._disk.open_to_checks():
                self._sample()
        return True

    def _sample(self) -> None:
        assert self.counts is not None
        gc.collect()
        self.within.add(
            segment=len(self._incarnations),
            in_flight=self.counts.in_flight,
            queued=self.counts.queued,
            cached_pages=sum(engine.num_cached_pages for engine in self._cluster.engines),
            tasks=len(asyncio.all_tasks(self._loop)),
            **self._held_by_process(),
        )

    def _held_by_process(self) -> dict[str, float]:
        """Return what the process and its folder hold, and the work done until now."""
        return {
            "version": self._version,
            "trajectories": self.attempts,
            "memory": growth.allocated_bytes(),
            "descriptors": growth.open_descriptors(),
            "threads": growth.num_threads(),
            "kept_tokens": self._checker.num_kept_tokens,
            "expected_tokens": self._checker.num_expected_tokens,
            "disk": growth.disk_bytes(self._run_dir),
        }

    def attempt_begins(self, remaining_s: float) -> AttemptLimit:
        """Count an attempt; plant the leak that the soak must find."""
        if not self._checker.deaf:
            self.attempts += 1
            if self._leak_bytes:
                held = self._planted.setdefault(len(self._incarnations), [])
                held.append(bytes(self._leak_bytes - sys.getsizeof(b"")))
        return super().attempt_begins(remaining_s)

    # -- what came of it ----------------------------------------------------------------------------------

    @property
    def restarts(self) -> int:
        """Restarts of the driver."""
        return max(0, len(self._incarnations) - 1)

    @property
    def cpu_s(self) -> float:
        """CPU time so far."""
        return time.process_time() - self._begin_cpu_s

    def _progress(self) -> str:
        plan, met = self._plan, self._checker.met_faults
        fewest = min(met[kind] for kind, row in FAULTS.items() if row.family != "driver")
        return (
            f"version {self._version} of {plan.versions}"
            f" · {self.counts.dispatched if self.counts else 0:,} trajectories, {self.attempts:,} attempts"
            f" · {self.restarts} restarts · each fault {fewest} of {plan.faults_each} times"
            f" · {growth.resident_bytes() / 1e6:.0f} MB · {self.cpu_s:.0f} s CPU"
        )

    def checks(self) -> list[Check]:
        """Return the lines of the verdict."""
        plan, checker = self._plan, self._checker
        counts = self.counts
        dispatched, trained = (counts.dispatched, counts.trained) if counts else (0, 0)
        lost = counts.unaccounted if counts else 0
        twice = sum("again" in text or "twice" in text for text in checker.violations)
        stale = sum("is trained at" in text for text in checker.violations)
        few = [f"{kind} {checker.met_faults[kind]}" for kind in FAULTS if self._is_rare(kind)]
        checks = [
            _at_most("violations of invariants", len(checker.violations), 0),
            _at_most("trajectories lost", abs(lost), 0),
            _at_most("trajectories trained twice", twice, 0),
            _at_most("trajectories trained beyond max_staleness", stale, 0),
            Check(
                name="trajectories",
                holds=dispatched >= plan.trajectories,
                found=f"{dispatched:,} ({trained:,} trained)",
                expected=f"≥ {plan.trajectories:,}",
            ),
            _at_least("weight versions", self._version, plan.versions - 1),
            _at_least("restarts of the driver", self.restarts, plan.restarts),
            Check(
                name="faults that happened too rarely",
                holds=not few,
                found=", ".join(few) or "none",
                expected=f"each ≥ {plan.faults_each}, of the driver {plan.endings_each}",
            ),
        ]
        per_version = _MAX_BYTES_PER_TRAJECTORY * plan.groups_per_batch * plan.group_size
        for samples, where in ((self.within, "within an incarnation"), (self.between, "over restarts")):
            rows = (
                ("memory", "trajectories", "memory, B per trajectory", _MAX_BYTES_PER_TRAJECTORY),
                ("memory", "version", "memory, B per version", per_version),
                ("descriptors", "version", "descriptors per version", 0.2),
                ("threads", "version", "threads per version", 0.02),
                ("tasks", "version", "tasks per version", 2.0),
                ("disk", "version", "disk, B per version", per_version),
            )
            for held, work, name, limit in rows:
                if samples is self.within or (held in samples.columns and len(samples) >= _MIN_SAMPLES):
                    checks.append(_growth(f"{name}, {where}", samples.regress(held, work), limit))
        return checks

    def report(self) -> list[str]:
        """Return the table of faults, the ends of incarnations and the verdict."""
        checks = self.checks()
        ends = Counter(incarnation.split(": ")[0] for incarnation in self._incarnations)
        lines = [*fault_table(self._checker.met_faults), ""]
        lines.append(
            f"incarnations: {', '.join(f'{number} {end}' for end, number in ends.most_common())}; "
            f"{self._checker.tokens_said:,} tokens, {self._steps:,} callbacks, "
            f"{self._now_s / 3600:.1f} virtual hours, "
            f"{self.cpu_s:.0f} s CPU ({1e3 * self.cpu_s / max(1, self.attempts):.2f} ms per attempt)"
        )
        lines += ["", f"{'':<5}{'check':<48}{'found':>28}  expected"]
        for check in checks:
            lines.append(
                f"{'ok' if check.holds else 'FAIL':<5}{check.name:<48}{check.found:>28}  {check.expected}"
            )
        failed = sum(not check.holds for check in checks)
        lines += [
            "",
            "the soak holds" if not failed else f"the soak FAILED: {failed} of {len(checks)} checks",
        ]
        return lines


def _at_most(name: str, found: int, limit: int) -> Check:
    return Check(name=name, holds=found <= limit, found=f"{found:,}", expected=f"≤ {limit:,}")


def _at_least(name: str, found: int, limit: int) -> Check:
    return Check(name=name, holds=found >= limit, found=f"{found:,}", expected=f"≥ {limit:,}")


def _growth(name: str, growth: Growth, limit: float) -> Check:
    """Flat means: with 95% confidence it grows by less than the limit."""
    found = f"{growth.slope:+.3g} ± {growth.half_width:.2g}"
    return Check(name=name, holds=growth.upper < limit, found=found, expected=f"< {limit:g}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a soak and print its verdict; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m verification.simulation.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--short", action="store_true", help="the version of CI, about two minutes")
    parser.add_argument("--seed", type=int, default=0, help="of tasks and faults")
    parser.add_argument(
        "--leak-bytes", type=int, default=0, help="plant a leak of so many bytes per trajectory"
    )
    parser.add_argument("--leak", choices=get_args(Lifetime), default="process", help="how long it is held")
    options = parser.parse_args(arguments)
    plan = replace(SHORT if options.short else FULL, seed=options.seed)
    gc.collect()
    gc.freeze()  # modules stay; each sample collects what has become garbage
    gc.set_threshold(50_000, 20, 100)
    with scratch() as folder:
        soak = Soak(plan, Path(folder), leak_bytes=options.leak_bytes, leak=options.leak)
        outcome = soak.run()
    print()
    print("\n".join(soak.report()))
    for violation in outcome.violations:
        print(f"VIOLATION {violation}\n" + "\n".join(outcome.events))
    return int(not all(check.holds for check in soak.checks()))


if __name__ == "__main__":
    sys.exit(main())
