"""What a run writes down and tells of itself, over all its lives: phases, steps, evaluations, the summary.

```
 a step that is done ─► its record ─► metrics.jsonl, the instruments, the trackers, the terminal
```
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from async_rl.config import Config
from async_rl.engines.pool import EnginePool
from async_rl.observability import evaluation_record as evaluations
from async_rl.observability.console_report import RunProgress
from async_rl.observability.evaluation_record import EvaluationRecord, evaluation_record_log
from async_rl.observability.metrics import Metrics, value_of
from async_rl.observability.records import (
    StepRecord,
    Summary,
    Totals,
    TrajectoryCounts,
    step_record_log,
    summarise,
)
from async_rl.observability.trackers.tracker import Trackers
from async_rl.queue.packing import TakenBatch
from async_rl.queue.trajectory_queue import TrajectoryQueue
from async_rl.run.step_record import StepDone, record_of
from async_rl.weights.weight_sync import SyncReport

log = logging.getLogger(__name__)


class RunLogger:
    """See the module.

    Invariant: from `back_to` on, `records` are all steps up to the trainer's, of earlier lives too.

    Example:
        >>> run_log = RunLogger(config, run_dir, pool, metrics, clock)
        >>> run_log.back_to(4)  # of the checkpoint
        >>> run_log.begin(4)
        >>> run_log.step_done(done, report, queue)
        >>> run_log.summary(queue.statistics().counts, ended_s=clock())
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        pool: EnginePool,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        """Read what earlier lives wrote down."""
        self._config = config
        self._step_records = step_record_log(run_dir / "metrics.jsonl")
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self.phase = "starting"
        self.records = self._step_records.read()
        """Until the trainer is up all that there are, for the live page; then what its checkpoint knows."""
        self.evaluations = evaluation_record_log(run_dir / evaluations.FILE).read()
        """Likewise."""
        self.progress: RunProgress | None = None
        """Where a person sees the run, if one looks on."""
        self.trackers: Trackers | None = None
        self._begin_s: float | None = None
        """Of the run, on the clock: seconds of earlier lives count."""
        self._recorded_s = 0.0
        """When the last step was written down."""
        self._sampled = 0.0
        """Tokens by then."""

    @property
    def elapsed_s(self) -> float | None:
        """Since the first trajectory of the run was dispatched, earlier lives included; None before it."""
        return None if self._begin_s is None else self._clock() - self._begin_s

    def enter(self, phase: str) -> None:
        """Say what the run does from now on."""
        self.phase = phase
        log.info("%s", phase)
        if self.progress is not None:
            self.progress.phase(phase)

    def back_to(self, step: int) -> None:
        """Take up the records of the steps up to the one that a trainer has come up at."""
        self.records = [record for record in self._step_records.read() if record.step <= step]
        self.evaluations = [record for record in self.evaluations if record.weight_version <= step]

    def begin(self, step: int) -> None:
        """The training of a life begins at a step; seconds, tokens and rates are of the whole run."""
        self._metrics.trainer_weight_version.set(step)
        now, sampled = self._clock(), self._metrics.sampled_tokens_total
        if self._begin_s is None:
            self._begin_s = now - (self.records[-1].time_s if self.records else 0.0)
            sampled.inc(sampled_before(self.records))
            self._pool.restart_clock()
        self._recorded_s, self._sampled = now, value_of(sampled)

    def step_done(self, done: StepDone, report: SyncReport, queue: TrajectoryQueue) -> None:
        """Write a step down whose weights have gone where they were to go, and show it."""
        assert self._begin_s is not None, "steps are done after the beginning"
        now, sampled = self._clock(), value_of(self._metrics.sampled_tokens_total)
        record = record_of(
            done,
            report,
            counts=queue.statistics().counts,
            time_s=now - self._begin_s,
            tokens_per_s=(sampled - self._sampled) / max(now - self._recorded_s, 1e-9),
            length_ks=queue.length_ks,
            engine_idle_share=self._pool.idle_share,
        )
        self._recorded_s, self._sampled = now, sampled
        self.records.append(record)
        self._step_records.append(record)
        if self.trackers is not None:
            self.trackers.log(record)
        self._show(done.batch, record)
        if self.progress is not None:
            self.progress.step(record)

    def evaluated(self, record: EvaluationRecord) -> EvaluationRecord:
        """Show an evaluation that has ended, and give its record back with the run's time."""
        record = replace(record, time_s=self.elapsed_s or 0.0)
        self.evaluations.append(record)
        self._metrics.observe_evaluation(record)
        if self.trackers is not None:
            self.trackers.log_evaluation(record)
        return record

    def summary(self, trajectories: TrajectoryCounts, ended_s: float) -> Summary:
        """Of a run whose last step ended at this time of the clock."""
        assert self._begin_s is not None, "a run that has ended has begun"
        config = self._config
        return summarise(
            self.records,
            Totals(
                trajectories=trajectories,
                rl_seconds=ended_s - self._begin_s,
                sampled_tokens=int(value_of(self._metrics.sampled_tokens_total)),
                engine_idle_share=self._pool.idle_share,
                max_staleness=config.rollout.max_staleness,
                routing_merge=config.routing.merge if config.routing.from_engine else "off",
            ),
        )

    def _show(self, batch: TakenBatch, record: StepRecord) -> None:
        """Bring the instruments up to date with a step."""
        m = self._metrics
        m.observe_step(record)
        for staleness in batch.staleness:
            m.staleness_versions.observe(staleness)
        for length in batch.lengths:
            m.trajectory_tokens.observe(length)
        waited_s = sum(earlier.wait_s for earlier in self.records)
        m.trainer_idle_ratio.set(waited_s / max(record.time_s, 1e-9))
        m.engine_idle_ratio.set(self._pool.idle_share)


def sampled_before(records: list[StepRecord]) -> float:
    """Tokens that an earlier life of the run sampled, from its rates."""
    starts = [0.0, *(record.time_s for record in records)]
    return sum(r.tokens_per_s * (r.time_s - start) for r, start in zip(records, starts, strict=False))
