"""Decides who is to blame when a rollout worker gets no connection to an engine, or loses one.

```
 the worker's report ──► no new calls of the engine ──► the driver asks it for its health
     no connection ────────────────────────► the engine is quarantined
     no answer in time ────────────────────► a strike against the engine
     an answer, and it is the only engine
     reported since one answered the worker ► a strike against the engine
     an answer, and it is not ──────────────► no leases for the worker for a while; it is ended if that lasts
```

A worker whose network fails would otherwise have all engines restarted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Final, NamedTuple, NoReturn

from async_rl.engine_protocol import Engine
from async_rl.engines.lease import EngineSnapshot, EngineState
from async_rl.engines.pool import EnginePool
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
from async_rl.runtime.waits import waiting

log = logging.getLogger(__name__)

_PAUSE_S: Final = 1.0
"""How long a worker that is to blame gets no leases; twice as long each time in a row, so that its calls do
not fail so often that sessions give up before it ends."""


class _Report(NamedTuple):
    """What a worker has reported of an engine."""

    pool: EnginePool
    engine: Engine
    text: str
    before: EngineSnapshot
    """The engine's state at that time."""
    paused_calls: ExitStack
    """Gives the engine calls again when it is closed."""


class EngineChecks:
    """Checks the engines that one worker cannot reach."""

    def __init__(
        self,
        worker: str,
        pools: Mapping[str, EnginePool],
        on_pause: Callable[[], None],
        on_resume: Callable[[], None],
        *,
        probe_timeout_s: float,
        limit_s: float,
    ) -> None:
        """Start with a worker that reaches all engines.

        Args:
            worker: The worker's name.
            pools: The engines of each model by its name.
            on_pause: Called when the worker is to get no leases.
            on_resume: Called when it may be given leases again.
            probe_timeout_s: How long an engine may take to answer.
            limit_s: A worker that has been paused for longer, and has reached no engine, is ended.
        """
        self._worker = worker
        self._pools = pools
        self._on_pause = on_pause
        self._on_resume = on_resume
        self._probe_timeout_s = probe_timeout_s
        self._limit_s = limit_s
        self._reports: dict[str, _Report] = {}
        """By engine; those that are not checked yet."""
        self._reported = asyncio.Event()
        self._paused_engines: set[str] = set()
        """Engines that get no calls because of a report; others of them say nothing new."""
        self._unreached: set[str] = set()
        """Engines that answered the driver and not the worker, since one last answered the worker."""
        self._pause: asyncio.TimerHandle | None = None
        self._next_pause_s = _PAUSE_S
        self._paused_s = 0.0
        """How long it has been paused since an engine last answered it."""

    @property
    def is_paused(self) -> bool:
        """Whether the worker is to get no leases."""
        return self._pause is not None or bool(self._unreached and self._reports)

    def report_lost_connection(self, engine_id: str, text: str) -> None:
        """Check an engine to which the worker got no connection, or lost one."""
        pool = next((pool for pool in self._pools.values() if engine_id in pool), None)
        before = pool.snapshot_of(engine_id) if pool is not None else None
        if pool is None or before is None or before.state is not EngineState.SERVING:
            return
        if engine_id in self._paused_engines:
            return
        paused_calls = ExitStack()
        paused_calls.enter_context(pool.paused_calls(engine_id, self._probe_timeout_s + _PAUSE_S))
        self._paused_engines.add(engine_id)
        paused_calls.callback(self._paused_engines.discard, engine_id)
        self._reports[engine_id] = _Report(pool, pool.engine(engine_id), text, before, paused_calls)
        self._reported.set()
        if self._unreached:
            self._on_pause()

    def record_answer(self) -> None:
        """Note that the worker has received something from an engine."""
        if self._unreached:
            self._unreached.clear()
            self._next_pause_s, self._paused_s = _PAUSE_S, 0.0
            self._end_pause()

    async def check_engines(self) -> NoReturn:
        """Check what is reported until cancelled.

        Raises:
            WorkerLost: The worker reaches no engine, and the driver does.
        """
        checking: set[str] = set()
        try:
            async with Nursery() as nursery:
                while True:
                    with waiting("idle"):
                        await self._reported.wait()
                    self._reported.clear()
                    for engine_id in self._reports:
                        if engine_id not in checking:
                            checking.add(engine_id)
                            nursery.start_task(f"check {engine_id}", self._check_engine(engine_id, checking))
                raise AssertionError("the loop has no end")
        finally:
            if self._pause is not None:
                self._pause.cancel()
            for report in self._reports.values():
                report.paused_calls.close()

    async def _check_engine(self, engine_id: str, checking: set[str]) -> None:
        report = self._reports[engine_id]
        with report.paused_calls:
            problem = await self._probe(report)
            is_only = len(self._reports) == 1
            del self._reports[engine_id]
            checking.remove(engine_id)
            is_struck = self._judge_engine(engine_id, report, problem, is_only)
            if not self.is_paused:
                self._on_resume()
            if is_struck:
                # Meanwhile other engines show whether the worker reaches them.
                with waiting("idle"):
                    await asyncio.sleep(_PAUSE_S)

    def _judge_engine(
        self, engine_id: str, report: _Report, problem: EngineError | None, is_only: bool
    ) -> bool:
        """Blame the engine or the worker; return whether the engine gets a strike although it answers."""
        pool = report.pool
        if pool.snapshot_of(engine_id) != report.before:
            return False  # it was updated or restarted meanwhile, or has left
        if isinstance(problem, EngineUnreachable):
            pool.quarantine_engine(engine_id, problem)
        elif isinstance(problem, EngineTimeout):
            pool.record_strike(engine_id, problem)
        elif problem is None:
            is_first = not self._unreached
            self._unreached.add(engine_id)
            if is_first and is_only:
                pool.record_strike(engine_id, ConnectionLost(report.text))
                return True
            self._blame_worker(engine_id, report.text)
        return False

    async def _probe(self, report: _Report) -> EngineError | None:
        """Ask an engine for its health; return what is wrong with it, or with the driver."""
        engine, text = report.engine, report.text
        try:
            async with (
                asyncio.timeout(self._probe_timeout_s) as scope,
                waiting("engine", engine.engine_id, scope=scope),
            ):
                await engine.health()
        except EngineBusy:
            return None
        except LocalShortage as error:
            log.warning("engine %s was not probed: %s", engine.engine_id, error)
            with waiting("idle"):
                await asyncio.sleep(_PAUSE_S)
            return error
        except (EngineTimeout, TimeoutError):  # it may be busy
            return EngineTimeout(text)
        except EngineError:
            return EngineUnreachable(text)
        return None

    def _blame_worker(self, engine_id: str, text: str) -> None:
        if self._pause is not None:
            return
        problem = (
            f"it reaches no engine, and {len(self._unreached)} of them answer the driver, such as "
            f"{engine_id}: {text}"
        )
        if self._paused_s >= self._limit_s:
            raise WorkerLost(problem)
        pause_s = min(self._next_pause_s, self._limit_s - self._paused_s)
        log.warning("%s gets no leases for %.0f s: %s", self._worker, pause_s, problem)
        self._pause = asyncio.get_running_loop().call_later(pause_s, self._end_pause)
        self._paused_s += pause_s
        self._next_pause_s = 2 * pause_s
        self._on_pause()

    def _end_pause(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        if not self.is_paused:
            self._on_resume()
