"""The state of a run between two steps, for the live page, `/health`, the gauges and the terminal panel."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from async_rl.observability.diagnosis import Diagnosis
from async_rl.observability.metrics import Metrics
from async_rl.observability.page.view import Now, look
from async_rl.rollout.manager import RolloutManager
from async_rl.run.doctor import Doctor
from async_rl.run.run_log import RunLogger
from async_rl.runtime.machine_limits import LimitUsage, descriptor_usage, memory_usage
from async_rl.runtime.user_processes import read_reports
from async_rl.runtime.waits import Waits, sleep_idle
from async_rl.store.trajectory_queue import TrajectoryQueue

_DIAGNOSIS_MAX_AGE_S: Final = 5.0
_DIAGNOSIS_MAX_SHARE: Final = 0.01
"""While the run makes progress, a diagnosis for the page and `/health` is reused for this long, or longer
where diagnoses would take more than this share of the time: with 4,096 trajectories one takes 40 ms."""


class LiveStatus:
    """Reports what a run does now."""

    def __init__(
        self,
        run_log: RunLogger,
        doctor: Doctor,
        waits: Waits,
        metrics: Metrics,
        run_dir: Path,
        *,
        queue: Callable[[], TrajectoryQueue | None],
        manager: Callable[[], RolloutManager | None],
        max_steps: int,
    ) -> None:
        """Connect the components.

        Args:
            run_log: Phase and records of the run; shows the state on the terminal.
            doctor: Diagnoses what the run waits for.
            waits: The waits of the run, with its clock.
            metrics: The metrics of the run.
            run_dir: The run's folder, whose disk is measured.
            queue: Returns the current queue; None before the trainer has started.
            manager: Returns the current rollout manager; None before the trainer has started.
            max_steps: `run.max_steps`.
        """
        self._run_log = run_log
        self._doctor = doctor
        self._waits = waits
        self._metrics = metrics
        self._dir = run_dir
        self._max_steps = max_steps
        self._queue = queue
        self._manager = manager
        self._diagnosis: Diagnosis | None = None
        self._diagnose_again_s = 0.0

    def now(self) -> Now:
        """Return the state of the run for the live page."""
        queue, manager = self._queue(), self._manager()
        return look(
            phase=self._run_log.phase,
            max_steps=self._max_steps,
            elapsed_s=self._run_log.elapsed_s,
            records=self._run_log.records,
            counts=None if queue is None else queue.groups.ledger.counts(),
            engines=self._doctor.engine_views(),
            waits=self._waits,
            diagnosis=self._recent_diagnosis(),
            running=[] if manager is None else manager.trajectories.running.values(),
            failures=() if queue is None else queue.groups.ledger.attempts.rows(),
        )

    def _recent_diagnosis(self) -> Diagnosis:
        """Return a diagnosis for the live page and `/health`."""
        now, known = self._waits.clock(), self._diagnosis
        if known is None or known.state != "moving" or self._doctor.is_quiet or now >= self._diagnose_again_s:
            self._diagnosis = known = self._doctor.diagnosis()
            taken_s = self._waits.clock() - now
            self._diagnose_again_s = now + max(_DIAGNOSIS_MAX_AGE_S, taken_s / _DIAGNOSIS_MAX_SHARE)
        return known

    def health(self) -> dict[str, Any]:
        """Return the answer to `/health`: the state of the run and what it waits for.

        Its `status` is `ok` exactly if no cause of the diagnosis has a problem.
        """
        diagnosis, records = self._recent_diagnosis(), self._run_log.records
        return {
            "status": diagnosis.state if diagnosis.state in ("stalled", "overdue") else "ok",
            "phase": self._run_log.phase,
            "step": records[-1].step if records else 0,
            "waiting_for": diagnosis.causes[0].chain if diagnosis.causes else (),
            "diagnosis": msgspec.to_builtins(diagnosis),
        }

    async def update_gauges(self) -> None:
        """Update the gauges and the terminal panel once a second; never returns."""
        m, queue = self._metrics, self._queue()
        assert queue is not None, "the service runs while there is a queue"
        while True:
            counts = queue.groups.ledger.counts()
            m.queue_bytes.set(queue.groups.spool.used_bytes)
            disk, memory, descriptors = await asyncio.to_thread(self._measure_limits)
            for labels, count in (await asyncio.to_thread(read_reports, self._dir)).items():
                m.user_processes_reaped_total.labels(*labels).inc(count)
            m.disk_free_bytes.set(disk.free)
            m.disk_size_bytes.set(disk.total)
            m.memory_used_bytes.set(memory.used)
            m.memory_limit_bytes.set(memory.limit)
            m.open_descriptors.set(descriptors.used)
            m.max_descriptors.set(descriptors.limit)
            self._run_log.show_flow(counts.in_flight, counts.queued, self._doctor.waiting_for)
            await sleep_idle(1.0)

    def _measure_limits(self) -> tuple[Any, LimitUsage, LimitUsage]:
        """Return the usage of the run folder's disk, of memory, and of descriptors."""
        return shutil.disk_usage(self._dir), memory_usage(), descriptor_usage()
