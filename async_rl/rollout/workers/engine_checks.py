"""Decides who is to blame when a rollout worker gets no connection to an engine, or loses one.

```
 the worker's report ──► no leases for it ──► the driver asks the engine for its health
     no connection ───────────────────────────────► the engine is quarantined
     no answer in time ───────────────────────────► a strike against the engine
     an answer, and it is the only report since
     an engine last answered the worker ──────────► a strike against the engine
     an answer, and it is not ────────────────────► the worker waits, and is ended if that lasts
```

A worker whose network fails would otherwise have all engines restarted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final, NoReturn

from async_rl.engines.lease import EngineState
from async_rl.engines.pool import EnginePool
from async_rl.errors import ConnectionLost, EngineBusy, EngineError, EngineTimeout, LocalShortage, WorkerLost
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import waiting

log = logging.getLogger(__name__)

_PAUSE_S: Final = 1.0
"""How long a worker that is to blame waits before it is given leases again; twice as long each time in a row,
so that its calls do not fail so often that sessions give up before it ends."""


class EngineChecks:
    """Checks the engines that one worker cannot reach.

    Example:
        >>> checks = EngineChecks("rollout-worker-0", {"": pool}, leases.resume, clock, ...)
        >>> async with services(checks=checks.check_engines):
        ...     checks.report_lost_connection("engine-3", "connection refused")
    """

    def __init__(
        self,
        worker: str,
        pools: Mapping[str, EnginePool],
        resume: Callable[[], None],
        clock: Callable[[], float],
        *,
        probe_timeout_s: float,
        limit_s: float,
    ) -> None:
        """Start with a worker that reaches all engines.

        Args:
            worker: The worker's name.
            pools: The engines of each model by its name.
            resume: Called when the worker may be given leases again.
            clock: Monotonic seconds.
            probe_timeout_s: How long an engine may take to answer.
            limit_s: A worker that has reached no engine for so long is ended.
        """
        self._worker = worker
        self._pools = pools
        self._resume = resume
        self._clock = clock
        self._probe_timeout_s = probe_timeout_s
        self._limit_s = limit_s
        self._reports: dict[str, str] = {}
        """What the worker has reported, by engine, and is to be checked."""
        self._reported = asyncio.Event()
        self._unreached: set[str] = set()
        """Engines that answered the driver and not the worker, since one last answered the worker."""
        self._blamed_s: float | None = None
        """When it was blamed first since then."""
        self._pause_s = _PAUSE_S
        self.is_checking = False
        """Whether the worker is to get no leases."""

    def report_lost_connection(self, engine_id: str, text: str) -> None:
        """Check an engine to which the worker got no connection, or lost one."""
        self.is_checking = True
        self._reports.setdefault(engine_id, text)
        self._reported.set()

    def record_answer(self) -> None:
        """Note that an engine has answered a call of the worker."""
        self._unreached.clear()
        self._blamed_s, self._pause_s = None, _PAUSE_S

    async def check_engines(self) -> NoReturn:
        """Check what is reported until cancelled.

        Raises:
            WorkerLost: The worker has reached no engine for `limit_s`, and the driver reaches them.
        """
        while True:
            with waiting("idle"):
                await self._reported.wait()
            self._reported.clear()
            reports, self._reports = self._reports, {}
            answered: dict[str, str] = {}
            async with Nursery() as nursery:
                for engine_id, text in reports.items():
                    nursery.start_task(f"check {engine_id}", self._check_engine(engine_id, text, answered))
            is_first = not self._unreached
            self._unreached |= answered.keys()
            if is_first and len(answered) == 1:
                ((engine_id, text),) = answered.items()
                if (pool := self._pool_of(engine_id)) is not None:
                    pool.record_strike(engine_id, ConnectionLost(text))
            elif answered:
                self._blame_worker(answered)
                with waiting("idle"):
                    await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, self._limit_s)
            if not self._reports:
                self.is_checking = False
                self._resume()

    async def _check_engine(self, engine_id: str, text: str, answered: dict[str, str]) -> None:
        """Record what is wrong with an engine, or add it to those that answer."""
        pool = self._pool_of(engine_id)
        before = pool.snapshot_of(engine_id) if pool is not None else None
        if pool is None or before is None or before.state is not EngineState.SERVING:
            return
        problem: EngineError | None = None
        try:
            async with (
                asyncio.timeout(self._probe_timeout_s) as scope,
                waiting("engine", engine_id, scope=scope),
            ):
                await pool.engine(engine_id).health()
        except EngineBusy:
            pass
        except LocalShortage as error:
            log.warning("engine %s was not probed: %s", engine_id, error)
            with waiting("idle"):
                await asyncio.sleep(_PAUSE_S)
            return
        except (EngineTimeout, TimeoutError):
            problem = EngineTimeout(text)
        except EngineError:
            problem = EngineError(text)
        if pool.snapshot_of(engine_id) != before:
            return  # it was updated or restarted meanwhile
        if problem is None:
            answered[engine_id] = text
        elif isinstance(problem, EngineTimeout):  # it may be busy
            pool.record_strike(engine_id, problem)
        else:
            pool.quarantine_engine(engine_id, problem)

    def _blame_worker(self, answered: Mapping[str, str]) -> None:
        now = self._clock()
        if self._blamed_s is None:
            self._blamed_s = now
        engine_id, text = next(iter(answered.items()))
        problem = (
            f"it reaches no engine, and {len(self._unreached)} of them answer the driver, such as "
            f"{engine_id}: {text}"
        )
        if now - self._blamed_s > self._limit_s:
            raise WorkerLost(problem)
        log.warning("%s gets no leases for %.0f s: %s", self._worker, self._pause_s, problem)

    def _pool_of(self, engine_id: str) -> EnginePool | None:
        return next((pool for pool in self._pools.values() if engine_id in pool), None)
