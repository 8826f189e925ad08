"""Restarts engines that failed, and starts engines that join: each in a task of its own.

```
 quarantined ─► wait (back-off) ─► restart ─► rejoin ─► weights, verified ─► serving
      ▲                               └───────── failed ────────┘
      └───────────────────────────────────────────┘          no restarts left: left out, or the run ends
```

| loop | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| `repair_engines` | engines that need repair | a quarantine, a newcomer | the pool | a task for each |
| an engine's | its failure | its back-off, then its restart | time; its answer | a serving engine |
| outage | states | a serving engine | the pool, or the limit | the end of the run |
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from async_rl.config import EnginesConfig
from async_rl.engines.device_phases import DevicePhases
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.errors import ConfigError, EngineError, EnvironmentNotReady
from async_rl.observability.metrics import Metrics
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import waiting

log = logging.getLogger(__name__)


RESTART_WINDOW_S: Final = 3600.0
"""Restarts longer ago than this are not counted: what fails once an hour is worth restarting."""

RESTART_DELAY_S: Final = 2.0
"""Delay before the second restart within the window, doubled for each further one: a port or the memory of a
GPU is free again after seconds."""

RESTART_DELAY_MAX_S: Final = 300.0
"""Longest delay: by then only somebody who repairs the node helps, and is not kept waiting longer."""


class RestartDelay(msgspec.Struct, frozen=True):
    """When a failed engine may be restarted."""

    delay_s: float
    exhausted: bool = False
    """Whether its restarts are used up; the delay then lasts until one leaves the window."""


class RestartBackoff:
    """The restarts of one engine within the window, from which the next delay follows. Owns no clock."""

    def __init__(self, max_restarts: int, rng: random.Random) -> None:
        """Start without restarts; `max_restarts` may fall within the window, and `rng` draws the jitter."""
        self._max_restarts = max_restarts
        self._rng = rng
        self._times: deque[float] = deque()

    def next_delay(self, now: float) -> RestartDelay:
        """Return the delay before the next restart: none for the first, then longer and longer.

        Jitter keeps engines that failed together from starting together: half of the delay is drawn.
        Source: "equal jitter" of Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015.
        """
        while self._times and self._times[0] + RESTART_WINDOW_S <= now:
            self._times.popleft()
        if len(self._times) >= self._max_restarts:
            oldest = self._times[0] if self._times else now
            # At least a second: after rounding, the rest of a window may be too short to advance the clock.
            return RestartDelay(max(1.0, oldest + RESTART_WINDOW_S - now), exhausted=True)
        if not self._times:
            return RestartDelay(0.0)
        doubled = RESTART_DELAY_S * 2.0 ** (len(self._times) - 1)
        return RestartDelay(min(doubled, RESTART_DELAY_MAX_S) * self._rng.uniform(0.5, 1.0))

    def record_restart(self, now: float) -> None:
        """Record that a restart begins."""
        self._times.append(now)

    @property
    def count(self) -> int:
        """Number of restarts within the window, at the last `next_delay`."""
        return len(self._times)


class EngineRepair:
    """Repairs the engines of a pool: restarts quarantined ones, and loads the weights of newcomers."""

    def __init__(
        self,
        pool: EnginePool,
        restart: Callable[[str], Awaitable[None]],
        catch_up: Callable[[str], Awaitable[None]],
        config: EnginesConfig,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        seed: int,
        phases: DevicePhases | None = None,
    ) -> None:
        """Wire the parts.

        Args:
            pool: The engines.
            restart: Restarts an engine and waits until it answers; bounded in time.
            catch_up: Loads the current weights into it, verifies them, and lets it serve; bounded in time.
            config: Limits and delays.
            metrics: Restarts by result.
            clock: Monotonic seconds.
            seed: Seed of the jitter.
            phases: Phases in which engines may be started; None allows it at any time.
        """
        self._pool = pool
        self._restart = restart
        self._catch_up = catch_up
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._seed = seed
        self._phases = phases or DevicePhases()
        self._backoffs: dict[str, RestartBackoff] = {}
        self._under_way: set[str] = set()

    async def repair_engines(self) -> None:
        """Repair engines until cancelled.

        Raises:
            EngineError: When no engine has served for `engine.max_outage_s`.
        """
        async with Nursery() as nursery:
            nursery.start_task("outage", self._watch_outage())
            while True:
                with waiting("idle"):
                    engine_id = await self._pool.wait_for_repair(self._under_way)
                self._under_way.add(engine_id)
                nursery.start_task(f"repair {engine_id}", self._repair_engine(engine_id))

    async def _repair_engine(self, engine_id: str) -> None:
        """Restart an engine until it serves or has left the pool."""
        if engine_id not in self._backoffs:
            rng = random.Random(f"{self._seed} {engine_id}")
            self._backoffs[engine_id] = RestartBackoff(self._config.max_restarts, rng)
        backoff = self._backoffs[engine_id]
        try:
            while self._pool.needs_repair(engine_id):
                delay = backoff.next_delay(self._clock())
                if delay.exhausted:
                    self._leave_out_engine(engine_id, backoff.count, delay.delay_s)
                with waiting("engine start", engine_id):
                    await asyncio.sleep(delay.delay_s)
                if delay.exhausted or not self._pool.needs_repair(engine_id):
                    continue
                async with self._phases.lease_engines():
                    backoff.record_restart(self._clock())
                    await self._restart_engine(engine_id)
        finally:
            self._under_way.discard(engine_id)

    async def _restart_engine(self, engine_id: str) -> None:
        try:
            with waiting("engine start", engine_id):
                await self._pool.end_engine(engine_id, self._restart)
            if not self._pool.needs_repair(engine_id):  # it has left, or is leaving
                return
            self._pool.rejoin_engine(engine_id)
            await self._catch_up(engine_id)
        except (EngineError, EnvironmentNotReady, ConfigError, TimeoutError) as error:
            self._metrics.engine_restarts_total.labels(engine_id, "failed").inc()
            log.warning("engine %s failed to restart: %s", engine_id, error)
            self._pool.record_failed_repair(engine_id, error)
        else:
            self._metrics.engine_restarts_total.labels(engine_id, "ok").inc()
            waits = engine_id in {each.engine_id for each in self._pool.engines(EngineState.JOINING)}
            how = "has been restarted, and waits for the next hand-over" if waits else "serves again"
            log.info("engine %s %s", engine_id, how)

    def _leave_out_engine(self, engine_id: str, count: int, delay_s: float) -> None:
        """Log that an engine has no restarts left."""
        log.error(
            "engine %s failed again after %d restarts within %.0f s, engine.max_restarts is %d; the last "
            "cause: %s. It is left out for %.0f s",
            engine_id,
            count,
            RESTART_WINDOW_S,
            self._config.max_restarts,
            self._pool.error_of(engine_id),
            delay_s,
        )

    async def _watch_outage(self) -> None:
        """End the run when no engine has served for long; updates and loans count as serving."""
        limit_s = self._config.max_outage_s
        while True:
            with waiting("idle"):
                while self._pool.has_active_engine:
                    await self._pool.wait_for_change()
                await self._phases.wait_for_engines_phase()  # no engine can be restarted before
            engines = self._pool.engines()
            if not engines or any(self._pool.error_of(e.engine_id) for e in engines):  # not just joining
                log.warning("no engine serves; the run ends after engine.max_outage_s = %s of it", limit_s)
            try:
                async with asyncio.timeout(limit_s) as scope, waiting("engine", scope=scope):
                    while not self._pool.has_active_engine:
                        await self._pool.wait_for_change()
            except TimeoutError:
                if not self._phases.engines_may_start:
                    continue
                causes = "; ".join(str(self._pool.error_of(e.engine_id)) for e in self._pool.engines())
                raise EngineError(
                    f"no engine has served for engine.max_outage_s = {limit_s}: {causes or 'there is none'}"
                ) from None
