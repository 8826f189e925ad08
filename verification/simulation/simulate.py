"""Run one seed: incarnations of a driver, one after the other, until the run ends.

```
 scenario ─► incarnation 1 ──killed──► copy of the folder ─► incarnation 2 ──failed, cancelled, stopped──►
 incarnation 3 ─► the end
               │                                        │
               └── a loop in virtual time, a cluster; the same run folder, checker, disk and clock go through
```

After each callback of the loop the checker looks on, and what the scenario has for this step is done. A kill
takes effect between two callbacks, or inside an operation on the disk: the folder is copied as it is at that
moment, and the next incarnation continues from the copy.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import random
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, get_args

import msgspec
from msgspec.structs import replace

from async_rl.config import Config
from async_rl.data.dataset import Dataset
from async_rl.engines.pool import EngineState
from async_rl.engines.request_refusals import MIN_TRAJECTORIES
from async_rl.errors import (
    AsyncRLError,
    EngineError,
    EnvironmentNotReady,
    InvariantError,
    LocalShortage,
    SpoolFull,
    StallError,
    StoppedAtStart,
    TrainerError,
)
from async_rl.observability.console_report import write_summary
from async_rl.observability.evaluation_record import FILE, evaluation_record_log
from async_rl.observability.metrics import Metrics, value_of
from async_rl.observability.records import Summary
from async_rl.planning.virtual_time import NumberedTask, VirtualTimeLoop
from async_rl.rollout.workers import worker_backend
from async_rl.run.inputs import RunInputs
from async_rl.run.orchestrator import Orchestrator
from async_rl.runtime.supervision import first_error, observer
from async_rl.runtime.waits import acting
from async_rl.store.ledger import Ledger
from verification.audit_run import audit
from verification.simulation.faults import ENGINE_FAULTS, TRAINER_FAULTS
from verification.simulation.faulty_engines import FaultyEngine, SimulatedCluster
from verification.simulation.invariant_checker import AttemptLimit, InvariantChecker, spooled_files
from verification.simulation.scenario import FACTS, NODES, Death, Injection, Scenario, draw
from verification.simulation.simulated_disk import Disk
from verification.simulation.simulated_workers import SimulatedNodes
from verification.simulation.users import (
    MISSING_PACKAGE,
    SimulatedChat,
    attempt_begins,
    attempt_cancelled,
    count_fault,
)

_NODES_AT_KILL: Final = "nodes-at-kill"
"""The disks of nodes as they were when the driver was killed, until its remains are gone."""

_DOWNTIME_S: Final = 1.0

Ended = Literal[
    "finished",
    "killed",
    "kill_on_disk",
    "cancelled",
    "stopped",
    "failed",
    "halted",
    "stopped_at_start",
    "power_cut",
]


class SeedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a seed."""

    seed: int
    violations: tuple[str, ...]
    incarnations: tuple[str, ...] = ()
    """How each ended; `failed: ` with the error."""
    faults: dict[str, int] = {}
    steps: int = 0
    """Callbacks of all loops."""
    tokens: int = 0
    virtual_s: float = 0.0
    trace: str = ""
    """Hash of all events and turns; equal for equal seeds."""
    decisions: str = ""
    """Hash of `InvariantChecker.decided`: equal for equal seeds, also after a renaming."""
    events: tuple[str, ...] = ()
    """The last ones."""


class _Halt(KeyboardInterrupt):
    """Ends the loop here and now: asyncio lets it through, unlike other exceptions."""


def simulate(
    seed: int,
    folder: Path,
    *,
    scenario: Scenario | None = None,
    after_turn: Callable[[int, asyncio.Task[Any]], None] | None = None,
) -> SeedOutcome:
    """Run a seed to its end.

    Args:
        seed: Decides everything.
        folder: Empty; run folders are made in it.
        scenario: In the place of the one that the seed draws.
        after_turn: Called after each turn of a task of the first incarnation, with the number of its
        callback.
    """
    return Simulation(scenario or draw(seed), folder, after_turn).run()


_WORKER_SILENCES: Final = ("mute_worker", "deafen_worker", "cut_off_worker", "isolate_worker", "delay_worker")

_SILENCE: Final = ("sent nothing for", "did not take new weights within", "did not end its calls within")
"""What an engine is quarantined for that makes no progress."""


class Simulation:
    """Incarnations of a driver, one after the other; the soak makes a long run of it."""

    max_incarnations = 24
    max_stuck_s = 3000.0
    """Virtual seconds within which a new version must come, or the end: many times the sum of timeouts."""
    max_stuck_steps = 1_600_000
    """The same in callbacks of the loop, so that an incarnation that loops without time passing is noticed.
    Neither counts from the beginning: where most attempts exceed their time limit and run one at a time, a
    version can take 600 virtual seconds, and again when the trainer restarts. Journals that tick 20 times per
    second in the driver and three workers take 500 callbacks in each."""
    look_every = 8
    """Steps between two looks at what is in memory."""
    scrape_every = 64
    """Callbacks between two comparisons of the counters with the ledger."""

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        after_turn: Callable[[int, asyncio.Task[Any]], None] | None = None,
        *,
        digests: bool = True,
    ) -> None:
        """Start with an empty folder; see `simulate`."""
        self._folder = folder
        self._config = self._in_folder(scenario.config)
        self._scenario = scenario = replace(scenario, config=self._config)
        self._after_turn = after_turn
        self._checker = InvariantChecker(scenario, digests=digests)
        self._nodes = SimulatedNodes()
        self._checker.lost_nodes, self._checker.wiped = self._nodes.lost, self._nodes.wiped
        self._checker.absent_until_s = self._nodes.absent_until_s
        self._checker.unasked_nodes = self._nodes.unasked
        self._disk = Disk()
        self._disk.die = self._kill_on_disk
        self._threads = random.Random(f"threads {scenario.seed}")
        self._injections = deque(scenario.injections)
        self._blamed: dict[str, Exception | None] = {}
        """The error of each engine's last quarantine, which is judged once."""
        self._steps = self._incarnation_steps = self._num_ids = 0
        self._now_s = 0.0
        self._run_dir = folder / "incarnation-0"
        self._diary = folder / "diary.jsonl"  # beside what a power cut takes
        self._incarnations: list[str] = []
        self._death: Death | None = None
        self._ended: Ended = "finished"
        self._clearing = self._killed = False

    def _in_folder(self, config: Config) -> Config:
        """Return a config whose nodes keep their files in the simulation's folder, if they keep any."""
        places = {"spool_dir": config.queue.spool_dir, "journal_dir": config.queue.journal_dir}
        places = {key: str(self._folder / place) for key, place in places.items() if place is not None}
        return replace(config, queue=replace(config.queue, **places))

    def run(self) -> SeedOutcome:
        """Run all incarnations."""
        with (
            self._scenario.constants_set(),
            self._disk.mounted(),
            _logging_only(_ErrorsThatNothingElseShows(self._checker)),
        ):
            self._run_dir.mkdir()
            for incarnation in range(self.max_incarnations):
                deaths = self._scenario.deaths
                self.run_incarnation(incarnation, deaths[incarnation] if incarnation < len(deaths) else None)
                if self._checker.violations or self._ended == "finished":
                    break
                self._disk.write_error, self._disk.no_files = 0, False
            else:
                self._checker.fail(
                    f"after {self.max_incarnations} incarnations there is no end: {self._incarnations}"
                )
            # Without a step, because all tasks failed, there is nothing to audit.
            if self._ended == "finished" and self._checker.last_step and not self._checker.violations:
                with self._disk.open_to_checks():
                    results = audit(self._run_dir, self._diary, unrecorded=self._checker.unrecorded)
                for check, holds, detail in results:
                    if not holds:
                        self._checker.fail(f"the audit denies that {check}: {detail}")
        return SeedOutcome(
            seed=self._scenario.seed,
            violations=tuple(self._checker.violations),
            incarnations=tuple(self._incarnations),
            faults=dict(self._checker.met_faults),
            steps=self._steps,
            tokens=self._checker.tokens_said,
            virtual_s=self._now_s,
            trace=self._checker.trace,
            decisions=self._checker.decisions,
            events=tuple(self._checker.events),
        )

    # -- one incarnation ---------------------------------------------------------------------------------

    def run_incarnation(self, incarnation: int, death: Death | None) -> None:
        """Run one incarnation until it ends or `death` ends it."""
        self._checker.note(f"incarnation {incarnation}")
        self._death, self._incarnation_steps, self._ended = death, 0, "failed"
        self._has_rival = False
        self._disk.die_at = None
        if death is not None and death.kind == "kill_on_disk":
            self._disk.die_at = self._disk.operations + death.after
        loop = VirtualTimeLoop(
            begin_s=self._now_s,
            thread_s=self._thread_s if self._scenario.speeds.thread_s else None,
            after_step=self._after_step,
        )
        self._loop, self._newest_version = loop, -1
        self._note_progress()
        self._checker.begin_incarnation(self._config, loop.time)
        self._nodes.begin_incarnation()
        loop.set_exception_handler(self._unhandled)
        for name in ("checkpoints", "logs"):
            (self._run_dir / name).mkdir(parents=True, exist_ok=True)
        self._stop = asyncio.Event()
        self._metrics = Metrics()
        self._cluster = SimulatedCluster(
            self._scenario, self._checker, incarnation, self.before_step, self._nodes, self._run_dir
        )
        for engine in self._cluster.engines:
            engine.others_accept = lambda: bool(self._accepting())
        self._cluster.trainer.own_files = self._disk.open_to_checks
        self._cluster.trainer.diary = self._diary
        self._orchestrator = Orchestrator(
            self._config,
            self._run_dir,
            self._stop,
            self._cluster,
            self._metrics,
            loop.time,
            RunInputs(self._scenario.tasks, SimulatedChat(), FACTS, self._new_id, self._validation()),
        )
        try:
            loop.run_until_complete(self._main())
        except _Halt:
            self._clear_away()
        self._checker.decided("end", get_args(Ended).index(self._ended))
        self._incarnations.append(self._ended if self._ended != "failed" else f"failed: {self._cause}")
        self._now_s = loop.time() + _DOWNTIME_S
        loop.close()

    async def _main(self) -> None:
        """Run one incarnation of the driver and record how it ended."""
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        attempt_begins.set(self.attempt_begins)
        attempt_cancelled.set(self._checker.attempt_cancelled)
        count_fault.set(self._checker.count)
        self._cause = ""
        try:
            with acting("run", waits=self._orchestrator.waits):
                summary = await self._orchestrator.run()
        except asyncio.CancelledError:
            self._ended = "cancelled"
            if not self._was("cancel"):
                self._checker.fail("the run was cancelled without a cause")
        except Exception as error:
            cause = first_error(error)
            told = f"{type(cause).__name__}: {cause}"
            self._cause = told.replace(str(self._folder), "...")  # which another run does not have
            if isinstance(cause, StoppedAtStart) and self._was("stop"):
                self._ended = "stopped_at_start"
            else:
                self._judge(cause)
        else:
            if self._killed:  # inside this very callback: the driver never came to its end
                return
            self._ended = "finished"
            with self._disk.open_to_checks():
                self._check_end(summary)
        if not self._checker.deaf:
            await self._loop.shutdown_default_executor()
            # Without a free descriptor the driver cannot list what workers left: the next start deletes it.
            if self._ended in ("finished", "stopped") and not self._disk.no_files:
                with self._disk.open_to_checks():
                    self._checker.check_folder(self._run_dir)
            self._checker.note(f"incarnation ends: {self._ended} {self._cause}")
            left = [t.get_name() for t in asyncio.all_tasks() if t is not task]
            if left:
                self._checker.fail(f"tasks are left: {sorted(left)}")
            if open_calls := [e.engine_id for e in self._cluster.engines if e.num_streams]:
                self._checker.fail(f"calls are left open on {open_calls}")

    def _judge(self, cause: BaseException) -> None:
        """Whether what was done to the run may end it so."""
        met = self._checker.met_faults.keys()
        if isinstance(cause, InvariantError) or not isinstance(cause, AsyncRLError):
            allowed = False
        elif "another driver has written" in str(cause):
            allowed = self._has_rival
        elif isinstance(cause, TrainerError):
            allowed = bool(met & TRAINER_FAULTS)
        elif isinstance(cause, EngineError | EnvironmentNotReady):
            # A clock that jumps lets everything run past its time. Requests that arrive late look from the
            # driver like an engine that does not answer, so they may use up its restarts.
            unanswered = "late_request" in met and _SILENCE[0] in str(cause)
            allowed = unanswered or bool(met & {*ENGINE_FAULTS, "clock_jump"})
        elif isinstance(cause, StallError):
            hangs = any(task.metadata["trouble"] == "hang_loop" for task in self._scenario.tasks)
            # A worker may be silent for as long as the doctor waits, and another one after it.
            silences = sum(self._checker.met_faults[kind] for kind in _WORKER_SILENCES)
            may_stall = hangs or silences > 1 or bool(met & ENGINE_FAULTS)
            allowed = self._config.doctor.action != "report" and may_stall
        elif "disk" in str(cause):
            allowed = bool(met & {"disk_full", "unwritable_disk", "worker_disk_full", "node_disk_full"})
        elif isinstance(cause, SpoolFull):
            allowed = "queue.max_bytes" in str(cause)
        else:
            before = self._config.rollout
            # Engines that refuse all requests as wrong are believed, unless another one could accept them.
            # Each is believed a few times before, in each worker that starts by all attempts of as many
            # trajectories: failures with other causes may follow.
            wrong = "wrong request" in str(cause)
            if refused := re.search(r"(\d+) RequestRefused", str(cause)):
                refused_needlessly = min(int(refused[1]), len(self._checker.refused_needlessly))
                restarts = int(value_of(self._metrics.rollout_worker_restarts_total))
                judges = len(self._cluster.engines) * (max(1, self._config.num_workers) + restarts)
                wrong = refused_needlessly > MIN_TRAJECTORIES * judges * before.max_attempts
            others = [e for e in self._accepting() if f"{e.engine_id} answered 400" not in str(cause)]
            # The tasks are as hard the next time: the user does what the error message says.
            if "max_filtered_groups" in str(cause):
                after = replace(
                    before, failed_siblings="train_rest", min_group_size=1, dynamic_filtering=False
                )
                if after == before:  # tasks that fail follow each other, some for want of time
                    after = replace(
                        before,
                        max_filtered_groups=4 * before.max_filtered_groups,
                        trajectory_timeout_s=4 * before.trajectory_timeout_s,
                    )
            elif "max_failed_share" in str(cause):
                after = replace(before, max_failed_share=1.0)
            else:
                after = before
            if after == before and "rollout.trajectory_timeout_s" in str(cause):
                after = replace(before, trajectory_timeout_s=4 * before.trajectory_timeout_s)
            allowed = not others if wrong else after != before
            self._config = replace(self._config, rollout=after)
        # Only one worker lacks it, while others may be without descriptors.
        if MISSING_PACKAGE in str(cause) and self._config.num_workers > 1 and "no_files" not in met:
            allowed = False
        if not allowed:
            self._checker.fail(f"the run ended with {type(cause).__name__}: {cause}")

    def _accepting(self) -> list[FaultyEngine]:
        """Return the engines that could accept, now or soon, what another one refuses as a wrong request."""
        pool, reserved = self._orchestrator.pool, self._config.evaluation.engines
        rollout_engines = pool.engines()[: -reserved if isinstance(reserved, int) else None]
        if len(rollout_engines) == 1:  # an engine alone is believed
            return []
        states = (EngineState.JOINING, EngineState.UPDATING, EngineState.SERVING)
        return [
            engine
            for engine in pool.engines(*states)
            if engine in rollout_engines
            and isinstance(engine, FaultyEngine)
            and not (engine.refuses_requests or engine.has_refused_last)
            and engine.holds_memory
        ]

    def _was(self, kind: str) -> bool:
        return (
            self._death is not None
            and self._death.kind == kind
            and self._incarnation_steps >= self._death.after
        )

    def _check_end(self, summary: Summary) -> None:
        """Check what must hold when a run has ended or was asked to stop."""
        config, checker = self._scenario.config, self._checker
        if self._task.cancelling():
            checker.fail("the run was cancelled and ended as if it had not been")
        write_summary(self._run_dir, summary)
        if summary.trajectories.unaccounted:
            checker.fail(f"unaccounted: {summary.trajectories}")
        for record in evaluation_record_log(self._run_dir / FILE).read():
            if record.status == "done" and record.unaccounted:
                checker.fail(f"{record.unaccounted} answers of version {record.weight_version} are missing")
        step = self._cluster.trainer.step
        checker.check_ledger(self._run_dir, settled=step)
        checker.check_records(self._run_dir, settled=step)
        if step < config.run.max_steps:
            if self._was("stop"):
                self._ended = "stopped"
            elif config.data.epochs is None:
                checker.fail(f"the run ended after {step} of {config.run.max_steps} steps")

    def _check_counters(self) -> None:
        """Check that a scrape would see the counts of the ledger, so that trajectories add up in it."""
        if (queue := self._orchestrator.queue) is None:
            return
        counts, metrics = queue.groups.ledger.counts(), self._metrics
        (dropped,) = metrics.trajectories_dropped_total.collect()
        counted = (
            value_of(metrics.trajectories_dispatched_total),
            value_of(metrics.trajectories_trained_total),
            sum(sample.value for sample in dropped.samples if sample.name.endswith("_total")),
        )
        if counted != (counts.dispatched, counts.trained, sum(counts.dropped.values())):
            self._checker.fail(f"a scrape counts (dispatched, trained, dropped) = {counted}, not {counts}")

    # -- what happens between two callbacks ---------------------------------------------------------------

    def _after_step(self, task: NumberedTask | None) -> None:
        self._steps += 1
        self._incarnation_steps += 1
        if (
            self._incarnation_steps - self._progress_steps > self.max_stuck_steps
            or self._loop.time() - self._progress_s > self.max_stuck_s
        ):
            self._halt_stuck()
        if self._clearing:
            return
        if self._killed:
            raise _Halt
        self._checker.engines_serve(self._orchestrator.pool.has_engine(EngineState.SERVING))
        self._checker.turn(task.number if task is not None else 0)
        if self._incarnation_steps % self.scrape_every == 0:
            self._check_counters()
        if self._after_turn is not None and task is not None and not self._incarnations:
            self._after_turn(self._incarnation_steps, task)
        while self._injections and self._injections[0].step <= self._steps:
            self._inject(self._injections.popleft())
        death = self._death
        if death is not None and death.kind != "kill_on_disk" and self._incarnation_steps == death.after:
            self._die(death)
        if self._incarnation_steps % self.look_every == 0:
            self._look()
            self._cluster.look_at_devices()
        if self._checker.violations:
            self._ended = "halted"
            raise _Halt

    def _look(self) -> None:
        """Check what must hold between any two callbacks."""
        queue, pool, checker = self._orchestrator.queue, self._orchestrator.pool, self._checker
        if queue is not None:
            try:
                queue.groups.ledger.counts()
            except InvariantError as error:
                checker.fail(str(error))
                return
            outstanding = queue.groups.backlog.outstanding
            if outstanding > self._config.max_outstanding_groups:
                checker.fail(f"{outstanding} groups are outstanding")
            if queue.groups.spool.used_bytes > self._config.queue.max_bytes:
                checker.fail(f"the spool holds {queue.groups.spool.used_bytes} bytes")
        for engine in pool.engines(EngineState.SERVING):
            assert isinstance(engine, FaultyEngine)
            claimed = pool.version_of(engine.engine_id)
            if engine.weight_version != claimed:
                checker.fail(
                    f"{engine.engine_id} serves version {engine.weight_version}, the pool says {claimed}"
                )

        for engine in pool.engines(EngineState.QUARANTINED):
            assert isinstance(engine, FaultyEngine)
            cause = pool.error_of(engine.engine_id)
            if self._blamed.get(engine.engine_id) is cause:
                continue  # it may move a payload again since
            self._blamed[engine.engine_id] = cause
            if isinstance(cause, LocalShortage):
                checker.fail(f"{engine.engine_id} is blamed for a shortage of the driver: {cause}")
            if engine.moves_payload and any(silence in str(cause) for silence in _SILENCE):
                checker.fail(f"{engine.engine_id} is blamed for silence while it moves a payload: {cause}")

    def _note_progress(self) -> None:
        self._progress_steps, self._progress_s = self._incarnation_steps, self._loop.time()

    def _halt_stuck(self) -> None:
        """Neither a new version nor the end nor an error in all this time."""
        where = (
            "while it was cleared away"
            if self._clearing
            else f"waits: {self._orchestrator.live_status.health()}"
        )
        deaf, self._checker.deaf = self._checker.deaf, False
        self._checker.fail(f"the run does not come to its end; {where}")
        self._checker.deaf = deaf
        self._ended = "halted"
        raise _Halt

    def _inject(self, injection: Injection) -> None:
        kind, amount = injection.kind, injection.amount
        if kind in ("disk_full", "unwritable_disk"):
            self._checker.met(kind)
            number = (errno.EROFS, errno.EIO)[int(amount * 1e6) % 2]
            self._disk.write_error = errno.ENOSPC if kind == "disk_full" else number
            self._loop.call_later(10 * amount, setattr, self._disk, "write_error", 0)
        elif kind == "no_files":
            self._disk.no_files = True
            self._disk.on_no_file = lambda: self._checker.met(kind)
            self._loop.call_later(10 * amount, setattr, self._disk, "no_files", False)
        elif kind == "unreadable_file":
            self._make_unreadable(amount)
        elif kind == "second_driver":
            self._start_second_driver(injection)
        elif kind == "corrupt_frame":
            with self._disk.open_to_checks():
                self._corrupt_frame(amount)
        elif kind == "clock_jump":
            self._checker.met(kind)
            jump_s = 10 ** (4 * amount - 2)
            self._checker.clock_jumps(jump_s)
            self._loop.jump(jump_s)
        else:
            with self._disk.open_to_checks():
                self._cluster.inject(injection)

    def _corrupt_frame(self, amount: float) -> None:
        """Flip a bit of a frame of the queue."""
        found = spooled_files(self._config, self._run_dir)
        frames = sorted(path for path in found if path.suffix != ".part")
        if not frames:
            return
        self._checker.met("corrupt_frame")
        path = frames[int(amount * len(frames))]
        with path.open("r+b") as file:
            place = int(amount * 1e6) % min(600, path.stat().st_size)
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1]))

    def _make_unreadable(self, amount: float) -> None:
        """Let a frame or a journal answer an error whenever it is opened, in later incarnations, too."""
        with self._disk.open_to_checks():
            found = [*spooled_files(self._config, self._run_dir), *self._run_dir.glob("journal/*/journal-*")]
        files = sorted(path for path in found if path.suffix != ".part")
        if not files:
            return
        self._checker.met("unreadable_file")
        path = files[int(amount * len(files))]
        number = (errno.EIO, errno.ESTALE, errno.EACCES)[int(amount * 1e6) % 3]
        self._disk.unreadable["/".join(path.parts[-2:])] = number

    def _start_second_driver(self, injection: Injection) -> None:
        """Let another driver roll the ledger back, as at each start, and be killed; this one must end then.

        Not while this one writes a checkpoint: the next start would refuse it, see `Ledger.rollback`.
        """
        path = self._run_dir / "ledger.sqlite"
        if self._orchestrator.queue is None or self._has_rival:
            return
        starts_checkpoint = any(wait.on == "checkpoint" for wait in self._orchestrator.waits.open_waits())
        if starts_checkpoint or self._cluster.trainer.is_saving:
            self._injections.appendleft(replace(injection, step=self._steps + 1))
            return
        self._checker.met("second_driver")
        self._has_rival = True
        with self._disk.open_to_checks():
            Ledger(path).rollback(self._checker.saved_step)

    def _die(self, death: Death) -> None:
        self._checker.count(death.kind)
        if death.kind in ("kill", "power_cut"):
            self._kill("killed" if death.kind == "kill" else "power_cut")
            raise _Halt
        elif death.kind == "cancel":
            self._checker.note("cancelled")
            self._task.cancel()
        elif death.kind == "stop":
            self._checker.note("told to stop")
            self._stop.set()

    def _kill_on_disk(self) -> None:
        self._checker.count("kill_on_disk")
        self._kill("kill_on_disk")

    def _kill(self, ended: Ended) -> None:
        """Keep the folder as it is; what the remains do to theirs until they are gone never happened."""
        self._checker.note(ended)
        copy = self._folder / f"incarnation-{len(self._incarnations) + 1}"
        with self._disk.open_to_checks():
            try:
                shutil.copytree(self._run_dir, copy)
            except shutil.Error:  # the collector has closed a connection to the ledger, which removed its log
                shutil.rmtree(copy)
                shutil.copytree(self._run_dir, copy)
            self._disk.keep_synced(self._run_dir, copy)
            if (disks := self._folder / NODES).exists():
                shutil.copytree(disks, self._folder / _NODES_AT_KILL)
            if ended == "power_cut":
                rng = random.Random(f"power {self._scenario.seed} {len(self._incarnations)}")
                self._checker.lose_power(copy, self._disk.cut_power(copy, rng))
        self._run_dir = copy
        self._ended, self._killed, self._checker.deaf = ended, True, True

    def _clear_away(self) -> None:
        """End the tasks of an incarnation that was cut off; they are cancelled, which must end them."""
        self._checker.deaf = self._clearing = True
        self._disk.write_error, self._disk.no_files = 0, False
        self._disk.die_at = None
        self._incarnation_steps = 0
        self._note_progress()
        ended, cause = self._ended, self._cause
        self._task.cancel()
        with suppress(_Halt, asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._ended, self._cause = ended, cause
        self._checker.deaf = self._clearing = self._killed = False
        if (kept := self._folder / _NODES_AT_KILL).exists():  # references to frames on nodes have whole paths
            with self._disk.open_to_checks():
                shutil.rmtree(self._folder / NODES)
                kept.rename(self._folder / NODES)

    def _validation(self) -> tuple[Dataset, ...]:
        if not (tasks := list(self._scenario.validation)):
            return ()
        return (Dataset(name="validation", path="validation", schema="plain", detected=False, tasks=tasks),)

    # -- what the run is given ----------------------------------------------------------------------------

    def attempt_begins(self, remaining_s: float) -> AttemptLimit:
        """The agent loop of a trajectory starts from its prompt, in the trajectory's task."""
        return self._checker.attempt_begins(remaining_s)

    def before_step(self) -> None:
        """Compare the ledger with what was seen, before each step and checkpoint of the trainer."""
        version = self._cluster.trainer.step
        if version > self._newest_version:
            self._newest_version = version
            self._note_progress()
        if not self._has_rival:  # else the ledger is not that of this driver any more
            with self._disk.open_to_checks():
                self._checker.check_ledger(self._run_dir, settled=version)

    def _thread_s(self) -> tuple[float, float]:
        mean = self._scenario.speeds.thread_s
        draw_s = self._threads.expovariate
        return draw_s(1 / mean), draw_s(1 / mean)

    def _new_id(self) -> str:
        self._num_ids += 1
        return f"{self._num_ids:032x}"

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What a callback or a forgotten task raised."""
        if not self._clearing:
            self._checker.fail(f"unhandled: {context.get('message')}: {context.get('exception')!r}")


class _ErrorsThatNothingElseShows(logging.Handler):
    """Reports observers that failed, unless the operating system refused them something.

    Also workers that the driver ended for a message that it refuses: the simulated ones run the program's own
    code, and their attempts go on in others. One may have been made to send what is wrong.
    """

    def __init__(self, checker: InvariantChecker) -> None:
        super().__init__(logging.ERROR)
        self._checker = checker

    def emit(self, record: logging.LogRecord) -> None:
        """Implements `logging.Handler.emit`."""
        error, text = record.exc_info[1] if record.exc_info else None, record.getMessage()
        if record.name == worker_backend.__name__:
            if ": it sent " in text and not self._checker.met_faults["wrong_message"]:
                self._checker.fail(f"log: {text}")
        elif not isinstance(error, OSError):
            self._checker.fail(f"log: {text}")


@contextmanager
def _logging_only(handler: logging.Handler) -> Iterator[None]:
    """Let only a handler hear of errors: thousands of runs have nothing to say to the log."""
    logger = logging.getLogger("async_rl")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    heard = [logging.getLogger(name) for name in (observer.__module__, worker_backend.__name__)]
    for each in heard:
        each.setLevel(logging.ERROR)
        each.propagate = False
        each.addHandler(handler)
    try:
        yield
    finally:
        for each in heard:
            each.removeHandler(handler)
            each.propagate = True
            each.setLevel(logging.NOTSET)
        logger.setLevel(level)
