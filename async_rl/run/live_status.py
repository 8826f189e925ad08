"""What a run shows between two steps: the live page, `/health`, and once a second gauges and the panel."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from async_rl.engines.pool import EnginePool, EngineState
from async_rl.observability.diagnosis import Diagnosis
from async_rl.observability.metrics import Metrics
from async_rl.observability.page.view import EngineRow, Now, look
from async_rl.queue.trajectory_queue import TrajectoryQueue
from async_rl.rollout.manager import RolloutManager
from async_rl.run.doctor import Doctor
from async_rl.run.run_log import RunLogger
from async_rl.runtime.waits import Waits, waiting

_DIAGNOSIS_LASTS_S: Final = 5.0
"""On the live page; 40 ms go into one of 4096 trajectories."""


class LiveStatus:
    """See the module.

    Example:
        >>> pulse = Pulse(run_log, doctor, pool, waits, metrics, clock, run_dir, max_steps=100)
        >>> pulse.attend(queue, manager)
        >>> async with services(pulse=pulse.run): ...
        >>> pulse.health()["waiting_for"]
    """

    def __init__(
        self,
        run_log: RunLogger,
        doctor: Doctor,
        pool: EnginePool,
        waits: Waits,
        metrics: Metrics,
        clock: Callable[[], float],
        run_dir: Path,
        *,
        max_steps: int,
    ) -> None:
        """Know what is of the run; queue and manager come later."""
        self._run_log = run_log
        self._doctor = doctor
        self._pool = pool
        self._waits = waits
        self._metrics = metrics
        self._clock = clock
        self._dir = run_dir
        self._max_steps = max_steps
        self._queue: TrajectoryQueue | None = None
        self._manager: RolloutManager | None = None
        self._diagnosis: Diagnosis | None = None
        self._diagnose_again_s = 0.0

    def attend(self, queue: TrajectoryQueue, manager: RolloutManager) -> None:
        """Show these from now on."""
        self._queue, self._manager = queue, manager

    def now(self) -> Now:
        """For the live page: the run at this moment."""
        return look(
            phase=self._run_log.phase,
            max_steps=self._max_steps,
            elapsed_s=self._run_log.elapsed_s,
            records=self._run_log.records,
            counts=None if self._queue is None else self._queue.statistics().counts,
            engines=_engine_rows(self._pool),
            waits=self._waits,
            diagnosis=self._recent_diagnosis(),
            running=[] if self._manager is None else self._manager.running.values(),
        )

    def _recent_diagnosis(self) -> Diagnosis:
        """One for the live page: that of a run that moves may be some seconds old, for each costs."""
        now = self._clock()
        if self._diagnosis is None or self._diagnosis.state != "moving" or now >= self._diagnose_again_s:
            self._diagnosis, self._diagnose_again_s = self._doctor.diagnosis(), now + _DIAGNOSIS_LASTS_S
        return self._diagnosis

    def health(self) -> dict[str, Any]:
        """For `/health`: how the run is and what it waits for."""
        diagnosis, records = self._doctor.diagnosis(), self._run_log.records
        return {
            "status": "stalled" if diagnosis.state == "stalled" else "ok",
            "phase": self._run_log.phase,
            "step": records[-1].step if records else 0,
            "waiting_for": diagnosis.causes[0].chain if diagnosis.causes else (),
            "diagnosis": msgspec.to_builtins(diagnosis),
        }

    async def run(self) -> None:
        """Show once a second what moves between steps; a service of a life, it never returns."""
        assert self._queue is not None, "a life has a queue"
        m, queue, progress = self._metrics, self._queue, self._run_log.progress
        # As of the scrape, as the counters are that they must add up with.
        m.trajectories_in_flight.set_function(lambda: queue.statistics().in_flight)
        m.trajectories_queued.set_function(lambda: queue.statistics().queued)
        while True:
            counts = queue.statistics()
            m.queue_bytes.set(counts.bytes)
            disk = shutil.disk_usage(self._dir)
            m.disk_free_bytes.set(disk.free)
            m.disk_size_bytes.set(disk.total)
            if progress is not None:
                progress.flow(
                    in_flight=counts.in_flight,
                    queued=counts.queued,
                    waiting_for=self._doctor.waiting_for(),
                )
            with waiting("idle"):
                await asyncio.sleep(1.0)


def _engine_rows(pool: EnginePool) -> list[EngineRow]:
    rows = []
    for state in EngineState:
        for engine in pool.engines(state):
            vitals = pool.statistics.load_of(engine.engine_id)
            rows.append(
                EngineRow(
                    engine_id=engine.engine_id,
                    state=state,
                    weight_version=pool.version_of(engine.engine_id),
                    calls=vitals.calls,
                    prefill_tokens=vitals.prefill_tokens,
                    error=str(pool.error_of(engine.engine_id) or ""),
                )
            )
    return rows
