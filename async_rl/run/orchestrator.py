"""Connects the components of a run and leads it from start to end, across restarts of its trainer.

```
 loop         consumes         waits for                  unblocked by                  produces
 train loop   batches (queue)  a batch ready by its bound a group arrives or is dropped version n+1
 rollouts     tasks (feeder)   a slot, admission          a trajectory ends; a version  groups
 repair       failed engines   a quarantine               a call or an update fails     a serving engine
 watch        processes        a server that exits        its exit                      a quarantine
 health       calls, probes    the next check             time                          a quarantine
 members      the urls_file    the next check             time                          joins, departures
 stopper      the stop event   the first signal           Ctrl-C                        a drain
 live_status  statistics       a second                   time                          gauges, the panel
 doctor       waits, states    the next check             time                          log, remedies
 journal      new tokens       queue.journal_s            time                          the journal
 archive      trajectories     a second                   time                          their database
 evaluation   served versions  a version that is due      the pool                      its record
```

`async_rl.run.train_loop` documents the order of the train loop and its reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from async_rl.config import Config
from async_rl.errors import StallError, TrainerError
from async_rl.observability.console_report import RunProgress
from async_rl.observability.metrics import Metrics
from async_rl.observability.records import Summary
from async_rl.observability.trackers.tracker import Trackers
from async_rl.rollout.manager import RolloutManager
from async_rl.run.cluster import Cluster
from async_rl.run.doctor import Doctor
from async_rl.run.incarnation import Incarnation, RunParts, build_incarnation, restore
from async_rl.run.inputs import RunInputs
from async_rl.run.live_status import LiveStatus
from async_rl.run.plan_watch import PlanWatch
from async_rl.run.run_engines import RunEngines
from async_rl.run.run_log import RunLogger
from async_rl.run.trainer_restarts import TrainerHandle, TrainerRestarts
from async_rl.runtime.shortages import wait_for_files
from async_rl.runtime.supervision import cut_by, first_error, observer, services
from async_rl.runtime.waits import Waits, acting
from async_rl.store.trajectory_queue import TrajectoryQueue
from async_rl.weights.checksums import ChecksumComparison


class Orchestrator:
    """Leads one run from start-up to summary."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        stop: asyncio.Event,
        cluster: Cluster,
        metrics: Metrics,
        clock: Callable[[], float],
        inputs: RunInputs,
        *,
        progress: RunProgress | None = None,
        trackers: Trackers | None = None,
        plan: PlanWatch | None = None,
    ) -> None:
        """Build the components that last for the whole run.

        Args:
            config: The run's config.
            run_dir: The run's folder.
            stop: Set by the first signal.
            cluster: Starts the processes of the run.
            metrics: The metrics of the run.
            clock: Monotonic seconds.
            inputs: Model and data.
            progress: Shows phases and steps on the terminal; None shows nothing.
            trackers: Get every step and evaluation; None for none.
            plan: Compares the run with what is expected of it; None for no comparison.
        """
        metrics.max_staleness_versions.set(config.rollout.max_staleness)
        engines = self._engines = RunEngines(
            config, cluster, metrics, clock, catch_up=self._catch_up, forget=self._forget_engine
        )
        pool = self.pool = engines.pool
        self.devices = engines.devices
        self._incarnation: Incarnation | None = None
        self.waits = Waits(clock)
        self.doctor = Doctor(
            config,
            self.waits,
            pool,
            metrics,
            queue=lambda: self.queue,
            slots=lambda: None if self._manager is None else self._manager.slots,
        )
        self._plan_service = {} if plan is None else {"plan": observer(plan.run)}
        self.run_log = RunLogger(
            config, run_dir, pool, metrics, clock, progress=progress, trackers=trackers, plan=plan
        )
        self.live_status = LiveStatus(
            self.run_log,
            self.doctor,
            self.waits,
            metrics,
            run_dir,
            queue=lambda: self.queue,
            manager=lambda: self._manager,
            max_steps=config.run.max_steps,
        )
        self._trainer_restarts = TrainerRestarts(
            cluster,
            run_dir,
            pool,
            self.devices,
            self.run_log,
            metrics,
            max_restarts=config.trainer.max_restarts,
        )
        self._parts = RunParts(
            config,
            run_dir,
            stop,
            cluster,
            metrics,
            clock,
            inputs,
            pool,
            {frozen.name: frozen.pool for frozen in engines.frozen},
            self.devices,
            self.run_log,
            ChecksumComparison(),
        )

    @property
    def queue(self) -> TrajectoryQueue | None:
        """The queue of the current incarnation; None before the trainer has started."""
        return None if self._incarnation is None else self._incarnation.recovered.queue

    @property
    def _manager(self) -> RolloutManager | None:
        return None if self._incarnation is None else self._incarnation.manager

    async def run(self) -> Summary:
        """Start engines and trainer, train to the end, and return the summary.

        Raises:
            AsyncRLError: The error of the service that failed, inside an exception group.
        """
        async with cut_by(self._parts.stop), services(doctor=self._watching_doctor):
            trainer_handle = await self._trainer_restarts.start_first_trainer(self._engines)
        if self._parts.inputs.validation:
            self._engines.reserve_for_evaluation()
        failed_checkpoints = 0
        while True:
            # A restarted trainer continues from its checkpoint exactly as a new process does: the components
            # that depend on its step are rebuilt from the run's folder, and the engines get its weights.
            await wait_for_files(self._parts.directory / "spool")
            generation = self._trainer_restarts.failures
            async with self._parts.until_cut(generation), services(doctor=self._watching_doctor):
                progress = await restore(self._parts, trainer_handle.step)
            await wait_for_files(self._parts.directory / "spool")
            incarnation = self._incarnation = build_incarnation(
                self._parts,
                trainer_handle,
                progress,
                generation=generation,
                failed_checkpoints=failed_checkpoints,
            )
            queue = incarnation.recovered.queue
            try:
                end = await self._run_incarnation(incarnation)
            finally:
                incarnation.recovered.write_and_close()
            trajectories, failures = queue.groups.ledger.counts(), queue.groups.ledger.attempts.rows()
            queue.close()
            if not isinstance(end, TrainerHandle):
                return self.run_log.summary(trajectories, ended_s=end, failures=failures)
            trainer_handle, failed_checkpoints = end, incarnation.checkpoints.num_failed

    @property
    def _watching_doctor(self) -> Callable[[], Awaitable[None]]:
        return observer(self.doctor.run_checks, ends_run_with=(StallError,))

    async def _run_incarnation(self, incarnation: Incarnation) -> float | TrainerHandle:
        """Run until the end, or until the trainer has failed and has been restarted from its checkpoint.

        Returns:
            The time on the clock at which the last step ended, or the restarted trainer.
        """
        trainer_failed = False
        try:
            async with services(
                rollouts=incarnation.manager.run,
                **self._engines.services,
                stopper=incarnation.stop_when_asked,
                doctor=self._watching_doctor,
                live_status=observer(self.live_status.update_gauges),
                **self._plan_service,
                **incarnation.recovered.services,
            ):
                try:
                    async with services(
                        repair=self._engines.repair.repair_engines, **incarnation.evaluations
                    ):
                        with acting("train loop"):
                            return await incarnation.train_to_end()
                except ExceptionGroup as group:
                    cause = first_error(group)
                    if not isinstance(cause, TrainerError) or not cause.restartable:
                        raise
                    trainer_failed = True
                    # Meanwhile rollouts continue up to the staleness bound; the next incarnation keeps them.
                    return await self._trainer_restarts.restart_trainer(cause)
        except ExceptionGroup as group:
            await incarnation.save_before_error(first_error(group), trainer_failed=trainer_failed)
            raise

    async def _forget_engine(self, engine_id: str) -> None:
        """End weight updates of an engine that has left."""
        if self._incarnation is not None:
            await self._incarnation.sync.remove_engine(engine_id)

    async def _catch_up(self, engine_id: str) -> None:
        """Bring an engine to the current trainer's weights."""
        assert self._incarnation is not None, "engines are repaired while there is a trainer"
        await self._incarnation.sync.catch_up_engine(engine_id)
