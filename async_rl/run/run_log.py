"""Records a run over all its incarnations: phases, steps, evaluations and the summary.

```
 trained step ─► StepRecord ─► metrics.jsonl, Prometheus metrics, trackers, terminal
```
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.structs import replace

from async_rl.config import Config
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.observability import evaluation_record as evaluations
from async_rl.observability.console_report import RunProgress
from async_rl.observability.evaluation_record import EvaluationRecord, evaluation_record_log
from async_rl.observability.failures import FailureRow
from async_rl.observability.metrics import Metrics, observe_all, totals_of, value_of
from async_rl.observability.records import (
    COUNTS,
    FIGURES,
    MANY_WITHOUT_SIGNAL,
    StepRecord,
    Summary,
    Totals,
    TrajectoryCounts,
    count_without_signal,
    is_finite,
    no_signal,
    step_record_log,
    summarise,
)
from async_rl.observability.trackers.tracker import Trackers
from async_rl.rollout.groups import count_groups_without_signal
from async_rl.run.plan_watch import AFTER_STEPS, PlanWatch
from async_rl.runtime.shortages import DISK_ERRORS, is_shortage, writing
from async_rl.runtime.threads import run_to_end, run_uncancellable
from async_rl.store.trajectory_queue import TrajectoryQueue
from async_rl.trainer_protocol import StepResult
from async_rl.types import TakenBatch
from async_rl.weights.weight_sync import SyncReport

log = logging.getLogger(__name__)


class TrainedStep(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A step that the trainer has finished and the ledger has settled. Times in seconds."""

    batch: TakenBatch
    result: StepResult
    wait_s: float
    """Time spent waiting for the batch."""
    step_s: float
    sync_hidden_s: float
    """Part of the previous weight update that ran during this step; see `StepRecord`."""


class RunLogger:
    """Writes the records of a run and shows its progress.

    Invariant: after `load_records_until`, `records` holds every step up to the trainer's, including those of
    earlier incarnations of the run.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        pool: EnginePool,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        progress: RunProgress | None = None,
        trackers: Trackers | None = None,
        plan: PlanWatch | None = None,
    ) -> None:
        """Read the records of earlier incarnations.

        Args:
            config: The run's config.
            run_dir: The run's folder.
            pool: The engines of the run.
            metrics: The metrics of the run.
            clock: Monotonic seconds.
            progress: Shows phases and steps on the terminal; None shows nothing.
            trackers: Get every step and evaluation; None for none.
            plan: Compares the run with what is expected of it; None for no comparison.
        """
        self._config = config
        self._plan = plan
        self._step_records = step_record_log(run_dir / "metrics.jsonl")
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._progress = progress
        self._trackers = trackers
        self.phase = "starting"
        self.records = self._step_records.read()
        """All records on disk until the trainer has started, for the live page; then those up to its step."""
        self._evaluation_records = evaluation_record_log(run_dir / evaluations.FILE)
        self.evaluations = self._evaluation_records.read()
        """Evaluation records, limited like `records`."""
        self._unrecorded: dict[int, StepRecord] = {}
        """Records of steps whose line is not written yet; until `log_step` without the update's figures."""
        self._writing = asyncio.Lock()
        self._before_restart: dict[str, float] = {}
        """What the last step before a restart measured, until the first step after it measures the same."""
        self._run_begin_s: float | None = None
        """Start of the run on the clock, moved back by the seconds of earlier incarnations."""
        self._last_record = 0.0, 0.0
        """The time on the clock at which the last step was recorded, and the tokens sampled by then."""
        self._last_prefills = 0.0, 0.0, 0.0
        """What `_prefills_again` was then."""

    @property
    def elapsed_s(self) -> float | None:
        """Seconds since the run dispatched its first trajectory, earlier incarnations included."""
        return None if self._run_begin_s is None else self._clock() - self._run_begin_s

    def warn(self, text: str) -> None:
        """Tell the log and the terminal what a person should look at."""
        log.warning("%s", text)
        if self._progress is not None:
            self._progress.note(text)

    def enter_phase(self, phase: str) -> None:
        """Report what the run does from now on."""
        self.phase = phase
        log.info("%s", phase)
        if self._progress is not None:
            self._progress.phase(phase)

    def show_flow(self, in_flight: int, queued: int, waiting_for: Callable[[], str]) -> None:
        """Show on the terminal, between two steps, where trajectories are and what the run waits for."""
        if self._progress is not None:
            self._progress.flow(in_flight=in_flight, queued=queued, waiting_for=waiting_for())

    async def load_records_until(self, step: int) -> None:
        """Load the records of the steps up to the one that the trainer continues from; remove all others."""
        self._unrecorded.clear()

        def load_records() -> list[StepRecord]:
            self._step_records.truncate_to(step)  # the others were undone, and come again
            self._evaluation_records.truncate_to(step)
            return self._step_records.read()

        self.records, cancelled = await run_uncancellable(None, load_records)
        self._before_restart = {
            tokens: value
            for tokens, figure in _COMPARED_OVER_RESTARTS.items()
            if (value := next(filter(is_finite, (getattr(r, figure) for r in reversed(self.records))), None))
            is not None
        }
        self.evaluations = [record for record in self.evaluations if record.weight_version <= step]
        if cancelled is not None:
            raise cancelled
        if self._progress is not None:
            self._progress.continue_from(self.records)

    def begin_training(self, step: int) -> None:
        """Start measuring at a step; seconds, tokens and rates are those of the whole run."""
        self._metrics.restore(step, self.records, self.evaluations)
        if self.records:
            self._metrics.trainer_idle_ratio.set(self._trainer_idle_share(self.records[-1]))
        now, sampled = self._clock(), self._metrics.sampled_tokens_total
        if self._run_begin_s is None:
            self._run_begin_s = now - (self.records[-1].time_s if self.records else 0.0)
            sampled.inc(_sampled_before(self.records))
            self._pool.restart_idle_clock()
        self._last_record = now, value_of(sampled)
        self._last_prefills = self._prefills_again()
        if self._plan is not None:
            self._plan.begin_steps()

    def hold_step(self, done: TrainedStep, queue: TrajectoryQueue) -> None:
        """Hold the record of a step that the ledger has settled, for `log_step` or a checkpoint."""
        self._unrecorded[done.result.step] = self._record(
            done, SyncReport(weight_version=done.result.step), queue
        )

    async def write_held_steps(self) -> None:
        """Flush the records to disk: `metrics.jsonl` must have each step that a checkpoint holds.

        Raises:
            AsyncRLError: The disk does not take them.
        """
        with writing(self._step_records.path):
            await self._write_held(lambda step: True, wait_out_shortage=True)
            await run_to_end(self._step_records.sync)

    async def log_step(self, done: TrainedStep, report: SyncReport, queue: TrajectoryQueue) -> None:
        """Show a step after the update of the engines' weights, and write its record."""
        record = self._record(done, report, queue)
        if self._plan is not None:
            ratio, causes = self._plan.observe_step(
                [*self.records[-AFTER_STEPS:], record], self._num_engines()
            )
            record = replace(record, throughput_vs_plan_ratio=ratio, below_plan=causes)
        self._unrecorded[done.result.step] = record
        self._last_record = self._clock(), value_of(self._metrics.sampled_tokens_total)
        self._last_prefills = self._prefills_again()
        self.records.append(record)
        if self._trackers is not None:
            self._trackers.log(record)
        self._observe_step(done.batch, record)
        if self._progress is not None:
            self._progress.step(record)
        without = count_without_signal(self.records)
        if without >= MANY_WITHOUT_SIGNAL > without - record.groups:
            self.warn(no_signal(without))
        await self._write_held(lambda step: step <= record.step, wait_out_shortage=False)

    async def _write_held(self, which: Callable[[int], bool], *, wait_out_shortage: bool) -> None:
        """Append the held records of these steps in a thread, and hold each until its line is written.

        With `weights.overlap` a step is held before the one before it is recorded: times never go back.

        Args:
            which: Whether a step is to be written.
            wait_out_shortage: Whether to wait for a descriptor or space. Otherwise what cannot be written is
                held until the next step or checkpoint.
        """
        async with self._writing:
            held = [self._unrecorded[step] for step in sorted(self._unrecorded) if which(step)]
            last_s = self.records[-1].time_s if self.records else 0.0
            written: list[StepRecord] = []

            def append_lines() -> None:
                for record in held[len(written) :]:
                    try:
                        self._step_records.append(replace(record, time_s=max(record.time_s, last_s)))
                    except OSError as error:
                        passes = is_shortage(error) or error.errno in DISK_ERRORS
                        if wait_out_shortage or not passes:
                            raise
                        return
                    written.append(record)

            try:
                _, cancelled = await run_uncancellable(None, append_lines)
            finally:
                for record in written:
                    if self._unrecorded[record.step] is record:  # else it has got its figures meanwhile
                        del self._unrecorded[record.step]
            if cancelled is not None:
                raise cancelled

    def log_evaluation(self, record: EvaluationRecord) -> EvaluationRecord:
        """Show a finished evaluation, and return its record with the run's time."""
        record = replace(record, time_s=self.elapsed_s or 0.0)
        if self._progress is not None:
            self._progress.evaluation(record, self.evaluations)
        self.evaluations.append(record)
        self._metrics.observe_evaluation(record)
        if self._trackers is not None:
            self._trackers.log_evaluation(record)
        return record

    def summary(
        self, trajectories: TrajectoryCounts, ended_s: float, failures: Sequence[FailureRow] = ()
    ) -> Summary:
        """Return the summary of the run, whose last step ended at this time on the clock."""
        assert self._run_begin_s is not None, "training has begun"
        config = self._config
        summary = summarise(
            self.records,
            Totals(
                trajectories=trajectories,
                rl_seconds=ended_s - self._run_begin_s,
                sampled_tokens=int(value_of(self._metrics.sampled_tokens_total)),
                engine_idle_share=self._pool.idle_share,
                max_staleness=config.rollout.max_staleness,
                routing_merge=config.routing.merge if config.routing.from_engine else "off",
            ),
        )
        return replace(summary, failures=failures)

    def _record(self, done: TrainedStep, report: SyncReport, queue: TrajectoryQueue) -> StepRecord:
        assert self._run_begin_s is not None, "training has begun"
        now, (last_s, tokens_before) = self._clock(), self._last_record
        tokens = value_of(self._metrics.sampled_tokens_total) - tokens_before
        again, waited_s, calls = np.subtract(self._prefills_again(), self._last_prefills).tolist()
        return _step_record(
            done,
            report,
            counts=queue.groups.ledger.counts(),
            time_s=now - self._run_begin_s,
            tokens_per_s=tokens / max(now - last_s, 1e-9),
            prefilled_again_tokens=int(again),
            prefilled_again_s=waited_s / calls if calls else None,
            length_ks=queue.groups.lengths.distance,
            engine_idle_share=self._pool.idle_share,
            groups_without_signal=count_groups_without_signal(done.batch, self._config.trainer.loss),
        )

    def _num_engines(self) -> int:
        """Return how many engines serve; those that an evaluation has borrowed come back."""
        return len(self._pool.engines(EngineState.SERVING, EngineState.UPDATING, EngineState.EVALUATING))

    def _prefills_again(self) -> tuple[float, float, float]:
        """Return the tokens that updates made engines prefill again so far, and the waits for prefills of
        lost tokens: seconds and calls.
        """
        m = self._metrics
        tokens = value_of(m.prefilled_again_tokens_total.labels("update"))
        return tokens, *totals_of(m.first_token_seconds.labels("again"))

    def _observe_step(self, batch: TakenBatch, record: StepRecord) -> None:
        """Update the Prometheus metrics with a step."""
        m = self._metrics
        m.observe_step(record)
        for tokens, before in list(self._before_restart.items()):
            if is_finite(after := getattr(record, _COMPARED_OVER_RESTARTS[tokens])):
                m.restart_log_prob_abs_diff_nats.labels(tokens, "before").set(before)
                m.restart_log_prob_abs_diff_nats.labels(tokens, "after").set(after)
                del self._before_restart[tokens]
        observe_all(m.staleness_versions, batch.staleness)
        observe_all(m.trajectory_tokens, batch.lengths)
        m.trainer_idle_ratio.set(self._trainer_idle_share(record))

    def _trainer_idle_share(self, record: StepRecord) -> float:
        """Return the share of the run up to its last step in which the trainer waited for batches."""
        return sum(each.wait_s for each in self.records) / max(record.time_s, 1e-9)


_COMPARED_OVER_RESTARTS: Final = {"all": "log_prob_abs_diff", "lag0": "lag0_log_prob_abs_diff"}
"""Figures of a step by the tokens that they are of. A restart does not change them: the trainer restores the
weights that sampled the restored trajectories, and the engines load the trainer's."""


def _sampled_before(records: list[StepRecord]) -> float:
    """Return the tokens that earlier incarnations of the run sampled, computed from their rates."""
    starts = [0.0, *(record.time_s for record in records)]
    return sum(r.tokens_per_s * (r.time_s - start) for r, start in zip(records, starts, strict=False))


def _step_record(
    done: TrainedStep,
    report: SyncReport,
    *,
    counts: TrajectoryCounts,
    time_s: float,
    tokens_per_s: float,
    prefilled_again_tokens: int,
    prefilled_again_s: float | None,
    length_ks: float | None,
    engine_idle_share: float,
    groups_without_signal: int,
) -> StepRecord:
    """Build the record of a step; figures that are not of the step itself are as of its end."""
    batch, result = done.batch, done.result
    staleness, sampled_lengths = np.array(batch.staleness), np.array(batch.sampled_lengths)
    staleness_p50, staleness_p95 = np.percentile(staleness, (50, 95))
    measured: dict[str, Any] = {name: result.metrics.get(name) for name in FIGURES}
    measured |= {name: int(result.metrics.get(name, 0)) for name in COUNTS}
    return StepRecord(
        step=result.step,
        weight_version=report.weight_version,
        time_s=time_s,
        reward_mean=float(np.mean(batch.attempt_rewards)),
        reward_min=min(batch.rewards),
        reward_max=max(batch.rewards),
        **measured,
        extremes=result.extremes,
        staleness_mean=float(np.mean(staleness)),
        staleness_p50=float(staleness_p50),
        staleness_p95=float(staleness_p95),
        staleness_max=max(batch.staleness),
        staleness_counts=tuple(np.bincount(staleness).tolist()),
        length_ks=length_ks,
        trajectories=len(batch.trajectory_ids),
        groups=len(set(batch.group_index)),
        groups_without_signal=groups_without_signal,
        interrupted=sum(1 for resumes in batch.resumes if resumes),
        sampled_tokens_mean=float(np.mean(sampled_lengths)),
        sampled_tokens_min=min(batch.sampled_lengths),
        sampled_tokens_max=max(batch.sampled_lengths),
        masked_tokens=batch.num_masked_tokens,
        routing_rows_recomputed=batch.routing_rows_recomputed,
        wait_s=done.wait_s,
        step_s=done.step_s,
        sync_s=report.total_s,
        handover_s=report.handover_s,
        sync_hidden_s=done.sync_hidden_s,
        sync_parts=report.parts,
        sync_bytes=report.num_bytes,
        pause_s=report.pause_s,
        prefilled_again_tokens=prefilled_again_tokens,
        prefilled_again_s=prefilled_again_s,
        in_flight=counts.in_flight,
        queued=counts.queued,
        dropped=sum(counts.dropped.values()),
        dropped_reasons=counts.dropped,
        engine_idle_share=engine_idle_share,
        tokens_per_s=tokens_per_s,
    )
