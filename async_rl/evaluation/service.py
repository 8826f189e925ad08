"""Evaluations beside training: at a pinned weight version, without stopping it.

```
 engines serve a version that is due ─► shared     one of them is lent out: its rollouts go on elsewhere,
                                        │          updates of the weights pass it by
                                        reserved   the engines kept for this are brought to it
                                        ▼
                     examine (a pool of its own: the version stays until the end)
                                        ▼
                     a record ─► the engines are taken back, and catch up as one that joins
```

| loop | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| `run` | served versions | one that is due; the evaluator | the pool; its end | records |
| mirror | states of both pools | a change | a quarantine in either | the same in the other |

On devices that engines and trainer share an evaluation is a guest of the engines' turn: the trainer's waits
for it, so that no update falls into it.

One evaluation runs at a time. When a version becomes due meanwhile, what the engines serve afterwards is
evaluated in its place. What cuts an evaluation off (no engine left, its time is over) marks its version as
missing; a crash of the driver leaves no record, so that the run evaluates again when it is back.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

from async_rl.config import EvaluationConfig
from async_rl.engine_protocol import Engine
from async_rl.engines.device_phases import DevicePhases
from async_rl.engines.pool import EnginePool, EngineState
from async_rl.errors import AsyncRLError, EngineError, InvariantError, WeightSyncError
from async_rl.evaluation.evaluator import Evaluator, missing
from async_rl.observability.evaluation_record import (
    FILE,
    EvaluationRecord,
    evaluation_record_log,
)
from async_rl.queue import archive
from async_rl.queue.archive import Archive, Observer
from async_rl.runtime.supervision import Nursery, first_error, services
from async_rl.runtime.waits import acting, waiting

log = logging.getLogger(__name__)

FOLDER: Final = "evaluations"
"""In the run's folder: one folder a version, with the answers as `async-rl inspect` reads them."""

_ROUNDS: Final = 3
"""So often reserved engines chase a version that moves on; those that still differ then are left out."""


def due(config: EvaluationConfig, version: int, evaluated: int | None) -> bool:
    """Whether a version is to be evaluated, or one since the last evaluation was and is not.

    Args:
        config: When.
        version: That is served now.
        evaluated: The newest version with a record, None without any.
    """
    if evaluated is None and version == 0:
        return config.at_start
    if not config.every:
        return False
    return version // config.every > (evaluated or 0) // config.every


class EvaluationService:
    """The evaluations of one life of a run.

    Example:
        >>> service = EvaluationService(settings, run_dir, pool, sync.take_back_engine, evaluator, ...)
        >>> async with services(evaluation=service.run):
        ...     await train()
        ...     await service.finish(version)
    """

    def __init__(
        self,
        config: EvaluationConfig,
        run_dir: Path,
        pool: EnginePool,
        take_back: Callable[[str], Awaitable[None]],
        evaluator: Evaluator,
        *,
        step: int,
        interrupt_timeout_s: float,
        ended: Callable[[EvaluationRecord], EvaluationRecord],
        clock: Callable[[], float],
        phases: DevicePhases | None = None,
    ) -> None:
        """Wire the parts.

        Args:
            config: When, and by whom.
            run_dir: Of the run.
            pool: The engines of the run.
            take_back: Brings an engine of it to the current weights, and lets it serve.
            evaluator: Has the questions answered.
            step: That this life of the run starts from; records of later ones are of a life that is undone.
            interrupt_timeout_s: Longest wait for an engine to end the calls that it has.
            ended: Shows a record, and gives it back with the run's time.
            clock: Monotonic seconds.
            phases: When engines can answer; None lets them at any time.
        """
        self._config = config
        self._run_dir = run_dir
        self._phases = phases or DevicePhases()
        self._pool = pool
        self._take_back = take_back
        self._evaluator = evaluator
        self._interrupt_timeout_s = interrupt_timeout_s
        self._ended = ended
        self._clock = clock
        records = [r for r in evaluation_record_log(run_dir / FILE).read() if r.weight_version <= step]
        self._evaluated = records[-1].weight_version if records else None
        self._lent: list[str] = []
        self._idle = asyncio.Event()
        self._under_way: asyncio.Timeout | None = None
        self._left = False

    def leave(self) -> None:
        """The run ends before its time: cut off what is evaluated, without a record; begin nothing more."""
        if self._under_way is not None and not self._left:
            self._under_way.reschedule(0.0)
        self._left = True

    async def finish(self, version: int) -> None:
        """Wait until nothing is evaluated any more, and this version is, if it is due.

        Each evaluation has its time, and engines that serve nothing for long end the run.
        """
        with waiting("evaluation"):
            while not self._idle.is_set() or due(self._config, version, self._evaluated):
                self._idle.clear()
                await self._idle.wait()

    async def run(self) -> None:
        """Never returns."""
        while True:
            if self._due() is None:
                self._idle.set()
                with waiting("idle"):
                    await self._pool.wait_for_change()
                continue
            self._idle.clear()
            async with self._phases.lease_engines():
                await self._evaluate_due()
                # Not when it is cancelled: the run ends, or whoever goes on brings all engines up anew.
                while self._lent:
                    await self._return(self._lent.pop())

    def _due(self) -> int | None:
        """The newest version that engines serve, if it is to be evaluated."""
        serving = self._pool.engines(EngineState.SERVING)
        version = max((self._pool.version_of(engine.engine_id) for engine in serving), default=None)
        if version is None or self._left or not due(self._config, version, self._evaluated):
            return None
        return version

    # -- one evaluation ----------------------------------------------------------------------------------

    async def _evaluate_due(self) -> None:
        """Evaluate what is due by now, unless it is cut off by `leave`."""
        version = self._due()
        if version is None:
            return
        try:
            async with asyncio.timeout(None) as self._under_way:
                with acting("evaluation", f"version {version}"):
                    record = await self._evaluate(version)
        except TimeoutError:
            if not self._left:
                raise
            return
        finally:
            self._under_way = None
        self._evaluated = max(version, record.weight_version)
        evaluation_record_log(self._run_dir / FILE).append(self._ended(record))

    async def _evaluate(self, version: int) -> EvaluationRecord:
        """At this version or, where the engines came to a later one meanwhile, at that."""
        began_s = self._clock()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                engines = await self._engines(version)
            version = self._pool.version_of(engines[0].engine_id)
            log.info("version %d is evaluated by %s", version, [engine.engine_id for engine in engines])
            record = await self._examine(engines, version)
        except InvariantError:
            raise
        except (AsyncRLError, TimeoutError) as error:
            told = error if isinstance(error, AsyncRLError) else EngineError("no engine came to it in time")
            log.warning("the evaluation of version %d is missing: %s", version, told)
            record = missing(version, told, duration_s=self._clock() - began_s)
        return record

    async def _examine(self, engines: Sequence[Engine], version: int) -> EvaluationRecord:
        pool = self._evaluator.pool()
        for engine in engines:
            pool.add_engine(engine)
            pool.serve_engine(engine.engine_id, version)
        answers = self._archive(version)
        try:
            async with services(mirror=lambda: self._mirror(pool)):
                return await self._evaluator.evaluate_sets(pool, version, answers)
        except ExceptionGroup as group:
            raise first_error(group) from group
        finally:
            if isinstance(answers, Archive):
                await asyncio.to_thread(answers.close)

    def _archive(self, version: int) -> Observer:
        """Where answers are kept; the oldest evaluations make room."""
        folder, keep = self._run_dir / FOLDER, self._config.keep_answers
        if not keep:
            return Observer()
        mine = folder / f"version_{version:08d}"
        mine.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob("version_*"))[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
        return Archive(mine / archive.FILE, keep=self._evaluator.num_answers)

    async def _mirror(self, pool: EnginePool) -> None:
        """What fails here has failed for the run, and what the run takes away is lost here. Never returns."""
        while True:
            for engine in pool.engines():
                name = engine.engine_id
                if pool.needs_repair(name):
                    error = pool.error_of(name) or EngineError(f"engine {name} failed in an evaluation")
                    self._pool.quarantine_engine(name, error)
                standing = self._pool.snapshot_of(name)
                if standing is None or standing.state is not EngineState.EVALUATING:
                    pool.quarantine_engine(name, EngineError(f"engine {name} left the evaluation"))
            await _either(pool.wait_for_change, self._pool.wait_for_change)

    # -- engines -----------------------------------------------------------------------------------------

    async def _engines(self, version: int) -> list[Engine]:
        """Engines of one version, this or a later one, that serve nobody else."""
        if self._config.engines == "shared":
            return [await self._borrow(version)]
        for _ in range(_ROUNDS):
            await self._refresh(version)
            found = self._reserved()
            version = max(self._pool.version_of(engine.engine_id) for engine in found)
            if all(self._pool.version_of(engine.engine_id) == version for engine in found):
                return found
        return [engine for engine in found if self._pool.version_of(engine.engine_id) == version]

    async def _borrow(self, version: int) -> Engine:
        """Take the engine with the fewest calls out, once it serves the version, and end those calls."""
        while True:
            serving = self._pool.engines(EngineState.SERVING)
            able = [engine for engine in serving if self._pool.version_of(engine.engine_id) >= version]
            if not able:
                if (
                    not self._phases.engines_may_start
                ):  # nor is any repaired before the trainer has had its turn
                    raise EngineError(f"no engine serves version {version} any more in the engines' turn")
                with waiting("engine", why=lambda: f"none serves version {version}"):
                    await _either(self._pool.wait_for_change, self._phases.wait_for_engines_phase_end)
                continue
            engine = min(able, key=lambda engine: self._pool.statistics.load_of(engine.engine_id).calls)
            name = engine.engine_id
            if not self._pool.lend_engine(name):
                continue
            self._lent.append(name)
            try:
                async with self._pool.bounded_request(name, self._interrupt_timeout_s) as scope:
                    with waiting("engine update", name, scope=scope):
                        await engine.interrupt("abort")
                        await engine.resume_generation("abort")
                return engine
            except EngineError as error:
                self._pool.quarantine_engine(name, error)
            except TimeoutError:
                message = f"engine {name} did not end its calls within {self._interrupt_timeout_s} s"
                self._pool.quarantine_engine(name, WeightSyncError(message))

    async def _refresh(self, version: int) -> None:
        """Bring the reserved engines to the current weights, if they do not serve this version yet."""
        while not self._reserved():
            with waiting("engine", why=lambda: "those of the evaluation are not there"):
                await self._pool.wait_for_change()
        async with Nursery() as nursery:
            for engine in self._reserved():
                if self._pool.version_of(engine.engine_id) < version:
                    nursery.start_task(f"refresh {engine.engine_id}", self._return(engine.engine_id))
        while not any(self._pool.version_of(e.engine_id) >= version for e in self._reserved()):
            with waiting("engine", why=lambda: f"none of the evaluation's has version {version}"):
                await self._pool.wait_for_change()

    def _reserved(self) -> list[Engine]:
        return list(self._pool.engines(EngineState.EVALUATING))

    async def _return(self, engine_id: str) -> None:
        """Bring an engine to the current weights; one that does not come is left to `repair`."""
        try:
            await self._take_back(engine_id)
        except EngineError as error:
            self._pool.quarantine_engine(engine_id, error)


async def _either(*changes: Callable[[], Awaitable[None]]) -> None:
    """Wait for whichever comes first."""

    async def wait(change: Callable[[], Awaitable[None]]) -> None:
        with waiting("idle"):
            await change()
        nursery.cancel_tasks()

    async with Nursery() as nursery:
        for index, change in enumerate(changes):
            nursery.start_task(f"change {index}", wait(change))
