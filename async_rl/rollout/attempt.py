"""One attempt at a task: runs the agent loop in its session, scores it, and makes its trajectories.

The rollout manager and the evaluator dispatch attempts: they make the sessions, and decide what follows from
a failed attempt. `attempt_boundary` is around all of it: what goes wrong inside fails the attempt and never
the run, unless a rule of this program is violated.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, get_args

import msgspec

from async_rl.config import RolloutConfig
from async_rl.errors import (
    AgentLoopError,
    AlignmentError,
    EngineError,
    InvariantError,
    RolloutError,
    WorkerLost,
)
from async_rl.rollout.loops import AgentLoops
from async_rl.rollout.rewards.reward_calls import Rewards
from async_rl.rollout.session.conversation import Conversation
from async_rl.rollout.session.rollout_session import RolloutSession
from async_rl.runtime.supervision import Nursery, contained, first_error
from async_rl.runtime.user_processes import attempt_scope
from async_rl.runtime.waits import waiting
from async_rl.types import Completion, StopReason, Task, Trajectory

ATTEMPT_ERRORS: Final = (RolloutError, EngineError, AlignmentError, WorkerLost)
"""Errors that fail an attempt."""

CLEAN_UP_S: Final = 30.0
"""How long an agent loop may release what it holds after it was cancelled."""

_STOP_REASONS: Final[tuple[StopReason, ...]] = tuple(r for r in get_args(StopReason) if r != "error")
"""What an agent loop may return."""


@contextmanager
def attempt_boundary() -> Iterator[None]:
    """Turn every error of an attempt into one of `ATTEMPT_ERRORS`.

    What users' code, the policy and the machine cause belongs to the attempt. An `InvariantError` and a
    failed assertion are bugs of this program and end the run.

    Example:
        >>> with attempt_boundary():
        ...     results = await backend.run_attempt(task, session)

    Raises:
        RolloutError: The attempt raised something that is not one of `ATTEMPT_ERRORS`.
    """
    try:
        yield
    except (*ATTEMPT_ERRORS, InvariantError, AssertionError):
        raise
    except Exception as error:
        raise RolloutError(f"the attempt raised {type(error).__name__}: {error}") from error


class AttemptResult(msgspec.Struct, frozen=True, kw_only=True):
    """A session that has ended well, with its reward."""

    session: RolloutSession
    reward_source: str
    """The trajectory for whose completion it is rewarded."""
    parts: dict[str, float] | None
    """Its reward; None if the whole group is scored by one call."""
    completion: Completion | None = None
    """What the reward function receives, if the session itself does not have it."""


async def run_agent_loop(
    task: Task, session: Conversation[Any], loops: AgentLoops, rollout: RolloutConfig
) -> None:
    """Run the agent loop of a task in a session, until it and its branches have ended.

    Raises:
        AgentLoopError: The loop raised, took too long, returned something else than a stop reason, or left a
            session open.
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
                waiting("agent loop", name, scope=scope) as wait,
            ):
                with session.serving_clock.in_use():
                    returned = await contained(
                        _call_loop(name, loop, task, session),
                        limit_s=CLEAN_UP_S,
                        on_cancel=session.refuse_calls,
                        on_ignored=lambda: loops.report_swallowed_cancellation(name),
                    )
    except Exception as error:
        cause = first_error(error)  # the loop may have its own task group
        if isinstance(error, TimeoutError) and scope.expired():
            limit = f"ran past rollout.trajectory_timeout_s = {rollout.trajectory_timeout_s}: raise it, or"
            why = "was ended by the stall doctor:" if wait.cut else limit
            raise AgentLoopError(f"agent loop {name} {why} bound the loop's own waits") from error
        if session.has_exceeded(cause) and session.last_turn is not None:
            pass  # keep what was sampled before the budget was used up
        elif isinstance(cause, (*ATTEMPT_ERRORS, InvariantError)):
            raise cause from cause.__cause__
        else:
            raise AgentLoopError(f"agent loop {name} raised {type(cause).__name__}: {cause}") from error
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


async def _call_loop(name: str, loop: Any, task: Task, session: Conversation[Any]) -> Any:
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


async def score_sources(
    task: Task, tree: Sequence[Conversation[Any]], rewards: Rewards
) -> Mapping[str, dict[str, float]]:
    """Score a session and its branches concurrently, each reward source once.

    Returns:
        The parts of the reward, by the trajectory id of the reward source.

    Raises:
        RewardError: One of them cannot be scored.
    """
    sources = {each.reward_source.trajectory_id: each.reward_source for each in tree}
    try:
        async with Nursery() as scoring:
            parts = {
                name: scoring.start_task(
                    f"reward of {name}", rewards.score_completion(task, source.completion)
                )
                for name, source in sources.items()
            }
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return {name: scored.result() for name, scored in parts.items()}


async def score_tree(task: Task, tree: Sequence[RolloutSession], rewards: Rewards) -> Sequence[AttemptResult]:
    """Score a session and its branches, and return the results in the order of the tree.

    Raises:
        RewardError: One of them cannot be scored.
    """
    parts = await score_sources(task, tree, rewards)
    return [
        AttemptResult(
            session=each,
            reward_source=each.reward_source.trajectory_id,
            parts=parts[each.reward_source.trajectory_id],
        )
        for each in tree
    ]


async def finish_trajectories(results: Sequence[AttemptResult]) -> Sequence[Trajectory]:
    """Make the trajectories of sessions that have ended well, concurrently.

    Raises:
        AlignmentError: The routing of one does not fit its tokens.
    """
    try:
        async with Nursery() as ending:
            ends = [
                ending.start_task(
                    f"end of {each.session.trajectory_id}",
                    each.session.finish_trajectory(each.session.stop_reason, each.parts or {}),
                )
                for each in results
            ]
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return [end.result() for end in ends]
