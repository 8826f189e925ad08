"""Runs evaluations beside training, at a pinned weight version, without stopping training.

```
 engines serve a version that is due ─► shared     one engine is borrowed: its rollouts move to others, and
                                        │          weight updates skip it
                                        reserved   the engines for evaluation are updated to the version
                                        ▼
                     the evaluator (in a pool of its own: the version stays until the end)
                                        ▼
                     a record ─► the engines return, and catch up like joining ones
```

| loop | consumes | waits for | unblocked by | produces |
|---|---|---|---|---|
| `run_evaluations` | served versions | a version that is due; the evaluator | the pool; its end | records |
| `_mirror_failures` | states of both pools | a change | a quarantine in either | the same in the other |

On devices that engines and trainer share, an evaluation holds the devices for the engines: the trainer waits
for its end, so that no update happens during it.

One evaluation runs at a time. If a version becomes due meanwhile, the version served afterwards is evaluated
instead. An evaluation that fails (no engine left, timeout) marks its version as missing; a crash of the
driver leaves no record, so that the resumed run evaluates again.
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
from async_rl.evaluation.best_checkpoint import BestCheckpointFile
from async_rl.evaluation.evaluator import Evaluator, missing_record
from async_rl.observability.evaluation_record import (
    FILE,
    EvaluationRecord,
    evaluation_record_log,
)
from async_rl.runtime.shortages import wait_out_shortage, writing
from async_rl.runtime.supervision import Nursery, first_error, services
from async_rl.runtime.threads import run_to_end
from async_rl.runtime.waits import acting, waiting
from async_rl.store import archive
from async_rl.store.archive import Archive

log = logging.getLogger(__name__)

FOLDER: Final = "evaluations"
"""Subfolder of the run's folder: one folder per version, with the answers for `async-rl inspect`."""

KEPT_ANSWERS: Final = 5
"""Evaluations whose answers are kept: the newest."""

_MAX_REFRESHES: Final = 3
"""How often reserved engines are updated to a newer version; those that still differ are left out."""


def due(config: EvaluationConfig, version: int, evaluated: int | None) -> bool:
    """Whether a version must be evaluated, or one that was served since the last evaluation.

    Args:
        config: Sets which versions are due.
        version: The version that is served now.
        evaluated: The newest version with a record; None without any.
    """
    if evaluated is None and version == 0:
        return config.at_start
    if not config.every:
        return False
    return version // config.every > (evaluated or 0) // config.every


class EvaluationService:
    """The evaluations of one incarnation of a run."""

    def __init__(
        self,
        run_dir: Path,
        pool: EnginePool,
        take_back: Callable[[str], Awaitable[None]],
        evaluator: Evaluator,
        *,
        step: int,
        log_evaluation: Callable[[EvaluationRecord], EvaluationRecord],
        clock: Callable[[], float],
        best: BestCheckpointFile,
        phases: DevicePhases | None = None,
    ) -> None:
        """Connect the components.

        Args:
            run_dir: The run's folder.
            pool: The engines of the run.
            take_back: Updates an engine of the run to the current weights, and lets it serve.
            evaluator: Gets and scores the answers; its config says when to evaluate, and on which engines.
            step: The step that this incarnation starts from; later records belong to undone steps.
            log_evaluation: Shows a record, and returns it with the run's time.
            clock: Monotonic seconds.
            best: Is written after each evaluation.
            phases: When engines may work on shared devices; None for always.
        """
        self._config = evaluator.config.evaluation
        self._run_dir = run_dir
        self._phases = phases or DevicePhases()
        self._pool = pool
        self._take_back = take_back
        self._evaluator = evaluator
        self._interrupt_timeout_s = evaluator.config.weights.timeout_s
        """Maximum time for an engine to end its calls."""
        self._log_evaluation = log_evaluation
        self._clock = clock
        self._best = best
        records = [r for r in evaluation_record_log(run_dir / FILE).read() if r.weight_version <= step]
        self._evaluated = records[-1].weight_version if records else None
        self._borrowed: list[str] = []
        self._evaluating = False
        self._ended = asyncio.Event()
        """Set when an evaluation has ended, and when no more will start."""
        self._current: asyncio.Timeout | None = None
        self._cancelled = False

    def evaluates(self, version: int) -> bool:
        """Return whether a version is or was evaluated last, or is likely to be when engines serve it."""
        if version in (self._best.evaluating, self._evaluated):
            return True
        if self._evaluating:  # which may end before the next version is served
            return bool(self._config.every) and version % self._config.every == 0
        return not self._cancelled and due(self._config, version, self._evaluated)

    def cancel_evaluations(self) -> None:
        """Cancel the current evaluation without a record, and start no more, because the run stops."""
        if self._current is not None and not self._current.expired():
            self._current.reschedule(0.0)
        self._cancelled = True
        self._ended.set()

    async def finish_evaluations(self, version: int) -> None:
        """Wait until no evaluation runs, and this version is evaluated, if it is due and none was cancelled.

        Each evaluation has a time limit, and engines that do not serve for long end the run.
        """
        with waiting("evaluation"):
            while self._evaluating or (not self._cancelled and due(self._config, version, self._evaluated)):
                self._ended.clear()
                await self._ended.wait()

    async def run_evaluations(self) -> None:
        """Evaluate each version that is due; never returns."""
        while True:
            if self._due_version() is None:
                self._evaluating = False
                self._ended.set()
                with waiting("idle"):
                    await self._pool.wait_for_change()
                continue
            self._evaluating = True
            async with self._phases.lease_engines():
                with waiting("evaluation"):
                    await self._evaluate_due()
                # Not on cancellation: the run ends, or the next incarnation updates all engines.
                while self._borrowed:
                    await self._return_engine(self._borrowed.pop())

    def _due_version(self) -> int | None:
        """Return the newest version that engines serve, if it is due."""
        serving = self._pool.engines(EngineState.SERVING)
        version = max((self._pool.version_of(engine.engine_id) for engine in serving), default=None)
        if version is None or self._cancelled or not due(self._config, version, self._evaluated):
            return None
        return version

    # -- one evaluation ----------------------------------------------------------------------------------

    async def _evaluate_due(self) -> None:
        """Evaluate the version that is due now, unless evaluations are cancelled."""
        version = self._due_version()
        if version is None:
            return
        try:
            async with asyncio.timeout(None) as self._current:
                with acting("evaluation", f"version {version}"):
                    self._best.evaluating = version
                    record = await self._evaluate(version)
        except TimeoutError:
            if not self._cancelled:
                raise
            return
        finally:
            self._current = self._best.evaluating = None
        self._evaluated = max(version, record.weight_version)
        record, records = self._log_evaluation(record), evaluation_record_log(self._run_dir / FILE)
        with writing(records.path):
            await run_to_end(lambda: records.append(record))
            await run_to_end(self._best.write)

    async def _evaluate(self, version: int) -> EvaluationRecord:
        """Evaluate this version, or a later one if the engines have been updated meanwhile."""
        began_s = self._clock()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                engines = await self._acquire_engines(version)
            version = self._best.evaluating = self._pool.version_of(engines[0].engine_id)
            log.info("version %d is evaluated by %s", version, [engine.engine_id for engine in engines])
            record = await self._evaluate_on(engines, version)
        except InvariantError:
            raise
        except (AsyncRLError, TimeoutError) as error:
            cause = error if isinstance(error, AsyncRLError) else EngineError("no engine was free in time")
            record = missing_record(version, cause, duration_s=self._clock() - began_s)
        if record.status == "missing":
            log.warning("the evaluation of version %d is missing: %s", version, record.reason)
        return record

    async def _evaluate_on(self, engines: Sequence[Engine], version: int) -> EvaluationRecord:
        pool = self._evaluator.new_pool()
        for engine in engines:
            pool.add_engine(engine)
            pool.serve_engine(engine.engine_id, version)
        answers = await wait_out_shortage(lambda: asyncio.to_thread(self._open_archive, version))
        # Workers of the evaluation have grants of its pool: they count where the run changes an engine.
        self._forget_ended_pools()
        self._pool.borrowers[pool] = None
        try:
            async with services(mirror=lambda: self._mirror_failures(pool)):
                return await self._evaluator.evaluate_sets(pool, version, answers)
        except ExceptionGroup as group:
            raise first_error(group) from group
        finally:
            self._forget_ended_pools()
            await asyncio.to_thread(answers.close)

    def _forget_ended_pools(self) -> None:
        """Forget pools of evaluations whose workers can no longer use their grants."""
        for pool in list(self._pool.borrowers):
            if not pool.holders:
                del self._pool.borrowers[pool]

    def _open_archive(self, version: int) -> Archive:
        """Return the archive of the answers; remove those of the oldest evaluations."""
        folder = self._run_dir / FOLDER
        mine = folder / f"version_{version:08d}"
        mine.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob("version_*"))[:-KEPT_ANSWERS]:
            shutil.rmtree(old, ignore_errors=True)
        return Archive(
            mine / archive.FILE, self._evaluator.num_answers, pass_reward=self._evaluator.pass_reward
        )

    async def _mirror_failures(self, pool: EnginePool) -> None:
        """Quarantine engines that fail here in the run, and those that the run takes away here; never
        returns.
        """
        lent = {engine.engine_id: self._lent_as(engine.engine_id) for engine in pool.engines()}
        while True:
            for name, lent_as in lent.items():
                if lent_as is None or self._lent_as(name) != lent_as:
                    pool.quarantine_engine(name, EngineError(f"engine {name} left the evaluation"))
                elif pool.needs_repair(name):  # not again, once the run has taken it away to repair it
                    error = pool.error_of(name) or EngineError(f"engine {name} failed in an evaluation")
                    self._pool.quarantine_engine(name, error)
            await _wait_for_first(pool.wait_for_change, self._pool.wait_for_change)

    def _lent_as(self, engine_id: str) -> int | None:
        """Return how often an engine was restarted before it began to evaluate; None when it does not."""
        snapshot = self._pool.snapshot_of(engine_id)
        if snapshot is None or snapshot.state is not EngineState.EVALUATING:
            return None
        return snapshot.restart_count

    # -- engines -----------------------------------------------------------------------------------------

    async def _acquire_engines(self, version: int) -> list[Engine]:
        """Return engines of one version, this or a later one, that serve only the evaluation."""
        if self._config.engines == "shared":
            return [await self._borrow_engine(version)]
        for _ in range(_MAX_REFRESHES):
            await self._refresh_reserved(version)
            found = self._reserved()
            version = max(self._pool.version_of(engine.engine_id) for engine in found)
            if all(self._pool.version_of(engine.engine_id) == version for engine in found):
                return found
        return [engine for engine in found if self._pool.version_of(engine.engine_id) == version]

    async def _borrow_engine(self, version: int) -> Engine:
        """Borrow the engine with the fewest calls, once it serves the version, and end its calls."""
        while True:
            serving = self._pool.engines(EngineState.SERVING)
            able = [engine for engine in serving if self._pool.version_of(engine.engine_id) >= version]
            if not able:
                if not self._phases.engines_may_start:  # no engine is repaired before the trainer has worked
                    raise EngineError(
                        f"no engine serves version {version} any more, and the trainer waits for the devices"
                    )
                with waiting("engine", why=lambda: f"none serves version {version}"):
                    await _wait_for_first(self._pool.wait_for_change, self._phases.wait_for_engines_phase_end)
                continue
            engine = min(able, key=lambda engine: self._pool.load_of(engine.engine_id).calls)
            name = engine.engine_id
            if not self._pool.lend_engine(name):
                continue
            self._borrowed.append(name)
            try:
                async with self._pool.bounded_request(name, self._interrupt_timeout_s):
                    await self._pool.interrupt_engine(engine, "abort")
                    await engine.resume_generation("abort")
                return engine
            except EngineError as error:
                self._pool.quarantine_engine(name, error)
            except TimeoutError:
                message = f"engine {name} did not end its calls within {self._interrupt_timeout_s} s"
                self._pool.quarantine_engine(name, WeightSyncError(message))

    async def _refresh_reserved(self, version: int) -> None:
        """Update the reserved engines to the current weights if they do not serve this version yet."""
        while not self._reserved():
            with waiting("engine", why=lambda: "no engine is reserved for the evaluation"):
                await self._pool.wait_for_change()
        async with Nursery() as nursery:
            for engine in self._reserved():
                if self._pool.version_of(engine.engine_id) < version:
                    nursery.start_task(f"refresh {engine.engine_id}", self._return_engine(engine.engine_id))
        while not any(self._pool.version_of(e.engine_id) >= version for e in self._reserved()):
            with waiting("engine", why=lambda: f"none of the evaluation's has version {version}"):
                await self._pool.wait_for_change()

    def _reserved(self) -> list[Engine]:
        return list(self._pool.engines(EngineState.EVALUATING))

    async def _return_engine(self, engine_id: str) -> None:
        """Update an engine to the current weights; if that fails, leave it to `repair`."""
        try:
            await self._take_back(engine_id)
        except EngineError as error:
            self._pool.quarantine_engine(engine_id, error)


async def _wait_for_first(*changes: Callable[[], Awaitable[None]]) -> None:
    """Wait for the first of several changes."""

    async def wait(change: Callable[[], Awaitable[None]]) -> None:
        with waiting("idle"):
            await change()
        nursery.cancel_tasks()

    async with Nursery() as nursery:
        for index, change in enumerate(changes):
            nursery.start_task(f"change {index}", wait(change))
