"""A configured job in virtual time: the scheduler that runs, on engines and a trainer that only take time.

```
 Config + Workload ─► Orchestrator, RolloutManager, TrajectoryQueue, EnginePool, WeightSync   (the real ones)
                          │ engines            │ trainer            │ tasks
                          CoarseEngine         sleeps               lengths, drawn by seed and task
                      ─► Plan: throughput against the fluid bound, idle shares, staleness, memory
```

`relative` is the measured rate over the fluid bound (see `workload`). What is missing from 1 is accounted
for: engines paused, prefilled, or had empty slots.

Simulated tokens stand for `scale` real ones each, and one simulated trajectory for `coarsen` real ones (an
engine then has fewer slots, and each counts more in its step time): neither changes what a rate is relative
to.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec
import numpy as np
from msgspec.structs import replace

from async_rl.config import Config, EvaluationConfig, SGLangEngines, TeacherConfig
from async_rl.config.base import PositiveInt, Strict
from async_rl.engine_protocol import Engine, EngineFacts, GroupInvite, WeightBucket
from async_rl.errors import AsyncRLError, ConfigError, EngineError
from async_rl.observability.console_report import RunProgress
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import FIGURES, StepRecord, Summary
from async_rl.observability.text_console import TextConsole
from async_rl.planning.coarse_engine import MARKS, CoarseEngine, Usage
from async_rl.planning.virtual_time import run_virtual
from async_rl.planning.workload import (
    EndlessTasks,
    PlannedChat,
    PlannedLoop,
    Workload,
    fluid_rate,
    no_reward,
    num_engines,
)
from async_rl.rollout.workers.worker_backend import WorkerSpec
from async_rl.run.inputs import RunInputs
from async_rl.run.orchestrator import Orchestrator
from async_rl.runtime.supervision import first_error
from async_rl.store.spool_nodes import no_other_nodes
from async_rl.trainer_protocol import Saved, SendReport, StepResult, Trainer, TrainerState
from async_rl.types import Int32Array, TakenBatch

_MIN_TOKENS: Final = 128
"""Simulated tokens of a mean answer, at least: lengths are then right to a few thousandths."""

_EVER_S: Final = 1e9
"""Coarse engines say nothing before a call ends: silence is no sign of anything here."""

FRAME_BYTES: Final = 8
"""Bytes of a token in a frame: its id and its log-prob."""

_BATCH_BYTES: Final = 14
"""Bytes of a token in a batch: in addition its version and two masks."""


class PlannedRun(Strict, frozen=True, kw_only=True):
    """How a plan is simulated. Docstrings of fields are help texts of flags, as those of `Workload`."""

    versions: PositiveInt = 12
    """Steps that are measured."""
    warmup: PositiveInt = 8
    """Steps before them: all ages are in the queue only after the longest answer."""
    seed: int = 0
    """Seed of the lengths."""
    coarsen: PositiveInt = 1
    """Real trajectories for each simulated one; default: 1 for up to 2048 in flight."""
    scale: int | None = None
    """Real tokens for each simulated one; None takes as many as lengths allow."""


MakeTasks = Callable[[int], EndlessTasks]
"""Makes the tasks of a simulation, for a number of real tokens for each simulated one."""


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """How much those that share a machine slow each other down; all 0 where each has devices of its own."""

    by_trainer: float = 0.0
    """What a trainer that trains adds to the times of an engine, as a share of them."""
    by_engine: float = 0.0
    """What each other engine with calls adds to them."""
    of_trainer: float = 0.0
    """What engines add to a trainer step if all of them have calls, as a share of it."""


class SimulatedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A whole simulated run, as it would have been recorded."""

    records: list[StepRecord]
    """All steps, those of the warm-up included; tokens are simulated ones."""
    scale: int
    """Real tokens for each simulated one."""
    usage: Usage
    """Of all engines together, after the warm-up."""


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to expect of a job. Shares are of the measured time, tokens and trajectories are real ones."""

    engines: int
    slots: int
    """The usage of one engine."""
    groups_per_batch: int
    max_staleness: int
    seconds: float
    trajectories_per_s: float
    """Trained."""
    tokens_per_s: float
    """Sampled and trained."""
    fluid_trajectories_per_s: float
    relative: float
    """Trained trajectories a second over the fluid bound."""
    trainer_idle: float
    """Share of time in which the trainer did not train."""
    trainer_waits: float
    """The part of it in which it waited for a batch."""
    trainer_syncs: float
    """The part in which it was paused for its weights: copied, or published and brought to engines."""
    engines_empty: float
    """Share of the engines' capacity lost to slots without a call."""
    engines_prefill: float
    """Share of the engines' time in which decoding waited for prefills."""
    engines_still: float
    """Share of the engines' time in which an update paused them."""
    staleness: list[float]
    """Share of the trained trajectories by staleness, from 0 on."""
    token_lags: list[float]
    """Share of the trained tokens by lag, from 0 on: a trajectory is as stale as its oldest token."""
    staleness_mean: float
    staleness_p99: int
    staleness_max: int
    dropped: float
    """Dropped trajectories over dropped and trained."""
    masked: float
    """Sampled tokens that were too old to be trained on, over all of the trained trajectories."""
    prefilled: float
    """Prefilled tokens over sampled ones; an uninterrupted job has prompt over answer."""
    ks_lengths: float
    """Kolmogorov-Smirnov distance of the trained lengths from those that were given out."""
    queue_bytes: int
    """Mean of the frames of finished groups, with their routing rows."""
    queue_bytes_peak: int
    batch_bytes: int
    """One packed batch."""
    cached_calls: float | None
    """Calls that the cache of an engine holds, by their mean size; None if it has no limit."""
    running_calls: float
    """Mean of the calls that decode on an engine."""
    retracted: float
    """Retractions for lack of cache over trained trajectories."""
    admission_closed: float
    """Share of time in which the staleness bound let no further group be dispatched."""
    coarsen: int
    scale: int


def simulate(
    config: Config,
    workload: Workload,
    simulation: PlannedRun | None = None,
    *,
    tasks: MakeTasks | None = None,
    sharing: Sharing | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> JobPlan:
    """Run a job in virtual time.

    Args:
        config: Its scheduling is used as it is; model, data, agent loop and reward are not looked at.
        workload: Lengths and speeds.
        simulation: How long and how coarse.
        tasks: Makes the tasks, whose lengths are at most those of the workload; None: makes them as it says.
        sharing: How engines and trainer slow each other down; None: not at all.
        on_step: Called with the number of each step that ends, those of the warm-up included.

    Returns:
        What was measured after the warm-up.

    Raises:
        ConfigError: An error ended the simulated run, as it would end the real one.
    """
    return _run_job(config, workload, simulation or PlannedRun(), on_step, tasks, sharing).measure()


def simulate_run(
    config: Config,
    workload: Workload,
    simulation: PlannedRun,
    tasks: MakeTasks,
    sharing: Sharing | None = None,
    *,
    on_step: Callable[[int], None] = lambda step: None,
) -> SimulatedRun:
    """Run a job in virtual time, as `simulate` does, and return its records.

    Args:
        config: As for `simulate`.
        workload: As for `simulate`.
        simulation: As for `simulate`.
        tasks: As for `simulate`.
        sharing: As for `simulate`.
        on_step: As for `simulate`.

    Raises:
        ConfigError: As for `simulate`.
    """
    job = _run_job(config, workload, simulation, on_step, tasks, sharing)
    first, last = job.observer.usages
    return SimulatedRun(records=job.observer.records, scale=job.scale, usage=used_between(first, last))


def used_between(first: Usage, last: Usage) -> Usage:
    """Return what was used from one moment to another."""
    return Usage(**{n: getattr(last, n) - getattr(first, n) for n in last.__struct_fields__})


def _run_job(
    config: Config,
    workload: Workload,
    simulation: PlannedRun,
    on_step: Callable[[int], None],
    tasks: MakeTasks | None,
    sharing: Sharing | None,
) -> _Job:
    shared = Path("/dev/shm")  # memory, where there is some: only the CPU time of files is of interest
    parent = shared if os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="async-rl-plan-", dir=parent) as folder:
        job = _Job(config, workload, simulation, Path(folder), on_step, tasks, sharing)
        try:
            run_virtual(job.run())
        except ExceptionGroup as group:
            if isinstance(error := first_error(group), AsyncRLError):
                raise ConfigError(f"the simulated run ends: {error}") from group
            raise
        return job


class _Job:
    """One simulated run, and what is observed of it."""

    def __init__(
        self,
        config: Config,
        workload: Workload,
        simulation: PlannedRun,
        folder: Path,
        on_step: Callable[[int], None],
        tasks: MakeTasks | None,
        sharing: Sharing | None,
    ) -> None:
        self._config = config
        self._workload = workload
        self._simulation = simulation
        self._folder = folder
        coarsen = simulation.coarsen
        self.engines = num_engines(config)
        self.slots = config.engine.max_running_requests
        self.scale = simulation.scale or max(
            1, min(workload.prompt_tokens // MARKS, int(workload.mean_tokens / _MIN_TOKENS))
        )
        scale = self.scale
        self.speed = workload.engine_speed(self.slots, scale, coarsen)
        self.groups_per_batch = max(1, config.trainer.groups_per_batch // coarsen)
        self.config = self._simulated(config)
        self.tasks = (
            EndlessTasks(workload, scale, simulation.seed, config.rollout.group_size)
            if tasks is None
            else tasks(scale)
        )
        self.machine = SharedMachine(sharing or Sharing())
        self.fluid = fluid_rate(self.engines, self.slots, workload)
        self.trainer = TimedTrainer(
            self.train_s,
            publish_s=workload.publish_s,
            snapshot_s=workload.snapshot_s,
            warmup=simulation.warmup,
            machine=self.machine,
        )
        self.observer = _Observer(simulation.warmup, self._usage, on_step)
        self.cluster: PlannedCluster | None = None

    def _simulated(self, config: Config) -> Config:
        """The config as it runs here: its own scheduling, our agent loop, model and lengths."""
        workload, scale, simulation = self._workload, self.scale, self._simulation
        longest = -(-workload.max_tokens // scale)
        prompts = max(MARKS, workload.prompt_tokens // scale) + workload.turns * (
            MARKS + workload.tool_tokens // scale
        )
        limit = config.engine.max_calls
        if isinstance(limit, int):
            limit = max(1, limit // simulation.coarsen)
        engine = replace(config.engine, stall_s=_EVER_S, max_calls=limit, urls_file=None)
        if isinstance(engine, SGLangEngines):
            engine = replace(engine, context_length=None)  # limits real tokens
        # The first counts real tokens, too; a plan has no engines of other models.
        loss = replace(config.trainer.loss, overlong_buffer_tokens=None, teacher=TeacherConfig())
        return replace(
            config,
            run=replace(config.run, max_steps=simulation.warmup + simulation.versions, seed=simulation.seed),
            models={},
            rollout=replace(
                config.rollout,
                agent_loop=f"{PlannedLoop.__module__}:{PlannedLoop.__name__}",
                agent_loop_args={},
                agent_loops={},
                num_workers=0,
                rewards={},
                rewards_by_source={},
                reward=f"{no_reward.__module__}:{no_reward.__name__}",
                max_concurrent_trajectories=max(
                    1, config.rollout.max_concurrent_trajectories // simulation.coarsen
                ),
                max_new_tokens=longest + workload.turns,
                max_context_tokens=longest + prompts + 2 * workload.turns,
            ),
            data=replace(config.data, shuffle=False, epochs=None, curriculum=None),
            engine=engine,
            doctor=replace(config.doctor, action="report", stall_s=_EVER_S),
            routing=replace(config.routing, replay="off"),
            queue=replace(config.queue, max_bytes=1 << 50, journal_s=None),
            evaluation=EvaluationConfig(),
            trainer=replace(
                config.trainer,
                loss=loss,
                updates_per_batch=1,
                groups_per_batch=self.groups_per_batch,
                checkpoint_every=0,
            ),
        )

    def train_s(self, tokens: int, sampled: int) -> float:
        """Seconds of a step with this number of simulated tokens."""
        real = self.scale * self._simulation.coarsen
        return self._workload.train_s(tokens * real, sampled * real, self.fluid)

    async def run(self) -> Summary:
        """The whole run."""
        clock = asyncio.get_running_loop().time
        engines = [CoarseEngine(f"engine-{i}", self.speed) for i in range(self.engines)]
        self.cluster = PlannedCluster(engines, self.trainer)
        self.machine.add_engines(engines)
        ids = count()
        for name in ("checkpoints", "logs"):
            (self._folder / name).mkdir()
        facts = EngineFacts(
            num_layers=1,
            moe_layers=(),
            num_experts=0,
            top_k=0,
            vocab_size=1,
            context_length=self.config.rollout.max_context_tokens,
        )
        orchestrator = Orchestrator(
            self.config,
            self._folder,
            asyncio.Event(),
            self.cluster,
            Metrics(),
            clock,
            RunInputs(self.tasks, PlannedChat(), facts, lambda: f"{next(ids):032x}"),
            progress=self.observer,
        )
        return await orchestrator.run()

    def _usage(self) -> Usage:
        """The usage of all engines together."""
        total = Usage()
        for engine in self.cluster.engines if self.cluster else ():
            usage = engine.usage()
            for name in usage.__struct_fields__:
                setattr(total, name, getattr(total, name) + getattr(usage, name))
        return total

    def measure(self) -> JobPlan:
        """Everything between the end of the warm-up and the last step."""
        observer, trainer, workload = self.observer, self.trainer, self._workload
        coarsen, scale = self._simulation.coarsen, self.scale
        records = observer.records[self._simulation.warmup :]
        seconds = observer.ends_s[-1] - observer.ends_s[self._simulation.warmup - 1]
        first, last = observer.usages
        used = used_between(first, last)
        engine_s = seconds * self.engines
        trained = sum(record.trajectories for record in records)
        rate = trained * coarsen / seconds
        ages = np.concatenate(trainer.staleness)
        lengths = np.concatenate(trainer.lengths)
        dropped = records[-1].dropped - observer.records[self._simulation.warmup - 1].dropped
        queued = np.array(observer.queued or [0]) * coarsen  # none if the job took less than a second
        rows, tokens = workload.routing_row_bytes, workload.trajectory_tokens
        frame_bytes = tokens * (FRAME_BYTES + rows)
        limit = self.config.max_outstanding_groups * self.config.rollout.group_size
        return JobPlan(
            engines=self.engines,
            slots=self.slots,
            groups_per_batch=self._config.trainer.groups_per_batch,
            max_staleness=self._config.rollout.max_staleness,
            seconds=seconds,
            trajectories_per_s=rate,
            tokens_per_s=trainer.trained_tokens * scale * coarsen / seconds,
            fluid_trajectories_per_s=self.fluid,
            relative=rate / self.fluid,
            trainer_idle=1 - sum(record.step_s for record in records) / seconds,
            trainer_waits=sum(record.wait_s for record in records) / seconds,
            trainer_syncs=sum(record.handover_s for record in records) / seconds,
            engines_empty=used.empty_s / engine_s,
            engines_prefill=used.prefill_s / engine_s,
            engines_still=used.pause_s / engine_s,
            staleness=[float(share) for share in np.bincount(ages) / len(ages)],
            token_lags=trainer.token_lags(),
            staleness_mean=float(ages.mean()),
            staleness_p99=int(np.percentile(ages, 99)),
            staleness_max=int(ages.max()),
            dropped=dropped / max(1, dropped + trained),
            masked=1 - trainer.trained_tokens / max(1, int(lengths.sum())),
            prefilled=used.prefilled_tokens / max(used.decoded_tokens, 1.0),
            ks_lengths=self.tasks.ks_distance(lengths),
            queue_bytes=int(queued.mean() * frame_bytes),
            queue_bytes_peak=int(queued.max() * frame_bytes),
            batch_bytes=int(self._config.batch_trajectories * tokens * (_BATCH_BYTES + rows)),
            cached_calls=workload.cached_calls,
            running_calls=used.decode_s * coarsen / engine_s,
            retracted=used.retractions / max(1, trained),
            admission_closed=float(np.mean(np.array(observer.outstanding or [0]) >= limit)),
            coarsen=coarsen,
            scale=scale,
        )


_SLICES: Final = 16
"""Parts of a trainer step that has to share its machine; what shares it may change between two of them."""


class SharedMachine:
    """Slows down engines and trainer where both use one machine. See `Sharing`."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._engines: list[CoarseEngine] = []
        self._is_training = False

    def add_engines(self, engines: list[CoarseEngine]) -> None:
        """Let these engines use it."""
        self._engines = engines
        if self._sharing.by_engine:
            for engine in engines:
                engine.on_busy = self._set_speeds

    async def train(self, alone_s: float) -> None:
        """Let a trainer step pass that takes this long if nothing else runs."""
        self._is_training = True
        self._set_speeds()
        slices = _SLICES if self._sharing.of_trainer else 1
        for _ in range(slices):
            busy = sum(engine.is_busy for engine in self._engines) / max(1, len(self._engines))
            await asyncio.sleep(alone_s / slices * (1 + self._sharing.of_trainer * busy))
        self._is_training = False
        self._set_speeds()

    def _set_speeds(self) -> None:
        sharing = self._sharing
        if not sharing.by_engine and not sharing.by_trainer:
            return
        num_busy = sum(engine.is_busy for engine in self._engines)
        for engine in self._engines:
            others = num_busy - engine.is_busy
            engine.slow_down(1 + sharing.by_trainer * self._is_training + sharing.by_engine * others)


class TimedTrainer:
    """Takes the time of a step and looks at what it is given. See `training.Trainer`."""

    def __init__(
        self,
        train_s: Callable[[int, int], float],
        *,
        publish_s: float,
        snapshot_s: float,
        warmup: int,
        machine: SharedMachine,
    ) -> None:
        self._train_s = train_s
        self._publish_s = publish_s
        self._snapshot_s = snapshot_s
        self._warmup = warmup
        self._machine = machine
        self.staleness: list[Int32Array] = []
        """Of each trajectory, by its oldest token that is trained on, after the warm-up."""
        self.lengths: list[Int32Array] = []
        """Sampled tokens of each trajectory, after the warm-up."""
        self.trained_tokens = 0
        self._tokens_by_lag = Counter[int]()

    def token_lags(self) -> list[float]:
        """Return the share of the trained tokens by lag, from 0 on, after the warm-up."""
        counts = self._tokens_by_lag
        total = max(1, counts.total())
        return [counts[lag] / total for lag in range(max(counts, default=0) + 1)]

    async def setup(self, checkpoint_dir: str | None) -> TrainerState:
        """See `Trainer.setup`."""
        return TrainerState(step=0)

    async def read_batch(self, batch: TakenBatch) -> dict[str, str]:
        """See `Trainer.read_batch`."""
        return {}

    async def train_step(self, batch: TakenBatch, step: int) -> StepResult:
        """See `Trainer.train_step`."""
        num_tokens, num_sampled = batch.num_tokens, batch.num_sampled_tokens
        trained = num_sampled - batch.num_masked_tokens
        if step > self._warmup:
            self.staleness.append(np.array(batch.staleness, np.int32))
            self.lengths.append(np.array(batch.sampled_lengths, np.int32))
            self.trained_tokens += trained
            oldest = batch.masked_below or 0
            for span in (span for each in batch.trajectories for span in each.spans):
                if span.is_sampled and span.weight_version >= oldest:
                    self._tokens_by_lag[batch.trainer_version - span.weight_version] += span.length
        seconds = self._train_s(num_tokens, num_sampled)
        await self._machine.train(seconds)
        figures = dict.fromkeys(FIGURES, 0.0)
        known = {"tokens": num_tokens, "trained_tokens": trained, "step_s": seconds}
        return StepResult(step=step, metrics=figures | known)

    async def measure_lags(self, batch: TakenBatch) -> NoReturn:
        """See `Trainer.measure_lags`."""
        raise AssertionError("a plan has no gradients")

    async def take_snapshot(self, weight_version: int) -> None:
        """See `Trainer.take_snapshot`."""
        await asyncio.sleep(self._snapshot_s)

    async def publish(self, directory: str, weight_version: int) -> None:
        """See `Trainer.publish`."""
        await asyncio.sleep(self._publish_s)

    async def publish_delta(self, path: str, base: int | None, weight_version: int) -> bool:
        """See `Trainer.publish_delta`."""
        await asyncio.sleep(self._publish_s)
        return base is not None

    async def open_weight_group(self, invite: GroupInvite) -> None:
        """See `Trainer.open_weight_group`."""

    async def close_weight_group(self, group_name: str) -> None:
        """See `Trainer.close_weight_group`."""

    async def plan_buckets(self, bucket_bytes: int) -> tuple[WeightBucket, ...]:
        """See `Trainer.plan_buckets`."""
        return ()

    async def abort_weight_group(self, group_name: str) -> None:
        """See `Trainer.abort_weight_group`."""

    async def send_weights(self, group_names: list[str], bucket_bytes: int) -> SendReport:
        """See `Trainer.send_weights`."""
        return SendReport()

    async def checksums(self) -> dict[str, str]:
        """See `Trainer.checksums`."""
        return {}

    async def share_bucket(self, number: int, bucket_bytes: int, ranks: list[int]) -> list[bytes]:
        """See `Trainer.share_bucket`."""
        return [b""] * len(ranks)

    async def offload(self, keep_weights: bool = False) -> None:
        """See `Trainer.offload`."""

    async def reload(self) -> None:
        """See `Trainer.reload`."""

    async def save_checkpoint(self, directory: str, extra: dict[str, Any]) -> None:
        """See `Trainer.save_checkpoint`."""

    async def saved_checkpoint(self, wait: bool) -> Saved:
        """See `Trainer.saved_checkpoint`."""
        return Saved()

    async def close(self) -> None:
        """See `Trainer.close`."""


class PlannedCluster:
    """See `async_rl.run.cluster.Cluster`: nothing dies here."""

    weight_backend = "gloo"
    abortable_servers = True
    node = ""
    other_nodes = staticmethod(tuple)
    open_frame_reader = staticmethod(no_other_nodes)

    def __init__(self, engines: list[CoarseEngine], trainer: TimedTrainer) -> None:
        self.engines = engines
        self._trainer = trainer

    def engines_of(self, model: str) -> NoReturn:
        """See `Cluster.engines_of`."""
        raise AssertionError(f"a plan has no engines of {model}")

    def ranks_beside(self, engine_id: str) -> tuple[int, ...]:
        """See `WeightRoutes.ranks_beside`."""
        return ()

    async def start_engines(self) -> list[Engine]:
        """See `Cluster.start_engines`."""
        return list(self.engines)

    async def place_trainer(self) -> None:
        """See `Cluster.place_trainer`."""

    async def start_trainer(self) -> Trainer:
        """See `Cluster.start_trainer`."""
        return self._trainer

    def connect_engine(self, engine_id: str, url: str) -> Engine:
        """See `Cluster.connect_engine`."""
        raise AssertionError(f"{engine_id} at {url} joins")

    async def disconnect_engine(self, engine_id: str) -> None:
        """See `Cluster.disconnect_engine`."""

    async def stop_engine(self, engine_id: str) -> None:
        """See `Cluster.stop_engine`."""

    async def restart_engine(self, engine_id: str) -> None:
        """See `Cluster.restart_engine`."""

    async def watch_engines(self, died: Callable[[str, EngineError], None]) -> None:
        """See `Cluster.watch_engines`."""
        await asyncio.Future()

    async def open_port(self, rank: int) -> tuple[str, int]:
        """See `Cluster.open_port`."""
        return "127.0.0.1", 0

    def local_folder(self, engine_id: str) -> None:
        """See `Cluster.local_folder`."""

    def rollout_worker(self, spec: WorkerSpec) -> NoReturn:
        """See `Cluster.rollout_worker`."""
        raise AssertionError(f"{spec.name}: a plan is of a run whose agent loops are in the driver")


class _Observer(RunProgress):
    """Sees the run as a terminal would, and notes down what the plan is made of."""

    def __init__(self, warmup: int, usage: Callable[[], Usage], on_step: Callable[[int], None]) -> None:
        super().__init__(TextConsole(file=StringIO()))
        self._on_step = on_step
        self._warmup = warmup
        self._usage = usage
        self.records: list[StepRecord] = []
        self.ends_s: list[float] = []
        self.queued: list[int] = []
        """Finished trajectories, once a second."""
        self.outstanding: list[int] = []
        self.usages: list[Usage] = []
        """At the end of the warm-up and of the last step."""

    def phase(self, text: str) -> None:
        pass

    def flow(self, *, in_flight: int, queued: int, waiting_for: str) -> None:
        if len(self.records) >= self._warmup:
            self.queued.append(queued)
            self.outstanding.append(in_flight + queued)

    def step(self, record: StepRecord) -> None:
        self.records.append(record)
        self.ends_s.append(record.time_s)
        self._on_step(record.step)
        if len(self.records) >= self._warmup:
            self.usages[1:] = [self._usage()]
