"""The stall doctor: checks every few seconds whether the run makes progress, logs why not, and may act.

| loop | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| `run_checks` | waits, states | the next check | time | log messages, metrics, remedies, StallError |

A run makes progress while tokens arrive, trajectories end, steps finish or engines start to serve. A
diagnosis is logged once, and again only after growing intervals; `/health` shows it at any time. With
`doctor.action` `repair` the doctor ends the wait that blocks the run as its own timeout would: calls leave
their engine with their tokens, an attempt is retried, a lost group is dropped. If that does not help, the run
ends.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from async_rl.config import Config, SGLangEngines
from async_rl.engines import repair
from async_rl.engines.health import MIN_PREFILL_TOKENS_PER_S
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.errors import EngineTimeout, StallError
from async_rl.observability.diagnosis import (
    TRAIN_LOOP,
    Cause,
    Diagnosis,
    EngineView,
    RunSnapshot,
    diagnose,
    phrase,
)
from async_rl.observability.loop_watchdog import LoopWatchdog
from async_rl.observability.metrics import Metrics
from async_rl.rollout.slots import Slots
from async_rl.rollout.workers.worker import START_TIMEOUT_S
from async_rl.run.recovery import NODE_LOST_S
from async_rl.runtime.supervision import END_LIMIT_S
from async_rl.runtime.waits import WAIT_KINDS, Waits, acting, sleep_idle, waiting
from async_rl.store.trajectory_queue import TrajectoryQueue

log = logging.getLogger(__name__)

_LOG_INTERVAL_FACTOR: Final = 2.0
"""The interval between log messages on a lasting stall grows by this factor."""

LOOK_S: Final = 5.0
"""Time between two checks: a tenth of the default of `doctor.stall_s`."""

_CHECKS_BEFORE_ALARM: Final = 2
"""Consecutive checks that must find a stall: between them, data that arrived while the loop was blocked is
read.
"""


def wait_limits(config: Config) -> dict[str, float]:
    """Return the longest duration of each kind of wait by the config; kinds without a limit are missing."""
    engine, weights, trainer, rollout = config.engine, config.weights, config.trainer, config.rollout
    start_s = engine.start_timeout_s if isinstance(engine, SGLangEngines) else engine.stall_s
    start_s += repair.RESTART_DELAY_MAX_S  # a restart that waits for its delay counts as running
    named: dict[str, float] = {
        "agent loop": rollout.trajectory_timeout_s,
        "checkpoint": trainer.step_timeout_s,
        "chunk": engine.stall_s,
        "drain": config.run.drain_s,
        "engine start": start_s,
        "engine update": weights.timeout_s,
        # An engine may take as long to be free as the answers; afterwards the workers end. At its end a run
        # may wait for two evaluations.
        "evaluation": 2 * (2 * config.evaluation.timeout_s + END_LIMIT_S),
        "export": weights.timeout_s,
        "first chunk": engine.stall_s,
        "frames": trainer.step_timeout_s,
        "hand-over": weights.timeout_s,
        "publish": weights.timeout_s,
        "reward": rollout.reward_timeout_s,
        "node": 2 * NODE_LOST_S,
        "rollout worker": START_TIMEOUT_S,
        "send weights": 2 * weights.timeout_s,
        "snapshot": weights.timeout_s,
        "tool": rollout.tool_timeout_s,
        "trainer start": trainer.start_timeout_s,
        "trainer step": trainer.step_timeout_s,
        "weight groups": weights.timeout_s,
    }
    return {str(on): limit_s for on, limit_s in named.items()}


@asynccontextmanager
async def recording_waits(waits: Waits, metrics: Metrics) -> AsyncIterator[None]:
    """Record all waits of the block, and watch its event loop; the block is the run."""
    with acting("run", waits=waits), LoopWatchdog(metrics):
        yield


class Doctor:
    """Diagnoses stalls of a run and applies `doctor.action`."""

    def __init__(
        self,
        config: Config,
        waits: Waits,
        pool: EnginePool,
        metrics: Metrics,
        *,
        queue: Callable[[], TrajectoryQueue | None] = lambda: None,
        slots: Callable[[], Slots | None] = lambda: None,
    ) -> None:
        """Connect the components.

        Args:
            config: The run's config.
            waits: The waits of the run.
            pool: The engines of the run.
            metrics: The metrics of the run.
            queue: Returns the current queue; None before the trainer has started.
            slots: Returns the current trajectory slots; None before the trainer has started.
        """
        self._config = config.doctor
        self._engine = config.engine
        self._worker_stall_s = config.rollout.worker_stall_s
        self.limits_s = wait_limits(config)
        """Longest duration of each kind of wait, seconds; kinds without a limit are missing."""
        self._waits = waits
        self._pool = pool
        self._metrics = metrics
        self._queue = queue
        self._slots = slots
        self._num_checks = 0
        self._logged: tuple[str, str, str] | None = None
        self._log_again_s = self._log_interval_s = 0.0
        self._counted: set[tuple[str, str]] = set()
        self._remedy_time_s: dict[tuple[str, str], float] = {}

    async def run_checks(self) -> None:
        """Check the run every `LOOK_S` seconds; never returns.

        Raises:
            StallError: The run is stalled, and `doctor.action` ends it.
        """
        interval_s = LOOK_S
        while True:
            expected_s = self._waits.clock() + interval_s
            await sleep_idle(interval_s)
            late_s = self._waits.clock() - expected_s
            if late_s > interval_s:  # nothing could make progress while the event loop was blocked
                self._waits.progressed_s += late_s
                continue  # and what was due meanwhile has its turn first
            self.check_progress()

    def check_progress(self) -> None:
        """Check the run once.

        Raises:
            StallError: The run is stalled, and `doctor.action` ends it.
        """
        quiet_s, oldest_s = self._waits.quiet_s, self._waits.oldest_s()
        self._metrics.seconds_since_progress.set(quiet_s)
        for on in WAIT_KINDS:
            if on != "idle":
                self._metrics.oldest_wait_seconds.labels(on).set(oldest_s.get(on, 0.0))
        overdue = any(age_s > self.limits_s.get(on, age_s) for on, age_s in oldest_s.items())
        if not self.is_quiet and not overdue:
            self._reset()
            return
        diagnosis = self.diagnosis()
        if diagnosis.state == "moving":
            self._reset()
            return
        self._num_checks += 1
        if self._num_checks < _CHECKS_BEFORE_ALARM:
            return
        self._log_diagnosis(diagnosis)
        if diagnosis.state == "quiet":
            return
        for cause in self._alarming(diagnosis):
            if (cause.on, cause.target) not in self._counted:
                self._counted.add((cause.on, cause.target))
                self._metrics.stalls_total.labels(cause.on).inc()
        self._apply_action(diagnosis)

    def diagnosis(self) -> Diagnosis:
        """Diagnose what the run waits for now."""
        waits, now = self._waits, self._waits.clock()
        queue, slots = self._queue(), self._slots()
        return diagnose(
            RunSnapshot(
                quiet_s=waits.quiet_s,
                stall_s=self._config.stall_s,
                waits=waits.open_waits(),
                actors=waits.actors(),
                limits_s=self.limits_s,
                longest_s=waits.longest_s,
                unheard_s={engine_id: now - heard_s for engine_id, heard_s in waits.heard_s.items()},
                engines=self.engine_views(),
                has_capacity=self._pool.dispatcher.has_capacity,
                queue=queue.view() if queue is not None else None,
                slots=slots.view() if slots is not None else None,
            )
        )

    @property
    def is_quiet(self) -> bool:
        """Whether the run has made no progress for `doctor.stall_s`."""
        return self._waits.quiet_s >= self._config.stall_s

    def waiting_for(self) -> str:
        """Return what the train loop waits for, for the panel; the whole chain without progress."""
        if self.is_quiet:
            return self.diagnosis().text
        ours = (wait for wait in self._waits.open if wait.actor.who == TRAIN_LOOP)
        return "; ".join(phrase(wait.on, wait.target, wait.why() if wait.why else None) for wait in ours)

    def engine_views(self) -> list[EngineView]:
        """Return the present state of all engines."""
        pool, config = self._pool, self._engine
        states = {engine.engine_id: state for state in EngineState for engine in pool.engines(state)}
        vitals = pool.loads(states)
        return [
            EngineView(
                engine_id=engine_id,
                state=state,
                reserved=pool.is_reserved(engine_id),
                calls=vitals[engine_id].calls,
                prefill_tokens=vitals[engine_id].prefill_tokens,
                patience_s=config.stall_s
                + vitals[engine_id].prefill_tokens / MIN_PREFILL_TOKENS_PER_S
                + self._worker_stall_s * vitals[engine_id].unobserved,
                weight_version=pool.version_of(engine_id),
                error=str(pool.error_of(engine_id) or ""),
            )
            for engine_id, state in states.items()
        ]

    @staticmethod
    def _alarming(diagnosis: Diagnosis) -> list[Cause]:
        """Return the cause of a stall; for a run that makes progress, all causes over their limits."""
        if diagnosis.state == "stalled":
            return list(diagnosis.causes[:1])
        return [cause for cause in diagnosis.causes if not cause.expected]

    # -- logging ------------------------------------------------------------------------------------------

    def _log_diagnosis(self, diagnosis: Diagnosis) -> None:
        """Log the chain of waits if it is new or has not been logged for a while."""
        first = diagnosis.causes[0] if diagnosis.causes else None
        key = (diagnosis.state, first.on if first else "", first.target if first else "")
        now = self._waits.clock()
        if key == self._logged and now < self._log_again_s:
            return
        self._log_interval_s = (
            self._log_interval_s * _LOG_INTERVAL_FACTOR if key == self._logged else self._config.stall_s
        )
        self._logged, self._log_again_s = key, now + self._log_interval_s
        match diagnosis.state:
            case "quiet":
                log.info("the run is quiet, and what it waits for is within its limit: %s", diagnosis.text)
            case "overdue":
                log.warning("the run makes progress, but a wait exceeds its limit: %s", diagnosis.text)
            case _:
                log.error("the run is stalled: %s", diagnosis.text)

    def _reset(self) -> None:
        if self._logged is not None:
            log.info("the run makes progress")
        self._num_checks, self._logged = 0, None
        self._counted.clear()
        self._remedy_time_s.clear()

    # -- remedies -----------------------------------------------------------------------------------------

    def _apply_action(self, diagnosis: Diagnosis) -> None:
        if self._config.action == "report":
            return
        if self._config.action == "end":
            if diagnosis.state == "stalled":
                raise self._stall_error(diagnosis)
            return
        now, stall_s = self._waits.clock(), self._config.stall_s
        acted = False
        for cause in self._alarming(diagnosis):
            remedied_s = self._remedy_time_s.setdefault((cause.on, cause.target), now)
            if remedied_s == now and (remedy := self._remedy(cause)) is not None:
                log.warning("remedy: %s", remedy)
                acted = True
            acted |= remedied_s < now < remedied_s + stall_s  # a remedy may need time
        if diagnosis.state == "stalled" and not acted:
            raise self._stall_error(diagnosis)

    def _stall_error(self, diagnosis: Diagnosis) -> StallError:
        return StallError(f"the run is stalled: {diagnosis.text}", on=diagnosis.on)

    def _remedy(self, cause: Cause) -> str | None:
        """End the wait of a cause as its own timeout would; return what was done, or None."""
        match cause.on:
            case "chunk" | "first chunk":
                self._pool.quarantine_engine(cause.target, EngineTimeout(cause.sentence))
                return f"{cause.target} is quarantined; its calls move to other engines with their tokens"
            case "group" if (queue := self._queue()) is not None:
                queue.groups.cancel_group(cause.target, "lost")
                return f"group {cause.target} is dropped"
            case "slot" if (slots := self._slots()) is not None:
                alive = {actor.who.id for actor in self._waits.acting if actor.who.kind == "trajectory"}
                return f"slots of {', '.join(slots.reclaim_slots(alive))} are free again"
            case _:
                ended = sum(map(self._expire_matching(cause), list(self._waits.open)))
                return f"{ended} waits for {cause.on} {cause.target} were ended" if ended else None

    def _expire_matching(self, cause: Cause) -> Callable[[waiting], bool]:
        """Return a function that ends a wait if it belongs to the cause and is about as old."""
        now = self._waits.clock()
        old_s = min(cause.age_s, self._config.stall_s if cause.limit_s is None else cause.limit_s)

        def end(wait: waiting) -> bool:
            since_s = max(wait.since_s, wait.actor.touched_s) if cause.on == "agent loop" else wait.since_s
            ours = (wait.on, wait.target) == (cause.on, cause.target)
            return ours and now - since_s >= old_s and wait.expire()

        return end
