"""One attempt at a task: runs the agent loop in a session, scores it, makes its trajectories and stores them.

```
 Attempt ─► RolloutBackend.run_attempt ─► agent loop ─► rewards ─► trajectories as frames ─► AttemptEnd
              LocalBackend: in this event loop, the driver's or that of a rollout worker
              WorkerBackend: in rollout workers (`async_rl.rollout.workers`)
```

The rollout manager and the evaluator dispatch attempts, and decide what follows from a failed one.
`attempt_boundary` is around all of it: what goes wrong inside fails the attempt and never the run, unless a
rule of this program is violated.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, Protocol, Self, get_args

import msgspec

from async_rl.config import RolloutConfig
from async_rl.errors import (
    AgentLoopError,
    AlignmentError,
    AsyncRLError,
    CorruptFrame,
    EngineError,
    InvariantError,
    RewardError,
    RolloutError,
    SpoolFull,
    TimeOver,
    WorkerLost,
)
from async_rl.rollout.groups import UnscoredTrajectory
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.model_answers import ModelAnswers
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.rollout.session.context import SessionContext
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.rollout.session.transcript import Transcript
from async_rl.rollout.teacher import Teacher
from async_rl.runtime.model_questions import asking
from async_rl.runtime.shortages import wait_out_shortage
from async_rl.runtime.supervision import contained, first_error, run_together
from async_rl.runtime.threads import run_uncancellable
from async_rl.runtime.user_processes import attempt_scope
from async_rl.runtime.waits import waiting
from async_rl.store.archive import InspectedTrajectories
from async_rl.store.frames import read_completion
from async_rl.store.journal import Journal, JournalEntry
from async_rl.store.journal_file import JournalledTrajectory
from async_rl.store.journal_folders import JournalClaim, JournalReader
from async_rl.store.progress import TrajectoryProgress
from async_rl.store.spool import FrameStore
from async_rl.types import (
    Completion,
    Outcome,
    Segment,
    StopReason,
    StoredCompletion,
    StoredTrajectory,
    Task,
    Trajectory,
    root_of,
)

log = logging.getLogger(__name__)

ATTEMPT_ERRORS: Final = (RolloutError, EngineError, AlignmentError, WorkerLost)
"""Errors that fail an attempt."""

_KEPT_ERRORS: Final = (*ATTEMPT_ERRORS, SpoolFull, InvariantError, AssertionError)
"""What `attempt_boundary` does not turn into another error."""

_MAX_LOST_WORKERS: Final = 3
"""An attempt fails after it has lost this many rollout workers and may be to blame for them."""

_MAX_LOST_IN_ALL: Final = 30
"""An attempt fails after it has lost this many workers in all: code of a branch may end workers while other
branches wait for engines."""

CLEAN_UP_S: Final = 30.0
"""How long an agent loop may release what it holds after it was cancelled."""

_STOP_REASONS: Final[tuple[StopReason, ...]] = tuple(r for r in get_args(StopReason) if r != "error")
"""What an agent loop may return."""

_OURS: Final = str(Path(__file__).parents[1])
"""The folder of this program."""

_NEW: Final = JournalClaim()
_NOTHING: Final[Mapping[str, TrajectoryProgress]] = MappingProxyType({})


class attempt_boundary:
    """Turn every error of an attempt into one of `ATTEMPT_ERRORS`.

    What users' code, the policy and the machine cause belongs to the attempt. So does a `CancelledError` of
    its own, as of a future that others share and have cancelled. A full spool does not: the attempt continues
    when there is space. An `InvariantError` and a failed assertion are bugs of this program and end the run.

    Raises:
        RolloutError: The attempt raised something that is not one of `ATTEMPT_ERRORS`.
    """

    __slots__ = ()

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_own = isinstance(error, asyncio.CancelledError) and not _is_cancelled()
        if (isinstance(error, Exception) and not isinstance(error, _KEPT_ERRORS)) or is_own:
            raise RolloutError(f"the attempt raised {type(error).__name__}: {error}") from error


def _is_cancelled() -> bool:
    """Return whether this task was cancelled; user code may raise `CancelledError` by itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def user_frames(error: BaseException) -> str:
    """Return the frames of user code in the traceback of an error's cause, or what a worker said of them."""
    if error.__cause__ is None:
        return "\n".join(getattr(error, "__notes__", ()))
    frames = traceback.extract_tb(error.__cause__.__traceback__)
    return "".join(traceback.format_list([f for f in frames if not f.filename.startswith(_OURS)])).rstrip()


class AttemptEnd(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What an attempt that succeeded has made."""

    trajectories: tuple[StoredTrajectory, ...]
    """The sibling and its branches that sampled something."""
    unscored: tuple[UnscoredTrajectory, ...] = ()
    """Those whose reward comes later, from one call for the whole group."""

    def is_of(self, attempt: Attempt) -> bool:
        """Return whether it names the attempt's trajectory and branches, once each, and files of these."""
        root_id, names = attempt.trajectory_id, [each.trajectory_id for each in self.trajectories]
        paths = [each.path for each in self.trajectories] + [each.path for each in self.completions]
        files = [path.rpartition("/")[2] for path in paths]
        return (
            len(set(names)) == len(names)
            and all(root_of(name) == root_id for name in names)
            and all(each.group_id == attempt.group_id for each in self.trajectories)
            and all(each.trajectory_id in names for each in self.unscored)
            and all(not file or file.startswith((f"{root_id}-", f"{root_id}.")) for file in files)
        )

    @property
    def completions(self) -> tuple[StoredCompletion, ...]:
        """What the call will read: each once, also where several are rewarded for the same."""
        if not self.unscored:
            return ()
        return tuple({each.completion.path: each.completion for each in self.unscored}.values())


class Attempt:
    """One attempt at a trajectory: what a backend needs to run it, and how far it is.

    Implements `page.view.InProgress`.
    """

    def __init__(
        self,
        task: Task,
        trajectory_id: str,
        group_id: str,
        number: int,
        *,
        started_s: float,
        claim: JournalClaim = _NEW,
        known: Mapping[str, TrajectoryProgress] = _NOTHING,
        on_start: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """Describe an attempt that has not started.

        Args:
            task: The task to attempt.
            trajectory_id: The sibling.
            group_id: Its group.
            number: The number of the attempt, from 1.
            started_s: When it started, monotonic seconds.
            claim: The number of its owner, and where what is left of it is.
            known: Progress of the trajectory and of its branches, as far as something is left of them.
            on_start: Called with the folder of the journal in which the attempt is from now on.
        """
        self.task = task
        self.trajectory_id = trajectory_id
        self.group_id = group_id
        self.number = number
        self.started_s = started_s
        self.claim = claim
        self.on_start = on_start
        self.progress: dict[str, TrajectoryProgress] = dict(known)
        """How far the trajectory and its branches are, by id."""
        self.failed: Callable[[Exception], StoredTrajectory] = self._describe_failure
        """Returns a summary of what a failed attempt has sampled, for display."""

    @property
    def num_turns(self) -> int:
        """The number of finished turns."""
        own = self.progress.get(self.trajectory_id)
        return 0 if own is None else own.num_turns

    @property
    def num_tokens(self) -> int:
        """The number of tokens of finished engine calls."""
        own = self.progress.get(self.trajectory_id)
        return 0 if own is None else own.num_tokens

    def _describe_failure(self, error: Exception) -> StoredTrajectory:
        outcome = Outcome(stop_reason="error", num_turns=self.num_turns)
        return StoredTrajectory.of(
            Trajectory(
                trajectory_id=self.trajectory_id,
                group_id=self.group_id,
                task_id=self.task.task_id,
                segments=(),
                trace=None,
                outcome=outcome,
            )
        )


class LostWorkers:
    """Counts the rollout workers that an attempt has lost, to find out whether it is what ends them.

    All attempts of a worker lose it, and most are not to blame: those that were waiting for an engine, and
    those that have made progress since the loss before. Attempts that are ended for others' faults would end
    the run by `rollout.max_failed_share`.
    """

    def __init__(self) -> None:
        """Begin without a loss."""
        self._blamed = self._all = self._reached = 0

    def may_go_on(self, error: AsyncRLError, attempt: Attempt) -> bool:
        """Return whether an attempt with this error continues in another worker, which counts as a loss."""
        if not isinstance(error, WorkerLost):
            return False
        self._all += 1
        far = sum(each.num_turns + each.num_sampled_tokens for each in attempt.progress.values())
        if far > self._reached:
            self._blamed, self._reached = 0, far
        self._blamed += not error.is_excused
        return self._blamed < _MAX_LOST_WORKERS and self._all < _MAX_LOST_IN_ALL


class AttemptEntries:
    """The journal's entries of one attempt, in the process that runs it; its `progress` from then on."""

    def __init__(
        self, attempt: Attempt, journal: Journal | None, left: dict[str, JournalledTrajectory]
    ) -> None:
        """Take over what is left of the attempt and its branches.

        Args:
            attempt: The attempt.
            journal: Writes the entries; None writes none.
            left: What an earlier owner has left, by id; states are removed as they are used.
        """
        self._attempt = attempt
        self._epoch = attempt.claim.owner_epoch
        self._left = left
        self._new_entry = JournalEntry if journal is None else journal.open_entry
        if journal is not None and left:
            journal.claim_trajectories(left, self._epoch)
        attempt.progress.clear()
        attempt.progress |= {name: JournalEntry(name, state.attempt, state) for name, state in left.items()}

    def open_entry(self, name: str, inherited: Sequence[Segment] = ()) -> JournalEntry:
        """Open the entry of the trajectory or of a branch."""
        restored = self._left.pop(name, None)
        if restored is not None and inherited and (restored := restored.after(inherited)) is None:
            log.warning("branch %s begins differently from before the restart: it is sampled anew", name)
        entry = self._new_entry(name, self._attempt.number, restored, inherited, self._epoch)
        self._attempt.progress[name] = entry
        return entry


async def run_agent_loop(
    task: Task, session: RolloutSession, loops: AgentLoops, rollout: RolloutConfig
) -> None:
    """Run the agent loop of a task in a session, until it and its branches have ended.

    Raises:
        AgentLoopError: The loop raised, returned something else than a stop reason, or left a session open.
        TimeOver: It took too long.
        RolloutError: A tool failed, or a prompt was too long.
        EngineError: Engines failed the attempt.
        WorkerLost: The driver has ended the attempt.
    """
    name = task.agent_loop or rollout.agent_loop
    loop = await loops.entered_loop(name)
    session.begin_limit()
    returned: Any = None
    try:
        with attempt_scope(f"trajectory {session.trajectory_id}", loops.count_reaped):
            async with (
                session.serving_clock.timeout(rollout.trajectory_timeout_s) as scope,
                waiting("agent loop", name, why=lambda: session.status, scope=scope) as wait,
            ):
                with session.serving_clock.in_use():
                    returned = await contained(
                        _call_loop(name, loop, task, session),
                        limit_s=CLEAN_UP_S,
                        on_cancel=session.abandon,
                        on_ignored=lambda: loops.report_swallowed_cancellation(name),
                    )
    except Exception as error:
        cause = first_error(error)  # the loop may have its own task group
        try:
            if isinstance(error, TimeoutError) and scope.expired():
                limit = (
                    f"ran past rollout.trajectory_timeout_s = {rollout.trajectory_timeout_s}: raise it, or"
                )
                why = "was ended by the stall doctor:" if wait.cut else limit
                status = f": {session.status}" if session.status else ""
                raise TimeOver(f"agent loop {name} {why} bound the loop's own waits{status}") from error
            if session.has_exceeded(cause) and session.last_turn is not None:
                pass  # keep what was sampled before the budget was used up
            elif isinstance(cause, (*ATTEMPT_ERRORS, InvariantError)):
                raise cause from cause.__cause__
            else:
                raise AgentLoopError(f"agent loop {name} raised {type(cause).__name__}: {cause}") from error
        finally:
            del cause  # its traceback holds this frame, a cycle that would keep the session
    finally:
        num_open = await session.close()
    if num_open:
        raise AgentLoopError(
            f"agent loop {name} ended while {num_open} of its sessions had not: await what it starts, "
            "and give each session a block, `async with session:`, where several are written at once"
        )
    if session.last_turn is None:
        raise AgentLoopError(
            f"agent loop {name} returned without a turn: await session.generate() at least once in run()"
        )
    session.end_session(_stop_reason(name, returned))


async def _call_loop(name: str, loop: Any, task: Task, session: RolloutSession) -> Any:
    running = loop.run(task, session)
    if not inspect.isawaitable(running):
        raise AgentLoopError(
            f"agent loop {name}: run() returned {_described(running)} at once, expected a coroutine: write "
            "`async def run(self, task, session)`, without `yield`"
        )
    return await running


def _stop_reason(name: str, returned: Any) -> StopReason | None:
    """Check what an agent loop returned."""
    if returned is None:
        return None
    if isinstance(returned, str) and returned in _STOP_REASONS:
        return next(reason for reason in _STOP_REASONS if reason == returned)
    raise AgentLoopError(
        f"agent loop {name}: run() returned {_described(returned)}, expected None or one of "
        f"{', '.join(map(repr, _STOP_REASONS))}: return nothing; rollout.reward scores the conversation, and "
        "an exception fails the attempt"
    )


def _described(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # of a user's class
        text = "an object"
    return f"{text:.100} ({type(value).__name__})"


class RolloutBackend(AbstractAsyncContextManager[Any, None], Protocol):
    """Runs agent loops and rewards inside its block, which releases everything that they hold."""

    async def run_attempt(self, attempt: Attempt) -> AttemptEnd:
        """Run the agent loop of a task, score its session and branches, and store their trajectories.

        Raises:
            SpoolFull: There was no space for the trajectories: run it again from what it has sampled.
            RolloutError: The loop, a tool or the reward failed.
            EngineError: Engines failed the attempt.
            AlignmentError: The routing of a trajectory does not fit its tokens.
            WorkerLost: The worker ended, for no known fault of the attempt: run it again.
        """
        ...

    @property
    def has_space_elsewhere(self) -> bool:
        """Whether an attempt that has just found no space may find some on another node."""
        ...

    async def score_group(
        self, task: Task, completions: Sequence[StoredCompletion]
    ) -> Sequence[dict[str, float] | RewardError]:
        """Score all trajectories of a group by one call, as `Rewards.score_group` does.

        A trajectory whose completion is damaged gets an error, and the others are scored without it.
        """
        ...


async def rewards_of_group(
    backend: RolloutBackend, task: Task, completions: Sequence[StoredCompletion]
) -> Sequence[dict[str, float] | RewardError]:
    """Score all trajectories of a group by one call; where that fails, each has its error."""
    try:
        with attempt_boundary():
            return await backend.score_group(task, completions)
    except ATTEMPT_ERRORS as error:
        failure = error if isinstance(error, RewardError) else RewardError(str(error))
        return [failure] * len(completions)


class LocalBackend(RolloutBackend):
    """Runs attempts in this event loop: the driver's, or that of a rollout worker."""

    def __init__(
        self,
        context: SessionContext,
        frames: FrameStore,
        inspected: InspectedTrajectories | None = None,
    ) -> None:
        """Load the agent loop and the rewards that the config names.

        Until `journal` is set, no attempt is journalled.

        Args:
            context: What all sessions share.
            frames: Stores the trajectories of attempts that succeeded.
            inspected: Keeps a copy of each trajectory for inspection.

        Raises:
            ConfigError: One of them cannot be loaded.
        """
        config = context.config
        self._config = config.rollout
        self._context = context
        self.journal: Journal | None = None
        """The journal of this process."""
        self._reader = JournalReader(context.metrics)
        self._frames = frames
        self._inspected = inspected
        self.loops = AgentLoops(config.rollout, context.metrics)
        teacher = config.trainer.loss.teacher.model
        self._teacher = None if teacher is None else Teacher(teacher, context)
        self._answers = ModelAnswers(context)
        self._rewards = Rewards(
            config, decode=context.chat.decode, metrics=context.metrics, clock=context.clock
        )

    async def __aenter__(self) -> Self:
        await self.loops.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self.loops.__aexit__(*error)
        finally:
            await self._rewards.close()

    async def run_attempt(self, attempt: Attempt) -> AttemptEnd:
        """Implements `RolloutBackend.run_attempt`."""
        if self.journal is not None:
            attempt.on_start(self.journal.directory)
        left = await self._reader.read_claim(attempt.claim, attempt.trajectory_id, attempt.number)
        asking.set(self._answers.ask)
        entries, task = AttemptEntries(attempt, self.journal, left), attempt.task
        entry = entries.open_entry(attempt.trajectory_id)
        transcript = Transcript(self._context, entry, entries.open_entry, group_id=attempt.group_id)
        session = RolloutSession(self._context, task, transcript, group_id=attempt.group_id)
        try:
            await run_agent_loop(task, session, self.loops, self._config)
            sources = {_source_of(each): each.reward_source for each in session.tree}
            if self._rewards.scores_groups(task):
                completions = {name: source.completion for name, source in sources.items()}
                return await self._store_tree(attempt, session.tree, {}, completions)
            scored = await run_together(
                (f"reward of {name}", self._rewards.score_completion(task, source.completion))
                for name, source in sources.items()
            )
            scores = dict(zip(sources, scored, strict=True))
            return await self._store_tree(attempt, session.tree, scores, {})
        except Exception as error:
            failed = session.failed_trajectory(error)
            summary = StoredTrajectory.of(failed)
            attempt.failed = lambda error: summary
            if (inspected := self._inspected) is not None:
                await asyncio.to_thread(inspected.keep, failed, attempt.number)
            raise
        finally:
            for each in session.tree:
                each.transcript.release_engine()

    async def _store_tree(
        self,
        attempt: Attempt,
        sessions: Sequence[RolloutSession],
        scores: Mapping[str, dict[str, float]],
        completions: Mapping[str, Completion],
    ) -> AttemptEnd:
        """Make the trajectories of sessions that have ended well, and store them in a thread.

        Args:
            attempt: Their attempt.
            sessions: The sessions.
            scores: The parts of their rewards, by reward source.
            completions: What the group's reward function will receive for the others, by reward source.
        """
        tree: Sequence[Trajectory] = await run_together(
            (
                f"end of {each.trajectory_id}",
                each.finish_trajectory(each.stop_reason, scores.get(_source_of(each), {})),
            )
            for each in sessions
        )
        if self._teacher is not None:
            tree = await self._teacher.score_trajectories(tree)

        def store() -> AttemptEnd:
            kept: dict[str, StoredCompletion] = {}
            try:
                for source, completion in completions.items():
                    kept[source] = self._frames.store_completion(source, completion)
                stored = self._frames.store_tree(tree)
            except BaseException:
                self._frames.discard(kept.values())
                raise
            if self._inspected is not None:
                for trajectory in tree:
                    self._inspected.keep(trajectory, attempt.number)
            return AttemptEnd(
                trajectories=stored,
                unscored=tuple(
                    UnscoredTrajectory(
                        trajectory_id=each.trajectory_id,
                        attempt=attempt.number,
                        reward_source=_source_of(each),
                        completion=kept[_source_of(each)],
                    )
                    for each in sessions
                    if _source_of(each) in kept
                ),
            )

        end, cancelled = await run_uncancellable(None, store)
        if cancelled is not None:
            await run_uncancellable(None, lambda: self._frames.discard([*end.trajectories, *end.completions]))
            raise cancelled
        return end

    @property
    def has_space_elsewhere(self) -> bool:
        """Implements `RolloutBackend.has_space_elsewhere`: this process has one disk."""
        return False

    async def score_group(
        self, task: Task, completions: Sequence[StoredCompletion]
    ) -> Sequence[dict[str, float] | RewardError]:
        """Implements `RolloutBackend.score_group`."""
        asking.set(self._answers.ask)
        found = await self._read_completions(completions)
        intact = [each for each in found if isinstance(each, Completion)]
        scores = iter(await self._rewards.score_group(task, intact) if intact else ())
        return [each if isinstance(each, RewardError) else next(scores) for each in found]

    async def _read_completions(
        self, stored: Sequence[StoredCompletion]
    ) -> Sequence[Completion | RewardError]:
        def read() -> list[Completion | RewardError]:
            found: list[Completion | RewardError] = []
            for each in stored:
                try:
                    found.append(read_completion(each))
                except CorruptFrame as flaw:
                    found.append(RewardError(f"a completion cannot be read: {flaw}"))
            return found

        try:
            return await wait_out_shortage(lambda: asyncio.to_thread(read))
        except OSError as error:
            raise RewardError(f"the completions of a group cannot be read: {error}") from error


def _source_of(session: RolloutSession) -> str:
    """Return the trajectory for whose completion a session is rewarded."""
    return session.reward_source.trajectory_id
