"""Brings engines back that failed, and in that join: each by itself, none in the way of another.

```
 quarantined ─► wait (back-off) ─► restart ─► rejoin ─► weights, attested ─► serving
      ▲                               └───────── failed ────────┘
      └───────────────────────────────────────────┘          no restarts left: left out, or the run ends
```

| loop | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| `run` | engines that need repair | a quarantine, a newcomer | the pool | a task for each |
| an engine's | its failure | its back-off, then itself | time; it answers | a serving engine |
| outage | states | that some engine serves | the pool, or the limit | the end of the run |
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec

from async_rl.config import EnginesConfig
from async_rl.engines.device_phases import DevicePhases
from async_rl.engines.lease import EngineState
from async_rl.engines.pool import EnginePool
from async_rl.errors import ConfigError, EngineError, EnvironmentNotReady
from async_rl.observability.metrics import Metrics
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import waiting

log = logging.getLogger(__name__)


class RepairVerdict(msgspec.Struct, frozen=True):
    """When a failed engine may be started again."""

    delay_s: float
    exhausted: bool = False
    """Its restarts are used up; the delay is what is left until one leaves the window."""


class Restarts:
    """The restarts of one engine within the window, and what they say of the next. Owns no clock."""

    def __init__(self, config: EnginesConfig, rng: random.Random) -> None:
        """None so far."""
        self._config = config
        self._rng = rng
        self._times: deque[float] = deque()

    def next(self, now: float) -> RepairVerdict:
        """When the next may be: at once the first time, then later and later.

        Jitter keeps engines that failed together from starting together: half of the delay is drawn.
        Source: "equal jitter" of Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015.
        """
        config = self._config
        while self._times and self._times[0] + config.restart_window_s <= now:
            self._times.popleft()
        if len(self._times) >= config.max_restarts:
            oldest = self._times[0] if self._times else now
            # What rounding leaves of a window is no time to sleep: the clock would not move.
            return RepairVerdict(max(1.0, oldest + config.restart_window_s - now), exhausted=True)
        if not self._times:
            return RepairVerdict(0.0)
        doubled = config.restart_delay_s * 2.0 ** (len(self._times) - 1)
        return RepairVerdict(min(doubled, config.restart_delay_max_s) * self._rng.uniform(0.5, 1.0))

    def note(self, now: float) -> None:
        """One begins."""
        self._times.append(now)

    @property
    def count(self) -> int:
        """Within the window, at the last look."""
        return len(self._times)


class Repair:
    """See the module.

    Example:
        >>> repair = Repair(pool, restart, catch_up, config.engine, metrics, clock, seed=0)
        >>> async with services(repair=repair.run): ...
    """

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
        turns: DevicePhases | None = None,
    ) -> None:
        """Wire the parts.

        Args:
            pool: The engines.
            restart: Brings an engine to where it answers; bounded in time.
            catch_up: Loads the current weights into it, reads them back, and lets it serve; bounded in time.
            config: Limits and delays.
            metrics: Restarts by result.
            clock: Monotonic seconds.
            seed: Of the jitter.
            turns: When an engine may be started; None lets it at any time.
        """
        self._pool = pool
        self._restart = restart
        self._catch_up = catch_up
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._seed = seed
        self._turns = turns or DevicePhases()
        self._restarts: dict[str, Restarts] = {}
        self._under_way: set[str] = set()

    async def run(self) -> None:
        """Never returns.

        Raises:
            EngineError: When no engine served for `engine.max_outage_s`, or one has no restarts left and the
                config says that this ends the run.
        """
        async with Nursery() as nursery:
            nursery.start_task("outage", self._watch_outage())
            while True:
                with waiting("idle"):
                    engine_id = await self._pool.wait_for_repair(self._under_way)
                self._under_way.add(engine_id)
                nursery.start_task(f"repair {engine_id}", self._bring_back(engine_id))

    async def _bring_back(self, engine_id: str) -> None:
        """Try until it serves, or has left."""
        if engine_id not in self._restarts:
            self._restarts[engine_id] = Restarts(self._config, random.Random(f"{self._seed} {engine_id}"))
        restarts = self._restarts[engine_id]
        try:
            while self._pool.needs_repair(engine_id):
                verdict = restarts.next(self._clock())
                if verdict.exhausted:
                    self._give_up(engine_id, restarts.count, verdict.delay_s)
                with waiting("engine start", engine_id):
                    await asyncio.sleep(verdict.delay_s)
                if verdict.exhausted or not self._pool.needs_repair(engine_id):
                    continue
                async with self._turns.guest():
                    restarts.note(self._clock())
                    await self._try(engine_id)
        finally:
            self._under_way.discard(engine_id)

    async def _try(self, engine_id: str) -> None:
        try:
            with waiting("engine start", engine_id):
                await self._restart(engine_id)
            if engine_id not in self._pool:
                return
            self._pool.rejoin(engine_id)
            await self._catch_up(engine_id)
        except (EngineError, EnvironmentNotReady, ConfigError, TimeoutError) as error:
            self._metrics.engine_restarts_total.labels(engine_id, "failed").inc()
            log.warning("engine %s is not back: %s", engine_id, error)
            self._pool.not_repaired(engine_id, error)
        else:
            self._metrics.engine_restarts_total.labels(engine_id, "ok").inc()
            log.info("engine %s is back", engine_id)

    def _give_up(self, engine_id: str, count: int, delay_s: float) -> None:
        """Say that an engine has no restarts left, or end the run for it."""
        cause = self._pool.error_of(engine_id)
        message = (
            f"engine {engine_id} failed again after {count} restarts within engine.restart_window_s = "
            f"{self._config.restart_window_s}, engine.max_restarts is {self._config.max_restarts}; the last "
            f"cause: {cause}"
        )
        if self._config.exhausted == "end_run":
            raise EngineError(message) from cause
        log.error("%s. It is left out for %.0f s", message, delay_s)

    async def _watch_outage(self) -> None:
        """End the run when nobody has served for long; one that is updated or lent out counts as serving."""
        limit_s = self._config.max_outage_s
        while True:
            with waiting("idle"):
                while self._some_serve():
                    await self._pool.changed()
                await self._turns.of_engines()  # before, nobody can be brought back
            engines = self._pool.engines()
            if not engines or any(self._pool.error_of(e.engine_id) for e in engines):  # none just joins
                log.warning("no engine serves; the run ends after engine.max_outage_s = %s of it", limit_s)
            try:
                async with asyncio.timeout(limit_s) as scope, waiting("engine", scope=scope):
                    while not self._some_serve():
                        await self._pool.changed()
            except TimeoutError:
                if not self._turns.engines_may_start:
                    continue
                causes = "; ".join(str(self._pool.error_of(e.engine_id)) for e in self._pool.engines())
                raise EngineError(
                    f"no engine has served for engine.max_outage_s = {limit_s}: {causes or 'there is none'}"
                ) from None

    def _some_serve(self) -> bool:
        return self._pool.has(EngineState.SERVING, EngineState.UPDATING) or self._pool.lends
