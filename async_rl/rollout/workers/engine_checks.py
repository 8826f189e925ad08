"""Decides who is to blame when a rollout worker gets no connection to an engine, or loses one.

```
 the worker's report ──► the driver asks the engine for its health; the worker calls it less meanwhile
     no connection ────────────────────────► the engine is quarantined
     no answer in time ────────────────────► a strike against the engine
     an answer, and it is the only engine
     reported since one answered the worker ► a strike against the engine
     an answer, and it is not ──────────────► the worker is ended if that lasts
```

A worker whose network fails would otherwise have all engines restarted.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, NoReturn

from async_rl.engine_protocol import Engine
from async_rl.engines.health import ask_health
from async_rl.engines.pool import EnginePool, EngineSnapshot, EngineState
from async_rl.errors import (
    ConnectionLost,
    EngineBusy,
    EngineError,
    EngineTimeout,
    EngineUnreachable,
    LocalShortage,
    WorkerLost,
)
from async_rl.runtime.supervision import Nursery
from async_rl.runtime.waits import sleep_idle, waiting

log = logging.getLogger(__name__)

_PAUSE_S: Final = 1.0
"""Streams of an engine that are lost within this time are one report."""


class _Report(NamedTuple):
    """What a worker has reported of an engine."""

    pool: EnginePool
    engine: Engine
    text: str
    before: EngineSnapshot
    """The engine's state at that time."""


class EngineChecks:
    """Checks the engines that one worker cannot reach."""

    def __init__(
        self,
        pools: Mapping[str, EnginePool],
        clock: Callable[[], float],
        *,
        limit_s: float,
    ) -> None:
        """Start with a worker that reaches all engines.

        Args:
            pools: The engines of each model by its name.
            clock: Monotonic seconds.
            limit_s: A worker that reaches no engine for longer, while engines answer the driver, is ended.
        """
        self._pools = pools
        self._clock = clock
        self._limit_s = limit_s
        self._reports: dict[str, _Report] = {}
        """By engine; those that are being checked."""
        self._reported: asyncio.Queue[str] = asyncio.Queue()
        self._unreached: set[str] = set()
        """Engines that answered the driver and not the worker, since one last answered the worker."""
        self._unreached_since_s = math.inf

    def report_lost_connection(self, engine_id: str, text: str) -> None:
        """Check an engine to which the worker got no connection, or lost one."""
        pool = next((pool for pool in self._pools.values() if engine_id in pool), None)
        before = pool.snapshot_of(engine_id) if pool is not None else None
        if pool is None or before is None or before.state is not EngineState.SERVING:
            return
        if engine_id not in self._reports:
            self._reports[engine_id] = _Report(pool, pool.engine(engine_id), text, before)
            self._reported.put_nowait(engine_id)

    def record_answer(self) -> None:
        """Note that the worker has received something from an engine."""
        self._unreached.clear()
        self._unreached_since_s = math.inf

    async def check_engines(self) -> NoReturn:
        """Check what is reported until cancelled.

        Raises:
            WorkerLost: The worker reaches no engine, and the driver does.
        """
        async with Nursery() as nursery:
            while True:
                with waiting("idle"):
                    engine_id = await self._reported.get()
                nursery.start_task(f"check {engine_id}", self._check_engine(engine_id))
        raise AssertionError("the loop has no end")

    async def _check_engine(self, engine_id: str) -> None:
        report = self._reports[engine_id]
        try:
            problem = await self._probe(report)
            self._judge_engine(engine_id, report, problem)
            # Other streams that it loses at this time say nothing new.
            await sleep_idle(_PAUSE_S)
        finally:
            del self._reports[engine_id]

    def _judge_engine(self, engine_id: str, report: _Report, problem: EngineError | None) -> None:
        """Blame the engine or the worker."""
        pool = report.pool
        if pool.snapshot_of(engine_id) != report.before:
            return  # it was updated or restarted meanwhile, or has left
        if isinstance(problem, EngineUnreachable):
            pool.quarantine_engine(engine_id, problem)
        elif isinstance(problem, EngineTimeout):
            pool.record_strike(engine_id, problem)
        elif problem is None:
            is_first = not self._unreached
            self._unreached.add(engine_id)
            if is_first and len(self._reports) == 1:
                pool.record_strike(engine_id, ConnectionLost(report.text))
                return
            self._unreached_since_s = min(self._unreached_since_s, self._clock())
            if self._clock() - self._unreached_since_s >= self._limit_s:
                lost = WorkerLost(
                    f"it reaches no engine, and {len(self._unreached)} of them answer the driver, such as "
                    f"{engine_id}: {report.text}"
                )
                lost.is_excused = True
                raise lost

    async def _probe(self, report: _Report) -> EngineError | None:
        """Ask an engine for its health; return what is wrong with it, or with the driver."""
        engine, text = report.engine, report.text
        try:
            await ask_health(engine)
        except EngineBusy:
            return None
        except LocalShortage as error:
            log.warning("engine %s was not probed: %s", engine.engine_id, error)
            await sleep_idle(_PAUSE_S)
            return error
        except (EngineTimeout, TimeoutError):  # it may be busy
            return EngineTimeout(text)
        except EngineError:
            return EngineUnreachable(text)
        return None
