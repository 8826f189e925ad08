"""A rollout worker: runs the attempts that the driver starts, with their sessions and engine calls.

```
 loop       consumes                  waits for            unblocked by           produces
 run        messages                  the next message     the driver; its end    attempts, grants
 attempt    a task                    engines, tools       grants, chunks, time   trajectories
 heartbeat  progress, waits, metrics  the next tick        time; a failed engine  a Heartbeat
 calls      the calls of a model      the next check       time                   calls that move, reports
 journal    new tokens                queue.journal_s      time                   the worker's journal
```

A worker ends when its link is lost, at whichever end: its state is useless without the driver.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

from async_rl.config import Config
from async_rl.data.chat_format import ChatFormat
from async_rl.engine_protocol import EngineFacts
from async_rl.engines.frozen_models import MODEL_METRICS
from async_rl.engines.health import watch_calls
from async_rl.errors import AsyncRLError, RewardError, SpoolFull, WorkerLost
from async_rl.observability.metrics import Metrics
from async_rl.rollout.attempt import Attempt, LocalBackend, attempt_boundary
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.workers.messages import (
    AttemptEnded,
    AttemptFailed,
    AttemptProgress,
    CancelRequest,
    EntriesReleased,
    Failure,
    GrantEngines,
    GroupScored,
    Heartbeat,
    Link,
    LongWait,
    Message,
    OpenJournal,
    Renewed,
    RevokeEngines,
    ScoreGroup,
    StartAttempt,
    TrajectoryScore,
    WorkerFailed,
)
from async_rl.rollout.workers.metric_counts import IncrementCollector
from async_rl.rollout.workers.worker_engines import ConnectEngine, WorkerEngines
from async_rl.runtime.shortages import is_shortage
from async_rl.runtime.supervision import Nursery, first_error, services
from async_rl.runtime.waits import Waits, acting, sleep_idle, waiting
from async_rl.store.archive import InspectedTrajectories
from async_rl.store.journal import Journal, JournalEntry
from async_rl.store.progress import ProgressReport
from async_rl.store.spool import FrameStore

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
"""Between heartbeats."""

START_TIMEOUT_S: Final = 120.0
"""Longest start of a worker process, with the import of user code."""

_MESSAGES_PER_TURN: Final = 16
"""The event loop comes round after this many messages: each attempt takes up to a millisecond to begin."""

_MIN_REPORTED_WAIT_S: Final = 5.0
"""A heartbeat reports waits that have lasted at least this long."""


_HEARTBEATS_PER_LOOK: Final = 4
"""A heartbeat looks at a quarter of the trajectories: looking at hundreds would be most of its cost."""

_MIN_REPORTED_TOKENS: Final = 64
"""A trajectory that has sampled fewer tokens more is not reported again for that."""


class WorkerFiles(NamedTuple):
    """Where a worker stores what it makes."""

    frames: FrameStore
    """Finished trajectories."""
    inspected: InspectedTrajectories | None = None
    """A copy of each for inspection."""
    syncs_journal: bool = False
    """Whether its journal is for processes of other nodes: see `Journal`."""


class RolloutWorker:
    """Runs the attempts that the driver starts over a link."""

    def __init__(
        self,
        config: Config,
        *,
        chat: ChatFormat,
        facts: EngineFacts,
        connect: ConnectEngine,
        new_id: Callable[[], str],
        metrics: Metrics,
        clock: Callable[[], float],
        files: WorkerFiles,
    ) -> None:
        """Load the agent loop and the rewards that the config names.

        Args:
            config: The settings of the run.
            chat: The model's chat format.
            facts: The model's dimensions.
            connect: Makes the client of an engine.
            new_id: Returns a unique id for each engine request.
            metrics: Counted here, and added to the driver's.
            clock: Monotonic seconds.
            files: Where it stores what it makes.

        Raises:
            ConfigError: One of them cannot be loaded.
        """
        self._config = config
        self._clock = clock
        self._syncs_journal = files.syncs_journal
        self._link: Link | None = None
        model_metrics = {name: Metrics().share(metrics, MODEL_METRICS) for name in config.models}
        self._engines = WorkerEngines(self._post, connect, {"": metrics} | model_metrics, clock=clock)
        policy = self._engines.models[""]
        context = SessionContext(
            chat=chat,
            config=config,
            metrics=metrics,
            clock=clock,
            serving_clock=policy.serving_clock,
            calls=policy.dispatcher,
            facts=facts,
            new_id=new_id,
            models={name: self._engines.models[name].dispatcher for name in config.models},
        )
        self._metrics = metrics
        self._backend = LocalBackend(context, files.frames, files.inspected)
        self._attempts: dict[int, Attempt] = {}
        self._reported: dict[int, dict[str, _Reported]] = {}
        """What the driver knows of attempts, by request and trajectory."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._waits = Waits(clock)
        self._increments = IncrementCollector(metrics)
        self._heartbeats: dict[int, float] = {}
        """When heartbeats that have no answer yet were sent, by number."""
        self._num_heartbeats = 0

    async def run(self, link: Link) -> None:
        """Serve the driver until the link is lost."""
        self._link = link
        try:
            with acting("run", waits=self._waits):
                async with (
                    self._backend,
                    services(
                        heartbeat=self._send_heartbeats, journal=self._write_journal, **self._call_checks()
                    ),
                    Nursery() as attempts,
                ):
                    try:
                        for number in count(1):
                            if (message := link.receive_arrived()) is None:
                                with waiting("idle"):
                                    message = await link.receive()
                            self._handle_message(message, attempts)
                            if number % _MESSAGES_PER_TURN == 0:
                                await asyncio.sleep(0)
                    finally:
                        self._engines.close()
                        attempts.cancel_tasks()
        except ExceptionGroup as errors:
            error = first_error(errors)
            if not isinstance(error, WorkerLost):
                self._fail(error)
                raise
        finally:
            await self._engines.close_clients()

    def _call_checks(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return what moves the calls of each model that engines have forgotten."""
        limits = {name: self._config.of_model(name).engine for name in self._config.models}
        limits[""] = self._config.engine
        return {
            f"calls {name}": partial(watch_calls, engines, limits[name], self._metrics, self._clock)
            for name, engines in self._engines.models.items()
        }

    def _post(self, message: Message) -> None:
        assert self._link is not None, "the worker runs"
        self._link.post(message)

    def _fail(self, error: BaseException) -> None:
        """Report the error that ends the worker."""
        self._post(WorkerFailed(failure=Failure.of(error), progress=tuple(self._all_progress())))

    def _handle_message(self, message: Message, attempts: Nursery) -> None:
        match message:
            case GrantEngines():
                if unknown := {each.model for each in message.engines} - self._engines.models.keys():
                    raise WorkerLost(f"the driver granted engines of {unknown}, which this run does not have")
                self._engines.grant(message)
            case Renewed():
                if (sent_s := self._heartbeats.pop(message.number, None)) is not None:
                    self._engines.renew(sent_s)
            case RevokeEngines():
                self._engines.revoke(message, self._all_progress())
            case OpenJournal():
                self._backend.journal = Journal(
                    Path(message.folder), self._metrics, syncs=self._syncs_journal
                )
            case EntriesReleased():
                running = {attempt.trajectory_id for attempt in self._attempts.values()}
                assert running.isdisjoint(message.trajectory_ids), "running attempts are journalled"
                if (journal := self._backend.journal) is not None:
                    journal.remove_entries(message.trajectory_ids)
            case StartAttempt():
                self._start_task(
                    attempts, message, f"trajectory {message.trajectory_id}", self._run_attempt(message)
                )
            case ScoreGroup():
                self._start_task(
                    attempts, message, f"reward {message.request_id}", self._score_group(message)
                )
            case CancelRequest():
                if (task := self._tasks.get(message.request_id)) is not None:  # it has not ended meanwhile
                    self._forget_request(message.request_id)
                    task.cancel()
            case _:
                raise WorkerLost(f"the driver sent {type(message).__name__}, which only workers send")

    def _start_task(
        self, nursery: Nursery, request: StartAttempt | ScoreGroup, name: str, work: Coroutine[Any, Any, None]
    ) -> None:
        task = self._tasks[request.request_id] = nursery.start_task(name, work)
        task.add_done_callback(lambda _: self._forget_request(request.request_id))

    def _forget_request(self, request_id: int) -> None:
        self._tasks.pop(request_id, None)
        self._attempts.pop(request_id, None)
        self._reported.pop(request_id, None)

    async def _run_attempt(self, request: StartAttempt) -> None:
        """Run an attempt to its end, and report to the driver."""
        attempt = self._attempts[request.request_id] = Attempt(
            request.task,
            request.trajectory_id,
            request.group_id,
            request.attempt,
            started_s=self._clock(),
            claim=request.claim,
        )
        with acting("trajectory", request.trajectory_id):
            try:
                with attempt_boundary():
                    end = await self._backend.run_attempt(attempt)
                    # Inside the block: messages of the loop may hold what cannot be encoded.
                    self._post(AttemptEnded(request_id=request.request_id, end=end))
            except Exception as error:
                if isinstance(error, SpoolFull) and not is_shortage(error):
                    # Its disk fails: what it has sampled goes on in other workers, from its journal.
                    if (journal := self._backend.journal) is not None:
                        with suppress(SpoolFull):
                            await journal.write_in_thread()
                    self._fail(error)
                    raise WorkerLost(str(error)) from error
                cause = error.__cause__
                if cause is not None and not isinstance(error, WorkerLost):
                    log.info("trajectory %s: %s", request.trajectory_id, error, exc_info=cause)
                self._post(
                    AttemptFailed(
                        request_id=request.request_id,
                        failure=Failure.of(error),
                        trajectory=attempt.failed(error),
                        has_sampled=any(each.in_turn or each.num_turns for each in attempt.progress.values()),
                    )
                )

    async def _score_group(self, request: ScoreGroup) -> None:
        with acting("reward", str(request.request_id)):
            try:
                with attempt_boundary():
                    results = await self._backend.score_group(request.task, request.completions)
                    scores = [
                        TrajectoryScore(failure=Failure.of(result))
                        if isinstance(result, RewardError)
                        else TrajectoryScore(parts=result)
                        for result in results
                    ]
                    # Inside the block: names of parts may hold what cannot be encoded.
                    self._post(GroupScored(request_id=request.request_id, scores=tuple(scores)))
            except AsyncRLError as error:
                self._post(GroupScored(request_id=request.request_id, failure=Failure.of(error)))

    async def _send_heartbeats(self) -> None:
        while True:
            self._num_heartbeats += 1
            journal = self._backend.journal
            self._heartbeats[self._num_heartbeats] = self._clock()
            assert self._link is not None, "the worker runs"
            self._post(
                Heartbeat(
                    number=self._num_heartbeats,
                    received=self._link.numbers.received,
                    waits=tuple(self._long_waits()),
                    increments=self._increments.collect_increments(),
                    engines=self._engines.uses(),
                    reports=self._engines.pop_reports(),
                    progress=tuple(self._new_progress()),
                    written_claims=() if journal is None else tuple(journal.pop_written_claims()),
                    journal_bytes=0 if journal is None else journal.nbytes,
                )
            )
            with waiting("idle"), suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._engines.has_news.wait()

    def _all_progress(self) -> Iterator[AttemptProgress]:
        """Yield the progress of all trajectories."""
        for request_id, attempt in self._attempts.items():
            for name, entry in attempt.progress.items():
                yield AttemptProgress(
                    request_id=request_id, trajectory_id=name, report=ProgressReport.of(entry)
                )

    def _new_progress(self) -> Iterator[AttemptProgress]:
        """Yield the progress of trajectories that changed enough to report."""
        for request_id, attempt in self._attempts.items():
            if request_id in self._reported and (request_id + self._num_heartbeats) % _HEARTBEATS_PER_LOOK:
                continue
            reported = self._reported.setdefault(request_id, {})
            for name, entry in attempt.progress.items():
                assert isinstance(entry, JournalEntry), "the attempt runs here"
                stage = entry.stage
                if (known := reported.get(name)) is None or not known.is_up_to_date(entry, stage):
                    report = ProgressReport.of(entry)
                    reported[name] = _Reported(stage, report.num_sampled_tokens)
                    yield AttemptProgress(request_id=request_id, trajectory_id=name, report=report)

    async def _write_journal(self) -> None:
        """Write new journal entries every `queue.journal_s`, if the driver wants a journal."""
        clock, every_s = asyncio.get_running_loop().time, self._config.queue.journal_s or TICK_S
        due_s = clock()
        while True:
            # From tick to tick, as in the driver: what a write takes does not postpone the next tick.
            due_s = max(due_s + every_s, clock())
            await sleep_idle(due_s - clock())
            if (journal := self._backend.journal) is None:
                continue
            try:
                with waiting("disk"):
                    await journal.write_in_thread()
            except FileNotFoundError as error:
                raise WorkerLost(
                    f"its journal {journal.directory} was removed: its trajectories go on elsewhere"
                ) from error
            except SpoolFull as error:
                self._fail(error)
                raise WorkerLost(str(error)) from error

    @property
    def journal_folder(self) -> Path | None:
        """Where its journal is."""
        return None if self._backend.journal is None else self._backend.journal.directory

    def write_and_close(self) -> None:
        """Write all trajectories up to the last token, then close the link: the worker ends in good order."""
        if (journal := self._backend.journal) is not None:
            try:
                journal.write_entries()
            except (AsyncRLError, OSError) as error:
                log.warning("trajectories in flight could not be journalled to the last token: %s", error)
        self.close()
        if self._link is not None:
            self._link.close()

    def close(self) -> None:
        """Close the journal without writing."""
        if self._backend.journal is not None:
            self._backend.journal.close()

    def _long_waits(self) -> Iterator[LongWait]:
        """Yield what trajectories have been waiting for."""
        for wait in self._waits.open_waits(_MIN_REPORTED_WAIT_S, except_on="agent loop"):
            if wait.who.kind == "trajectory":
                yield LongWait(
                    trajectory_id=wait.who.id,
                    on=wait.on,
                    target=wait.target,
                    age_s=wait.age_s,
                    why=wait.why or "",
                )


class _Reported(NamedTuple):
    """What the driver knows of a trajectory."""

    stage: tuple[int, ...]
    """`JournalEntry.stage` at the last report."""
    num_sampled_tokens: int

    def is_up_to_date(self, entry: JournalEntry, stage: tuple[int, ...]) -> bool:
        """Return whether the driver knows versions and turns exactly, and the length within a factor of 2."""
        limit = 2 * self.num_sampled_tokens + _MIN_REPORTED_TOKENS
        return self.stage == stage and entry.num_sampled_tokens <= limit
