"""The stall doctor: looks every few seconds whether the run moves, says why not, and by config acts.

```
 loop    consumes          waits for       unblocked by   produces
 run     waits, states     the next look   time           the chain in the log, metrics, remedies, StallError
```

A run moves while tokens come, trajectories end, steps are done or engines begin to serve. What is found goes
into the log once, again only after growing times, and is in `/health` at any time. With `doctor.action`
`repair` the doctor ends the wait that everything waits for in the way its own timeout would: calls leave
their engine with their tokens, an attempt is tried again, a lost group is dropped. What does not move after
that ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from async_rl.config import Config, DoctorConfig, SGLangEngines
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
from async_rl.queue.trajectory_queue import TrajectoryQueue
from async_rl.rollout.slots import Slots
from async_rl.runtime.waits import WAIT_KINDS, Waits, acting, waiting

log = logging.getLogger(__name__)

_AGAIN: Final = 2.0
"""A stall that lasts is said again after so many times the time before."""

_LOOKS_TO_BELIEVE: Final = 2
"""A stall must be there twice: what came in while the loop stood still is read between the two looks."""


def limits(config: Config) -> dict[str, float]:
    """Longest waits of a config, by what is awaited; what is not in it has no limit of its own."""
    engine, weights, trainer, rollout = config.engine, config.weights, config.trainer, config.rollout
    start_s = engine.start_timeout_s if isinstance(engine, SGLangEngines) else engine.stall_s
    start_s += engine.restart_delay_max_s  # a restart that waits for its turn counts as one under way
    named: dict[str, float] = {
        "agent loop": rollout.trajectory_timeout_s,
        "checkpoint": trainer.step_timeout_s,
        "chunk": engine.stall_s,
        "drain": config.run.drain_s,
        "engine start": start_s,
        "engine update": weights.timeout_s,
        "export": weights.timeout_s,
        "first chunk": engine.stall_s,
        "hand-over": weights.timeout_s,
        "publish": weights.timeout_s,
        "reward": rollout.reward_timeout_s,
        "rollout worker": rollout.worker_start_timeout_s,
        "send weights": 2 * weights.timeout_s,
        "snapshot": weights.timeout_s,
        "tool": rollout.tool_timeout_s,
        "trainer start": trainer.start_timeout_s,
        "trainer step": trainer.step_timeout_s,
    }
    return {str(on): limit_s for on, limit_s in named.items()}


@asynccontextmanager
async def watched(waits: Waits, metrics: Metrics, config: DoctorConfig) -> AsyncIterator[None]:
    """The block is the run: all waits in it are written down, and its event loop is watched."""
    with acting("run", waits=waits), LoopWatchdog(metrics, config.blocked_s):
        yield


class Doctor:
    """See the module.

    Example:
        >>> doctor = Doctor(config, waits, pool, metrics, queue=lambda: queue, slots=lambda: manager.slots)
        >>> async with services(doctor=doctor.run): ...
        >>> print(doctor.diagnosis().text)
    """

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
        self._limits = limits(config)
        self._waits = waits
        self._pool = pool
        self._metrics = metrics
        self._queue = queue
        self._slots = slots
        self._looks = 0
        self._said: tuple[str, str, str] | None = None
        self._say_at_s = self._say_after_s = 0.0
        self._counted: set[tuple[str, str]] = set()
        self._treated_s: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        """Look, for ever.

        Raises:
            StallError: When the run stands still, and by `doctor.action` that is its end.
        """
        look_s = self._config.look_s
        while True:
            expected_s = self._waits.clock() + look_s
            with waiting("idle"):
                await asyncio.sleep(look_s)
            late_s = self._waits.clock() - expected_s
            if late_s > look_s:  # nothing could move while the event loop stood still
                self._waits.progressed_s += late_s
            self.look()

    def look(self) -> None:
        """Look once.

        Raises:
            StallError: See `run`.
        """
        quiet_s, oldest_s = self._waits.quiet_s, self._waits.oldest_s()
        self._metrics.seconds_since_progress.set(quiet_s)
        for on in WAIT_KINDS:
            if on != "idle":
                self._metrics.oldest_wait_seconds.labels(on).set(oldest_s.get(on, 0.0))
        overdue = any(age_s > self._limits.get(on, age_s) for on, age_s in oldest_s.items())
        if quiet_s < self._config.stall_s and not overdue:
            self._recovered()
            return
        diagnosis = self.diagnosis()
        if diagnosis.state == "moving":
            self._recovered()
            return
        self._looks += 1
        if self._looks < _LOOKS_TO_BELIEVE:
            return
        self._say(diagnosis)
        if diagnosis.state == "quiet":
            return
        for cause in self._alarming(diagnosis):
            if (cause.on, cause.target) not in self._counted:
                self._counted.add((cause.on, cause.target))
                self._metrics.stalls_total.labels(cause.on).inc()
        self._act(diagnosis)

    def diagnosis(self) -> Diagnosis:
        """What the run waits for, now."""
        waits, now = self._waits, self._waits.clock()
        queue, slots = self._queue(), self._slots()
        return diagnose(
            RunSnapshot(
                quiet_s=waits.quiet_s,
                stall_s=self._config.stall_s,
                waits=waits.open_waits(),
                actors=waits.actors(),
                limits_s=self._limits,
                longest_s=waits.longest_s,
                unheard_s={engine_id: now - heard_s for engine_id, heard_s in waits.heard_s.items()},
                engines=self._engines(),
                queue=queue.view() if queue is not None else None,
                slots=slots.view() if slots is not None else None,
            )
        )

    def waiting_for(self) -> str:
        """For the panel: what the train loop waits for; the whole chain when the run does not move."""
        if self._waits.quiet_s >= self._config.stall_s:
            return self.diagnosis().text
        ours = (wait for wait in self._waits.open if wait.actor.who == TRAIN_LOOP)
        return "; ".join(phrase(wait.on, wait.target, wait.why() if wait.why else None) for wait in ours)

    def _engines(self) -> list[EngineView]:
        pool, config = self._pool, self._engine
        states = {engine.engine_id: state for state in EngineState for engine in pool.engines(state)}
        vitals = {engine_id: pool.statistics.load_of(engine_id) for engine_id in states}
        return [
            EngineView(
                engine_id=engine_id,
                state=state,
                running_calls=vitals[engine_id].calls,
                patience_s=config.stall_s
                + vitals[engine_id].prefill_tokens / config.min_prefill_tokens_per_s,
                weight_version=pool.version_of(engine_id),
                error=str(pool.error_of(engine_id) or ""),
            )
            for engine_id, state in states.items()
        ]

    @staticmethod
    def _alarming(diagnosis: Diagnosis) -> list[Cause]:
        """The one that a standing run waits for; of a moving one, all that are over their limits."""
        if diagnosis.state == "stalled":
            return list(diagnosis.causes[:1])
        return [cause for cause in diagnosis.causes if not cause.expected]

    # -- saying -------------------------------------------------------------------------------------------

    def _say(self, diagnosis: Diagnosis) -> None:
        """Write the chain into the log, when it is new or has not been said for long."""
        first = diagnosis.causes[0] if diagnosis.causes else None
        key = (diagnosis.state, first.on if first else "", first.target if first else "")
        now = self._waits.clock()
        if key == self._said and now < self._say_at_s:
            return
        self._say_after_s = self._say_after_s * _AGAIN if key == self._said else self._config.stall_s
        self._said, self._say_at_s = key, now + self._say_after_s
        match diagnosis.state:
            case "quiet":
                log.info("the run is quiet, and what it waits for is within its limit: %s", diagnosis.text)
            case "overdue":
                log.warning("the run moves, but a wait is over its limit: %s", diagnosis.text)
            case _:
                log.error("the run stands still: %s", diagnosis.text)

    def _recovered(self) -> None:
        if self._said is not None:
            log.info("the run moves")
        self._looks, self._said = 0, None
        self._counted.clear()
        self._treated_s.clear()

    # -- acting -------------------------------------------------------------------------------------------

    def _act(self, diagnosis: Diagnosis) -> None:
        if self._config.action == "report":
            return
        if self._config.action == "end":
            if diagnosis.state == "stalled":
                raise self._end(diagnosis)
            return
        now, stall_s = self._waits.clock(), self._config.stall_s
        helped = False
        for cause in self._alarming(diagnosis):
            treated_s = self._treated_s.setdefault((cause.on, cause.target), now)
            if treated_s == now and (remedy := self._remedy(cause)) is not None:
                log.warning("remedy: %s", remedy)
                helped = True
            helped |= treated_s < now < treated_s + stall_s  # what was done may need its time
        if diagnosis.state == "stalled" and not helped:
            raise self._end(diagnosis)

    def _end(self, diagnosis: Diagnosis) -> StallError:
        return StallError(f"the run stands still: {diagnosis.text}", on=diagnosis.on)

    def _remedy(self, cause: Cause) -> str | None:
        """Undo a cause in the way that its own timeout would; what was done, or None."""
        match cause.on:
            case "chunk" | "first chunk":
                self._pool.quarantine_engine(cause.target, EngineTimeout(cause.sentence))
                return f"{cause.target} is quarantined, its calls move with their tokens"
            case "group" if (queue := self._queue()) is not None:
                queue.cancel_group(cause.target, "lost")
                return f"group {cause.target} is dropped"
            case "slot" if (slots := self._slots()) is not None:
                alive = {actor.who.id for actor in self._waits.acting if actor.who.kind == "trajectory"}
                return f"slots of {', '.join(slots.reclaim_slots(alive))} are free again"
            case _:
                ended = sum(map(self._ended(cause), list(self._waits.open)))
                return f"{ended} waits for {cause.on} {cause.target} were ended" if ended else None

    def _ended(self, cause: Cause) -> Callable[[waiting], bool]:
        """Ends a wait that is of the cause, and about as old as it."""
        now = self._waits.clock()
        old_s = min(cause.age_s, self._config.stall_s if cause.limit_s is None else cause.limit_s)

        def end(wait: waiting) -> bool:
            since_s = max(wait.since_s, wait.actor.touched_s) if cause.on == "agent loop" else wait.since_s
            ours = (wait.on, wait.target) == (cause.on, cause.target)
            return ours and now - since_s >= old_s and wait.expire()

        return end
